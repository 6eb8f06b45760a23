"""Where a replica goes: filter the nodes, rank those that are left, take a seat; or say why there is none.

Every node that says no gives one reason, so the sentence of an unplaced want counts all of them. What is
unknown excludes nobody. A GB is 10^9 bytes, as in the catalog.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import StrEnum

from catalog.reading import quote
from catalog.spec import ModelSpec, ProfileSpec
from nodes.protocol import GpuReport, StateReport

GB = 1_000_000_000
MIB = 1 << 20
FOREIGN_LIMIT_MIB = 256  # a display server's few MiB leave a card usable
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

    taken: GPUs that claims, orphans and other engines hold. claimed_mib: host memory promised to what runs.
    """

    id: int
    name: str
    freshness: Freshness = Freshness.FRESH
    is_cordoned: bool = False
    report: StateReport | None = None
    taken: frozenset[str] = frozenset()
    claimed_mib: int = 0

    def seating(self, gpus: Iterable[str], memory_gb: int = 0) -> Node:
        """The same node once a rank holds these GPUs and was promised this much memory there."""
        return replace(self, taken=self.taken.union(gpus), claimed_mib=self.claimed_mib + _mib(memory_gb))


@dataclass(frozen=True, slots=True)
class Want:
    """One replica that should run. `profiles` may be tried, in this order of preference.

    crowd: replicas of the model, by node. held_on: names of nodes that are known to hold the weights.
    avoid: by profile name, the nodes where it failed lately for a reason of theirs.
    """

    spec: ModelSpec
    profiles: Sequence[ProfileSpec]
    source_bytes: int | None = None
    crowd: Mapping[int, int] = field(default_factory=dict)
    held_on: Collection[str] = frozenset()
    avoid: Mapping[str, Collection[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Seat:
    """Where the replica goes: one node, and the exact GPUs there (none for a profile without a card)."""

    profile: ProfileSpec
    node: Node
    gpus: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Unseated:
    """No node can take it. `why` is the sentence; `reasons` counts them, by profile."""

    why: str
    reasons: Mapping[str, Mapping[str, int]]


def _mib(memory_gb: int) -> int:
    return -(-memory_gb * GB // MIB)


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


def place(want: Want, nodes: Sequence[Node]) -> Seat | Unseated:
    """The best seat for the first profile that fits anywhere."""
    reasons: dict[str, Counter[str]] = {}
    gangs = []
    for profile in want.profiles:
        if profile.nodes > 1:
            gangs.append(profile.name)
            continue
        counted = reasons[profile.name] = Counter()
        seats = []
        for node in nodes:
            seat = _seat(want, profile, node)
            if isinstance(seat, Seat):
                seats.append(seat)
            else:
                counted[seat] += 1
        if seats:
            return min(seats, key=lambda seat: _rank(want, seat))
    return Unseated(_sentence(reasons, gangs, len(nodes)), reasons)


def _seat(want: Want, profile: ProfileSpec, node: Node) -> Seat | str:
    """A seat on this node, or its first reason to say no."""
    report = node.report
    if report is None or node.freshness is Freshness.NEVER:
        return "not heard from yet"
    if node.freshness is not Freshness.FRESH:
        return "out of contact"
    if node.is_cordoned:
        return "cordoned"
    if not _has_engine(report, profile):
        return f"without {profile.engine}"
    if label := _missing_label(report, profile):
        return f"without the label {label}"
    if node.id in want.avoid.get(profile.name, ()):
        return "where it failed a moment ago"
    free = _free_gpus(node, report, profile)
    if len(free) < profile.gpus_per_node:
        return f"lack {profile.gpus_per_node} free {profile.gpu_class}"
    if profile.min_memory_gb and _is_short_of_memory(node, report, profile):
        return f"short of memory (need {profile.min_memory_gb} GB)"
    need = _disk_bytes(want, profile)
    if (
        need
        and report.disk_free_bytes is not None
        and report.disk_free_bytes < need
        and not _holds(want, node)
    ):
        return f"short of disk (need {-(-need // GB)} GB)"
    return Seat(profile, node, tuple(gpu.id for gpu in free[: profile.gpus_per_node]))


def _rank(want: Want, seat: Seat) -> tuple[bool, int, int, str]:
    """Weights at hand, few replicas of the model, the tightest fit (big holes stay whole), the name."""
    report = seat.node.report
    free = len(_free_gpus(seat.node, report, seat.profile)) if report else 0
    return (not _holds(want, seat.node), want.crowd.get(seat.node.id, 0), free, seat.node.name)


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


def _free_gpus(node: Node, report: StateReport, profile: ProfileSpec) -> list[GpuReport]:
    if profile.cpu_only:
        return []
    return sorted(
        (
            gpu
            for gpu in report.gpus
            if gpu.gpu_class == profile.gpu_class
            and gpu.is_healthy
            and gpu.id not in node.taken
            and (gpu.foreign_mib or 0) <= FOREIGN_LIMIT_MIB
        ),
        key=lambda gpu: (gpu.index, gpu.id),
    )


def _is_short_of_memory(node: Node, report: StateReport, profile: ProfileSpec) -> bool:
    need = _mib(profile.min_memory_gb)
    total, free = report.memory_total_mib, report.memory_free_mib
    return (total is not None and total - node.claimed_mib < need) or (free is not None and free < need)


def _disk_bytes(want: Want, profile: ProfileSpec) -> int:
    """What has to be fetched first: nothing for a path on the nodes, nor for an engine without weights."""
    if want.spec.source.startswith("/"):
        return 0
    weights = 0 if profile.engine == "sim" else want.source_bytes or 0
    return max(profile.min_disk_gb * GB, weights)


def _holds(want: Want, node: Node) -> bool:
    return node.name in want.held_on or (node.report is not None and want.spec.source in node.report.weights)


def _sentence(reasons: Mapping[str, Counter[str]], gangs: Sequence[str], nodes: int) -> str:
    parts = {name: _counts(counted, nodes) for name, counted in reasons.items()}
    parts |= dict.fromkeys(gangs, "a replica over several nodes is not placed yet; set nodes to 1")
    if len(set(parts.values())) == 1:
        return next(iter(parts.values()))
    told = [f"profile {quote(name)}: {says}" for name, says in list(parts.items())[:SENTENCE_LIMIT]]
    more = len(parts) - len(told)
    return "; ".join([*told, f"and {more} more profiles"] if more else told)


def _counts(counted: Counter[str], nodes: int) -> str:
    if not nodes:
        return "0 of 0 nodes: none has joined yet; add one with manage.py node_add"
    told = ", ".join(
        f"{count} {_agreeing(reason, count)}"
        for reason, count in sorted(counted.items(), key=lambda item: (-item[1], item[0]))
    )
    return f"0 of {nodes} {'node' if nodes == 1 else 'nodes'}: {told}"


def _agreeing(reason: str, count: int) -> str:
    return reason.replace("lack ", "lacks ", 1) if count == 1 and reason.startswith("lack ") else reason
