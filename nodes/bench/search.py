"""Looks for the highest load that holds: up by a factor until one does not, then between the two, and what is
found once more for longer.

A value that is told what became of a rate and says which comes next. A rate that fails on the way up is
tried once more before it bounds the search, as a neighbour's hiccup may have failed it. Of many rates that
nearly hold, the luckiest was found: that is why it has to hold again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Search:
    """Rates are requests a second. `held` is the highest that held, `failed` the lowest that did not, None
    before there is one. Once the two are within `precision` of each other `held` is confirmed, or lowered
    until it is."""

    start: float
    floor: float
    ceiling: float
    growth: float = 2.0
    precision: float = 0.05
    held: float | None = None
    failed: float | None = None
    doubted: float | None = None
    is_confirmed: bool = False

    def next_rate(self) -> float | None:
        """None: there is nothing left to try."""
        if self.doubted is not None:
            return self.doubted
        if self.held is None:
            if self.failed is None:
                return min(max(self.start, self.floor), self.ceiling)
            return max(self.failed / self.growth, self.floor) if self.failed > self.floor else None
        if self.is_settled:
            return None if self.is_confirmed else self.held
        if self.failed is None:
            return min(self.held * self.growth, self.ceiling)
        return math.sqrt(self.held * self.failed)

    @property
    def is_settled(self) -> bool:
        """Whether what is next, if anything, is to confirm what was found."""
        if self.held is None or self.doubted is not None:
            return False
        if self.failed is None:
            return self.held >= self.ceiling
        return self.failed <= self.held * (1 + self.precision) * (1 + 1e-9)

    def told(self, rate: float, *, holds: bool) -> Search:
        """What is known once `rate`, which was the next, has been tried."""
        if self.is_settled:
            if holds:
                return replace(self, is_confirmed=True)
            lower = rate / (1 + self.precision)
            return replace(self, failed=rate, held=lower if lower >= self.floor else None)
        if holds:
            return replace(self, held=rate, doubted=None)
        if self.failed is None and self.doubted is None:
            return replace(self, doubted=rate)
        return replace(self, failed=rate, doubted=None)

    @property
    def part_done(self) -> float:
        """From 0 to 1; a guess before anything has failed."""
        if self.next_rate() is None:
            return 1.0
        if self.held is None or self.failed is None:
            return 0.9 if self.is_settled else 0.1
        left = math.log(self.failed / self.held) / math.log1p(self.precision)
        whole = max(math.log(self.growth) / math.log1p(self.precision), left)
        return 0.9 if self.is_settled else 0.3 + 0.6 * (1 - math.log(left) / math.log(whole))
