"""Engines as pure values: which there are, and the command that runs a launch on a seat.

Adding one is a file beside this one and a row in ENGINES; how it fails is told in `causes.py`.
"""

from __future__ import annotations

from nodes.engines import adapter, llamacpp, sglang, sim, vllm
from nodes.engines.adapter import Adapter, Command, RenderError, Seat
from nodes.protocol import Launch

__all__ = ["ENGINES", "Adapter", "Command", "RenderError", "Seat", "render"]

ENGINES = {each.name: each for each in (vllm.ADAPTER, sglang.ADAPTER, llamacpp.ADAPTER, sim.ADAPTER)}


def render(launch: Launch, seat: Seat) -> Command:
    """What runs this launch on this seat. Raises RenderError with one sentence."""
    known = ENGINES.get(launch.engine)
    if known is None:
        raise RenderError(
            f'model "{launch.model}": this agent cannot run the engine "{launch.engine}", only '
            f"{' and '.join(sorted(ENGINES))}; choose one of these in the profile."
        )
    return adapter.render(known, launch, seat)
