"""Which models may answer for one that cannot: its fallbacks, then theirs, each once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from llmgw.gateway.admission import ModelEntry


def fallbacks_of(
    model: ModelEntry,
    find: Callable[[str], ModelEntry | None],
    may_serve: Callable[[ModelEntry], bool],
) -> Iterator[ModelEntry]:
    """In order, the nearest first. One that may not serve the request is passed over; what it would fall back
    to itself is not. Two models may name each other."""
    visited, line = {model.id}, [model]
    for at in line:
        for name in at.fallbacks:
            other = find(name)
            if other is None or other.id in visited:
                continue
            visited.add(other.id)
            line.append(other)
            if may_serve(other):
                yield other
