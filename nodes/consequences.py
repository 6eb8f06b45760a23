"""What a change of the catalog would bring about, before it is made: which replicas turn stale, and what the
next pass would do, hold back or leave waiting that it does not without the change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from catalog.differences import Difference
from catalog.spec import ModelSpec
from nodes import stale
from nodes.agenda import BLOCKED, Item, agenda
from nodes.plan import plan
from nodes.snapshot import RUN, Model, Replica, Snapshot


@dataclass(frozen=True, slots=True)
class TurnsStale:
    """A replica that would run on as started, and differ from the catalog in what a restart would change."""

    replica: str
    model: str
    profile: str
    nodes: tuple[str, ...]
    fields: tuple[Difference, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Consequences:
    """stale: of the models' replicas that are not stale now. items: what the plan would have more.

    lifted: wants that wait now, and would not any more.
    """

    stale: tuple[TurnsStale, ...] = ()
    items: tuple[Item, ...] = ()
    lifted: tuple[Item, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.stale or self.items or self.lifted)


def with_added(snapshot: Snapshot, spec: ModelSpec) -> tuple[Snapshot, Model]:
    """The world with one more model, which comes after all others."""
    model = Model(max((each.id for each in snapshot.models), default=0) + 1, spec)
    return replace(snapshot, models=(*snapshot.models, model)), model


def with_edited(snapshot: Snapshot, model: Model, spec: ModelSpec) -> tuple[Snapshot, Model]:
    """The world with the model as it is wanted. What the law has against it stays where scaling alone
    differs; any other edit the law has judged."""
    is_scaling_alone = replace(spec, scaling=model.spec.scaling) == model.spec
    edited = replace(model, spec=spec, fault=model.fault if is_scaling_alone else "")
    return with_model(snapshot, edited), edited


def with_model(snapshot: Snapshot, model: Model) -> Snapshot:
    return replace(snapshot, models=tuple(model if each.id == model.id else each for each in snapshot.models))


def without(snapshot: Snapshot, model: Model) -> Snapshot:
    """The world once the model has left the catalog."""
    return replace(
        snapshot,
        models=tuple(each for each in snapshot.models if each.id != model.id),
        replicas=tuple(
            replace(each, model=None) if each.model == model.id else each for each in snapshot.replicas
        ),
        failures=tuple(each for each in snapshot.failures if each[0] != model.id),
    )


def consequences(now: Snapshot, then: Snapshot, edits: Iterable[tuple[Model, Model]]) -> Consequences:
    """How the world as it is differs from the one with the change; `edits` are models before and after, where
    they neither come nor go."""
    before, after = agenda(plan(now), now), agenda(plan(then), then)
    known = Counter(before)
    more = []
    for item in after:
        if known[item]:
            known[item] -= 1
        else:
            more.append(item)
    waits = {(item.bucket, item.model) for item in after}
    lifted = [item for item in before if item.bucket == BLOCKED and (item.bucket, item.model) not in waits]
    turned = [turned for was, model in edits for turned in _turned(now, was, model)]
    return Consequences(tuple(turned), tuple(more), tuple(lifted))


def _turned(snapshot: Snapshot, was: Model, model: Model) -> Iterator[TurnsStale]:
    names = {node.id: node.name for node in snapshot.nodes}
    for each in sorted(snapshot.replicas, key=lambda replica: (replica.created_at, replica.id)):
        if each.model != model.id or each.wanted != RUN:
            continue
        found = _judge(each, model)
        if found.restart_needed and not _judge(each, was).restart_needed:
            nodes = tuple(names.get(rank.node, "a node that is gone") for rank in each.ranks)
            fields = found.stale_fields + found.launch_fields
            profile = str(each.launch.profile.get("name", ""))
            yield TurnsStale(each.id, model.spec.name, profile, nodes, fields, found.sentence)


def _judge(replica: Replica, model: Model) -> stale.Staleness:
    profile = model.spec.profile(str(replica.launch.profile.get("name", "")))
    return stale.judge(
        replica.fingerprint, replica.launch, profile, model.spec, source_revision=model.source_revision
    )
