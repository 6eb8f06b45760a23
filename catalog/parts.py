"""The small parts of a model, each a map of its own in JSON: how it is scaled, what it promises and can do,
how much may be asked of it, and how long its requests wait. Limits are a key's, too.

Each part is read from a Reader, which keeps what is wrong with it, and written without its zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from catalog.durations import HOUR, format_duration
from catalog.reading import Reader, quote

Written = Callable[[int], str | int]
"""How a duration is written: as nanoseconds, or as people do."""

SLO_KEYS = {"TTFTp99": "ttft_p99", "TPOTp99": "tpot_p99"}
CAPABILITY_KEYS = ("tools", "vision", "embeddings")
LIMIT_KEYS = ("requests_per_minute", "tokens_per_minute", "concurrency")
TIMEOUT_KEYS = ("hold", "connect", "first_byte", "idle")
OVER_MAX_OUTPUT = ("", "clamp", "refuse")
LONGEST_TIMEOUT = 24 * HOUR


@dataclass(frozen=True, slots=True)
class Scaling:
    """How many replicas to keep, and how long one that is on demand may be idle (0: the default)."""

    min: int = 0
    max: int = 0
    idle_timeout: int = 0

    @classmethod
    def read(cls, reader: Reader) -> Scaling:
        reader.refuse_unknown_keys(("min", "max", "idle_timeout"))
        lowest, highest = max(reader.integer("min"), 0), reader.integer("max")
        return cls(lowest, highest or lowest, reader.duration("idle_timeout"))

    def written(self, duration: Written) -> dict[str, Any]:
        return _written(self, duration, "idle_timeout")


@dataclass(frozen=True, slots=True)
class Slo:
    """Nanoseconds to the first token and per output token, each promised at the 99th percentile."""

    ttft_p99: int = 0
    tpot_p99: int = 0

    @classmethod
    def read(cls, reader: Reader) -> Slo:
        reader.refuse_unknown_keys((*SLO_KEYS, *SLO_KEYS.values()))
        values = []
        for key, other in SLO_KEYS.items():
            if reader.has(key) and reader.has(other):
                reader.refuse(f"slo.{key}", "duplicate", f"slo gives both {key} and {other}; keep one")
            values.append(reader.duration(key) or reader.duration(other))
        return cls(*values)

    def written(self, duration: Written) -> dict[str, Any]:
        return {key: duration(getattr(self, attribute)) for key, attribute in SLO_KEYS.items()}


@dataclass(frozen=True, slots=True)
class Capabilities:
    tools: bool = False
    vision: bool = False
    embeddings: bool = False

    @classmethod
    def read(cls, reader: Reader) -> Capabilities:
        reader.refuse_unknown_keys(CAPABILITY_KEYS)
        return cls(*(reader.is_true(key) for key in CAPABILITY_KEYS))

    def written(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value}


@dataclass(frozen=True, slots=True)
class Limits:
    """How much may be asked, of a model by everybody or with one key. 0 is no limit; true where there is
    one."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrency: int = 0

    def __bool__(self) -> bool:
        return bool(self.requests_per_minute or self.tokens_per_minute or self.concurrency)

    @classmethod
    def read(cls, reader: Reader) -> Limits:
        return cls(*(reader.integer(key, negative_allowed=False) for key in LIMIT_KEYS))

    def written(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value}

    def beyond(self, other: Limits) -> tuple[str, ...]:
        """The keys of those that let through more than the other's do."""
        pairs = ((key, getattr(self, key), getattr(other, key)) for key in LIMIT_KEYS)
        return tuple(key for key, own, bound in pairs if bound and not 0 < own <= bound)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long a request waits, in nanoseconds: for a replica to be there, for the connection to its engine,
    for the first byte of the answer and for each further one. 0 is the default of the cluster."""

    hold: int = 0
    connect: int = 0
    first_byte: int = 0
    idle: int = 0

    @classmethod
    def read(cls, reader: Reader) -> Timeouts:
        reader.refuse_unknown_keys(TIMEOUT_KEYS)
        values = []
        for key in TIMEOUT_KEYS:
            value = reader.duration(key)
            if value > LONGEST_TIMEOUT:
                longest = format_duration(LONGEST_TIMEOUT)
                says = (
                    f"timeouts.{key} is longer than {longest}; give a shorter one, as no client waits so long"
                )
                reader.refuse(f"timeouts.{key}", "range", says)
            values.append(value)
        return cls(*values)

    def written(self, duration: Written) -> dict[str, Any]:
        return _written(self, duration, *TIMEOUT_KEYS)


def read_over_max_output(reader: Reader) -> str:
    """What becomes of a request for more than max_output. Empty: it is refused."""
    chosen = reader.name("over_max_output")
    if chosen not in OVER_MAX_OUTPUT:
        known = " or ".join(OVER_MAX_OUTPUT[1:])
        says = f"limits.over_max_output {quote(chosen)} is not known; choose {known}, or leave it out"
        reader.refuse("limits.over_max_output", "unknown_choice", says)
    return chosen


def _written(part: Any, duration: Written, *durations: str) -> dict[str, Any]:
    told = {key: value for key, value in asdict(part).items() if value}
    return {key: duration(value) if key in durations else value for key, value in told.items()}
