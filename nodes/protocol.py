"""The words that the control plane and a node's agent exchange, and the secrets both can derive.

JSON over HTTP, versioned. A reader ignores fields it does not know and takes a missing one as unknown (None
or empty), so that either side may be one version older or newer. Nothing here opens a socket or reads a
clock: ages travel, clock times never do.

    GET    /v1/state                        StateReport, with an ETag
    PUT    /v1/replicas/{id}                Assignment; idempotent; answers a RankReport
    DELETE /v1/replicas/{id}?drain=30s      with the headers of `command_headers`
                                            both with INSTANCE_HEADER, for the agent that was looked at alone
    GET    /v1/replicas/{id}/log?tail=200   text; &attempt=N of an earlier process, &follow=1 as it is written
    POST   /v1/paths                        {"paths": [...]} -> {"paths": [PathReport, ...]}
    POST   /v1/weights                      WeightsOrder, ahead of time; answers 202
    DELETE /v1/weights/{key}                what nothing uses; with CLUSTER_HEADER
    GET    /v1/weights/{key}                SharedWeights, for other nodes
    GET    /v1/weights/{key}/{file}         a file of them, with ranges

Every route wants `Authorization: Bearer <node token>`, and GET of weights takes a ticket (`nodes/tickets.py`)
as well. CLOCK_HEADER tells the control plane's time in whole seconds, for tickets alone.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import hmac
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

PROTOCOL = 1

FETCHING, STARTING, READY, DRAINING, STOPPED, FAILED = (
    "fetching",
    "starting",
    "ready",
    "draining",
    "stopped",
    "failed",
)
RANK_STATES = (FETCHING, STARTING, READY, DRAINING, STOPPED, FAILED)
"""What an agent says of a rank. `pending` and `lost` are the control plane's words."""

FAILURE_KINDS = ("configuration", "capacity", "disk", "transient", "node")
CONFIGURATION, CAPACITY, DISK, TRANSIENT, NODE = FAILURE_KINDS

# A command's authority travels in headers on DELETE, in the body on PUT.
CLUSTER_HEADER, FENCE_HEADER, GENERATION_HEADER = "LLMGW-Cluster", "LLMGW-Fence", "LLMGW-Generation"
INSTANCE_HEADER, CLOCK_HEADER = "LLMGW-Instance", "LLMGW-Clock"


class ProtocolError(ValueError):
    """A message that cannot be read; the text names the field."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The frozen record a replica is started from. It holds every field of the model that shapes the command,
    so that a later difference can be named. No secret is in it.

    context_length is in tokens (0: the engine's own). `profile` is the normalised JSON form.
    """

    model: str
    source: str
    profile: Mapping[str, Any]
    fingerprint: str = ""
    revision: str = ""
    context_length: int = 0
    capabilities: Mapping[str, bool] = field(default_factory=dict)
    source_bytes: int | None = None

    @property
    def engine(self) -> str:
        return str(self.profile.get("engine", ""))


@dataclass(frozen=True, slots=True)
class Peer:
    """Another node that holds the weights of a launch, or (is_fetching) will before long: where its agent is,
    and the ticket that opens them there. certificate: the SHA-256 of the one it shows, empty where the
    system's authorities vouch for it."""

    url: str
    ticket: str
    certificate: str = ""
    is_fetching: bool = False


@dataclass(frozen=True, slots=True)
class Assignment:
    """One rank of one replica, as an agent is told to run it. `key` is the replica's own, for its HTTP.

    meeting: where rank 0 waits for this one, HOST:PORT as its agent reports it; empty for rank 0 itself.
    peers: in the order of the launch's own weights. needed: sources (`org/name@commit`) that models of the
    catalog have, None where that is not told; what is neither needed nor in use may make room.
    """

    cluster: str
    replica: str
    generation: int
    fence: int
    launch: Launch
    key: str
    gpus: Sequence[str] = ()
    rank: int = 0
    meeting: str = ""
    peers: Sequence[Peer] = ()
    needed: Sequence[str] | None = None
    protocol: int = PROTOCOL


@dataclass(frozen=True, slots=True)
class WeightsOrder:
    """Weights that a node is to have before anything there asks for them; otherwise as in Assignment."""

    cluster: str
    launch: Launch
    peers: Sequence[Peer] = ()
    needed: Sequence[str] | None = None


@dataclass(frozen=True, slots=True)
class GpuReport:
    """One device. `id` is its UUID, stable over reboots and reorderings; memory is None where not told.
    sickness: what is wrong with one that is not healthy, as a phrase."""

    id: str
    index: int
    name: str = ""
    gpu_class: str = ""
    memory_mib: int | None = None
    used_mib: int | None = None
    foreign_mib: int | None = None
    is_healthy: bool = True
    sickness: str = ""


@dataclass(frozen=True, slots=True)
class EngineReport:
    name: str
    version: str = ""


@dataclass(frozen=True, slots=True)
class AttemptReport:
    """A process that was started for a rank and has ended. exit_code, signal and duration_s are None where
    nobody saw its end; cause is empty where it was told to end."""

    number: int
    generation: int = 1
    duration_s: float | None = None
    exit_code: int | None = None
    signal: int | None = None
    cause: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RankReport:
    """What an agent knows of one rank. `age_s` is how long it has been in its state, by a monotonic clock.

    reason: one sentence for people. cause, kind: a failure's code and class (FAILURE_KINDS).
    running, waiting: the engine's own counts. done_bytes, total_bytes, bytes_per_s: of a fetch, also of one
    that failed for want of room. wants_peers: whether it would be told again who has them. key_id: which of
    the cluster's keys its own was derived from. meeting: HOST:PORT where this rank waits for the others of
    its replica. attempt: the number of its process, by which its log is asked for; attempts: the last that
    ended. context_length: in tokens, what one request may have, its answer included, by the engine's own
    word. certificate: SHA-256 of the one that its port shows, in hex; empty where that speaks plain HTTP, as
    every older agent's does.
    """

    replica: str
    generation: int
    rank: int
    state: str
    reason: str = ""
    age_s: float = 0.0
    port: int | None = None
    pid: int | None = None
    gpus: Sequence[str] = ()
    launch: Launch | None = None
    command: Sequence[str] = ()
    cause: str = ""
    kind: str = ""
    exit_code: int | None = None
    running: int | None = None
    waiting: int | None = None
    done_bytes: int | None = None
    total_bytes: int | None = None
    bytes_per_s: int | None = None
    wants_peers: bool = False
    key_id: str = ""
    meeting: str = ""
    attempt: int | None = None
    attempts: Sequence[AttemptReport] = ()
    context_length: int | None = None
    certificate: str = ""


HELD, PARTIAL = "held", "partial"
"""What an agent says of weights, and `fetching`."""


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """What is in a node's store of one repository at one commit. size_bytes: on the disk, parts of files
    included. total_bytes: of what was asked for. is_used: whether a replica there reads it. reason: why the
    last fetch ahead of time ended without it."""

    key: str
    repo: str
    revision: str
    state: str = HELD
    size_bytes: int = 0
    total_bytes: int | None = None
    bytes_per_s: int | None = None
    is_used: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file as its repository has it. sha256 of what is stored apart, blob_id (git's) of the others; either
    may be unknown."""

    size: int
    sha256: str = ""
    blob_id: str = ""


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """What a node has of one repository at one commit for others: all files of that, and the names of those
    that are whole here. done_bytes grows while it fetches."""

    repo: str
    revision: str
    listing: Mapping[str, ListedFile] = field(default_factory=dict)
    files: Sequence[str] = ()
    is_fetching: bool = False
    done_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StateReport:
    """Everything a node says of itself. None is unknown and excludes nobody; memory in MiB, disk in bytes.
    cpu_cores: those that its engines may use, threads counted. runs_gangs: whether its agent runs one rank of
    a replica over several nodes. engine_tls: whether it starts engines with a certificate. instance: this
    life of its agent; follows: the lives before it, the last first. weights: sources of launches that are
    here; holdings: what is in its store. room_bytes: what the store could take yet, with what it would make
    room by."""

    cluster: str
    node: str
    protocol: int = PROTOCOL
    agent_version: str = ""
    boot_id: str = ""
    instance: str = ""
    follows: Sequence[str] = ()
    gpus: Sequence[GpuReport] = ()
    engines: Sequence[EngineReport] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    fabric: str = ""
    runs_gangs: bool = False
    engine_tls: bool = False
    memory_total_mib: int | None = None
    memory_free_mib: int | None = None
    cpu_model: str = ""
    cpu_cores: int | None = None
    disk_total_bytes: int | None = None
    disk_free_bytes: int | None = None
    room_bytes: int | None = None
    weights: Sequence[str] = ()
    holdings: Sequence[WeightsReport] = ()
    ranks: Sequence[RankReport] = ()


@dataclass(frozen=True, slots=True)
class PathReport:
    """Whether a path exists on the node, and what lies there: `kind` is file or directory, `files` the weight
    files' names (bounded), `size_bytes` their sum."""

    path: str
    exists: bool
    kind: str = ""
    size_bytes: int | None = None
    files: Sequence[str] = ()
    reason: str = ""


T = TypeVar("T")


def to_json(message: Any) -> dict[str, Any]:
    """The message as plain JSON. What is unknown or empty stays out, unless its reader insists on it."""
    return {
        name: plain
        for name, is_required in _fields(typing.cast(Any, type(message)))
        if (plain := _plain(getattr(message, name))) not in (None, "", [], {}) or is_required
    }


@functools.cache
def _fields(kind: Any) -> tuple[tuple[str, bool], ...]:
    """Each with whether a reader insists on it. Kept, as a node's report is made every other second."""
    return tuple((item.name, _is_required(item)) for item in dataclasses.fields(kind))


def _is_required(item: dataclasses.Field[Any]) -> bool:
    return item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING


_ATOMS = frozenset({str, int, float, bool, type(None)})


def _plain(value: Any) -> Any:
    if type(value) in _ATOMS:
        return value
    if dataclasses.is_dataclass(value):
        return to_json(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


def read(kind: type[T], raw: object) -> T:
    """`raw` (parsed JSON) as a `kind`. Unknown fields are ignored. Raises ProtocolError naming the field."""
    return typing.cast(T, _read(kind, raw, kind.__name__))


def _read(kind: Any, raw: object, where: str) -> Any:
    if type(raw) is kind:  # most of a report
        return raw
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        if raw is None:
            return None
        return _read(next(arg for arg in typing.get_args(kind) if arg is not types.NoneType), raw, where)
    if dataclasses.is_dataclass(kind):
        if not isinstance(raw, Mapping):
            raise ProtocolError(f"{where} must be an object")
        hints = _hints(typing.cast(Any, kind))
        values = {
            name: _read(hints[name], item, f"{where}.{name}")
            for name, item in raw.items()
            if name in hints and item is not None
        }
        try:
            return typing.cast(Any, kind)(**values)
        except TypeError:
            missing = [
                item.name
                for item in dataclasses.fields(kind)
                if item.name not in values and _is_required(item)
            ]
            raise ProtocolError(f"{where} lacks {', '.join(missing)}") from None
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(raw, Mapping):
            raise ProtocolError(f"{where} must be an object")
        inner = typing.get_args(kind)[1]
        return {str(key): _read(inner, item, f"{where}.{key}") for key, item in raw.items()}
    if origin is not None and issubclass(origin, Sequence):
        if not isinstance(raw, list):
            raise ProtocolError(f"{where} must be a list")
        inner = typing.get_args(kind)[0]
        return tuple(_read(inner, item, f"{where}[{index}]") for index, item in enumerate(raw))
    if kind is Any:
        return raw
    if kind is float and isinstance(raw, int) and not isinstance(raw, bool):
        return float(raw)
    if not isinstance(raw, kind) or (kind is int and isinstance(raw, bool)):
        raise ProtocolError(f"{where} must be {_NAMES.get(kind, kind.__name__)}")
    return raw


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    """Of its fields. Kept, because finding them takes far longer than reading a report."""
    hints = typing.get_type_hints(kind)
    return {item.name: hints[item.name] for item in dataclasses.fields(kind)}


_NAMES = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}


def command_headers(*, cluster: str, fence: int, generation: int) -> dict[str, str]:
    return {CLUSTER_HEADER: cluster, FENCE_HEADER: str(fence), GENERATION_HEADER: str(generation)}


@dataclass(frozen=True, slots=True)
class ClusterKey:
    """One of the cluster's secrets. The first of a list mints, all of it verifies: so a key is rotated."""

    id: str
    secret: bytes

    def node_token(self, node: str, generation: int) -> str:
        return self._derive("node", node, generation)

    def replica_key(self, replica: str, generation: int) -> str:
        return self._derive("replica", replica, generation)

    @classmethod
    def chosen(cls, keys: Sequence[ClusterKey], id: str) -> ClusterKey:
        """The one an engine was started with, while it is still among the keys; else the first."""
        return next((key for key in keys if key.id == id), keys[0])

    @staticmethod
    def id_of(derived: str) -> str:
        """Which key a token or a replica's key was derived from."""
        return derived.partition(".")[0]

    def _derive(self, purpose: str, subject: str, generation: int) -> str:
        text = "\n".join(("llmgw", purpose, subject, str(generation)))
        return f"{self.id}.{hmac.new(self.secret, text.encode(), hashlib.sha256).hexdigest()}"
