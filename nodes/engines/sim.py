"""The sim engine's command line. Its server is `nodes/agent/sim.py`; it speaks as vllm does."""

from __future__ import annotations

from nodes.engines.adapter import Adapter, Command, Seat, profile_args
from nodes.protocol import Launch


def _command(launch: Launch, seat: Seat) -> Command:
    args = profile_args(launch)
    if launch.context_length > 0:  # ahead of the profile's: of an option given twice the last one counts
        args = ["--context-length", str(launch.context_length), *args]
    args += ["--model", launch.model, *seat.address]
    return Command((*seat.executable, *args), {"VLLM_API_KEY": seat.key})


ADAPTER = Adapter(
    name="sim",
    title="the sim engine",
    command=_command,
    needs_weights=False,
    needs_checkout=True,
    running="vllm:num_requests_running",
    waiting="vllm:num_requests_waiting",
)
