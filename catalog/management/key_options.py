"""The options that say at the shell what a key opens, once for `key_create` and `key_edit`."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping
from typing import Any

from catalog.typed import typed_value

_FIELDS: Mapping[str, tuple[str, str]] = {
    "requests_per_minute": ("N", "0: no limit"),
    "tokens_per_minute": ("N", "0: no limit"),
    "concurrency": ("N", "requests at once; 0: no limit"),
    "cache_scope": ("NAME", "keys of one scope may share what engines have cached of a prompt"),
}


def add_reach(parser: ArgumentParser) -> None:
    parser.allow_abbrev = False
    group = parser.add_argument_group("what it opens")
    either = group.add_mutually_exclusive_group()
    either.add_argument("--models", nargs="+", metavar="NAME", help="these and no others, by name or alias")
    either.add_argument("--all-models", action="store_true", help="every model, those to come as well")
    for key, (metavar, help_text) in _FIELDS.items():
        group.add_argument(f"--{key.replace('_', '-')}", metavar=metavar, help=help_text)


def reach_patch(options: Mapping[str, Any]) -> dict[str, Any]:
    """What was said of it, as a JSON merge patch; an empty text takes a field back."""
    patch: dict[str, Any] = {}
    if options["all_models"]:
        patch["models"] = None
    elif options["models"] is not None:
        patch["models"] = options["models"]
    for key in _FIELDS:
        if options[key] is not None:
            patch[key] = typed_value(key, options[key]) if options[key] else None
    return patch
