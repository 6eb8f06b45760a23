"""A plan as a value: named buckets of actions, each with its why. Dry run, preview, tests and the real thing
read the same one."""

from __future__ import annotations

from dataclasses import dataclass, field

from nodes.placement import Place, Reasons
from nodes.protocol import Launch, RankReport


@dataclass(frozen=True, slots=True)
class Start:
    """A replica to start, one place a rank. replaces: the replica that leaves once this one is ready."""

    model: int
    launch: Launch
    places: tuple[Place, ...]
    why: str
    replaces: str = ""


@dataclass(frozen=True, slots=True)
class End:
    """Drain, stop or evict, as the bucket says; or take as lost."""

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
    """A want that has to wait: `missing` replicas of a model, and what would end the wait.

    reasons: why each node says no, where that is what it waits for.
    """

    model: int
    missing: int
    why: str
    reasons: Reasons = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RollEnd:
    """A roll that is over (is_halted: it stopped before all were replaced)."""

    model: int
    is_halted: bool
    why: str


@dataclass(frozen=True, slots=True)
class Hold:
    """Ends that are too many for one pass. They wait for a person's yes, and `why` says to what."""

    drain: tuple[End, ...]
    stop: tuple[End, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What a pass would do. `alarm` says what keeps it from acting on what it sees, "" when nothing does."""

    adopt: tuple[Adopt, ...] = ()
    lost: tuple[End, ...] = ()
    drain: tuple[End, ...] = ()
    stop: tuple[End, ...] = ()
    evict: tuple[End, ...] = ()
    start: tuple[Start, ...] = ()
    blocked: tuple[Blocked, ...] = ()
    orphans: tuple[Orphan, ...] = ()
    rolls: tuple[RollEnd, ...] = ()
    held: Hold | None = None
    alarm: str = ""

    @property
    def acts(self) -> bool:
        """Whether it changes anything. What is blocked, held or an orphan is only shown."""
        return bool(
            self.adopt or self.lost or self.drain or self.stop or self.evict or self.start or self.rolls
        )
