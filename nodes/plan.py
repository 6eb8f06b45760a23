"""What the reconciler will do next, and why: a pure decision over a snapshot of everything it may know.

`plan` compares what is wanted with what there is and fills named buckets; `orders` says what each agent has
yet to be told. Neither reads a clock or touches anything. A running replica is left alone when its profile or
model is edited; loss of contact is unknown, not dead; what cannot be done now is blocked, with its sentence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from datetime import timedelta

from catalog.durations import format_duration
from catalog.reading import quote
from catalog.spec import ProfileSpec
from nodes import placement, retry
from nodes.placement import Freshness
from nodes.protocol import DRAINING, FAILED, READY, STOPPED, Launch, RankReport
from nodes.snapshot import DRAIN, LOST, PENDING, RUN, Model, Rank, Replica, Snapshot, Stranger, launch_of

DRAIN_S = 30  # for running requests to finish, of a replica that leaves by itself
STOP_S = 5  # of one that a person stops: a breath for what is nearly done
WAKE_FOR = timedelta(seconds=30)  # a request still counts as asking after its client has given up


@dataclass(frozen=True, slots=True)
class Start:
    model: int
    launch: Launch
    node: int
    gpus: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class End:
    """Drain or stop, as the bucket says; or take as lost."""

    replica: str
    why: str


@dataclass(frozen=True, slots=True)
class Adopt:
    model: int
    launch: Launch
    node: int
    report: RankReport
    why: str


@dataclass(frozen=True, slots=True)
class Orphan:
    """Left running, shown, and counted as taken, until an operator stops it."""

    node: int
    report: RankReport
    why: str


@dataclass(frozen=True, slots=True)
class Blocked:
    """A want that has to wait: `missing` replicas of a model, and what would end the wait."""

    model: int
    missing: int
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    adopt: tuple[Adopt, ...] = ()
    lost: tuple[End, ...] = ()
    drain: tuple[End, ...] = ()
    stop: tuple[End, ...] = ()
    start: tuple[Start, ...] = ()
    blocked: tuple[Blocked, ...] = ()
    orphans: tuple[Orphan, ...] = ()

    @property
    def acts(self) -> bool:
        """Whether it changes any assignment. What is blocked or an orphan is only shown."""
        return bool(self.adopt or self.lost or self.drain or self.stop or self.start)


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


def plan(snapshot: Snapshot) -> Plan:
    """What brings what there is closer to what is wanted. The order of the rows does not matter."""
    draft = _Draft(snapshot)
    draft.adopt_strangers()
    draft.take_as_lost()
    draft.end_what_was_removed()
    for model in sorted(snapshot.models, key=lambda model: model.id):
        draft.scale(model)
    for model_id, why in sorted(snapshot.unreadable.items()):
        draft.blocked.append(Blocked(model_id, 0, why))
    return draft.finish()


def orders(snapshot: Snapshot) -> tuple[Order, ...]:
    """What the agents that answered have yet to be told, once the snapshot's plan is on record."""
    found = []
    for replica in sorted(snapshot.replicas, key=lambda replica: replica.id):
        for rank in replica.ranks:
            if rank.node not in snapshot.answered:
                continue
            if replica.wanted == RUN and (rank.state == PENDING or not rank.knows_launch):
                found.append(
                    Order(rank.node, replica.id, replica.generation, rank.rank, replica.launch, rank.gpus)
                )
            elif replica.wanted != RUN and rank.state not in (DRAINING, STOPPED, FAILED):
                drain_s = DRAIN_S if replica.wanted == DRAIN else STOP_S
                found.append(Order(rank.node, replica.id, replica.generation, rank.rank, drain_s=drain_s))
    for stranger in sorted(snapshot.strangers, key=_stranger_order):
        report = stranger.report
        if stranger.is_over_here and _is_running(report) and report.state != DRAINING:
            found.append(Order(stranger.node, report.replica, report.generation, report.rank, drain_s=STOP_S))
    return tuple(found)


class _Draft:
    """A plan in the making, and the room that is left as it grows."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.nodes = {node.id: node for node in sorted(snapshot.nodes, key=lambda node: (node.name, node.id))}
        self.replicas = sorted(snapshot.replicas, key=lambda replica: (replica.created_at, replica.id))
        self.lost_ids = {replica.id for replica in self.replicas if self._is_lost(replica)}
        self.adopt: list[Adopt] = []
        self.lost: list[End] = []
        self.drain: list[End] = []
        self.stop: list[End] = []
        self.start: list[Start] = []
        self.blocked: list[Blocked] = []
        self.orphans: list[Orphan] = []
        self.claims: dict[tuple[int, str], str] = {}
        for replica in self.replicas:
            self._take_room(replica)
        for stranger in snapshot.strangers:
            if _is_running(stranger.report) and stranger.node in self.nodes:
                node = self.nodes[stranger.node]
                self.nodes[stranger.node] = node.seating(stranger.report.gpus)

    def finish(self) -> Plan:
        return Plan(**{bucket.name: tuple(getattr(self, bucket.name)) for bucket in fields(Plan)})

    # Adoption and loss

    def adopt_strangers(self) -> None:
        """Take over engines of this cluster whose model and profile exist; show the others."""
        by_name = {model.spec.name: model for model in self.snapshot.models}
        for stranger in sorted(self.snapshot.strangers, key=_stranger_order):
            report = stranger.report
            if stranger.is_over_here or not _is_running(report):
                continue
            launch = report.launch
            model = by_name.get(launch.model) if launch else None
            why = self._why_not_adopted(stranger, model)
            if why or launch is None or model is None:
                self.orphans.append(Orphan(stranger.node, report, f"{why}; it is left running"))
                continue
            adopted = Replica(
                id=report.replica,
                model=model.id,
                launch=launch,
                ranks=(
                    Rank(stranger.node, report.rank, tuple(report.gpus), report.state, _requests(report)),
                ),
                created_at=self.snapshot.now,
                state_since=self.snapshot.now,
                state=report.state,
                fingerprint=launch.fingerprint,
                generation=report.generation,
            )
            self.replicas.append(adopted)
            self._take_room(adopted)
            why = "its engine runs, and its model and profile are in the catalog"
            self.adopt.append(Adopt(model.id, launch, stranger.node, report, why))

    def _why_not_adopted(self, stranger: Stranger, model: Model | None) -> str:
        report = stranger.report
        launch = report.launch
        if assigned := next((each for each in self.replicas if each.id == report.replica), None):
            names = ", ".join(self._name(rank.node) for rank in assigned.ranks)
            return f"replica {report.replica[:8]} is assigned to {names}, not to this node"
        if launch is None:
            return "its agent does not say what it was started from"
        if model is None:
            return f"model {quote(launch.model)} is not in the catalog"
        name = str(launch.profile.get("name", ""))
        if model.spec.profile(name) is None:
            return f"model {quote(launch.model)} has no profile {quote(name)}"
        if report.rank != 0 or launch.profile.get("nodes", 1) != 1:
            return "it is a part of a replica over several nodes"
        for gpu in report.gpus:
            if holder := self.claims.get((stranger.node, gpu)):
                return f"GPU {gpu} is claimed by replica {holder[:8]}"
        return ""

    def take_as_lost(self) -> None:
        for replica in self.replicas:
            if replica.id in self.lost_ids and replica.state != LOST:
                names = ", ".join(
                    self._name(rank.node) for rank in replica.ranks if self._node_is_lost(rank.node)
                )
                self.lost.append(End(replica.id, f"no contact with {names}; it is replaced if it can be"))

    def end_what_was_removed(self) -> None:
        for replica in self.replicas:
            if replica.model is None and replica.wanted == RUN:
                self._end(replica, f"model {quote(replica.launch.model)} was removed from the catalog")

    # Scaling

    def scale(self, model: Model) -> None:
        """To between min and max: fewer when there are too many or nobody asks, more when short."""
        low, high = model.spec.scaling.min, model.spec.scaling.max
        alive = [each for each in self.replicas if each.model == model.id and each.id not in self.lost_ids]
        present = [each for each in alive if each.wanted == RUN]
        if len(present) > high:
            why = "the model is off (max 0)" if high == 0 else f"{len(present)} run and the maximum is {high}"
            for replica in sorted(present, key=lambda each: self._first_to_go(model, each))[
                high - len(present) :
            ]:
                self._end(replica, why)
            return
        if model.spec.on_demand:
            if present and self._is_idle(model, present):
                timeout = format_duration(self._idle_timeout_ns(model))
                for replica in present:
                    self._end(replica, f"nobody has asked for it for {timeout}")
                return
            low = 1 if self._is_asked_for(model) else 0
        missing = low - len(present)
        if missing > 0:
            self._start(model, missing, present=len(present), free=high - len(alive), alive=alive)

    def _start(self, model: Model, missing: int, *, present: int, free: int, alive: list[Replica]) -> None:
        profiles, waits, avoid = self._profiles_to_try(model)
        crowd: dict[int, int] = {}
        for replica in alive:
            for rank in replica.ranks:
                crowd[rank.node] = crowd.get(rank.node, 0) + 1
        demand = model.demand
        why = f"{present + missing} wanted, {present} there before it"
        if model.spec.on_demand:
            why = f"asked for, {demand.waiting} waiting" if demand.waiting else "asked for"
        while missing and free > 0 and profiles:
            want = placement.Want(
                spec=model.spec,
                profiles=profiles,
                source_bytes=model.source_bytes,
                crowd=crowd,
                held_on=model.held_on,
                avoid=avoid,
            )
            seat = placement.place(want, tuple(self.nodes.values()))
            if isinstance(seat, placement.Unseated):
                waits = [seat.why, *waits]
                break
            node = seat.node
            self.nodes[node.id] = node.seating(seat.gpus, seat.profile.min_memory_gb)
            crowd[node.id] = crowd.get(node.id, 0) + 1
            self.start.append(Start(model.id, launch_of(model, seat.profile), node.id, seat.gpus, why))
            missing -= 1
            free -= 1
        if missing:
            if free <= 0:
                stopping = len(alive) - present
                says = "1 replica is" if stopping == 1 else f"{stopping} replicas are"
                waits = [f"{says} stopping first, as the maximum is {model.spec.scaling.max}"]
            self.blocked.append(Blocked(model.id, missing, "; ".join(waits)))

    def _profiles_to_try(
        self, model: Model
    ) -> tuple[list[ProfileSpec], list[str], dict[str, frozenset[int]]]:
        """Those that may be tried now, why others may not, and the nodes to pass over for each.

        One that waits for an edit gives way to the next; one that backs off does not, being back in a moment.
        """
        profiles, waits, avoid = [], [], {}
        failed = [failure for model_id, failure in self.snapshot.failures if model_id == model.id]
        for profile in placement.by_preference(model.spec.profiles):
            launch = launch_of(model, profile)
            verdict = retry.judge(
                profile.name,
                [failure for failure in failed if retry.is_same_attempt(failure.launch, launch)],
                wanted=model.spec.scaling.min,
                now=self.snapshot.now,
            )
            if verdict.may_try:
                profiles.append(profile)
                avoid[profile.name] = verdict.avoid
                continue
            waits.append(verdict.why)
            if verdict.retry_at is not None:
                break
        return profiles, waits, avoid

    def _first_to_go(self, model: Model, replica: Replica) -> tuple[bool, bool, float, str]:
        """Sorts those to keep first: ready, as the catalog has them now, oldest."""
        profile = model.spec.profile(str(replica.launch.profile.get("name", "")))
        is_current = profile is not None and replica.fingerprint == profile.fingerprint()
        return (replica.state != READY, not is_current, replica.created_at.timestamp(), replica.id)

    def _is_asked_for(self, model: Model) -> bool:
        demand = model.demand
        if demand.waiting:
            return True
        lately = min(WAKE_FOR, timedelta(microseconds=self._idle_timeout_ns(model) / 1000))
        # Either way: where the clock was set back, a moment in the future is no reason for hours to come.
        return demand.asked_at is not None and abs(self.snapshot.now - demand.asked_at) < lately

    def _is_idle(self, model: Model, present: Iterable[Replica]) -> bool:
        """The clock runs only while all are ready, nothing is in flight and somebody listens: silence is not
        idleness, nor are the days by which a clock was set."""
        demand = model.demand
        if not demand.is_known or demand.waiting or demand.in_flight:
            return False
        moments = [demand.asked_at, self.snapshot.watching_since]
        for replica in present:
            if replica.state != READY or any(rank.requests for rank in replica.ranks):
                return False
            moments.append(replica.state_since)
        since = max(moment for moment in moments if moment is not None)
        idle_timeout = timedelta(microseconds=self._idle_timeout_ns(model) / 1000)
        return self.snapshot.now - since >= idle_timeout

    def _idle_timeout_ns(self, model: Model) -> int:
        return model.spec.scaling.idle_timeout or self.snapshot.idle_timeout_ns

    # The ground

    def _end(self, replica: Replica, why: str) -> None:
        """Only what may have requests is drained."""
        (self.drain if replica.state in (READY, DRAINING, LOST) else self.stop).append(End(replica.id, why))

    def _take_room(self, replica: Replica) -> None:
        memory_gb = replica.launch.profile.get("min_memory_gb", 0)
        for rank in replica.ranks:
            for gpu in rank.gpus:
                self.claims[(rank.node, gpu)] = replica.id
            if node := self.nodes.get(rank.node):
                promised = memory_gb if isinstance(memory_gb, int) else 0
                self.nodes[rank.node] = node.seating(rank.gpus, promised)

    def _is_lost(self, replica: Replica) -> bool:
        return any(self._node_is_lost(rank.node) for rank in replica.ranks)

    def _node_is_lost(self, node_id: int) -> bool:
        node = self.nodes.get(node_id)
        return node is None or node.freshness is Freshness.LOST

    def _name(self, node_id: int) -> str:
        node = self.nodes.get(node_id)
        return node.name if node else "a node that is gone"


def _is_running(report: RankReport) -> bool:
    return report.state not in (STOPPED, FAILED)


def _requests(report: RankReport) -> int:
    return (report.running or 0) + (report.waiting or 0)


def _stranger_order(stranger: Stranger) -> tuple[int, str, int]:
    return (stranger.node, stranger.report.replica, stranger.report.rank)
