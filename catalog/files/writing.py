"""Models to text that everybody reads alike: one entry a line, no value that could be taken for another."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import yaml

FORMATS = ("yaml", "json")
_TEXT_TAG = "tag:yaml.org,2002:str"
_NO_WIDTH = 1_000_000  # lines are not folded, so that an edit changes one of them
_WORDS = frozenset({"", "~", "null", "true", "false", "yes", "no", "on", "off", "y", "n"})
_NUMBER_LIKE = re.compile(r"[-+.]*[0-9][0-9a-fA-FxXoO_.:+TZ -]*|[-+]?\.(inf|nan)", re.IGNORECASE)


def write_catalog_file(models: Iterable[Mapping[str, Any]], format: str) -> str:
    """Models in the form of `ModelSpec.as_text_dict()`, as a file that `read_catalog_file` reads."""
    content = {"models": [_without_empty(model) for model in models]}
    if format == "json":
        return json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    return str(yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=_NO_WIDTH))


def _without_empty(model: Mapping[str, Any]) -> dict[str, Any]:
    slo = {key: duration for key, duration in model["slo"].items() if duration != "0s"}
    return {key: value for key, value in {**model, "slo": slo}.items() if value}


class _Dumper(yaml.CSafeDumper):
    """One entry a line, and in quotes whatever some reader of YAML might not take for a text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> Any:
    return dumper.represent_scalar(_TEXT_TAG, text, style=_style(text))


def _style(text: str) -> str | None:
    if "\n" in text:
        is_readable = all(line.isprintable() and line == line.rstrip() for line in text.split("\n"))
        return "|" if is_readable and not text[0].isspace() else '"'
    return '"' if text.lower() in _WORDS or _NUMBER_LIKE.fullmatch(text) else None


_Dumper.add_representer(str, _represent_text)
