"""What requests used, as it is counted, added up and read: numbers, and times in histograms of fixed bounds.

Tallies of any two processes, minutes or models can be added, and what is added is never added twice by
anything here: who adds decides that. No request is kept, only sums.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Any

_DIGITS = ("1", "1.25", "1.6", "2", "2.5", "3.2", "4", "5", "6.3", "8")
BOUNDS_S = (*(float(f"{digits}e{power}") for power in range(-3, 3) for digits in _DIGITS), 1000.0)
"""The upper ends of the buckets: ten a decade, from a millisecond up. Slower ones are in one more."""

TIMES = ("ttft", "tpot", "queue", "hold", "duration")
"""To the first token and between tokens (streams alone), waiting for limits and engines' connections, waiting
for a replica, and in all."""

OK, REFUSED, FAILED, LEFT = "2xx", "4xx", "5xx", "499"
"""How a request ended: answered, refused for what it was, failed by llmgw or an engine (a stream that was cut
as well), or left by its client."""
OUTCOMES = (OK, REFUSED, FAILED, LEFT)

CODES_AT_ONCE = 32
"""Codes of errors told apart in one tally. Engines make up their own, and the rest are counted as one."""
OTHER = "other"


class Histogram:
    """How many lasted how long."""

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.total_s = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.total_s += seconds

    def add(self, other: Histogram) -> None:
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total_s += other.total_s

    def quantile(self, part: float) -> float | None:
        """In seconds, as if times were spread evenly within their bucket; None of nothing. What is slower
        than the last bound is told as that bound."""
        rank = part * self.count
        if not rank:
            return None
        below = 0
        for place, count in enumerate(self.counts[:-1]):
            if below + count >= rank:
                low = BOUNDS_S[place - 1] if place else 0.0
                return low + (BOUNDS_S[place] - low) * (rank - below) / count
            below += count
        return BOUNDS_S[-1]

    def as_list(self) -> list[float]:
        """The total, then the counts up to the last that is not 0."""
        last = max((place for place, count in enumerate(self.counts) if count), default=-1)
        return [round(self.total_s, 6), *self.counts[: last + 1]]

    @classmethod
    def of_list(cls, kept: list[float]) -> Histogram:
        found = cls()
        found.total_s = float(kept[0])
        found.counts[: len(kept) - 1] = [int(count) for count in kept[1:]]
        return found


class Tally:
    """What some requests used. `errors` were refused or failed, by code in `codes`; those whose client left
    are in `left` alone. Tokens are the engines' own counts."""

    __slots__ = (
        "cached_tokens",
        "codes",
        "completion_tokens",
        "errors",
        "left",
        "prompt_tokens",
        "requests",
        "times",
    )

    def __init__(self) -> None:
        self.requests = self.errors = self.left = 0
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0
        self.codes: dict[str, int] = {}
        self.times: dict[str, Histogram] = {}

    def observe(self, time: str, seconds: float | None) -> None:
        if seconds is not None:
            histogram = self.times.get(time)
            if histogram is None:
                histogram = self.times[time] = Histogram()
            histogram.observe(seconds)

    def count_code(self, code: str, times: int = 1) -> None:
        if code not in self.codes and len(self.codes) >= CODES_AT_ONCE:
            code = OTHER
        self.codes[code] = self.codes.get(code, 0) + times

    def add(self, other: Tally) -> None:
        for name in SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for code, times in other.codes.items():
            self.count_code(code, times)
        for time, histogram in other.times.items():
            self.times.setdefault(time, Histogram()).add(histogram)

    def quantile(self, time: str, part: float) -> float | None:
        return self.times[time].quantile(part) if time in self.times else None

    def as_dict(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in SUMS},
            "codes": dict(self.codes),
            "times": {time: histogram.as_list() for time, histogram in self.times.items()},
        }

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> Tally:
        """From what `as_dict` gave, or a row of the same columns."""
        found = cls()
        for name in SUMS:
            setattr(found, name, kept[name])
        found.codes = dict(kept["codes"])
        found.times = {time: Histogram.of_list(counts) for time, counts in kept["times"].items()}
        return found


SUMS = ("requests", "errors", "left", "prompt_tokens", "cached_tokens", "completion_tokens")


def total(tallies: Iterable[Tally]) -> Tally:
    found = Tally()
    for tally in tallies:
        found.add(tally)
    return found
