"""How the cluster is, as one value."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from nodes.attention import Matter


@dataclass(frozen=True, slots=True)
class Nodes:
    """never: not heard from yet. cordoned: those that are drained as well."""

    fresh: int = 0
    suspect: int = 0
    lost: int = 0
    never: int = 0
    cordoned: int = 0
    draining: int = 0


@dataclass(frozen=True, slots=True)
class Gpus:
    """Devices of one class. used: by engines of ours; foreign: by something else; closed: free, on a node
    that nothing is placed on."""

    gpu_class: str
    total: int = 0
    used: int = 0
    free: int = 0
    closed: int = 0
    foreign: int = 0
    unhealthy: int = 0


@dataclass(frozen=True, slots=True)
class Models:
    """ready: as many replicas as are wanted. Of those that are short, failing: something failed within the
    hour or has no place; loading: all that is missing is on its way. asleep: on demand, and nobody asks."""

    ready: int = 0
    loading: int = 0
    failing: int = 0
    asleep: int = 0
    off: int = 0


@dataclass(frozen=True, slots=True)
class Replicas:
    """stale: a restart would change what runs; mild: it differs from the catalog in what needs no restart."""

    ready: int = 0
    starting: int = 0
    draining: int = 0
    lost: int = 0
    stale: int = 0
    mild: int = 0


@dataclass(frozen=True, slots=True)
class Want:
    """One that the last pass could not place."""

    key: int
    model: str
    missing: int
    why: str
    since: datetime


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of the last hour; of one's own keys alone for whoever may not see what others used. TTFT of streams,
    in seconds, None where there was none. Tokens are those that were generated."""

    requests: int
    errors: int
    requests_per_s: float
    tokens_per_s: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None


@dataclass(frozen=True, slots=True)
class Happened:
    """An event. by is empty for llmgw's own doing."""

    key: int
    at: datetime
    by: str
    door: str
    did: str
    why: str


@dataclass(frozen=True, slots=True)
class Overview:
    """What whoever asks may see: None where that is not theirs to see."""

    at: datetime
    needs: tuple[Matter, ...]
    under_way: tuple[Matter, ...]
    nodes: Nodes | None
    gpus: tuple[Gpus, ...] | None
    models: Models | None
    replicas: Replicas | None
    unplaced: tuple[Want, ...] | None
    traffic: Traffic | None
    events: tuple[Happened, ...] | None
