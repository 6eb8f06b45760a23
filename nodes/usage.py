"""What requests used, as the database keeps it: added by gateways, told by minute or hour, and forgotten.

Minutes and hours are written side by side, so that a question about a month reads a few hundred rows and no
roll-up can fail half-way; minutes go after two days, hours after ninety. What each model ever did is a row of
its own that only grows, which is what a counter of Prometheus must do.

Plots are of models, whatever the keys, and would have to add up all keys' minutes: for them, each model's
traffic and that of all of them is written as well, in the steps of the plots, and kept as long as they show
it: about 520 rows a model that is never idle, a kilobyte each.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db import transaction
from django.db.models import Exists, Model, OuterRef, Q, QuerySet
from django.db.models.functions import Now

from catalog.models import Key, Name
from nodes.models import Gateway, Traffic, Usage
from nodes.tallies import SUMS, Tally

KEEP_MINUTES = timedelta(hours=48)
KEEP_HOURS = timedelta(days=90)
BITE = 5_000
"""Rows that are removed at once."""

MINUTE_S, HOUR_S = 60, 3600
KEEP_TRAFFIC = {
    MINUTE_S: timedelta(hours=2),
    10 * MINUTE_S: timedelta(hours=26),
    3 * HOUR_S: timedelta(days=31),
}
PLOTTED_TIMES = ("ttft", "tpot", "queue", "hold")
_EVER = datetime(1970, 1, 1, tzinfo=UTC)
_COLUMNS = (*SUMS, "codes", "times")
_TRAFFIC_COLUMNS = (*SUMS, "times")
_PLACE = ("span", "begins_at", "key", "model", "endpoint", "outcome")
_TRAFFIC_PLACE = ("step_s", "begins_at", "model")

Place = tuple[str, str, str, str]
"""Key, model, endpoint, outcome."""


# --- added ----------------------------------------------------------------------------------------


def add_lot(gateway: uuid.UUID, number: int, at_s: float, lot: Mapping[Place, Tally]) -> None:
    """Adds what one gateway counted around a moment (seconds of the database's clock). A lot with the number
    of one that was added, or a lower one, adds nothing: its first try got through and the answer did not."""
    with transaction.atomic():
        Gateway.objects.get_or_create(pk=gateway)
        if Gateway.objects.filter(pk=gateway, lots__lt=number).update(lots=number):
            rows = _rows(at_s, lot)
            names = dict(Key.objects.filter(pk__in={key for _, _, key, *_ in rows}).values_list("pk", "name"))
            _add(Usage, _PLACE, _COLUMNS, rows, lambda place: {"key_name": names.get(place["key"], "")})
            _add(Traffic, _TRAFFIC_PLACE, _TRAFFIC_COLUMNS, _traffic(at_s, lot), lambda place: {})


def _rows(at_s: float, lot: Mapping[Place, Tally]) -> dict[tuple[str, datetime, str, str, str, str], Tally]:
    minute, hour = _begin(at_s, MINUTE_S), _begin(at_s, HOUR_S)
    rows: dict[tuple[str, datetime, str, str, str, str], Tally] = {}
    for (key, model, endpoint, outcome), tally in lot.items():
        for place in (
            (Usage.Span.MINUTE.value, minute, key, model, "", ""),
            (Usage.Span.HOUR.value, hour, key, model, "", ""),
            (Usage.Span.EVER.value, _EVER, "", model, endpoint, outcome),
        ):
            rows.setdefault(place, Tally()).add(tally)
    return rows


def _traffic(at_s: float, lot: Mapping[Place, Tally]) -> dict[tuple[int, datetime, str], Tally]:
    by_model: dict[str, Tally] = {}
    for (_, model, _, _), tally in lot.items():
        for name in {model, ""}:
            by_model.setdefault(name, Tally()).add(tally)
    for tally in by_model.values():
        tally.times = {time: lasted for time, lasted in tally.times.items() if time in PLOTTED_TIMES}
    return {
        (step_s, _begin(at_s, step_s), model): tally
        for step_s in KEEP_TRAFFIC
        for model, tally in by_model.items()
    }


def _begin(at_s: float, step_s: int) -> datetime:
    return datetime.fromtimestamp(at_s - at_s % step_s, UTC)


def _add(
    table: type[Model],
    place: tuple[str, ...],
    columns: tuple[str, ...],
    rows: Mapping[Any, Tally],
    beside: Callable[[Mapping[str, Any]], dict[str, Any]],
) -> None:
    """Rows are made first, then locked, always in the same order: of gateways that add at once, none waits
    for one that waits for it."""
    manager: Any = table._default_manager
    places = [dict(zip(place, each, strict=True)) for each in sorted(rows)]
    manager.bulk_create([table(**each, **beside(each)) for each in places], ignore_conflicts=True)
    told = [name for name in place if name not in ("endpoint", "outcome")]
    there = manager.filter(**{f"{name}__in": {each[name] for each in places} for name in told})
    written = []
    for row in there.order_by("pk").select_for_update():
        added = rows.get(tuple(getattr(row, name) for name in place))
        if added is not None:
            found = _tally({name: getattr(row, name) for name in columns})
            found.add(added)
            values = found.as_dict()
            for name in columns:
                setattr(row, name, values[name])
            written.append(row)
    manager.bulk_create(written, update_conflicts=True, unique_fields=place, update_fields=columns)


def _tally(row: Mapping[str, Any]) -> Tally:
    return Tally.of({"codes": {}, **row})


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


def traffic(model: str, step_s: int, since: datetime, until: datetime) -> list[tuple[datetime, Tally]]:
    """What all requests to this model came to, or with no name what all did, by the steps of that time in
    which there were some."""
    rows = Traffic.objects.filter(
        step_s=step_s, begins_at__gte=since, begins_at__lt=until, model=model
    ).values("begins_at", *_TRAFFIC_COLUMNS)
    return [(row["begins_at"], _tally(row)) for row in rows]


def ever() -> list[tuple[str, str, str, Tally]]:
    """What each model that there is did since it was first asked for, by endpoint and outcome; under no name
    what was none of theirs."""
    rows = Usage.objects.filter(Q(model="") | Q(model__in=_canonical()), span=Usage.Span.EVER)
    told = rows.order_by("pk").values("model", "endpoint", "outcome", *_COLUMNS)
    return [(row["model"], row["endpoint"], row["outcome"], Tally.of(row)) for row in told]


def _canonical() -> QuerySet[Name, str]:
    return Name.objects.filter(is_canonical=True).values_list("name", flat=True)


# --- forgotten ------------------------------------------------------------------------------------


def forget(*, bite: int = BITE) -> bool:
    """Removes one bite of what is too old, and whether there may be more."""
    span, hours = Usage.Span, Usage.objects.filter(span=Usage.Span.HOUR, model=OuterRef("model"))
    old = (
        Q(span=span.MINUTE, begins_at__lt=Now() - KEEP_MINUTES - timedelta(hours=1))
        | Q(span=span.HOUR, begins_at__lt=Now() - KEEP_HOURS)
        | Q(span=span.EVER) & ~Q(model="") & ~Q(model__in=_canonical()) & ~Exists(hours)
    )
    return remove_bite(Usage.objects.filter(old), bite)


def forget_traffic() -> bool:
    """As `forget`."""
    old = Q()
    for step_s, keep in KEEP_TRAFFIC.items():
        old |= Q(step_s=step_s, begins_at__lt=Now() - keep)
    return remove_bite(Traffic.objects.filter(old))


def remove_bite(rows: QuerySet[Any], size: int = BITE) -> bool:
    """Whether there may be more."""
    bite = list(rows.values_list("pk", flat=True)[:size])
    rows.model._default_manager.filter(pk__in=bite).delete()
    return len(bite) == size
