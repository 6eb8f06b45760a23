"""vllm's command line.

The agent watches health and counts itself, so the engine is told to let running requests finish when it ends,
and to ask nobody outside the node. Its own key guards few of its routes: the guard beside it closes the rest.
"""

from __future__ import annotations

from catalog.arguments import is_given
from catalog.durations import SECOND
from nodes.engines.adapter import Adapter, Command, Seat, number_of, profile_args
from nodes.protocol import Launch

SHUTDOWN_S = 20  # without it vllm cuts off its requests at TERM, and its clients hang
GUARD = "nodes.agent.guard.Guard"


def _command(launch: Launch, seat: Seat) -> Command:
    args = profile_args(launch)
    tp, pp, nodes = (number_of(launch, key) for key in ("tp", "pp", "nodes"))
    if tp > 1:
        args += ["--tensor-parallel-size", str(tp)]
    if pp > 1:
        args += ["--pipeline-parallel-size", str(pp)]
    if nodes > 1:
        host, port = seat.meeting
        args += ["--nnodes", str(nodes), "--node-rank", str(seat.rank), "--master-addr", host]
        args += ["--master-port", port, *(["--headless"] if seat.rank else [])]
    if launch.context_length > 0 and not is_given(args, ("--max-model-len",)):
        args += ["--max-model-len", str(launch.context_length)]
    if launch.capabilities.get("embeddings") and not is_given(args, ("--runner", "--convert")):
        args += ["--runner", "pooling"]
    is_parsing_tools = launch.capabilities.get("tools") and is_given(args, ("--tool-call-parser",))
    if is_parsing_tools and not is_given(args, _AUTO_TOOLS):
        args += ["--enable-auto-tool-choice"]
    if not is_given(args, ("--shutdown-timeout",)):
        args += ["--shutdown-timeout", str(SHUTDOWN_S)]
    args += ["--middleware", GUARD, "--served-model-name", launch.model, *seat.address]
    env = {
        "VLLM_API_KEY": seat.key,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if nodes > 1 and seat.fabric_address:  # of several addresses it would choose one by itself
        env["VLLM_HOST_IP"] = seat.fabric_address
    startup_ns = launch.profile.get("startup_timeout")
    if isinstance(startup_ns, int) and startup_ns > 0:  # its own limit is ten minutes
        env["VLLM_ENGINE_READY_TIMEOUT_S"] = str(-(-startup_ns // SECOND))
    return Command((*seat.executable, "serve", seat.model_path, *args), env)


_AUTO_TOOLS = ("--enable-auto-tool-choice", "--no-enable-auto-tool-choice")

_OPENS = "opens a file on the node"
_WRITES = "writes files on the node"
_LOADS = "loads code into the engine"
_CARDS = "takes cards that the profile does not ask for"
_LISTENS = "listens on another address"
_SENDS = "sends to an address"
_LOGS = "writes what people ask to the log"
_LETS_IN = "lets clients hand the engine more than text"

FIGURES = {
    "kv_cache_usage_ratio": ("vllm:kv_cache_usage_perc",),  # a ratio, whatever it is called
    "prompt_tokens_total": ("vllm:prompt_tokens_total",),
    "cached_tokens_total": ("vllm:prompt_tokens_cached_total",),
    "generation_tokens_total": ("vllm:generation_tokens_total",),
    "preemptions_total": ("vllm:num_preemptions_total",),
    "time_to_first_token_seconds": ("vllm:time_to_first_token_seconds",),
    "inter_token_latency_seconds": ("vllm:inter_token_latency_seconds",),
    "queue_seconds": ("vllm:request_queue_time_seconds",),
}

ADAPTER = Adapter(
    name="vllm",
    title="vllm",
    command=_command,
    executables=("vllm",),
    package="vllm",
    needs_checkout=True,  # the guard
    running="vllm:num_requests_running",
    waiting="vllm:num_requests_waiting",
    progress=(
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:iteration_tokens_total_count",
    ),
    figures=FIGURES,
    uncached_args=("--no-enable-prefix-caching",),
    refused_args={
        "--config": _OPENS,
        "--allowed-local-media-path": "lets clients read files of the node",
        "--chat-template": _OPENS,
        "--compilation-config": _LOADS,
        "-cc": _LOADS,
        "--data-parallel-address": _LISTENS,
        "-dpa": _LISTENS,
        "--data-parallel-rpc-port": _LISTENS,
        "-dpp": _LISTENS,
        "--data-parallel-supervisor-port": _LISTENS,
        "--data-parallel-size": _CARDS,
        "-dp": _CARDS,
        "--default-mm-loras": _OPENS,
        "--device-ids": _CARDS,
        "--disable-log-stats": "stops the counts that a drain goes by",
        "--download-dir": _WRITES,
        "--ec-transfer-config": _LOADS,
        "--enable-log-outputs": _LOGS,
        "--enable-log-requests": _LOGS,
        "--enable-mm-embeds": _LETS_IN,
        "--enable-prompt-embeds": _LETS_IN,
        "--grpc": "answers no HTTP",
        "--hf-config-path": _OPENS,
        "--hf-token": "shows a token to everybody on the node",
        "--io-processor-plugin": _LOADS,
        "--kv-events-config": _SENDS,
        "--kv-transfer-config": _LOADS,
        "--log-config-file": _LOADS,
        "--logging-config": _LOADS,
        "--logits-processors": _LOADS,
        "--lora-modules": _OPENS,
        "--middleware": _LOADS,
        "--mm-encoder-fp8-scale-path": _OPENS,
        "--mm-encoder-fp8-scale-save-path": _WRITES,
        "--model-class-overrides": _LOADS,
        "--model-loader-extra-config": _OPENS,
        "--otlp-traces-endpoint": _SENDS,
        "--profiler-config": _WRITES,
        "--reasoning-parser-plugin": _LOADS,
        "--root-path": "moves the routes that the agent and the gateway call",
        "--scheduler-cls": _LOADS,
        "--spec-model": _OPENS,
        "--speculative-config": _OPENS,
        "-sc": _OPENS,
        "--ssl-ca-certs": _OPENS,
        "--ssl-certfile": _OPENS,
        "--ssl-keyfile": _OPENS,
        "--structured-outputs-config": _LOADS,
        "--tokenizer": _OPENS,
        "--tool-parser-plugin": _LOADS,
        "--tool-server": "runs programs on the node",
        "--trust-request-chat-template": _LETS_IN,
        "--trust-request-mm-kwargs": _LETS_IN,
        "--weight-transfer-config": _LISTENS,
        "--worker-cls": _LOADS,
        "--worker-extension-cls": _LOADS,
    },
    harmless_args=frozenset({"--reasoning-parser"}),
    refused_env={
        "NCCL_CONF_FILE": _OPENS,
        "NCCL_NET_PLUGIN": _LOADS,
        "NCCL_PROFILER_PLUGIN": _LOADS,
        "NCCL_TUNER_PLUGIN": _LOADS,
        "VLLM_ALLOW_INSECURE_SERIALIZATION": _LOADS,
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "lets clients read files of the node",
        "VLLM_LOGGING_CONFIG_PATH": _LOADS,
        "VLLM_PLUGINS": _LOADS,
        "VLLM_SERVER_DEV_MODE": "opens routes that stop or change the engine",
    },
)
