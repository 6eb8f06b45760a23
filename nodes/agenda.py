"""A plan line by line: what would be done, to what, where and why. Every door tells a plan by these lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from nodes.buckets import End, Plan
from nodes.placement import Reasons
from nodes.protocol import Launch
from nodes.snapshot import Replica, Snapshot

ADOPT, LOST, DRAIN, STOP, EVICT, START = "adopt", "lost", "drain", "stop", "evict", "start"
ROLLED, HALTED, HELD, BLOCKED, ORPHAN = "rolled", "roll halted", "held", "blocked", "orphan"
BUCKETS = (HELD, BLOCKED, LOST, ADOPT, DRAIN, STOP, EVICT, START, ROLLED, HALTED, ORPHAN)


@dataclass(frozen=True, slots=True)
class Item:
    """One line. What does not apply is empty: a start has no replica yet, a want that waits no nodes.

    replaces: the replica that leaves once this start is ready. missing: replicas short of what is wanted.
    reasons: why each node says no.
    """

    bucket: str
    model: str
    profile: str = ""
    replica: str = ""
    replaces: str = ""
    nodes: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    missing: int = 0
    why: str = ""
    reasons: Reasons = field(default_factory=dict, compare=False)


def agenda(plan: Plan, snapshot: Snapshot) -> tuple[Item, ...]:
    """All that the plan does, holds back, leaves waiting or only shows: what needs a person first."""
    found = list(_items(plan, _Names(snapshot)))
    return tuple(sorted(found, key=lambda item: (BUCKETS.index(item.bucket), item.model)))


class _Names:
    """What ids are called."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.models: Mapping[int, str] = {model.id: model.spec.name for model in snapshot.models}
        self.nodes: Mapping[int, str] = {node.id: node.name for node in snapshot.nodes}
        self.replicas: Mapping[str, Replica] = {replica.id: replica for replica in snapshot.replicas}

    def of_nodes(self, ids: Sequence[int]) -> tuple[str, ...]:
        return tuple(self.nodes.get(id, "a node that is gone") for id in ids)

    def item_of(self, bucket: str, end: End) -> Item:
        replica = self.replicas.get(end.replica)
        if replica is None:  # it is to be adopted first
            return Item(bucket, "", replica=end.replica, why=end.why)
        return Item(
            bucket,
            replica.launch.model,
            _profile(replica.launch),
            replica.id,
            nodes=self.of_nodes([rank.node for rank in replica.ranks]),
            gpus=tuple(gpu for rank in replica.ranks for gpu in rank.gpus),
            why=end.why,
        )


def _items(plan: Plan, names: _Names) -> Iterator[Item]:
    held = (*plan.held.drain, *plan.held.stop) if plan.held else ()
    ends = ((HELD, held), (LOST, plan.lost), (DRAIN, plan.drain), (STOP, plan.stop), (EVICT, plan.evict))
    for bucket, bucketful in ends:
        yield from (names.item_of(bucket, end) for end in bucketful)
    for blocked in plan.blocked:
        name = names.models.get(blocked.model, "")
        yield Item(BLOCKED, name, missing=blocked.missing, why=blocked.why, reasons=blocked.reasons)
    for adopt in plan.adopt:
        nodes, report = names.of_nodes([adopt.node]), adopt.report
        profile = _profile(adopt.launch)
        yield Item(
            ADOPT, adopt.launch.model, profile, report.replica, "", nodes, tuple(report.gpus), 0, adopt.why
        )
    for start in plan.start:
        yield Item(
            START,
            start.launch.model,
            _profile(start.launch),
            replaces=start.replaces,
            nodes=names.of_nodes([place.node for place in start.places]),
            gpus=tuple(gpu for place in start.places for gpu in place.gpus),
            why=start.why,
        )
    for roll in plan.rolls:
        yield Item(HALTED if roll.is_halted else ROLLED, names.models.get(roll.model, ""), why=roll.why)
    for orphan in plan.orphans:
        report, launch = orphan.report, orphan.report.launch
        yield Item(
            ORPHAN,
            launch.model if launch else "",
            _profile(launch) if launch else "",
            report.replica,
            nodes=names.of_nodes([orphan.node]),
            gpus=tuple(report.gpus),
            why=orphan.why,
        )


def _profile(launch: Launch) -> str:
    return str(launch.profile.get("name", ""))
