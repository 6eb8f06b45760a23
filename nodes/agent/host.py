"""What all ranks of a node share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from nodes.agent.inventory import FoundEngine
from nodes.agent.secrets import Secrets
from nodes.agent.state import StateFolder


@dataclass(frozen=True, slots=True)
class Host:
    """address: where engines listen. ports: the first and the last that they may have."""

    node: str
    state: StateFolder
    engines: Mapping[str, FoundEngine]
    session: aiohttp.ClientSession
    store: Path
    address: str
    ports: tuple[int, int]
    secrets: Secrets
    allowed_args: frozenset[str] = frozenset()
    stop_grace_s: float = 30.0
    engines_end_with_agent: bool = False
