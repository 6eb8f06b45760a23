"""Tests wait for a condition with a deadline; none sleeps and hopes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

SELDOM_S = 0.25
"""What takes long is looked at less often: to look costs time as well, often that of what is waited for."""


def wait_until(
    condition: Callable[[], T],
    what: str,
    *,
    tell: Callable[[], str] = str,
    timeout_s: float = 20,
    every_s: float = 0.05,
) -> T:
    """The first true value of `condition`. Fails with what was waited for, and what `tell` tells then.
    A quiet machine needs a tenth of the time that is left to it: others may work beside it."""
    began = time.monotonic()
    while not (value := condition()):
        waited_s = time.monotonic() - began
        if waited_s > timeout_s:
            raise AssertionError(f"waited {timeout_s:.0f} s for {what} {tell()}")
        time.sleep(max(every_s, min(waited_s / 20, SELDOM_S)))
    return value
