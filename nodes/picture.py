"""The picture that the core decides on: how things stand, as values. It reads rows, and writes none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypedDict

from django.conf import settings
from django.db.models import Min, Q, QuerySet

from catalog.models import Model
from catalog.reading import CatalogError
from catalog.spec import ModelSpec
from nodes import placement, retry, scaling
from nodes import snapshot as values
from nodes.kept import Kept
from nodes.models import Demand, Gateway, Load, Orphan, Replica, Roll
from nodes.protocol import CONFIGURATION, DISK, FAILED
from nodes.stale import launch_from
from nodes.standing import Standing, launches, reports


class SourceFacts(TypedDict):
    source_bytes: int | None
    held_on: frozenset[str]


def picture_of(standing: Standing) -> values.Snapshot:
    """Of this moment of the pass. A fixed number of queries."""
    replicas = tuple(replicas_of(standing))
    return values.Snapshot(
        now=standing.now,
        nodes=tuple(_nodes(standing)),
        models=tuple(_with_loads(standing, _models(standing), replicas)),
        replicas=replicas,
        strangers=tuple(standing.strangers),
        failures=tuple(_failures(standing)),
        answered=frozenset(standing.answered),
        idle_timeout_ns=settings.LLMGW_IDLE_TIMEOUT,
        watching_since=standing.watching_since,
        seen_revision=_alive_gateways(standing).aggregate(seen=Min("seen_revision"))["seen"],
    )


def replicas_of(standing: Standing) -> Iterator[values.Replica]:
    """All that are not over, as the last report of each left them."""
    for replica_id, row in standing.replicas.items():
        yield values.Replica(
            id=replica_id,
            model=row.model_id,
            launch=launches.get(replica_id, row.launch),
            ranks=tuple(
                values.Rank(
                    rank.node_id,
                    rank.rank,
                    tuple(standing.claims.get(rank.pk, ())),
                    rank.state,
                    rank.running,
                    rank.waiting,
                    rank.done_bytes or 0,
                    knows_launch=rank.pk not in standing.said or standing.said[rank.pk].launch is not None,
                    meeting=rank.meeting,
                    wants_peers=rank.pk in standing.said and standing.said[rank.pk].wants_peers,
                )
                for rank in standing.ranks[replica_id]
            ),
            created_at=row.created_at,
            state_since=row.state_since,
            state=row.state,
            reason=row.reason,
            fingerprint=row.fingerprint,
            wanted=row.wanted,
            wanted_why=row.wanted_why,
            wanted_since=row.wanted_since,
            generation=row.generation,
            replaces=str(row.replaces or ""),
            revision=None if row.pk in standing.rerouted else row.revision,
        )


def _nodes(standing: Standing) -> Iterator[placement.Node]:
    orphaned: dict[int, set[str]] = {}
    # Of nodes that just reported, strangers say what orphans hold; of the others, the record does.
    for node_id, gpus in Orphan.objects.exclude(node__in=standing.reported).values_list("node_id", "gpus"):
        orphaned.setdefault(node_id, set()).update(gpus)
    for node in standing.nodes.values():
        # Nobody is lost for a silence in which nobody listened.
        freshness = placement.freshness(
            standing.now - node.seen_at if node.seen_at else None,
            standing.now - standing.watching_since,
            suspect_after_s=settings.LLMGW_SUSPECT_AFTER_S,
            lost_after_s=settings.LLMGW_LOST_AFTER_S,
        )
        yield placement.Node(
            id=node.pk,
            name=node.name,
            freshness=freshness,
            is_cordoned=node.is_cordoned,
            is_draining=node.is_draining,
            report=reports.get(node.pk, node.report),
            taken=frozenset(orphaned.get(node.pk, ())),
        )


def _models(standing: Standing) -> Iterator[values.Model]:
    demand = _demand(standing)
    rolls = {row.model_id: row for row in Roll.objects.all()}
    rows = Model.objects.prefetch_related("names", "profiles", "fallbacks")
    _judged.keep_only({row.pk for row in rows})
    for row in rows:
        stored = row.spec
        lawful, fault = _judged.get(row.pk, stored.as_dict())
        yield values.Model(
            id=row.pk,
            spec=lawful or stored,
            source_revision=row.source_revision,
            **known_of_source(row.source_facts),
            demand=demand.get(row.pk, demand[None]),
            roll=_roll(rolls.get(row.pk)),
            fault=fault,
        )


def _with_loads(
    standing: Standing, models: Iterable[values.Model], replicas: Iterable[values.Replica]
) -> Iterator[values.Model]:
    """Each model with how busy it is and since when, as far as that is known."""
    rows = {row.model_id: row for row in Load.objects.all()}
    by_model: dict[int | None, list[values.Replica]] = {}
    for replica in replicas:
        by_model.setdefault(replica.model, []).append(replica)
    for model in models:
        row = rows.get(model.id)
        known = values.Load(row.level, row.since, row.replicas) if row else None
        standing.loads[model.id] = known
        yield replace(model, load=scaling.load_now(model, by_model.get(model.id, ()), known, standing.now))


def _alive_gateways(standing: Standing) -> QuerySet[Gateway]:
    """Those that were heard from lately, by a clock that may have been set back meanwhile, and have not
    said that they stop."""
    lately = timedelta(seconds=settings.LLMGW_SUSPECT_AFTER_S)
    heard = (standing.now - lately, standing.now + lately)
    return Gateway.objects.filter(heartbeat_at__range=heard, stopped_at=None)


def _demand(standing: Standing) -> dict[int | None, values.Demand]:
    """By model; under None that of a model nobody has asked for."""
    alive = set(_alive_gateways(standing).values_list("pk", flat=True))
    is_known = bool(alive)
    by_model: dict[int | None, values.Demand] = {None: values.Demand(is_known=is_known)}
    rows = Demand.objects.values_list("model_id", "asked_at", "waiting", "in_flight", "gateway")
    for model_id, asked_at, waiting, in_flight, gateway in rows:
        # A gateway that is gone has taken its waiters along; when it was last asked stays true.
        is_alive = gateway in alive
        so_far = by_model.get(model_id, by_model[None])
        moments = [moment for moment in (so_far.asked_at, asked_at) if moment is not None]
        by_model[model_id] = values.Demand(
            asked_at=max(moments, default=None),
            waiting=so_far.waiting + (waiting if is_alive else 0),
            in_flight=so_far.in_flight + (in_flight if is_alive else 0),
            is_known=is_known,
        )
    return by_model


def _failures(standing: Standing) -> Iterator[tuple[int, retry.Failure]]:
    """Failures that may still delay a new try. One that an operator has stopped is dealt with."""
    lately = Q(state_since__gte=standing.now - retry.SLOW_WINDOW) | Q(failure_kind=CONFIGURATION)
    rows = Replica.objects.filter(lately, state=FAILED, wanted=values.RUN, model__isnull=False)
    for row in rows.prefetch_related("ranks"):
        failed = [rank for rank in row.ranks.all() if rank.state == FAILED]
        failed.sort(key=lambda rank: rank.reason != row.reason)
        yield (
            int(row.model_id or 0),
            retry.Failure(
                replica=str(row.pk),
                launch=launch_from(row.launch),
                at=row.state_since,
                kind=row.failure_kind,
                reason=row.reason,
                node=failed[0].node_id if failed else None,
                created_at=row.created_at,
                total_bytes=failed[0].total_bytes if failed and row.failure_kind == DISK else None,
            ),
        )


def _judge(stored: dict[str, Any]) -> tuple[ModelSpec | None, str]:
    """The model as today's law reads it, or what the law has against it."""
    try:
        return ModelSpec.load(stored), ""
    except CatalogError as no:  # written by another release, or by hand
        return None, f"{no}; edit the model, until then nothing of it is started"


_judged = Kept(_judge)


def known_of_source(facts: object) -> SourceFacts:
    """What a check of the source has found that placement asks for."""
    facts = facts if isinstance(facts, dict) else {}
    size, nodes = facts.get("bytes"), facts.get("nodes")
    return {
        "source_bytes": size if isinstance(size, int) else None,
        "held_on": frozenset(nodes if isinstance(nodes, list) else ()),
    }


def _roll(row: Roll | None) -> values.Roll | None:
    return values.Roll(row.asked_at, row.by, row.keep, row.halted) if row else None
