"""Which replica a request goes to. Pure: loads are handed in, and nothing is remembered between two picks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """A replica that may be sent requests. `served_name` is the name it was launched under, the only one
    its engine is known to answer to; `origin` is `http://host:port` of its rank 0; `key` is the replica's
    own. `context_length` is what the running engine says a request may use, else what it was launched with; 0
    where neither is known."""

    replica: str
    served_name: str
    origin: str
    key: str
    weight: float = 1.0
    engine: str = ""
    context_length: int = 0

    def __repr__(self) -> str:
        return f"Target({self.replica!r}, {self.served_name!r}, {self.origin!r})"


def pick(
    targets: Sequence[Target], in_flight: Mapping[str, int], turn: int, *, without: Collection[str] = ()
) -> Target | None:
    """The one that would be least loaded for its weight with this request on top. `turn` says whose turn
    it is among equals: count it up, and they take turns."""
    best: Target | None = None
    least = 0.0
    for step in range(len(targets)):
        target = targets[(turn + step) % len(targets)]
        if target.replica in without:
            continue
        load = (in_flight.get(target.replica, 0) + 1) / target.weight
        if best is None or load < least:
            best, least = target, load
    return best
