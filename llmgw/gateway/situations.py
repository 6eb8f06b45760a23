"""What stands between each model and its first ready replica, as the database has it just now.

Told to whoever waits, so it is read every second, whether or not anything got a new revision.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from uuid import UUID

from django.db.models import OuterRef, Subquery
from django.db.models.functions import Now

from llmgw.gateway.availability import Loading, Situation
from nodes.models import Rank, Replica, Unplaced
from nodes.protocol import CONFIGURATION


def read_situations() -> dict[int, Situation]:
    """By model. Runs in the table's thread."""
    situations: dict[int, Situation] = {}
    state = Replica.State
    on_the_way = (
        Replica.objects.filter(
            wanted=Replica.Wanted.RUN,
            model__isnull=False,
            state__in=[state.STARTING, state.FETCHING, state.PENDING],
        )
        .order_by("created_at", "pk")
        .values_list("pk", "model_id", "state", "reason")
    )
    first: dict[UUID, int] = {}
    for replica, model, at, reason in on_the_way:
        if model not in situations:
            first[replica] = model
        now = situations.get(model, Situation())
        situations[model] = replace(now, on_the_way=(*now.on_the_way, (str(at), reason)))
    for model, loading in _loads(first):
        situations[model] = replace(situations[model], loading=loading)
    last_failure = Replica.objects.filter(model=OuterRef("model"), state=state.FAILED).order_by(
        "-state_since"
    )
    unplaced = Unplaced.objects.annotate(kind=Subquery(last_failure.values("failure_kind")[:1]))
    for model, why, kind in unplaced.values_list("model_id", "why", "kind"):
        now = situations.get(model, Situation())
        situations[model] = replace(now, unplaced=why, needs_edit=kind == CONFIGURATION)
    return situations


def _loads(first: Mapping[UUID, int]) -> Iterator[tuple[int, Loading]]:
    """How far these replicas are: as far as the rank that is furthest behind."""
    ranks = (
        Rank.objects.filter(replica__in=first)
        .annotate(now=Now())
        .order_by("replica", "rank")
        .values_list(
            "replica_id",
            "replica__state",
            "replica__state_since",
            "node__name",
            "done_bytes",
            "total_bytes",
            "now",
        )
    )
    behind: dict[int, Loading] = {}
    for replica, state, since, node, done, total, now in ranks if first else ():
        loading = Loading(str(state), node or "")
        if state == Replica.State.FETCHING and total and done is not None:
            passed_s = (now - since).total_seconds()
            eta_s = math.ceil((total - done) * passed_s / done) if done and passed_s > 0 else None
            loading = replace(loading, progress=min(done / total, 1.0), eta_seconds=eta_s)
        model = first[replica]
        if model not in behind or (loading.progress or 0) < (behind[model].progress or 0):
            behind[model] = loading
    yield from behind.items()
