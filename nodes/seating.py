"""Of the nodes that say yes, the best: rank them, and choose the exact GPUs.

Weights at hand first, then few replicas of the model on a node, then the tightest fit so that big holes stay
whole, then the name. Nodes are kept by what is free on them: a want looks at the few that fit tightest, and
at all of them only to say why none does.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from catalog.spec import ProfileSpec
from nodes.placement import (
    Holding,
    Node,
    Place,
    Seat,
    Spot,
    Unseated,
    Want,
    closed,
    crowded,
    unseated,
)
from nodes.protocol import GpuReport

FEW = 32  # nodes that are sorted sooner than found by walking past all others

_Key: TypeAlias = tuple[object, ...]


class Room:
    """All nodes, and what is free on them as seats are taken."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        in_order = sorted(nodes, key=lambda node: (node.name, node.id))
        self.spots = {node.id: Spot(node) for node in in_order}
        self._ids = {node.name: node.id for node in in_order}
        self._open: dict[_Key, tuple[frozenset[int], Mapping[int, str]]] = {}
        self._shelves: dict[str, _Shelf] = {}
        self._holders: dict[str, set[int]] | None = None

    def __len__(self) -> int:
        return len(self.spots)

    def take(self, holding: Holding) -> None:
        spot = self.spots.get(holding.place.node)
        if spot is None:
            return
        if not (self._shelves and holding.place.gpus):
            spot.take(holding)
            return
        before = {gpu_class: len(spot.free(gpu_class)) for gpu_class in self._shelves}
        spot.take(holding)
        for gpu_class, free in before.items():
            self._shelves[gpu_class].move(spot.node, free, len(spot.free(gpu_class)))

    def open_to(self, profile: ProfileSpec) -> tuple[frozenset[int], Mapping[int, str]]:
        """The nodes that would take the profile had they room, and why each of the others does not."""
        key = (profile.engine, profile.nodes > 1, *sorted(profile.node_selector.items()))
        if key not in self._open:
            reasons = {id: closed(spot.node, profile) for id, spot in self.spots.items()}
            may = frozenset(id for id, reason in reasons.items() if not reason)
            self._open[key] = (may, {id: reason for id, reason in reasons.items() if reason})
        return self._open[key]

    def holders(self, want: Want) -> set[int]:
        """The nodes that are known to hold the weights."""
        if self._holders is None:
            self._holders = {}
            for id, spot in self.spots.items():
                for source in spot.node.report.weights if spot.node.report else ():
                    self._holders.setdefault(source, set()).add(id)
        named = {self._ids[name] for name in want.held_on if name in self._ids}
        told = self._holders.get(want.spec.source, set())
        return named | {id for id in told if self.spots[id].holds(want)}

    def tightest_first(self, gpu_class: str, count: int, among: Collection[int]) -> Iterator[Spot]:
        """Those of `among` with `count` free GPUs of the class or more: the fewest first, then by name."""
        if len(among) <= FEW:
            fitting = [self.spots[id] for id in among if len(self.spots[id].free(gpu_class)) >= count]
            yield from sorted(fitting, key=lambda spot: _tightness(spot, gpu_class))
            return
        if gpu_class not in self._shelves:
            self._shelves[gpu_class] = _Shelf(gpu_class, self.spots.values())
        for id in self._shelves[gpu_class].from_count(count):
            if id in among:
                yield self.spots[id]


class _Shelf:
    """Nodes by how many GPUs of one class are free on them, each lot in the order of their names."""

    def __init__(self, gpu_class: str, spots: Iterable[Spot]) -> None:
        self._lots: dict[int, list[tuple[str, int]]] = {}
        for spot in spots:  # by name already
            self._lots.setdefault(len(spot.free(gpu_class)), []).append((spot.node.name, spot.node.id))

    def move(self, node: Node, was: int, now: int) -> None:
        if was == now:
            return
        entry = (node.name, node.id)
        lot = self._lots[was]
        del lot[bisect_left(lot, entry)]
        insort(self._lots.setdefault(now, []), entry)

    def from_count(self, count: int) -> Iterator[int]:
        for free in sorted(self._lots):
            if free >= count:
                for _, id in self._lots[free]:
                    yield id


def place(want: Want, room: Room) -> Seat | Unseated:
    """The best seat for the first profile that fits anywhere."""
    for profile in want.profiles:
        seat = _gang_seat(want, profile, room) if profile.nodes > 1 else _seat(want, profile, room)
        if seat is not None:
            return seat
    return unseated({profile.name: reasons(want, profile, room) for profile in want.profiles}, len(room))


def _seat(want: Want, profile: ProfileSpec, room: Room) -> Seat | None:
    may, _ = room.open_to(profile)
    for among in (room.holders(want) & may, may):
        spot = _best(want, profile, room, among)
        if spot is not None:
            return Seat(profile, (_place_on(spot, profile),))
    return None


def _best(want: Want, profile: ProfileSpec, room: Room, among: Collection[int]) -> Spot | None:
    """Of nodes that are alike in holding the weights: few replicas of the model, the tightest fit, the name.

    Those without a replica of the model come in that order, so the first that has room is the best.
    """
    for spot in room.tightest_first(profile.gpu_class, profile.gpus_per_node, among):
        if spot.node.id not in want.crowd and not crowded(want, profile, spot):
            return spot
    shared = [room.spots[id] for id in want.crowd if id in among]
    able = [spot for spot in shared if not crowded(want, profile, spot)]
    return min(able, key=lambda spot: _rank(want, profile, spot), default=None)


def _rank(want: Want, profile: ProfileSpec, spot: Spot) -> tuple[bool, int, int, str, int]:
    crowd = want.crowd.get(spot.node.id, 0)
    return (not spot.holds(want), crowd, *_tightness(spot, profile.gpu_class))


def _tightness(spot: Spot, gpu_class: str) -> tuple[int, str, int]:
    return (len(spot.free(gpu_class)), spot.node.name, spot.node.id)


# --- gangs ------------------------------------------------------------------------------------------


def _gang_seat(want: Want, profile: ProfileSpec, room: Room) -> Seat | None:
    """All ranks in one fabric, or none: in the fabric whose best nodes rank best."""
    gangs = [gang for spots in fabrics(profile, room).values() if (gang := gang_of(want, profile, spots))]
    if not gangs:
        return None
    best = min(gangs, key=lambda gang: [_rank(want, profile, spot) for spot in gang])
    return Seat(profile, tuple(_place_on(spot, profile) for spot in best))


def fabrics(profile: ProfileSpec, room: Room) -> dict[str, list[Spot]]:
    """The nodes that may join a gang of this profile, by the fabric they share."""
    found: dict[str, list[Spot]] = {}
    for id in room.open_to(profile)[0]:
        spot = room.spots[id]
        if spot.node.report is not None:
            found.setdefault(spot.node.report.fabric, []).append(spot)
    return found


def gang_of(want: Want, profile: ProfileSpec, spots: Iterable[Spot]) -> list[Spot]:
    """The best nodes of one fabric for all ranks, empty where it has too few."""
    able = [spot for spot in spots if not crowded(want, profile, spot)]
    able.sort(key=lambda spot: _rank(want, profile, spot))
    return able[: profile.nodes] if len(able) >= profile.nodes else []


def reasons(want: Want, profile: ProfileSpec, room: Room) -> dict[str, str]:
    """By node, "" where it has room. One that has, but for a part of a gang alone, says so."""
    may, why_not = room.open_to(profile)
    suffice = set(may)
    if profile.nodes > 1:
        gangs = (spots for spots in fabrics(profile, room).values() if gang_of(want, profile, spots))
        suffice = {spot.node.id for spots in gangs for spot in spots}
    alone = f"in a fabric where too few have room (need {profile.nodes} nodes)"
    return {
        spot.node.name: crowded(want, profile, spot) or ("" if id in suffice else alone)
        if id in may
        else why_not[id]
        for id, spot in room.spots.items()
    }


# --- exact GPUs -------------------------------------------------------------------------------------


def _place_on(spot: Spot, profile: ProfileSpec) -> Place:
    return Place(spot.node.id, choose(spot.free(profile.gpu_class), profile.gpus_per_node))


def choose(free: Sequence[GpuReport], count: int) -> tuple[str, ...]:
    """Neighbours, as boards are built of pairs and fours: out of the block that is broken up most already.

    `free` is by index. Where no such block is whole, the first that are free.
    """
    if count == len(free) or count == 0:
        return tuple(gpu.id for gpu in free[:count])
    blocks: dict[int, list[GpuReport]] = {}
    for gpu in free:
        blocks.setdefault(gpu.index // count, []).append(gpu)
    whole = [block for block in blocks.values() if len(block) >= count]
    if not whole:
        return tuple(gpu.id for gpu in free[:count])
    around = []
    size = count * 2
    while size <= 2 * free[-1].index:
        around.append((size, Counter(gpu.index // size for gpu in free)))
        size *= 2
    best = min(whole, key=lambda block: [free_in[block[0].index // size] for size, free_in in around])
    return tuple(gpu.id for gpu in best[:count])
