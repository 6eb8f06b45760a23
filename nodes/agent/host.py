"""What all ranks of a node share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import aiohttp

from nodes.agent.configuration import Configuration
from nodes.agent.gpus import Devices
from nodes.agent.hints import Hints
from nodes.agent.inventory import FoundEngine
from nodes.agent.state import StateFolder
from nodes.agent.weights.fetches import Fetches


@dataclass(frozen=True, slots=True)
class Host:
    configuration: Configuration
    state: StateFolder
    engines: Mapping[str, FoundEngine]
    devices: Devices
    session: aiohttp.ClientSession
    hints: Hints
    fetches: Fetches
