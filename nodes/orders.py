"""What the agents have yet to be told, once a plan is on record: to run a rank, or to drain and stop it.

A replica that serves is drained hand in hand: its agent hears of it once no gateway sends it requests any
more, and stops the engine once none is in flight. Neither waits beyond its time.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from nodes.adoption import stranger_order
from nodes.draft import is_running
from nodes.protocol import DRAINING, FAILED, STOPPED, Launch
from nodes.snapshot import DRAIN, PENDING, RUN, Replica, Snapshot

DRAIN_S = 30  # for running requests to finish, of a replica that leaves by itself
STOP_S = 5  # of one that a person stops: a breath for what is nearly done
UNROUTED_WITHIN = timedelta(seconds=10)  # a gateway that has not read its table for so long is stuck


@dataclass(frozen=True, slots=True)
class Order:
    """What one agent must be told of one rank: to run the launch, or (None) to drain and stop it."""

    node: int
    replica: str
    generation: int
    rank: int
    launch: Launch | None = None
    gpus: tuple[str, ...] = ()
    drain_s: int = 0


def orders(snapshot: Snapshot) -> tuple[Order, ...]:
    """One for each rank whose agent answered and does not know yet."""
    found = []
    for replica in sorted(snapshot.replicas, key=lambda replica: replica.id):
        for rank in replica.ranks:
            if rank.node not in snapshot.answered:
                continue
            if replica.wanted == RUN and (rank.state == PENDING or not rank.knows_launch):
                found.append(
                    Order(rank.node, replica.id, replica.generation, rank.rank, replica.launch, rank.gpus)
                )
            elif (
                replica.wanted != RUN
                and rank.state not in (DRAINING, STOPPED, FAILED)
                and _is_unrouted(replica, snapshot)
            ):
                drain_s = DRAIN_S if replica.wanted == DRAIN else STOP_S
                found.append(Order(rank.node, replica.id, replica.generation, rank.rank, drain_s=drain_s))
    for stranger in sorted(snapshot.strangers, key=stranger_order):
        report = stranger.report
        if stranger.is_over_here and is_running(report) and report.state != DRAINING:
            found.append(Order(stranger.node, report.replica, report.generation, report.rank, drain_s=STOP_S))
    return tuple(found)


def _is_unrouted(replica: Replica, snapshot: Snapshot) -> bool:
    """Whether no gateway sends it requests any more: every live one has read a table without it."""
    if not replica.is_ready or snapshot.seen_revision is None:
        return True
    if replica.revision is not None and snapshot.seen_revision >= replica.revision:
        return True
    since = replica.wanted_since
    return since is None or not timedelta(0) <= snapshot.now - since < UNROUTED_WITHIN
