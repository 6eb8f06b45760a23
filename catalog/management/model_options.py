"""The options that say at the shell what a model shall be, once for `model_add` and `model_edit`.

They become the law's own JSON, or a merge patch of it, and are judged nowhere but there. What is not said is
left out; an empty text takes a field back to what it is when left out.
"""

from __future__ import annotations

import difflib
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from django.core.management.base import DjangoHelpFormatter

from catalog.durations import format_duration
from catalog.parts import OVER_MAX_OUTPUT
from catalog.patching import merged, patched_profile
from catalog.reading import NAME_LIMIT, quote
from catalog.showing import default_timeouts
from catalog.spec import ENGINES, ROUTING_PROFILES, ModelSpec
from catalog.typed import TypingError, read_settings, split_settings, typed_value

PROFILE_HELP = """
A profile's settings are key=value: name, engine, gpu_class, tp, pp, nodes, gpus_per_node, min_memory_gb,
min_disk_gb, weight, priority, startup_timeout (20m); args once an argument, all of them anew; env.NAME and
node_selector.LABEL entry by entry. key= takes a field back to what it is when left out, env.NAME- takes an
entry away. The profile's name may be left out where there is one profile alone.
Scaling: min 0 with max above it is on demand; min 0, max 0 is off.
"""

_USUAL = default_timeouts()

# Option -> the field of the model's JSON, what stands for its value, and what the help says.
FIELDS: Mapping[str, tuple[str, str, str]] = {
    "source": ("source", "SOURCE", "org/name[@revision][:file-or-glob], or an absolute path on the nodes"),
    "description": ("description", "TEXT", "for people"),
    "min": ("scaling.min", "N", "replicas kept running"),
    "max": ("scaling.max", "N", "replicas at most"),
    "idle-timeout": (
        *("scaling.idle_timeout", "TIME"),
        "with min 0: unloaded after this long without a request, as 15m",
    ),
    "routing-profile": ("routing_profile", "HOW", ", ".join(ROUTING_PROFILES[1:])),
    "context-length": ("context_length", "N", "tokens"),
    "max-output": ("max_output", "N", "tokens"),
    "ttft-p99": ("slo.TTFTp99", "TIME", "promised time to the first token, as 800ms"),
    "tpot-p99": ("slo.TPOTp99", "TIME", "promised time per further token, as 40ms"),
    "requests-per-minute": ("limits.requests_per_minute", "N", "of all keys together; 0: no limit"),
    "tokens-per-minute": ("limits.tokens_per_minute", "N", "of all keys together; 0: no limit"),
    "concurrency": ("limits.concurrency", "N", "requests at once, of all keys together; 0: no limit"),
    "over-max-output": (
        *("limits.over_max_output", "HOW"),
        f"of a request for more than max-output: {' or '.join(OVER_MAX_OUTPUT[1:])}; refuse, if left out",
    ),
    "timeout-hold": (
        *("timeouts.hold", "TIME"),
        f"for a replica to be there; {format_duration(_USUAL.hold)}, if left out",
    ),
    "timeout-connect": (
        *("timeouts.connect", "TIME"),
        f"for the engine to take it; {format_duration(_USUAL.connect)}, if left out",
    ),
    "timeout-first-byte": (
        *("timeouts.first_byte", "TIME"),
        f"for an answer to begin; {format_duration(_USUAL.first_byte)}, if left out",
    ),
    "timeout-idle": (
        *("timeouts.idle", "TIME"),
        f"for its next byte; {format_duration(_USUAL.idle)}, if left out",
    ),
}
# Option -> the list of names in the model's JSON, and what one of them is.
_LISTS: Mapping[str, tuple[str, str]] = {
    "alias": ("aliases", "a further name"),
    "fallback": ("fallbacks", "a model to ask when this one cannot answer; the first one first"),
}
# Settings of the profile that have an option of their own.
_SETTINGS: Mapping[str, tuple[str, str, str]] = {
    "engine": ("engine", "NAME", f"{', '.join(ENGINES)}; {ENGINES[0]} if left out"),
    "gpu-class": ("gpu_class", "NAME", "leave out to run without a card (llamacpp)"),
    "tp": ("tp", "N", "GPUs that share each layer"),
}


class _Help(DjangoHelpFormatter, RawDescriptionHelpFormatter):
    """Examples keep their lines, and what every command of Django's takes comes last."""


# --- the options ----------------------------------------------------------------------------------


def add_options(parser: ArgumentParser, *, is_new: bool) -> None:
    """Those that say what the model is. A model that is there may also be renamed, and lose something."""
    parser.formatter_class = _Help
    parser.allow_abbrev = False  # --alias is not short for --aliases
    parser.add_argument(
        "--skip-source-check",
        action="store_true",
        help="save without asking for the source; --why says the reason",
    )
    fields = parser.add_argument_group("the model")
    for option, (_, metavar, help_text) in FIELDS.items():
        fields.add_argument(
            f"--{option}", required=is_new and option == "source", metavar=metavar, help=help_text
        )
    for option, (_, help_text) in _LISTS.items():
        _add_repeated(fields, option, f"{help_text}; may be repeated")
    _add_repeated(fields, "capability", "tools, vision or embeddings; may be repeated")
    profiles = parser.add_argument_group("its profiles")
    for option, (_, metavar, help_text) in _SETTINGS.items():
        profiles.add_argument(f"--{option}", metavar=metavar, help=help_text)
    _add_profile(profiles, "profile", ("[NAME] KEY=VALUE", "KEY=VALUE"), "settings of a profile, as above")
    if not is_new:
        _add_options_of_edit(fields, profiles)


def _add_options_of_edit(fields: Any, profiles: Any) -> None:
    fields.add_argument("--name", dest="new_name", metavar="NAME", help="rename it")
    for option, (field, _) in _LISTS.items():
        _add_repeated(fields, f"remove-{option}", f"of its {field}; may be repeated")
        fields.add_argument(
            f"--{field}", nargs="*", metavar="NAME", help=f"these and no other {field}; none: no {field}"
        )
    _add_repeated(fields, "remove-capability", "may be repeated")
    _add_profile(profiles, "add-profile", ("NAME", "KEY=VALUE"), "one more profile; may be repeated")
    _add_repeated(profiles, "remove-profile", "may be repeated")


def _add_repeated(group: Any, option: str, help_text: str) -> None:
    group.add_argument(f"--{option}", action="append", default=[], metavar="NAME", help=help_text)


def _add_profile(group: Any, option: str, words: tuple[str, str], help_text: str) -> None:
    group.add_argument(f"--{option}", action="append", nargs="+", default=[], metavar=words, help=help_text)


# --- what they say --------------------------------------------------------------------------------


def new_model(options: Mapping[str, Any]) -> dict[str, Any]:
    """The model's JSON, for the law to judge. Raises TypingError where something typed cannot be read."""
    told = {"name": options["name"], **_fields(options), "profiles": _new_profiles(options)}
    told |= {field: options[option] for option, (field, _) in _LISTS.items()}
    return dict(merged({}, told))


def model_patch(options: Mapping[str, Any], stored: ModelSpec) -> dict[str, Any]:
    """What of a model shall be otherwise, as a JSON merge patch. Raises TypingError as `new_model` does."""
    patch = _fields(options)
    if options["new_name"] is not None:
        patch["name"] = options["new_name"]
    for option, (field, _) in _LISTS.items():
        were = list(getattr(stored, field))
        names = _names(options, option, field, were, stored.name)
        if names != were:
            patch[field] = names
    for capability in options["remove_capability"]:
        patch.setdefault("capabilities", {})[capability] = None
    profiles = _edited_profiles(options, stored)
    return patch if profiles is None else patch | {"profiles": profiles}


def _fields(options: Mapping[str, Any]) -> dict[str, Any]:
    patch: dict[str, Any] = {}
    for option, (place, _, _) in FIELDS.items():
        text = _said(options, option)
        if text is not None:
            *outer, key = place.split(".")
            inside = patch.setdefault(outer[0], {}) if outer else patch
            inside[key] = typed_value(key, text) if text else None
    if options["capability"]:
        patch["capabilities"] = dict.fromkeys(options["capability"], True)
    return patch


def _said(options: Mapping[str, Any], option: str) -> str | None:
    text: str | None = options[option.replace("-", "_")]
    return text


def _names(options: Mapping[str, Any], option: str, field: str, were: list[str], model: str) -> list[str]:
    names = were if options[field] is None else list(options[field])
    for name in options[f"remove_{option}"]:
        if name not in names:
            raise TypingError(_has_no(model, option, name, names))
        names = [each for each in names if each != name]
    return names + [name for name in options[option] if name not in names]


def _new_profiles(options: Mapping[str, Any]) -> list[Any]:
    named, unnamed = _settings(options, ())
    if unnamed or not named:
        named.setdefault(_only(list(named) or ["default"], unnamed), []).extend(unnamed)
    return [_new_profile(name, settings) for name, settings in named.items()]


def _edited_profiles(options: Mapping[str, Any], stored: ModelSpec) -> list[Any] | None:
    """All profiles of the model, in their order. None: nothing is said of them."""
    kept = {profile.name: profile for profile in stored.profiles}
    named, unnamed = _settings(options, kept)
    if not (named or unnamed or options["remove_profile"] or options["add_profile"]):
        return None
    for name in options["remove_profile"]:
        if name not in kept:
            raise TypingError(_has_no(stored.name, "profile", name, kept))
        del kept[name]
    if unnamed:
        named.setdefault(_only(list(kept), unnamed), []).extend(unnamed)
    for name in named:
        if name not in kept:
            says = _has_no(stored.name, "profile", name, kept)
            raise TypingError(f"{says} (--add-profile adds one)")
    edited = [patched_profile(each, read_settings(named.get(name, ()))) for name, each in kept.items()]
    return edited + [_new_profile(name, settings) for name, *settings in options["add_profile"]]


def _new_profile(name: str, settings: Sequence[str]) -> Any:
    return merged({}, {"name": name, **read_settings(settings)})


def _settings(options: Mapping[str, Any], known: Collection[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Settings by the profile that they name, and those that name none."""
    named: dict[str, list[str]] = {}
    unnamed = [
        f"{key}={text}"
        for option, (key, _, _) in _SETTINGS.items()
        if (text := _said(options, option)) is not None
    ]
    for words in options["profile"]:
        name, settings = split_settings(words, known)
        (named.setdefault(name, []) if name else unnamed).extend(settings)
    return named, unnamed


def _only(names: Sequence[str], unnamed: Sequence[str]) -> str:
    """The profile that settings without a name are for."""
    if len(names) == 1:
        return names[0]
    if not names:
        raise TypingError("no profile is left to change; --add-profile NAME KEY=VALUE adds one")
    told = ", ".join(quote(name) for name in names)
    raise TypingError(
        f"{quote(unnamed[0])} could be for any of the profiles {told}; name the one you mean, as in"
        f" --profile {names[0]} {unnamed[0]}"
    )


def _has_no(model: str, what: str, name: str, names: Collection[str]) -> str:
    near = difflib.get_close_matches(name[:NAME_LIMIT], names, n=1)
    known = ", ".join(quote(each) for each in names) or "none"
    advice = f"did you mean {quote(near[0])}?" if near else f"it has {known}"
    return f"model {quote(model)} has no {what} {quote(name)}; {advice}"
