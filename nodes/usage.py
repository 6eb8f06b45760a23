"""What requests used, as the database keeps it: added by gateways, told by minute or hour, and forgotten.

Minutes and hours are written side by side, so that a question about a month reads a few hundred rows and no
roll-up can fail half-way; minutes go after two days, hours after ninety. What each model ever did is a row of
its own that only grows, which is what a counter of Prometheus must do.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from django.db import transaction
from django.db.models import Exists, OuterRef, Q, QuerySet
from django.db.models.functions import Now

from catalog.models import Key, Name
from nodes.models import Gateway, Usage
from nodes.tallies import SUMS, Tally

KEEP_MINUTES = timedelta(hours=48)
KEEP_HOURS = timedelta(days=90)
BITE = 5_000
"""Rows that are removed at once."""

MINUTE_S, HOUR_S = 60, 3600
_EVER = datetime(1970, 1, 1, tzinfo=UTC)
_COLUMNS = (*SUMS, "codes", "times")
_PLACE = ("span", "begins_at", "key", "model", "endpoint", "outcome")

Place = tuple[str, str, str, str]
"""Key, model, endpoint, outcome."""


# --- added ----------------------------------------------------------------------------------------


def add_lot(gateway: uuid.UUID, number: int, at_s: float, lot: Mapping[Place, Tally]) -> None:
    """Adds what one gateway counted around a moment (seconds of the database's clock). A lot with the number
    of one that was added, or a lower one, adds nothing: its first try got through and the answer did not."""
    with transaction.atomic():
        Gateway.objects.get_or_create(pk=gateway)
        if Gateway.objects.filter(pk=gateway, lots__lt=number).update(lots=number):
            _add(_rows(at_s, lot))


def _rows(at_s: float, lot: Mapping[Place, Tally]) -> dict[tuple[str, datetime, str, str, str, str], Tally]:
    minute, hour = (datetime.fromtimestamp(at_s - at_s % span, UTC) for span in (MINUTE_S, HOUR_S))
    rows: dict[tuple[str, datetime, str, str, str, str], Tally] = {}
    for (key, model, endpoint, outcome), tally in lot.items():
        for place in (
            (Usage.Span.MINUTE.value, minute, key, model, "", ""),
            (Usage.Span.HOUR.value, hour, key, model, "", ""),
            (Usage.Span.EVER.value, _EVER, "", model, endpoint, outcome),
        ):
            rows.setdefault(place, Tally()).add(tally)
    return rows


def _add(rows: Mapping[tuple[str, datetime, str, str, str, str], Tally]) -> None:
    """Rows are made first, then locked, always in the same order: of gateways that add at once, none waits
    for one that waits for it."""
    names = dict(Key.objects.filter(pk__in={key for _, _, key, *_ in rows}).values_list("pk", "name"))
    places = [dict(zip(_PLACE, place, strict=True)) for place in sorted(rows)]
    Usage.objects.bulk_create(
        [Usage(**place, key_name=names.get(str(place["key"]), "")) for place in places], ignore_conflicts=True
    )
    there = Usage.objects.filter(
        **{f"{name}__in": {place[name] for place in places} for name in ("span", "begins_at", "key", "model")}
    )
    written = []
    for row in there.order_by("pk").select_for_update():
        added = rows.get((row.span, row.begins_at, row.key, row.model, row.endpoint, row.outcome))
        if added is not None:
            found = Tally.of({name: getattr(row, name) for name in _COLUMNS})
            found.add(added)
            for name, value in found.as_dict().items():
                setattr(row, name, value)
            written.append(row)
    Usage.objects.bulk_create(written, update_conflicts=True, unique_fields=_PLACE, update_fields=_COLUMNS)


# --- told -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Line:
    """What was used: by a key, of a model, or both. What it is not told apart by is empty."""

    key: str
    key_name: str
    model: str
    tally: Tally


def used(
    now: datetime, since: timedelta, *, by: Collection[str] = ("key", "model"), where: Q | None = None
) -> list[Line]:
    """From so long ago until now, which is the database's; most requests first. What began more than two days
    ago begins with a whole hour."""
    rows = Usage.objects.filter(_lately(now, since), where or Q())
    names: dict[str, str] = {}
    found: dict[tuple[str, str], Tally] = {}
    for row in rows.order_by("begins_at").values("key", "key_name", "model", *_COLUMNS):
        place = (row["key"] if "key" in by else "", row["model"] if "model" in by else "")
        names[place[0]] = row["key_name"]
        found.setdefault(place, Tally()).add(Tally.of(row))
    lines = [Line(key, names[key] if key else "", model, tally) for (key, model), tally in found.items()]
    return sorted(lines, key=lambda line: (-line.tally.requests, line.model, line.key_name, line.key))


def _lately(now: datetime, since: timedelta) -> Q:
    """Minutes up to the first whole hour, and hours from there. What a clock that was ahead wrote counts."""
    begins = (now - since).replace(second=0, microsecond=0)
    whole = begins.replace(minute=0)
    if since > KEEP_MINUTES:
        return Q(span=Usage.Span.HOUR, begins_at__gte=whole)
    if begins > whole:
        whole += timedelta(hours=1)
    minutes = Q(span=Usage.Span.MINUTE, begins_at__gte=begins, begins_at__lt=whole)
    return minutes | Q(span=Usage.Span.HOUR, begins_at__gte=whole)


def ever() -> list[tuple[str, str, str, Tally]]:
    """What each model that there is did since it was first asked for, by endpoint and outcome; under no name
    what was none of theirs."""
    rows = Usage.objects.filter(Q(model="") | Q(model__in=_canonical()), span=Usage.Span.EVER)
    told = rows.order_by("pk").values("model", "endpoint", "outcome", *_COLUMNS)
    return [(row["model"], row["endpoint"], row["outcome"], Tally.of(row)) for row in told]


def _canonical() -> QuerySet[Name, str]:
    return Name.objects.filter(is_canonical=True).values_list("name", flat=True)


# --- forgotten ------------------------------------------------------------------------------------


def forget() -> bool:
    """Removes one bite of what is too old, and whether there may be more."""
    span, hours = Usage.Span, Usage.objects.filter(span=Usage.Span.HOUR, model=OuterRef("model"))
    old = (
        Q(span=span.MINUTE, begins_at__lt=Now() - KEEP_MINUTES - timedelta(hours=1))
        | Q(span=span.HOUR, begins_at__lt=Now() - KEEP_HOURS)
        | Q(span=span.EVER) & ~Q(model="") & ~Q(model__in=_canonical()) & ~Exists(hours)
    )
    bite = list(Usage.objects.filter(old).values_list("pk", flat=True)[:BITE])
    Usage.objects.filter(pk__in=bite).delete()
    return len(bite) == BITE
