"""What people ask about usage, and the answer that every door gives: since when, told apart by what, of whom.

Whoever may not see what others' keys used is answered about their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Q

from catalog.durations import MINUTE, format_duration, parse_duration
from catalog.models import Key, Name, database_now
from catalog.reading import CatalogError, Fault, quote
from nodes.tallies import TIMES, Tally, total
from nodes.usage import KEEP_HOURS, Line, used

SEES_ALL = "nodes.all_usage"

BY = {"both": ("key", "model"), "key": ("key",), "model": ("model",)}
SINCE = "24h"
_LEAST, _MOST = MINUTE, int(KEEP_HOURS.total_seconds()) * 1_000_000_000
QUANTILES = {"p50": 0.5, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Question:
    """`key` is an id or a name, `model` a name or an alias; empty: all."""

    since: timedelta
    by: str
    key: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    question: Question
    now: datetime
    lines: list[Line]

    @property
    def total(self) -> Tally:
        return total(line.tally for line in self.lines)

    def as_dict(self) -> dict[str, Any]:
        apart = BY[self.question.by]
        return {
            "since_s": round(self.question.since.total_seconds()),
            "until": self.now,
            "by": self.question.by,
            "results": [_line_as_dict(line, apart) for line in self.lines],
            "total": tally_as_dict(self.total),
        }


def ask(*, since: str = SINCE, by: str = "both", key: str = "", model: str = "") -> Question:
    """Raises CatalogError for what cannot be asked."""
    faults = []
    span = 0
    try:
        span = parse_duration(since)
        if not _LEAST <= span <= _MOST:
            says = f"since must be from {format_duration(_LEAST)} to {format_duration(_MOST)}, which is kept,"
            faults.append(Fault("", "", "since", "range", f"{says} and is {quote(since)}"))
    except ValueError as error:
        faults.append(Fault("", "", "since", "duration", f"since {error}, and is {quote(since)}"))
    if by not in BY:
        says = f"by cannot be {quote(by)}; it is one of {', '.join(BY)}"
        faults.append(Fault("", "", "by", "unknown_choice", says))
    if faults:
        raise CatalogError(faults)
    return Question(timedelta(microseconds=span / 1_000), by, key, model)


def answer(question: Question, user: Any = None) -> Answer:
    """For this user; for a shell, where one may see everything, without. The same few queries whatever there
    is."""
    now, where = database_now(), Q()
    if user is not None and not user.has_perm(SEES_ALL):
        where &= Q(key__in=Key.objects.filter(user=user).values("pk"))
    if question.key:
        where &= Q(key=question.key) | Q(key_name=question.key)
    if question.model:
        called = Name.objects.filter(name=question.model).values("model__name")
        where &= Q(model=question.model) | Q(model__in=called)
    return Answer(question, now, used(now, question.since, by=BY[question.by], where=where))


def tally_as_dict(tally: Tally) -> dict[str, Any]:
    return {
        "requests": tally.requests,
        "errors": tally.errors,
        "left": tally.left,
        "codes": dict(sorted(tally.codes.items(), key=lambda item: (-item[1], item[0]))),
        "prompt_tokens": tally.prompt_tokens,
        "cached_tokens": tally.cached_tokens,
        "completion_tokens": tally.completion_tokens,
        **{
            f"{time}_ms": {name: _ms(tally.quantile(time, part)) for name, part in QUANTILES.items()}
            for time in TIMES
        },
    }


def _line_as_dict(line: Line, apart: tuple[str, ...]) -> dict[str, Any]:
    return {
        "key": line.key if "key" in apart else None,
        "key_name": line.key_name if "key" in apart else None,
        "model": line.model if "model" in apart else None,
        **tally_as_dict(line.tally),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 1)


def lasted(seconds: float | None) -> str:
    """For people: `1.25 s`, `340 ms`, `8.1 ms`; a dash for what never was."""
    if seconds is None:
        return "-"
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1000:.3g} ms"
