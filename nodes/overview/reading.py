"""Looks, for whoever asks: the same queries whatever there is, but for four when something turns stale."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from catalog.models import Event, database_now
from catalog.showing import events_for
from nodes import usage
from nodes.attention import needs_a_person, under_way
from nodes.overview.machines import count_nodes
from nodes.overview.models import Counted, count_models
from nodes.overview.value import Happened, Overview, Traffic
from nodes.reckoning import SEES_ALL, answer, ask
from nodes.tallies import total
from nodes.usage import MINUTE_S

SINCE, SINCE_S = "1h", 3600
EVENTS = 8


def look(user: Any = None) -> Overview:
    """For this user; for a shell, where one may see everything, without."""

    def may(permission: str) -> bool:
        return user is None or bool(user.has_perm(permission))

    now = database_now()
    counted = count_models() if may("catalog.view_model") or may("nodes.view_replica") else Counted()
    nodes, gpus = count_nodes(now) if may("nodes.view_node") else (None, None)
    return Overview(
        at=now,
        needs=needs_a_person(may, counted.stale),
        under_way=under_way(may),
        nodes=nodes,
        gpus=gpus,
        models=counted.models if may("catalog.view_model") else None,
        replicas=counted.replicas if may("nodes.view_replica") else None,
        unplaced=counted.unplaced if may("catalog.view_model") else None,
        traffic=_traffic(user, now) if may("nodes.view_usage") else None,
        events=_events(user) if may("catalog.view_event") else None,
    )


def _events(user: Any) -> tuple[Happened, ...]:
    rows = Event.objects.all() if user is None else events_for(user)
    return tuple(Happened(row.pk, row.at, row.by, row.door, str(row), row.why) for row in rows[:EVENTS])


def _traffic(user: Any, now: datetime) -> Traffic:
    """Sums of all requests are kept by the minute; those of one's own keys are added up."""
    if user is None or user.has_perm(SEES_ALL):
        used = total(tally for _, tally in usage.traffic("", MINUTE_S, now - timedelta(seconds=SINCE_S), now))
    else:
        used = answer(ask(since=SINCE, by="model"), user).total
    return Traffic(
        requests=used.requests,
        errors=used.errors,
        requests_per_s=used.requests / SINCE_S,
        tokens_per_s=used.completion_tokens / SINCE_S,
        ttft_p50_s=used.quantile("ttft", 0.5),
        ttft_p99_s=used.quantile("ttft", 0.99),
    )
