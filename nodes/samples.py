"""Samples as the database keeps them: written once a minute by whoever holds the lease, rolled up, read and
forgotten.

A minute is one upsert of all subjects, whatever their number; nothing is asked of any node for it. A row is
an hour of a subject in minutes, and is kept for two days; once over, it becomes a place in the row of its
day, which is kept for ninety. For 1,000 nodes and 500 models that is 74,000 rows by minutes and 137,000 by
hours, at most 120 MB on PostgreSQL and 50 MB of them for the minutes, however long the cluster runs.

Every write puts values at their places: two writers, or the same one once more, leave what one would have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta

from django.db.models import Q
from django.db.models.functions import Now

from nodes.models import Sample
from nodes.sampling import (
    DAY_S,
    HOUR_S,
    MINUTE_S,
    Packed,
    Subject,
    Value,
    Values,
    floor,
    mean_of,
    put,
    unpack,
)
from nodes.usage import remove_bite

KEEP_MINUTES = timedelta(hours=48)
KEEP_HOURS = timedelta(days=90)
BITE = 500
"""Rows that are rolled up at once."""

_ROW_S = {MINUTE_S: HOUR_S, HOUR_S: DAY_S}
"""How long a row is, by its step."""
_PLACE = ("step_s", "begins_at", "kind", "subject")


class Minutes:
    """Those that a process writes: each once."""

    def __init__(self) -> None:
        self._kept: datetime | None = None

    def are_due(self, now: datetime) -> bool:
        return self._kept != floor(now, MINUTE_S)

    def are_kept(self, now: datetime) -> None:
        """Once what was written is committed."""
        self._kept = floor(now, MINUTE_S)


def keep(now: datetime, values: Mapping[Subject, Values], *, bite: int = BITE) -> None:
    """What was measured in this minute. In the transaction of whoever holds the lease."""
    _put(MINUTE_S, now, values)
    _roll(floor(now, HOUR_S), bite)


def _roll(hour: datetime, limit: int) -> None:
    """Puts a bite of the oldest hour that is over into its day. The next minute goes on from there."""
    waiting = Sample.objects.filter(step_s=MINUTE_S, is_rolled=False, begins_at__lt=hour)
    bite = list(waiting.order_by("begins_at", "pk")[:limit])
    rows = [row for row in bite if row.begins_at == bite[0].begins_at]
    if rows:
        means = {
            (row.kind, row.subject): {name: mean_of(line) for name, line in row.lines.items()} for row in rows
        }
        _put(HOUR_S, rows[0].begins_at, means)
        Sample.objects.filter(pk__in=[row.pk for row in rows]).update(is_rolled=True)


def _put(step_s: int, at: datetime, values: Mapping[Subject, Values]) -> None:
    begins_at = floor(at, _ROW_S[step_s])
    place = int((at - begins_at).total_seconds()) // step_s
    there = Sample.objects.filter(step_s=step_s, begins_at=begins_at)
    known = {(kind, subject): lines for kind, subject, lines in there.values_list("kind", "subject", "lines")}
    Sample.objects.bulk_create(
        [
            Sample(
                kind=kind,
                subject=subject,
                step_s=step_s,
                begins_at=begins_at,
                lines=_with(known.get((kind, subject), {}), place, measured),
            )
            for (kind, subject), measured in sorted(values.items())
        ],
        update_conflicts=True,
        unique_fields=_PLACE,
        update_fields=["lines", "is_rolled"],  # a value that comes late is rolled up, too
    )


def _with(lines: Mapping[str, Packed], place: int, measured: Values) -> dict[str, Packed]:
    return {**lines, **{name: put(lines.get(name, []), place, value) for name, value in measured.items()}}


def lines(subject: Subject, step_s: int, since: datetime, count: int) -> dict[str, list[Value]]:
    """So many values from then on, by what was measured; None where nothing is known."""
    begins = _rows_between(step_s, since, since + timedelta(seconds=step_s * count))
    kind, name = subject
    rows = Sample.objects.filter(step_s=step_s, begins_at__in=begins, kind=kind, subject=name)
    found: dict[str, list[Value]] = {}
    for begins_at, packed in rows.values_list("begins_at", "lines"):
        offset = int((begins_at - since).total_seconds()) // step_s
        for measured, line in packed.items():
            values = found.setdefault(measured, [None] * count)
            for place, value in enumerate(unpack(line), offset):
                if 0 <= place < count:
                    values[place] = value
    return found


def _rows_between(step_s: int, since: datetime, until: datetime) -> Iterable[datetime]:
    row = timedelta(seconds=_ROW_S[step_s])
    begins, found = floor(since, _ROW_S[step_s]), []
    while begins < until:
        found.append(begins)
        begins += row
    return found


def forget() -> bool:
    """Removes one bite of what is too old, and whether there may be more. An hour that is in no day yet waits
    until it is."""
    minutes = Q(step_s=MINUTE_S, begins_at__lt=Now() - KEEP_MINUTES - timedelta(hours=1), is_rolled=True)
    hours = Q(step_s=HOUR_S, begins_at__lt=Now() - KEEP_HOURS - timedelta(days=1))
    return remove_bite(Sample.objects.filter(minutes | hours))
