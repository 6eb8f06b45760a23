"""What people type into forms and shells, and the words they read back.

Turns lines and `key=value` settings into the plain JSON that the law reads, and back again without loss. It
judges nothing but the writing: a text where a number belongs stays a text, so that every door shows the law's
own sentence about it.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from catalog.differences import PROFILE_KEYS
from catalog.durations import format_duration, parse_duration
from catalog.parts import LIMIT_KEYS, Limits, Scaling, Timeouts
from catalog.reading import quote
from catalog.spec import ModelSpec

WHOLE_NUMBERS = frozenset(
    {
        "tp", "pp", "gpus_per_node", "nodes", "min_memory_gb", "min_disk_gb", "priority",
        "min", "max", "context_length", "max_output", *LIMIT_KEYS,
    }
)  # fmt: skip
NUMBERS = frozenset({"weight"})
_WHOLE = re.compile(r"[+-]?[0-9]{1,40}")
_MAPS = ("env", "node_selector")


class TypingError(ValueError):
    """Something typed cannot be read; the text is one sentence that says how to write it."""


# --- one value ------------------------------------------------------------------------------------


def typed_value(key: str, text: str) -> Any:
    """The number that the text is, where the key wants one; otherwise the text, for the law to judge."""
    bare = text.strip()
    if key in WHOLE_NUMBERS and _WHOLE.fullmatch(bare):
        return int(bare)
    if key in NUMBERS and "_" not in bare:
        try:
            return float(bare)
        except ValueError:
            return text
    return text


def read_duration(key: str, text: str) -> int:
    """Nanoseconds. Raises TypingError."""
    try:
        return parse_duration(text)
    except ValueError as no:
        raise TypingError(f"{key} {no}") from None


# --- one entry a line -----------------------------------------------------------------------------

# A line that begins with a quote is a JSON text: so may entries be empty, begin with spaces, hold line ends.


def _as_line(text: str) -> str:
    is_plain = text and text.isprintable() and text == text.strip() and not text.startswith('"')
    return text if is_plain else json.dumps(text)


def _from_line(line: str, number: int) -> str:
    if not line.startswith('"'):
        return line
    try:
        text = json.loads(line)
    except ValueError:
        raise TypingError(
            f"line {number} begins with a quote and is not a whole JSON text; close the quote, or drop it"
        ) from None
    return str(text)


def _lines(text: str) -> Iterable[tuple[int, str]]:
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return ((number, line.strip()) for number, line in enumerate(lines, 1) if line.strip())


def write_list(entries: Sequence[str]) -> str:
    return "\n".join(_as_line(entry) for entry in entries)


def read_list(text: str) -> list[str]:
    """One entry a line; empty lines are skipped. Raises TypingError naming the line."""
    return [_from_line(line, number) for number, line in _lines(text)]


def write_pairs(pairs: Mapping[str, str]) -> str:
    return "\n".join(f"{name}={_as_line(value) if value else ''}" for name, value in pairs.items())


def read_pairs(text: str) -> dict[str, str]:
    """`NAME=value` a line; spaces around either are not part of it. Raises TypingError naming the line."""
    pairs: dict[str, str] = {}
    for number, line in _lines(text):
        name, equals, value = line.partition("=")
        name = name.strip()
        if not equals:
            raise TypingError(f"line {number} has no =; write NAME=value")
        if not name:
            raise TypingError(f"line {number} has no name before the =; write NAME=value")
        if name in pairs:
            raise TypingError(f"line {number} sets {quote(name)} a second time; keep one of the two")
        pairs[name] = _from_line(value.strip(), number)
    return pairs


# --- settings in a shell --------------------------------------------------------------------------


def split_settings(words: Sequence[str], known: Iterable[str]) -> tuple[str, list[str]]:
    """The profile that settings are for, which is the first of several words unless that is a setting itself,
    and the settings. A profile that is `known` may be called anything."""
    first, *rest = words
    is_setting = "=" in first or _taken_away(first) is not None
    is_name = bool(rest) and (first in known or not is_setting)
    return (first, rest) if is_name else ("", [first, *rest])


def read_settings(settings: Iterable[str]) -> dict[str, Any]:
    """What settings make of a profile, as a JSON merge patch.

    `key=value` sets a field and `key=` takes it back to what it is when left out. args is given once an
    argument, all of them anew. `env.NAME=value` and `node_selector.LABEL=value` set one entry, `env.NAME-`
    takes it away. Raises TypingError naming the setting. Keys and values are for the law to judge.
    """
    patch: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        key = key.strip()
        place, name = _place(key)
        if entry := _taken_away(setting):
            _set(patch, *entry, None)
        elif not equals or not key:
            raise TypingError(f"the profile setting {quote(setting)} is not key=value; write it like tp=2")
        elif key == "args":
            patch.setdefault(key, []).append(text)
        elif place in _MAPS and name:
            _set(patch, place, name, text)
        elif key in _MAPS and text:
            raise TypingError(f"{key} is set entry by entry; write {key}.NAME=value")
        else:
            _set(patch, "", key, typed_value(key, text) if text or key not in PROFILE_KEYS else None)
    if patch.get("args") == [""]:
        patch["args"] = None
    return patch


def _place(key: str) -> tuple[str, str]:
    """The map and the entry of `env.NAME`."""
    place, _, name = key.partition(".")
    return place, name


def _taken_away(setting: str) -> tuple[str, str] | None:
    """The map and the entry of `env.NAME-`."""
    place, name = _place(setting.strip())
    is_it = place in _MAPS and "=" not in name and name.endswith("-")
    return (place, name.removesuffix("-")) if is_it else None


def _set(patch: dict[str, Any], place: str, key: str, value: Any) -> None:
    inside = patch.setdefault(place, {}) if place else patch
    if inside is None or key in inside:
        name = f"{place}.{key}" if place else key
        raise TypingError(f"the profile setting {quote(name)} is given twice; keep one of the two")
    inside[key] = value


# --- words to read --------------------------------------------------------------------------------


def scaling_words(scaling: Scaling, default_idle_ns: int) -> str:
    if scaling.max == 0:
        return "off"
    if scaling.min == 0:
        idle = format_duration(scaling.idle_timeout or default_idle_ns)
        return f"on demand, up to {scaling.max}, unloaded after {idle} idle"
    if scaling.min == scaling.max:
        return f"kept running: {scaling.min}"
    return f"kept running: {scaling.min} to {scaling.max}"


def limits_words(limits: Limits) -> str:
    """Empty where there is no limit."""
    per_minute = ((limits.requests_per_minute, "requests"), (limits.tokens_per_minute, "tokens"))
    words = [f"{count} {what} a minute" for count, what in per_minute if count]
    if limits.concurrency:
        words.append(f"{limits.concurrency} at once")
    return ", ".join(words)


def timeouts_words(timeouts: Timeouts) -> str:
    """Empty where all are the defaults."""
    told = asdict(timeouts).items()
    return ", ".join(f"{key.replace('_', ' ')} {format_duration(value)}" for key, value in told if value)


def bounds_words(model: ModelSpec) -> str:
    """All that bounds a model's requests. Empty where nothing does but the cluster's defaults."""
    over = f"over max output: {model.over_max_output}" if model.over_max_output else ""
    return ", ".join(filter(None, (limits_words(model.limits), over, timeouts_words(model.timeouts))))


def span_words(seconds: float) -> str:
    """A length of time at a glance: `12 s`, `5 min`, `3 h`, `2 d`."""
    seconds = max(seconds, 0)
    for unit, length_s, until_s in (("s", 1, 120), ("min", 60, 7_200), ("h", 3_600, 172_800)):
        if seconds < until_s:
            return f"{int(seconds // length_s)} {unit}"
    return f"{int(seconds // 86_400)} d"
