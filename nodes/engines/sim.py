"""The sim engine's command line. Its server is `nodes/agent/sim`; it speaks as vllm does."""

from __future__ import annotations

from nodes.engines.adapter import Adapter, Command, Seat, number_of, profile_args
from nodes.engines.vllm import FIGURES as FIGURES_OF_VLLM
from nodes.protocol import Launch


def _command(launch: Launch, seat: Seat) -> Command:
    # Ahead of the profile's: of an option given twice the last one counts.
    args: list[str] = []
    if launch.context_length > 0:
        args += ["--context-length", str(launch.context_length)]
    if launch.capabilities.get("tools"):
        args += ["--enable-auto-tool-choice", "--tool-call-parser", "sim"]
    if launch.capabilities.get("vision"):
        args += ["--vision"]
    args += profile_args(launch)
    if (nodes := number_of(launch, "nodes")) > 1:
        host, port = seat.meeting
        args += ["--nnodes", str(nodes), "--node-rank", str(seat.rank)]
        args += ["--master-addr", host, "--master-port", port]
    args += ["--model", launch.model, *seat.address]
    return Command((*seat.executable, *args), {"VLLM_API_KEY": seat.key})


_OPENS = "opens a file on the node"

ADAPTER = Adapter(
    name="sim",
    title="the sim engine",
    command=_command,
    needs_weights=False,
    needs_checkout=True,
    running="vllm:num_requests_running",
    waiting="vllm:num_requests_waiting",
    progress=(
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:iteration_tokens_total_count",
    ),
    figures=FIGURES_OF_VLLM,
    uncached_args=("--no-enable-prefix-caching",),
    refused_args={"--ssl-certfile": _OPENS, "--ssl-keyfile": _OPENS},
)
