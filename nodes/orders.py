"""What the agents have yet to be told, once a plan is on record: to run a rank, or to drain and stop it.

A replica that serves is drained hand in hand: its agent hears of it once no gateway sends it requests any
more, and stops the engine once none is in flight. Neither waits beyond its time.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from catalog.durations import SECOND
from nodes.adoption import stranger_order
from nodes.draft import is_running
from nodes.protocol import DRAINING, FAILED, STARTING, STOPPED, Launch
from nodes.sharing import Holder, Sharing, key_of
from nodes.snapshot import DRAIN, PENDING, RUN, Rank, Replica, Snapshot

DRAIN_S = 30  # for running requests to finish, of a replica that leaves by itself
STOP_S = 5  # of one that a person stops: a breath for what is nearly done
UNROUTED_WITHIN = timedelta(seconds=10)  # a gateway that has not read its table for so long is stuck


@dataclass(frozen=True, slots=True)
class Order:
    """What one agent must be told of one rank: to run the launch, or (None) to drain and stop it.

    meeting: where rank 0 waits for this one. holders: nodes that have its weights, or will before it.
    """

    node: int
    replica: str
    generation: int
    rank: int
    launch: Launch | None = None
    gpus: tuple[str, ...] = ()
    drain_s: int = 0
    meeting: str = ""
    holders: tuple[Holder, ...] = ()


def orders(snapshot: Snapshot) -> tuple[Order, ...]:
    """One for each rank whose agent answered and does not know yet."""
    found: list[Order] = []
    sharing = Sharing(snapshot)
    for replica in sorted(snapshot.replicas, key=lambda replica: replica.id):
        is_to_run = replica.wanted == RUN and not replica.is_broken
        for rank in replica.ranks:
            if rank.node in snapshot.answered:
                order = _begin(replica, rank, sharing) if is_to_run else _end(replica, rank, snapshot)
                found += [order] if order else []
    for stranger in sorted(snapshot.strangers, key=stranger_order):
        report = stranger.report
        if stranger.is_over_here and is_running(report) and report.state != DRAINING:
            found.append(Order(stranger.node, report.replica, report.generation, report.rank, drain_s=STOP_S))
    return tuple(found)


def _begin(replica: Replica, rank: Rank, sharing: Sharing) -> Order | None:
    """Rank 0 first: its agent chooses where the others meet it, another place for each replica."""
    first = replica.ranks[0]
    knows = rank.state != PENDING and rank.knows_launch and not rank.wants_peers
    if knows or (rank.rank > 0 and not first.meeting):
        return None
    meeting = first.meeting if rank.rank > 0 else ""
    return Order(
        rank.node,
        replica.id,
        replica.generation,
        rank.rank,
        replica.launch,
        rank.gpus,
        meeting=meeting,
        holders=sharing.holders(key_of(replica.launch), rank.node),
    )


def _end(replica: Replica, rank: Rank, snapshot: Snapshot) -> Order | None:
    """Rank 0 first: only its engine knows of requests, and it finishes none without the others."""
    if rank.state == DRAINING or rank.is_over or not _is_unrouted(replica, snapshot):
        return None
    first = replica.ranks[0]
    is_first_at_it = first.state not in (PENDING, STOPPED, FAILED) and first.node in snapshot.answered
    if rank.rank > 0 and is_first_at_it and not replica.is_broken:
        return None
    drain_s = 0 if replica.is_broken else DRAIN_S if replica.wanted == DRAIN else STOP_S
    return Order(rank.node, replica.id, replica.generation, rank.rank, drain_s=drain_s)


def _is_unrouted(replica: Replica, snapshot: Snapshot) -> bool:
    """Whether no gateway sends it requests any more: every live one has read a table without it."""
    if not replica.is_ready or snapshot.seen_revision is None:
        return True
    if replica.revision is not None and snapshot.seen_revision >= replica.revision:
        return True
    since = replica.wanted_since
    return since is None or not timedelta(0) <= snapshot.now - since < UNROUTED_WITHIN


def deadline_s(state: str, wanted: str, age_s: float, startup_timeout_ns: int) -> float | None:
    """Seconds after which the agent ends this state: a start has failed then, and a drain waits no more. None
    for a state without such a time; a fetch goes on while bytes come."""
    if state == STARTING:
        return max(startup_timeout_ns / SECOND - age_s, 0.0)
    if state == DRAINING:
        return max((DRAIN_S if wanted == DRAIN else STOP_S) - age_s, 0.0)
    return None
