"""What is known at one moment, as values: the ground that the reconciler's decisions stand on."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from catalog.spec import ModelSpec, ProfileSpec
from nodes import placement, retry
from nodes.protocol import FAILED, FETCHING, READY, STOPPED, Launch, RankReport

PENDING, LOST = "pending", "lost"
RUN, DRAIN, STOP = "run", "drain", "stop"
PRESSED, SLACK = "pressed", "slack"


@dataclass(frozen=True, slots=True)
class Demand:
    """What gateways say of a model. waiting, in_flight: of live ones. is_known: one of them lives."""

    asked_at: datetime | None = None
    waiting: int = 0
    in_flight: int = 0
    is_known: bool = True


@dataclass(frozen=True, slots=True)
class Load:
    """How busy this many ready replicas of a model have been without a change: pressed, or slack."""

    level: str
    since: datetime
    replicas: int


@dataclass(frozen=True, slots=True)
class Roll:
    """An operator's word to replace what is stale. keep: how many replicas there were.

    halted: why it goes no further, "" while it does.
    """

    asked_at: datetime
    by: str
    keep: int
    halted: str = ""


@dataclass(frozen=True, slots=True)
class Model:
    """A catalog entry, and what a launch needs besides. held_on: names of nodes known to hold the source.

    fault: what today's law has against it, with what to do; nothing of it is started then.
    """

    id: int
    spec: ModelSpec
    source_revision: str = ""
    source_bytes: int | None = None
    held_on: frozenset[str] = frozenset()
    demand: Demand = Demand()
    load: Load | None = None
    roll: Roll | None = None
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Rank:
    """The part of a replica on one node; `pending` until its agent reports it.

    running, waiting: requests, None where its engine does not tell. done_bytes: of what it fetches.
    knows_launch: whether its agent does. One that has lost its record runs on, and wants to be told again.
    meeting: where rank 0 waits for the others of its replica, "" until its agent has said so. wants_peers:
    whether its agent would be told again who has its weights.
    """

    node: int
    rank: int = 0
    gpus: tuple[str, ...] = ()
    state: str = PENDING
    running: int | None = None
    waiting: int | None = None
    done_bytes: int = 0
    knows_launch: bool = True
    meeting: str = ""
    wants_peers: bool = False

    @property
    def requests(self) -> int:
        return (self.running or 0) + (self.waiting or 0)

    @property
    def is_over(self) -> bool:
        return self.state in (STOPPED, FAILED)


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica that is not over. model is None once it has left the catalog.

    replaces: the replica that leaves once this one is ready. revision: which change of the routing table its
    last one was, None while that is not known yet.
    """

    id: str
    model: int | None
    launch: Launch
    ranks: tuple[Rank, ...]
    created_at: datetime
    state_since: datetime
    state: str = PENDING
    reason: str = ""
    fingerprint: str = ""
    wanted: str = RUN
    wanted_why: str = ""
    wanted_since: datetime | None = None
    generation: int = 1
    replaces: str = ""
    revision: int | None = 0

    @property
    def is_ready(self) -> bool:
        return self.state == READY

    @property
    def is_broken(self) -> bool:
        """Whether it has lost a part: what is left serves nobody, and has to go before another try."""
        return len(self.ranks) > 1 and any(rank.is_over for rank in self.ranks)

    def holdings(self) -> tuple[placement.Holding, ...]:
        """What its ranks take of their nodes."""
        return tuple(
            placement.holding_of(
                self.launch,
                placement.Place(rank.node, rank.gpus),
                has_begun=rank.state not in (PENDING, FETCHING),
                done_bytes=rank.done_bytes,
            )
            for rank in self.ranks
        )


@dataclass(frozen=True, slots=True)
class Stranger:
    """A rank that a node reports and is not assigned. is_over_here: by our record, its replica has ended."""

    node: int
    report: RankReport
    is_over_here: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that is known at one moment. answered: nodes whose agents can be told something in this pass.
    watching_since: from when on what was asked for and who answered has been watched without a gap.
    seen_revision: the routing table that every live gateway has by now, None where there is no gateway.
    """

    now: datetime
    nodes: tuple[placement.Node, ...] = ()
    models: tuple[Model, ...] = ()
    replicas: tuple[Replica, ...] = ()
    strangers: tuple[Stranger, ...] = ()
    failures: tuple[tuple[int, retry.Failure], ...] = ()
    answered: frozenset[int] = frozenset()
    idle_timeout_ns: int = 15 * 60 * 10**9
    watching_since: datetime | None = None
    seen_revision: int | None = None


def launch_of(model: Model, profile: ProfileSpec) -> Launch:
    """The record a replica of this profile would be started from now."""
    spec = model.spec
    return Launch(
        model=spec.name,
        source=spec.source,
        profile=profile.as_dict(),
        fingerprint=profile.fingerprint(),
        revision=model.source_revision,
        context_length=spec.context_length,
        capabilities=spec.as_dict()["capabilities"],
        source_bytes=model.source_bytes,
    )
