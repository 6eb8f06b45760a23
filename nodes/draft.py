"""A plan in the making: what there is of each model, the room that is left as it grows, and the buckets.

The steps that fill it are modules of their own: `adoption`, `scaling`, `moving`, `starting`. Each takes the
draft and leaves it such that the next one sees what was decided.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from nodes.buckets import Adopt, Blocked, End, Hold, Orphan, Plan, RollEnd, Start
from nodes.eviction import Tenant
from nodes.placement import Freshness, Holding, Place, Reasons
from nodes.protocol import DRAINING, FAILED, READY, STOPPED, Launch, RankReport
from nodes.seating import Room
from nodes.snapshot import LOST, RUN, Model, Replica, Roll, Snapshot

FEW_READY, MOST_READY = 3, 1 / 3  # what one pass may stop without asking: so many, or so large a part
MANY_NODES, MOST_NODES = 3, 0.55  # silent at once: as likely this side's network as theirs
_BY_SILENCE = (Freshness.FRESH, Freshness.NEVER, Freshness.SUSPECT, Freshness.LOST)


@dataclass(slots=True)
class Crew:
    """What there is of one model, apart from lost replicas.

    units: those that count. stand_ins: by the replica they will replace, those that are not ready for it yet.
    leaving: how many are on their way out. missing: how many wanted ones found no seat so far. roll: what an
    operator asked for and is not done yet.
    """

    model: Model
    roll: Roll | None = None
    units: list[Replica] = field(default_factory=list)
    stand_ins: dict[str, Replica] = field(default_factory=dict)
    leaving: int = 0
    pending: int = 0  # started in this plan
    missing: int = 0
    by_node: dict[int, int] = field(default_factory=dict)
    launches: dict[str, Launch] = field(default_factory=dict)  # by profile, of what would be started now

    @property
    def room_below_max(self) -> int:
        """How many more may be started: what still stops counts, what stands in for another does not."""
        return self.model.spec.scaling.max - len(self.units) - self.leaving - self.pending

    def count_in(self, node: int) -> None:
        self.by_node[node] = self.by_node.get(node, 0) + 1


class Draft:
    """The snapshot, and what was decided about it so far."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.now = snapshot.now
        self.room = Room(snapshot.nodes)
        self.replicas = sorted(snapshot.replicas, key=lambda replica: (replica.created_at, replica.id))
        self.alarm = self._alarm()
        self.lost_ids = {replica.id for replica in self.replicas if self._is_lost(replica)}
        self.claims: dict[tuple[int, str], str] = {}
        self.tenants: dict[str, Tenant] = {}  # that are leaving, or were ended by this plan
        self.adopt: list[Adopt] = []
        self.lost: list[End] = []
        self.drain: list[End] = []
        self.stop: list[End] = []
        self.evict: list[End] = []
        self.start: list[Start] = []
        self.orphans: list[Orphan] = []
        self.rolls: list[RollEnd] = []
        self._blocked: dict[int, Blocked] = {}
        self._sudden: set[str] = set()  # ends that no person has asked for replica by replica
        for replica in self.replicas:
            self.take_room(replica)
        for stranger in snapshot.strangers:
            if is_running(stranger.report):
                self.room.take(Holding(Place(stranger.node, tuple(stranger.report.gpus))))
        self.crews: dict[int, Crew] = {}

    def muster(self) -> None:
        """Count what there is of each model, once strangers are adopted and the lost are known."""
        self.crews = {
            model.id: Crew(model, model.roll)
            for model in sorted(self.snapshot.models, key=lambda model: model.id)
        }
        ended = {end.replica for bucket in (self.drain, self.stop) for end in bucket}
        wanted = {each.id for each in self.replicas if each.wanted == RUN and each.id not in ended}
        wanted -= self.lost_ids
        for replica in self.replicas:
            crew = self.crews.get(replica.model) if replica.model is not None else None
            if crew is None or replica.id in self.lost_ids:
                continue
            for rank in replica.ranks:
                crew.count_in(rank.node)
            if replica.id not in wanted:
                crew.leaving += 1
            elif (
                not replica.is_ready and replica.replaces in wanted and replica.replaces not in crew.stand_ins
            ):
                crew.stand_ins[replica.replaces] = replica
            else:
                crew.units.append(replica)

    def in_order(self) -> Iterator[Crew]:
        yield from self.crews.values()

    def end(self, crew: Crew, replica: Replica, why: str, *, is_sudden: bool = False) -> None:
        """Take a unit out. What was to stand in for it goes with it: alone it is one too many."""
        crew.units.remove(replica)
        leaver: Replica | None = replica
        while leaver is not None:
            crew.leaving += 1
            self.end_replica(leaver, why, is_sudden=is_sudden)
            leaver = crew.stand_ins.pop(leaver.id, None)

    def end_replica(self, replica: Replica, why: str, *, is_sudden: bool = False) -> None:
        """Only what may have requests is drained."""
        may_have_requests = replica.state in (READY, DRAINING, LOST)
        (self.drain if may_have_requests else self.stop).append(End(replica.id, why))
        self.leave(replica)
        if is_sudden:
            self._sudden.add(replica.id)

    def evict_unit(self, replica_id: str, why: str) -> None:
        for crew in self.crews.values():
            for replica in crew.units:
                if replica.id == replica_id:
                    crew.units.remove(replica)
                    crew.leaving += 1
                    self.evict.append(End(replica.id, why))
                    self.leave(replica)
                    return

    def leave(self, replica: Replica) -> None:
        """Count on the room it will give back."""
        self.tenants[replica.id] = Tenant(replica.id, replica.holdings(), replica.state_since)

    def take_room(self, replica: Replica) -> None:
        for holding in replica.holdings():
            self.room.take(holding)
            for gpu in holding.place.gpus:
                self.claims[(holding.place.node, gpu)] = replica.id
        if replica.wanted != RUN:
            self.leave(replica)

    def block(self, model: Model, missing: int, why: str, reasons: Reasons | None = None) -> None:
        """Note a want that waits. What is said of a model twice stands in one sentence."""
        reasons = reasons or {}
        if known := self._blocked.get(model.id):
            missing += known.missing
            why = known.why if why in known.why else f"{known.why}; {why}"
            reasons = {**known.reasons, **reasons}
        self._blocked[model.id] = Blocked(model.id, missing, why, reasons)

    def finish(self) -> Plan:
        for model in self.snapshot.models:
            if model.fault:  # said even while as many run as are wanted
                self.block(model, 0, model.fault)
        held = self._hold()
        spared = {end.replica for end in (*held.drain, *held.stop)} if held else set()
        return Plan(
            adopt=tuple(self.adopt),
            lost=tuple(self.lost),
            drain=tuple(end for end in self.drain if end.replica not in spared),
            stop=tuple(end for end in self.stop if end.replica not in spared),
            evict=tuple(self.evict),
            start=tuple(self.start),
            blocked=tuple(self._blocked[id] for id in sorted(self._blocked)),
            orphans=tuple(self.orphans),
            rolls=tuple(self.rolls),
            held=held,
            alarm=self.alarm,
        )

    # --- guards -----------------------------------------------------------------------------------

    def _hold(self) -> Hold | None:
        """A wrong file or a restored database may ask for the end of much at once."""
        ready = {replica.id for replica in self.replicas if replica.is_ready and replica.wanted == RUN}
        stopped = len(self._sudden & ready)
        if stopped <= FEW_READY or stopped <= len(ready) * MOST_READY:
            return None
        drain = tuple(end for end in self.drain if end.replica in self._sudden)
        stop = tuple(end for end in self.stop if end.replica in self._sudden)
        whys = _listed({end.why for end in (*drain, *stop)})
        return Hold(
            drain,
            stop,
            f"{stopped} of {len(ready)} ready replicas would stop at once ({whys}); they run on until a "
            "person says yes with manage.py reconcile_allow, or the catalog is put right",
        )

    def _alarm(self) -> str:
        """Of many nodes, most went silent: whom nobody can reach is not lost."""
        heard = [node for node in self.snapshot.nodes if node.freshness is not Freshness.NEVER]
        silent = sum(node.freshness is not Freshness.FRESH for node in heard)
        if len(heard) < MANY_NODES or silent < MOST_NODES * len(heard):
            return ""
        return (
            f"{silent} of {len(heard)} nodes are silent at once, which looks like the network of the control "
            "plane: nothing is taken as lost, replaced or evicted until more of them answer"
        )

    # --- the ground -------------------------------------------------------------------------------

    def node_is_lost(self, node_id: int) -> bool:
        spot = self.room.spots.get(node_id)
        return spot is None or spot.node.freshness is Freshness.LOST

    def silence(self, replica: Replica) -> int:
        """How far the part of it is out of contact that has been silent for the longest: more is farther."""
        return max((self._silence_of(rank.node) for rank in replica.ranks), default=0)

    def name(self, node_id: int) -> str:
        spot = self.room.spots.get(node_id)
        return spot.node.name if spot else "a node that is gone"

    def names(self, nodes: Collection[int]) -> str:
        return ", ".join(self.name(node) for node in nodes)

    def _silence_of(self, node_id: int) -> int:
        spot = self.room.spots.get(node_id)
        return _BY_SILENCE.index(spot.node.freshness) if spot else len(_BY_SILENCE)

    def _is_lost(self, replica: Replica) -> bool:
        """In an alarm no more are lost; those that were replaced before stay so."""
        may_be = not self.alarm or replica.state == LOST
        return may_be and any(self.node_is_lost(rank.node) for rank in replica.ranks)


def is_running(report: RankReport) -> bool:
    return report.state not in (STOPPED, FAILED)


def _listed(whys: Collection[str], limit: int = 3) -> str:
    told = sorted(whys)
    more = len(told) - limit
    return "; ".join(told[:limit] + ([f"and {more} more reasons"] if more > 0 else []))
