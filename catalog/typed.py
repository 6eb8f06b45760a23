"""What people type into forms and shells, and the words they read back.

Turns lines and `key=value` settings into the plain JSON that the law reads, and back again without loss. It
judges nothing but the writing: a text where a number belongs stays a text, so that every door shows the law's
own sentence about it.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from catalog.durations import format_duration
from catalog.reading import quote
from catalog.spec import Scaling

WHOLE_NUMBERS = frozenset(
    {
        "tp", "pp", "gpus_per_node", "nodes", "min_memory_gb", "min_disk_gb", "priority",
        "min", "max", "context_length", "max_output",
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


def read_settings(settings: Iterable[str]) -> dict[str, Any]:
    """A profile from `key=value` texts: args once an argument, `env.NAME=value`, `node_selector.NAME=value`.

    Raises TypingError naming the setting. Keys and values are for the law to judge.
    """
    profile: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key.strip():
            raise TypingError(f"the profile setting {quote(setting)} is not key=value; write it like tp=2")
        place, key = profile, key.strip()
        for name in _MAPS:
            if key == name:
                raise TypingError(f"{name} is set entry by entry; write {name}.NAME=value")
            if key.startswith(f"{name}."):
                place, key = profile.setdefault(name, {}), key.removeprefix(f"{name}.")
        if key == "args" and place is profile:
            profile.setdefault("args", []).append(text)
        elif key in place:
            raise TypingError(f"the profile setting {quote(key)} is given twice; keep one of the two")
        else:
            place[key] = text if place is not profile else typed_value(key, text)
    return profile


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


def span_words(seconds: float) -> str:
    """A length of time at a glance: `12 s`, `5 min`, `3 h`, `2 d`."""
    seconds = max(seconds, 0)
    for unit, length_s, until_s in (("s", 1, 120), ("min", 60, 7_200), ("h", 3_600, 172_800)):
        if seconds < until_s:
            return f"{int(seconds // length_s)} {unit}"
    return f"{int(seconds // 86_400)} d"
