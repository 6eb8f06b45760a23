"""What the environment says, each variable by a reader of its kind.

An empty one is none. What cannot be read raises ImproperlyConfigured, with one sentence: the variable, its
value, and what that should look like.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable
from typing import TypeVar

from django.core.exceptions import ImproperlyConfigured

from catalog.durations import parse_duration

T = TypeVar("T")

MAX_S = 1e7  # four months


def _read(name: str, default: T, parse: Callable[[str], T], looks_like: str) -> T:
    text = os.environ.get(name, "").strip()
    if not text:
        return default
    try:
        return parse(text)
    except ValueError:
        raise ImproperlyConfigured(f"{name} is {text!r}, which is not {looks_like}.") from None


def text(name: str, default: str) -> str:
    return _read(name, default, str, "a text")


def is_on(name: str) -> bool:
    def parse(text: str) -> bool:
        if text.lower() not in ("1", "true", "yes", "on", "0", "false", "no", "off"):
            raise ValueError
        return text.lower() in ("1", "true", "yes", "on")

    return _read(name, False, parse, "1 or 0")


def seconds(name: str, default: float, *, at_most: float = MAX_S) -> float:
    def parse(text: str) -> float:
        value = float(text)
        if not 0 < value <= at_most:
            raise ValueError
        return value

    bound = "" if at_most == MAX_S else f" and up to {at_most:g}"
    return _read(name, default, parse, f"a number of seconds above 0{bound}, such as 2 or 0.5")


def duration_ns(name: str, default: int) -> int:
    return _read(name, default, parse_duration, "a duration such as 15m or 1h30m")


def size_bytes(name: str, default: int) -> int:
    def parse(text: str) -> int:
        value = int(text)
        if value <= 0:
            raise ValueError
        return value

    return _read(name, default, parse, "a whole number of bytes above 0")


def count(name: str, default: int) -> int:
    def parse(text: str) -> int:
        value = int(text)
        if not 1 <= value <= 1000:
            raise ValueError
        return value

    return _read(name, default, parse, "a whole number from 1 to 1000")


def names(name: str, default: list[str]) -> list[str]:
    return _read(name, default, lambda text: [part.strip() for part in text.split(",")], "a list of names")


def networks(name: str) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    def parse(text: str) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
        return [ipaddress.ip_network(part.strip()) for part in text.split(",")]

    return _read(name, [], parse, "a list of networks such as 10.1.0.0/16 or 127.0.0.1")


def url(name: str, default: str, *schemes: str) -> str:
    starts = tuple(f"{scheme}://" for scheme in schemes)

    def parse(text: str) -> str:
        if not text.startswith(starts):
            raise ValueError
        return text.rstrip("/")

    return _read(name, default, parse, "a URL that begins with " + " or ".join(starts))


def urls(name: str, *schemes: str) -> list[str]:
    starts = tuple(f"{scheme}://" for scheme in schemes)

    def parse(text: str) -> list[str]:
        found = [part.strip().rstrip("/") for part in text.split(",")]
        if not all(each.startswith(starts) for each in found):
            raise ValueError
        return found

    return _read(name, [], parse, "a list of URLs that begin with " + " or ".join(starts))


def secret(name: str, default: T, parse: Callable[[str], T], looks_like: str) -> T:
    """As the others, and the value is never repeated."""
    try:
        return _read(name, default, parse, looks_like)
    except ImproperlyConfigured:
        raise ImproperlyConfigured(f"{name} is not {looks_like}.") from None
