"""What an agent keeps through its own death, as small JSON files that are whole or absent.

    <state>/lock                 held while an agent runs here
    <state>/agent.json           the highest fence, the next port, tombstones, weights, lives of agents
    <state>/replicas/<id>.json   one record a replica, mode 0600: its key is in it
    <state>/logs/<id>-<attempt>.log

A file that cannot be read is set aside under another name, never guessed at and never deleted.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from nodes.agent.clock import boot_id, now_s
from nodes.agent.files import DRAFT, read_file, write_file
from nodes.agent.inventory import disk_bytes
from nodes.protocol import (
    FAILED,
    FETCHING,
    STOPPED,
    Assignment,
    AttemptReport,
    ProtocolError,
    WeightsOrder,
    read,
    to_json,
)

log = logging.getLogger("llmgw.agent")

TOMBSTONE_S = 7 * 24 * 3600
TOMBSTONES_LIMIT = 10_000
ROOM_BYTES = 64 * 1024  # with less, a disk is full: what is written comes in larger pieces
LIVES_KEPT = 20  # of agents here: more than one's control plane can miss between two looks
LOGS_LIMIT = 50  # of replicas that are over; each is bounded by itself
ATTEMPTS_KEPT = 5  # of one replica, with their logs
OVER = (STOPPED, FAILED)

T = TypeVar("T")


class StateError(Exception):
    """This folder cannot be an agent's; the text is the sentence."""


@dataclass(frozen=True, slots=True)
class Record:
    """One rank as it is kept. since_s and drain_until_s are moments of the boot `boot`, by the boot clock.

    started: the process's start time in clock ticks; with pid and boot it identifies a process. attempt: its
    number, 0 before the first; attempts: those that have ended. meeting: where the ranks of its replica meet.
    gpu_used_mib: what was held on its cards before it came. context_length: of one request, as its engine
    said. certificate: the checksum of the one that its port shows, empty where it speaks plain HTTP.
    """

    assignment: Assignment
    state: str = FETCHING
    reason: str = ""
    since_s: float = 0.0
    boot: str = ""
    port: int | None = None
    command: tuple[str, ...] = ()
    pid: int | None = None
    started: int | None = None
    cause: str = ""
    kind: str = ""
    exit_code: int | None = None
    drain_until_s: float | None = None
    meeting: str = ""
    attempt: int = 0
    attempts: Sequence[AttemptReport] = ()
    gpu_used_mib: Mapping[str, int] = field(default_factory=dict)
    context_length: int | None = None
    certificate: str = ""

    @property
    def id(self) -> str:
        return self.assignment.replica

    @property
    def is_over(self) -> bool:
        return self.state in OVER


@dataclass(frozen=True, slots=True)
class Tombstone:
    generation: int
    boot: str
    since_s: float


@dataclass(frozen=True, slots=True)
class Ledger:
    """fence: the highest seen. next_port: where the search for one goes on. weights: source -> path.
    lives: of the agents that had this folder, the last first. ahead: weights that are being fetched before
    anything asks for them. needed: what the catalog's models need, as it was told last."""

    fence: int = 0
    next_port: int = 0
    tombstones: Mapping[str, Tombstone] = field(default_factory=dict)
    weights: Mapping[str, str] = field(default_factory=dict)
    lives: Sequence[str] = ()
    ahead: Mapping[str, WeightsOrder] = field(default_factory=dict)
    needed: Sequence[str] | None = None


def take_place(node: str) -> socket.socket:
    """Held while an agent of this node runs on this machine, whatever its folder. Raises StateError."""
    place = socket.socket(socket.AF_UNIX)
    try:
        place.bind(f"\0llmgw-agent-{node}")
    except OSError:
        place.close()
        raise StateError(
            "Another agent of this node runs on this machine, with another state folder; stop it, or let "
            "this one join as a node of its own."
        ) from None
    return place


class StateFolder:
    """Holds the folder's lock from `open` to `close`. instance, follows: this life of an agent with it, and
    those before, the last first."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock
        self._boot = boot_id()
        self.ledger = self._read(path / "agent.json", Ledger) or Ledger()
        self._renew_tombstones()
        self.follows = tuple(self.ledger.lives)
        self.instance = self._begin()

    @classmethod
    def open(cls, path: Path) -> StateFolder:
        """Raises StateError, in particular where another agent runs."""
        try:
            for folder in (path, path / "replicas", path / "logs"):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StateError(f"The state folder {path} cannot be used: {error.strerror}.") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise StateError(
                f"Another agent runs with the state folder {path}; stop it, or give this one another --state."
            ) from None
        for draft in (*path.glob(f"{DRAFT}*"), *path.glob(f"replicas/{DRAFT}*")):
            draft.unlink(missing_ok=True)  # of an agent that was killed while it wrote
        return cls(path, lock)

    def close(self) -> None:
        os.close(self._lock)

    def _begin(self) -> str:
        """Empty where it cannot be written down: none that comes later would know of it."""
        instance = str(uuid.uuid4())
        try:
            self._keep(replace(self.ledger, lives=(instance, *self.follows)[:LIVES_KEPT]))
        except OSError as error:
            log.error("This agent does not tell who it is: %s", self.no_room(error))
            return ""
        return instance

    # --- replicas

    def records(self) -> list[Record]:
        found = (self._read(path, Record) for path in sorted((self.path / "replicas").glob("*.json")))
        return [record for record in found if record is not None]

    def save(self, record: Record) -> None:
        write_file(self._record_path(record.id), to_json(record))

    def forget(self, replica: str) -> None:
        self._record_path(replica).unlink(missing_ok=True)

    def log_path(self, replica: str, attempt: int) -> Path:
        return self.path / "logs" / f"{uuid.UUID(replica)}-{attempt:d}.log"

    def logs(self, replica: str) -> dict[int, Path]:
        """By attempt, the newest first, whether or not the replica is still known."""
        paths = (self.path / "logs").glob(f"{uuid.UUID(replica)}-*.log")
        return dict(sorted(((int(path.stem[37:]), path) for path in paths), reverse=True))

    def last_attempt(self, replica: str) -> int:
        return max(self.logs(replica), default=0)

    def next_attempt(self, record: Record) -> int:
        """A number that no process of the replica has had here; the logs of the oldest attempts make room."""
        logs = self.logs(record.id)
        for path in [*logs.values()][ATTEMPTS_KEPT - 1 :]:
            path.unlink(missing_ok=True)
        return 1 + max(record.attempt, *logs, 0)

    def prune_logs(self, kept: set[str]) -> None:
        """Leave those of `kept` and the newest of the others."""
        others = [path for path in (self.path / "logs").iterdir() if path.name[:36] not in kept]
        others.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        for path in others[LOGS_LIMIT:]:
            path.unlink(missing_ok=True)

    def _record_path(self, replica: str) -> Path:
        return self.path / "replicas" / f"{uuid.UUID(replica)}.json"

    # --- the ledger

    def raise_fence(self, fence: int) -> None:
        if fence > self.ledger.fence:
            self._keep(replace(self.ledger, fence=fence))

    def keep_next_port(self, port: int) -> None:
        self._keep(replace(self.ledger, next_port=port))

    def keep_weights(self, source: str, path: str) -> None:
        if self.ledger.weights.get(source) != path:
            self._keep(replace(self.ledger, weights={**self.ledger.weights, source: path}))

    def keep_ahead(self, ahead: Mapping[str, WeightsOrder]) -> None:
        self._keep(replace(self.ledger, ahead=ahead))

    def keep_needed(self, needed: Sequence[str]) -> None:
        if self.ledger.needed is None or tuple(self.ledger.needed) != tuple(needed):
            self._keep(replace(self.ledger, needed=needed))

    def held_weights(self) -> list[str]:
        return sorted(source for source, path in self.ledger.weights.items() if os.path.exists(path))

    def bury(self, replica: str, generation: int) -> None:
        """From here on, no late PUT of this generation or an older one brings the replica back."""
        tombstones = {
            each: stone
            for each, stone in self.ledger.tombstones.items()
            if now_s() - stone.since_s < TOMBSTONE_S
        }
        before = tombstones.pop(replica, None)
        generation = max(generation, before.generation if before else generation)
        tombstones[replica] = Tombstone(generation, self._boot, now_s())
        while len(tombstones) > TOMBSTONES_LIMIT:
            del tombstones[next(iter(tombstones))]
        self._keep(replace(self.ledger, tombstones=tombstones))

    def tombstone(self, replica: str) -> Tombstone | None:
        return self.ledger.tombstones.get(replica)

    def _renew_tombstones(self) -> None:
        """A reboot restarts their week: how long the node was off is not known, and too long does no harm."""
        stones = self.ledger.tombstones
        if any(stone.boot != self._boot for stone in stones.values()):
            renewed = {
                each: Tombstone(stone.generation, self._boot, now_s()) for each, stone in stones.items()
            }
            self.ledger = replace(self.ledger, tombstones=renewed)  # whatever is kept next keeps them, too

    def _keep(self, ledger: Ledger) -> None:
        write_file(self.path / "agent.json", to_json(ledger))
        self.ledger = ledger

    # --- files

    def no_room(self, error: OSError) -> str:
        """The sentence for what could not be written."""
        return f"The agent cannot write to {self.path} ({error.strerror}); make room there."

    def full_disk(self) -> str:
        """The sentence where nothing more fits; empty where something does."""
        _, free = disk_bytes(self.path)
        if free is None or free > ROOM_BYTES:
            return ""
        return f"The disk of {self.path} is full, and the engine's log is on it; make room there."

    def _read(self, path: Path, kind: type[T]) -> T | None:
        try:
            return read(kind, read_file(path))
        except FileNotFoundError:
            return None
        except OSError as error:  # not guessed at: a record that is there may stand for a running engine
            raise StateError(f"{path} cannot be read: {error.strerror}; make it readable.") from None
        except (ValueError, RecursionError, ProtocolError) as fault:
            aside = path.with_suffix(".unreadable")
            log.error("%s cannot be read (%s); it is set aside as %s.", path, fault, aside.name)
            os.replace(path, aside)
            return None


def is_uuid(text: str) -> bool:
    """As files are named by it: in lower case, with dashes."""
    try:
        return str(uuid.UUID(text)) == text
    except ValueError:
        return False
