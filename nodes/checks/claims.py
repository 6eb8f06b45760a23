"""What is claimed of an engine: by the catalog of its model, and by a profile of what it reuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nodes.engines import ENGINES

CAPABILITIES = ("tools", "vision", "embeddings")
"""Of which the catalog may claim that a model has them; the rest is asked of every engine."""


@dataclass(frozen=True, slots=True)
class Claims:
    """name: which the engine is to answer to. context_length: 0 is not told. is_caching: no option of the
    profile has it compute every prompt anew."""

    name: str
    tools: bool = False
    vision: bool = False
    embeddings: bool = False
    context_length: int = 0
    is_caching: bool = True


def claims_of(
    name: str, capabilities: Mapping[str, object], context_length: int, *, engine: str, args: object
) -> Claims:
    """args: the profile's, as the catalog or a launch has them."""
    adapter = ENGINES.get(engine)
    given = args if isinstance(args, list | tuple) else ()
    return Claims(
        name=name,
        context_length=context_length,
        is_caching=adapter is None or not any(arg in adapter.uncached_args for arg in given),
        **{each: bool(capabilities.get(each)) for each in CAPABILITIES},
    )
