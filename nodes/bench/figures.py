"""What was seen of the requests of one step, in numbers, and whether it holds what is promised.

All times count from when a request was due, not from when it could be sent: what an overloaded engine keeps
waiting is waiting, too. A request that failed waited without end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LEVELS = (0.5, 0.9, 0.95, 0.99)
LATE_LIMIT_S = 0.05  # a generator that sends later than this measures itself
BACKLOG_PART = 0.02  # of what came, may be left behind by more than chance
BACKLOG_SIGMAS = 3.0
PROBLEMS_TOLD = 5  # kinds
GONE_RUN, DROPPED_RUN = 20, 5
"""So many failures in a row, or broken connections, are the end of an engine and no load."""
DROPPED = ("it refused", "it broke off", "it closed", "it was silent", "it did not accept")
TOO_MANY = "status 429"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request, in seconds since the step began. `first_s` and `last_s` are its first and
    last token; None where there was none. `problem` is empty where all of it came."""

    number: int
    due_s: float
    sent_s: float
    first_s: float | None
    last_s: float | None
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    problem: str = ""

    @property
    def ttft_s(self) -> float:
        return math.inf if self.problem or self.first_s is None else self.first_s - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """None: it had but one token."""
        if self.problem or self.first_s is None or self.last_s is None:
            return math.inf
        return (self.last_s - self.first_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def took_s(self) -> float:
        return math.inf if self.problem or self.last_s is None else self.last_s - self.due_s


def quantile(values: Sequence[float], level: float) -> float | None:
    """The smallest of them that so many are not above; of `values` in order."""
    return values[max(math.ceil(level * len(values)) - 1, 0)] if values else None


@dataclass(frozen=True, slots=True)
class Times:
    """Of one kind: how many, their mean, the largest and the quantiles of `LEVELS`, all in seconds."""

    count: int = 0
    mean_s: float | None = None
    largest_s: float | None = None
    quantiles_s: tuple[float | None, ...] = (None,) * len(LEVELS)

    @classmethod
    def of(cls, values: Iterable[float]) -> Times:
        ordered = sorted(values)
        if not ordered:
            return cls()
        mean_s = sum(ordered) / len(ordered)
        return cls(len(ordered), mean_s, ordered[-1], tuple(quantile(ordered, level) for level in LEVELS))

    @property
    def p50_s(self) -> float | None:
        return self.quantiles_s[LEVELS.index(0.5)]

    @property
    def p99_s(self) -> float | None:
        return self.quantiles_s[LEVELS.index(0.99)]

    def as_dict(self) -> dict[str, Any]:
        """In milliseconds, None for what is without end or not there."""
        told = {
            f"p{level * 100:g}_ms": _ms(value) for level, value in zip(LEVELS, self.quantiles_s, strict=True)
        }
        return {**told, "mean_ms": _ms(self.mean_s), "max_ms": _ms(self.largest_s)}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None or not math.isfinite(seconds) else round(seconds * 1_000, 3)


@dataclass(frozen=True, slots=True)
class Promise:
    """What has to hold at the 99th percentile, in seconds. 0: nothing is promised."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Figures:
    """Of the requests that were due from `since_s` until `until_s`, those before being the ramp to it."""

    rate: float
    since_s: float
    until_s: float
    requests: int
    failed: int
    problems: Mapping[str, int]
    ttft: Times
    tpot: Times
    took: Times
    late: Times
    output_tokens: int
    cached_part: float | None
    backlog_before: int
    backlog_after: int
    is_cut: bool

    @classmethod
    def of(
        cls,
        rate: float,
        outcomes: Sequence[Outcome],
        *,
        since_s: float,
        until_s: float,
        open_dues_s: Sequence[float] = (),
        waits_s: Sequence[float] = (),
        is_cut: bool = False,
    ) -> Figures:
        """`open_dues_s`: when those were due that were cut off without an answer. `waits_s`: how long those
        of them that count had waited for a first token by then, and would have gone on to."""
        measured = [each for each in outcomes if since_s <= each.due_s < until_s]
        problems: dict[str, int] = {}
        for each in measured:
            if each.problem:
                problems[each.problem] = problems.get(each.problem, 0) + 1
        prompts = sum(each.prompt_tokens for each in measured)
        cached = sum(each.cached_tokens for each in measured)
        return cls(
            rate=rate,
            since_s=since_s,
            until_s=until_s,
            requests=len(measured),
            failed=sum(problems.values()),
            problems=problems,
            ttft=Times.of([*(each.ttft_s for each in measured), *waits_s]),
            tpot=Times.of(each.tpot_s for each in measured if each.tpot_s is not None),
            took=Times.of(each.took_s for each in measured),
            late=Times.of(each.sent_s - each.due_s for each in measured),
            output_tokens=sum(each.output_tokens for each in measured),
            cached_part=cached / prompts if prompts else None,
            backlog_before=_backlog(outcomes, open_dues_s, since_s),
            backlog_after=_backlog(outcomes, open_dues_s, until_s),
            is_cut=is_cut,
        )

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / (self.until_s - self.since_s) if self.until_s > self.since_s else 0.0

    @property
    def is_falling_behind(self) -> bool:
        """Whether more was left at the end than at the beginning, by more than chance explains: a longer
        step would have waited longer."""
        chance = BACKLOG_SIGMAS * math.sqrt(max(self.backlog_before, 1))
        return self.backlog_after - self.backlog_before > BACKLOG_PART * self.requests + chance

    @property
    def was_late(self) -> bool:
        """Whether the generator itself was: what it measured is its own."""
        return (self.late.p99_s or 0.0) > LATE_LIMIT_S

    def misses(self, promise: Promise) -> str:
        """Why the promise is not held at this rate; empty where it is."""
        if not (self.requests or self.is_cut):
            return "no request was due"
        if self.failed > self.requests / 100:
            worst = max(self.problems, key=lambda each: self.problems[each])
            return f"{self.failed} of {self.requests} requests failed: {worst}"
        for name, times, limit_s in (
            ("TTFT", self.ttft, promise.ttft_s),
            ("TPOT", self.tpot, promise.tpot_s),
        ):
            if limit_s and times.p99_s is not None and times.p99_s > limit_s:
                return f"{name} p99 {told_s(times.p99_s)} is above {told_s(limit_s)}"
        if self.is_cut:
            return "too many were not answered in time"
        if self.is_falling_behind:
            return f"requests pile up: {self.backlog_before} open at first, {self.backlog_after} at the end"
        return ""

    def as_dict(self) -> dict[str, Any]:
        return {
            "rate": round(self.rate, 4),
            "measured_s": round(self.until_s - self.since_s, 3),
            "requests": self.requests,
            "failed": self.failed,
            "problems": dict(sorted(self.problems.items(), key=lambda each: -each[1])[:PROBLEMS_TOLD]),
            "ttft": self.ttft.as_dict(),
            "tpot": self.tpot.as_dict(),
            "took": self.took.as_dict(),
            "late": self.late.as_dict(),
            "output_tokens_per_s": round(self.tokens_per_s, 1),
            "cached_part": None if self.cached_part is None else round(self.cached_part, 3),
            "open_before": self.backlog_before,
            "open_after": self.backlog_after,
        }


def told_s(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "without end"
    return f"{seconds:.4g} s" if seconds >= 1 else f"{seconds * 1_000:.4g} ms"


def is_lost(
    outcomes: Sequence[Outcome],
    waiting_s: Sequence[float],
    now_s: float,
    *,
    since_s: float,
    planned: int,
    promise: Promise,
) -> bool:
    """Whether more have missed already than the 99th percentile of `planned` requests lets miss, so that the
    rest need not be waited for. `waiting_s`: when those were due that have no first token `now_s`."""
    measured = [each for each in outcomes if each.due_s >= since_s]
    slow_ttft = slow_tpot = 0
    if promise.ttft_s:
        slow_ttft = sum(each.ttft_s > promise.ttft_s for each in measured)
        slow_ttft += sum(due_s >= since_s and now_s - due_s > promise.ttft_s for due_s in waiting_s)
    if promise.tpot_s:
        slow_tpot = sum((each.tpot_s or 0.0) > promise.tpot_s for each in measured)
    failed = sum(bool(each.problem) for each in measured)
    return max(slow_ttft, slow_tpot, failed) > planned / 100


def is_gone(problems: Sequence[str]) -> bool:
    """Whether the problems of the last requests, empty where they were answered, are the end of an engine and
    no load. That there are too many requests is an answer: fewer may be taken."""
    last, dropped = problems[-GONE_RUN:], problems[-DROPPED_RUN:]
    if len(dropped) == DROPPED_RUN and all(each.startswith(DROPPED) for each in dropped):
        return True
    return len(last) == GONE_RUN and all(each and not each.startswith(TOO_MANY) for each in last)


def _backlog(outcomes: Sequence[Outcome], open_dues_s: Sequence[float], at_s: float) -> int:
    """How many were due and not at their end then."""
    answered = sum(
        each.due_s < at_s and not each.problem and each.last_s is not None and each.last_s >= at_s
        for each in outcomes
    )
    return answered + sum(due_s < at_s for due_s in open_dues_s)
