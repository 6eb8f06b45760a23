"""Where a replica may go: what a node has, who says no and why, and how that is said.

Filters first (here), then rank and seat (`nodes/seating.py`). Every node that says no gives one reason, so
the sentence of an unplaced want counts all of them. What is unknown excludes nobody. A GB is 10^9 bytes, as
in the catalog.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum

from catalog.reading import quote
from catalog.spec import ModelSpec, ProfileSpec
from nodes.protocol import HELD, GpuReport, Launch, StateReport

GB = 1_000_000_000
MIB = 1 << 20
FOREIGN_LIMIT_MIB = 256  # a display server's few MiB leave a card usable
RESERVED_MIB = 1024  # of a host's memory, for its system and the agent
SENTENCE_LIMIT = 4  # profiles that one sentence explains


class Freshness(StrEnum):
    """How far a node's last report can be believed."""

    NEVER = "never"
    FRESH = "fresh"
    SUSPECT = "suspect"
    LOST = "lost"


def freshness(
    silence: timedelta | None, watched: timedelta, *, suspect_after_s: float, lost_after_s: float
) -> Freshness:
    """`silence`: how long ago a node answered, None if it never has; `watched`: for how long it was asked."""
    if silence is None:
        return Freshness.NEVER
    if min(silence, watched).total_seconds() > lost_after_s:
        return Freshness.LOST
    return Freshness.SUSPECT if silence.total_seconds() > suspect_after_s else Freshness.FRESH


@dataclass(frozen=True, slots=True)
class Node:
    """A machine as placement sees it. `report` is its last, None where there was none yet.

    taken: GPUs that orphans hold. is_draining: it is to be empty, so what runs there moves.
    """

    id: int
    name: str
    freshness: Freshness = Freshness.FRESH
    is_cordoned: bool = False
    is_draining: bool = False
    report: StateReport | None = None
    taken: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Want:
    """One replica that should run. `profiles` may be tried, in this order of preference.

    crowd: replicas of the model, by node. held_on: names of nodes that are known to hold the weights.
    weights_key: what they are called between nodes at the model's commit, "" where it has none.
    avoid: by profile name, the nodes where it failed lately for a reason of theirs, and that reason.
    """

    spec: ModelSpec
    profiles: Sequence[ProfileSpec]
    source_bytes: int | None = None
    crowd: Mapping[int, int] = field(default_factory=dict)
    held_on: Collection[str] = frozenset()
    weights_key: str = ""
    avoid: Mapping[str, Mapping[int, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Place:
    """Where one rank goes: a node, and the exact GPUs there (none for a profile without a card)."""

    node: int
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Seat:
    """Where the replica goes: a place for each of its ranks, rank 0 first."""

    profile: ProfileSpec
    places: tuple[Place, ...]


Reasons = Mapping[str, Mapping[str, str]]
"""Why not: by profile, then by node, in each one's first reason."""


@dataclass(frozen=True, slots=True)
class Unseated:
    """No node can take it. `why` is the sentence that counts the reasons."""

    why: str
    reasons: Reasons


@dataclass(frozen=True, slots=True)
class Holding:
    """What one rank takes of its node. has_begun: its engine runs, and the node's free memory shows it.

    source, bytes_to_come: what has yet to arrive on the node's disk.
    """

    place: Place
    memory_gb: int = 0
    has_begun: bool = True
    source: str = ""
    bytes_to_come: int = 0


class Spot:
    """What is left of one node, as seats are taken there and given back."""

    __slots__ = ("_free", "claimed_mib", "coming", "coming_mib", "node", "taken")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.taken = set(node.taken)
        self.claimed_mib = 0
        self.coming_mib = 0  # of it, what the node's free memory does not show yet
        self.coming: dict[str, int] = {}  # bytes by source
        self._free: dict[str, list[GpuReport]] | None = None

    def take(self, holding: Holding) -> None:
        self.taken.update(holding.place.gpus)
        if self._free is not None and holding.place.gpus:
            self._free = {
                gpu_class: [gpu for gpu in free if gpu.id not in self.taken]
                for gpu_class, free in self._free.items()
            }
        mib = _mib(holding.memory_gb)
        self.claimed_mib += mib
        if not holding.has_begun:
            self.coming_mib += mib
        if holding.bytes_to_come:
            self.coming[holding.source] = max(self.coming.get(holding.source, 0), holding.bytes_to_come)

    def without(self, holdings: Iterable[Holding]) -> Spot:
        """How it would be once these are gone. Weights stay on the disk, and what is fetched still comes."""
        spot = Spot(self.node)
        spot.taken = set(self.taken)
        spot.claimed_mib, spot.coming_mib, spot.coming = self.claimed_mib, self.coming_mib, dict(self.coming)
        for holding in holdings:
            mib = _mib(holding.memory_gb)
            spot.taken.difference_update(holding.place.gpus)
            spot.claimed_mib -= mib
            spot.coming_mib -= mib
        return spot

    def free(self, gpu_class: str) -> Sequence[GpuReport]:
        """Its healthy GPUs of the class that nobody holds or uses, by index."""
        if self._free is None:
            self._free = {}
            for gpu in self.node.report.gpus if self.node.report else ():
                if (
                    gpu.is_healthy
                    and gpu.id not in self.taken
                    and (gpu.foreign_mib or 0) <= FOREIGN_LIMIT_MIB
                ):
                    self._free.setdefault(gpu.gpu_class, []).append(gpu)
            for gpus in self._free.values():
                gpus.sort(key=lambda gpu: (gpu.index, gpu.id))
        return self._free.get(gpu_class, ())

    def holds(self, want: Want) -> bool:
        """Whether the weights are there already. The source says which files, and its key which commit."""
        report = self.node.report
        if self.node.name in want.held_on:
            return True
        if report is None or want.spec.source not in report.weights:
            return False
        kept = {each.key for each in report.holdings if each.state == HELD}
        return not (want.weights_key and kept) or want.weights_key in kept


def by_preference(profiles: Iterable[ProfileSpec]) -> tuple[ProfileSpec, ...]:
    """Highest priority first; among equals, as declared."""
    return tuple(sorted(profiles, key=lambda profile: -profile.priority))


def could_run(spec: ModelSpec, report: StateReport) -> bool:
    """Whether a node with this report is one that some profile of the model is meant for, busy or not."""
    return any(
        _has_engine(report, profile)
        and not _missing_label(report, profile)
        and (profile.cpu_only or any(gpu.gpu_class == profile.gpu_class for gpu in report.gpus))
        for profile in spec.profiles
    )


def holding_of(launch: Launch, place: Place, *, has_begun: bool, done_bytes: int = 0) -> Holding:
    """What a rank of this launch takes. Of an adopted one, an older agent may have told less than all.

    A rank that has begun has all its weights; of another, done_bytes have arrived.
    """
    memory_gb, disk_gb = launch.profile.get("min_memory_gb"), launch.profile.get("min_disk_gb")
    need = _disk_bytes(
        launch.source, launch.engine, disk_gb if isinstance(disk_gb, int) else 0, launch.source_bytes
    )
    return Holding(
        place,
        memory_gb if isinstance(memory_gb, int) else 0,
        has_begun,
        launch.source,
        0 if has_begun else max(0, need - done_bytes),
    )


# --- who says no ------------------------------------------------------------------------------------


def closed(node: Node, profile: ProfileSpec) -> str:
    """Why the node takes nothing of this profile, however empty it is; "" where it may."""
    report = node.report
    if report is None or node.freshness is Freshness.NEVER:
        return "not heard from yet"
    if node.freshness is not Freshness.FRESH:
        return "out of contact"
    if node.is_draining:
        return "draining"
    if node.is_cordoned:
        return "cordoned"
    if not _has_engine(report, profile):
        return f"without {profile.engine}"
    if label := _missing_label(report, profile):
        return f"without the label {label}"
    if profile.nodes > 1:
        if not report.runs_gangs:
            return "without an agent that runs a part of a replica (set nodes to 1)"
        if not report.fabric:
            return "in no fabric"
    return ""


def crowded(want: Want, profile: ProfileSpec, spot: Spot) -> str:
    """Why a node that is open to the profile has no room for it now; "" where it has."""
    if cause := want.avoid.get(profile.name, {}).get(spot.node.id):
        return f"where it failed a moment ago ({cause})"
    if len(spot.free(profile.gpu_class)) < profile.gpus_per_node:
        return f"lack {profile.gpus_per_node} free {profile.gpu_class}"
    if profile.min_memory_gb and _is_short_of_memory(spot, _mib(profile.min_memory_gb)):
        return f"short of memory (need {profile.min_memory_gb} GB)"
    need = _disk_bytes(want.spec.source, profile.engine, profile.min_disk_gb, want.source_bytes)
    if need and _is_short_of_disk(want, spot, need):
        return f"short of disk (need {-(-need // GB)} GB)"
    return ""


def refusal(want: Want, profile: ProfileSpec, spot: Spot) -> str:
    """The node's first reason to say no, "" where it says yes."""
    return closed(spot.node, profile) or crowded(want, profile, spot)


def _has_engine(report: StateReport, profile: ProfileSpec) -> bool:
    return any(engine.name == profile.engine for engine in report.engines)


def _missing_label(report: StateReport, profile: ProfileSpec) -> str:
    return next(
        (
            f"{key}={value}"
            for key, value in sorted(profile.node_selector.items())
            if report.labels.get(key) != value
        ),
        "",
    )


def _is_short_of_memory(spot: Spot, need_mib: int) -> bool:
    """By what was promised to others, or by what the node sees free now."""
    report = spot.node.report
    total, free = (report.memory_total_mib, report.memory_free_mib) if report else (None, None)
    return (total is not None and total - RESERVED_MIB - spot.claimed_mib < need_mib) or (
        free is not None and free - spot.coming_mib < need_mib
    )


def _is_short_of_disk(want: Want, spot: Spot, need: int) -> bool:
    """What is there or on its way already needs no room."""
    report = spot.node.report
    free = report.disk_free_bytes if report else None
    if report and report.room_bytes is not None:  # with what the store would make room by
        free = report.room_bytes
    if (
        free is None
        or free + here_bytes(want.spec.source, want.weights_key, report) - sum(spot.coming.values()) >= need
    ):
        return False
    return want.spec.source not in spot.coming and not spot.holds(want)


def here_bytes(source: str, key: str, report: StateReport | None) -> int:
    """What there is of it already: a fetch goes on from there, and of another commit begins anew."""
    repo = source.partition(":")[0].partition("@")[0]
    sizes = (
        each.size_bytes
        for each in (report.holdings if report else ())
        if (each.key == key if key else each.repo == repo)
    )
    return max(sizes, default=0)


def _disk_bytes(source: str, engine: str, min_disk_gb: int, source_bytes: int | None) -> int:
    """What has to be fetched first: nothing for a path on the nodes, nor for an engine without weights."""
    if source.startswith("/"):
        return 0
    weights = 0 if engine == "sim" else source_bytes or 0
    return max(min_disk_gb * GB, weights)


def _mib(memory_gb: int) -> int:
    return -(-memory_gb * GB // MIB)


# --- how it is said ---------------------------------------------------------------------------------


def unseated(reasons: Reasons, nodes: int) -> Unseated:
    """The reasons of all nodes, and one sentence that counts them."""
    parts = {name: _counts(Counter(by_node.values()), nodes) for name, by_node in reasons.items()}
    if len(set(parts.values())) == 1:
        return Unseated(next(iter(parts.values())), reasons)
    told = [f"profile {quote(name)}: {says}" for name, says in list(parts.items())[:SENTENCE_LIMIT]]
    if more := len(parts) - len(told):
        told.append(f"and {more} more profiles")
    return Unseated("; ".join(told), reasons)


def _counts(counted: Counter[str], nodes: int) -> str:
    if not nodes:
        return "0 of 0 nodes: none has joined yet; add one with manage.py node_add"
    told = ", ".join(
        f"{count} {agreeing(reason, count)}"
        for reason, count in sorted(counted.items(), key=lambda item: (-item[1], item[0]))
    )
    return f"0 of {nodes} {'node' if nodes == 1 else 'nodes'}: {told}"


def agreeing(reason: str, count: int) -> str:
    """The reason, of so many nodes."""
    return reason.replace("lack ", "lacks ", 1) if count == 1 and reason.startswith("lack ") else reason
