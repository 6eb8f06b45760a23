"""Durations: texts for people (`1h30m`, `1.5s`, `300ms`), integers of nanoseconds for the catalog.

Both ways are exact, and there is one way to print a duration: hours and minutes whole, the rest in seconds,
or in milliseconds where it is less than a second.
"""

import re

MILLISECOND = 1_000_000
SECOND = 1_000 * MILLISECOND
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE

_UNITS = (("h", HOUR), ("m", MINUTE), ("s", SECOND), ("ms", MILLISECOND))
_LONGEST_NS = 2**63 - 1
_LONGEST_TEXT = 64
_PART = r"(?:([0-9]+)(?:\.([0-9]+))?{unit})?"
_DURATION = re.compile("(-?)" + "".join(_PART.format(unit=unit) for unit, _ in _UNITS))


def parse_duration(value: str | int) -> int:
    """Nanoseconds of a text such as `1h30m`, or of an integer that is nanoseconds already.

    Raises ValueError with a phrase that completes "idle_timeout ...".
    """
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ValueError("must be a duration such as 20m or 1.5s")
    nanoseconds = value if isinstance(value, int) else _parse_text(value.strip())
    if not -_LONGEST_NS <= nanoseconds <= _LONGEST_NS:
        raise ValueError("is longer than 290 years; give a shorter duration such as 20m")
    return nanoseconds


def _parse_text(text: str) -> int:
    if text == "0":
        return 0
    match = _DURATION.fullmatch(text) if len(text) <= _LONGEST_TEXT else None
    if match is None or not any(match.groups()[1:]):
        raise ValueError("must be a duration in h, m, s or ms, such as 1h30m, 1.5s or 300ms")
    total = 0
    for (_, unit_ns), whole, decimals in zip(_UNITS, match.groups()[1::2], match.groups()[2::2], strict=True):
        total += int(whole or 0) * unit_ns
        part, rest = divmod(int(decimals or 0) * unit_ns, 10 ** len(decimals or ""))
        if rest:
            raise ValueError("is finer than a nanosecond; give fewer decimals")
        total += part
    return -total if match[1] else total


def format_duration(nanoseconds: int) -> str:
    """The one text for a duration: `0s`, `300ms`, `1.5s`, `20m`, `1h30m`."""
    if nanoseconds == 0:
        return "0s"
    if nanoseconds < 0:
        return "-" + format_duration(-nanoseconds)
    hours, rest = divmod(nanoseconds, HOUR)
    minutes, rest = divmod(rest, MINUTE)
    text = (f"{hours}h" if hours else "") + (f"{minutes}m" if minutes else "")
    if rest >= SECOND:
        text += _decimal(rest, SECOND) + "s"
    elif rest:
        text += _decimal(rest, MILLISECOND) + "ms"
    return text


def _decimal(nanoseconds: int, unit_ns: int) -> str:
    whole, rest = divmod(nanoseconds, unit_ns)
    digits = str(unit_ns + rest)[1:].rstrip("0")
    return f"{whole}.{digits}" if digits else str(whole)
