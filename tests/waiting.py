"""Tests wait for a condition with a deadline; none sleeps and hopes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T],
    what: str,
    *,
    tell: Callable[[], str] = str,
    timeout_s: float = 10,
    every_s: float = 0.05,
) -> T:
    """The first true value of `condition`. Fails with what was waited for, and what `tell` tells then."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:.0f} s for {what} {tell()}")
        time.sleep(every_s)
    return value
