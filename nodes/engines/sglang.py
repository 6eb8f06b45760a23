"""sglang's command line.

It takes its key on the command line alone, where everybody with a login on the node reads it. At TERM it lets
its requests finish, however long they take: the agent's own grace ends that.
"""

from __future__ import annotations

from catalog.arguments import is_given
from nodes.engines.adapter import Adapter, Command, Seat, join_meeting, number_of, profile_args
from nodes.protocol import Launch


def _command(launch: Launch, seat: Seat) -> Command:
    args = profile_args(launch)
    tp, pp, nodes = (number_of(launch, key) for key in ("tp", "pp", "nodes"))
    if tp > 1:
        args += ["--tp-size", str(tp)]
    if pp > 1:
        args += ["--pp-size", str(pp)]
    if nodes > 1:
        args += ["--nnodes", str(nodes), "--node-rank", str(seat.rank)]
        args += ["--dist-init-addr", join_meeting(*seat.meeting)]
    if launch.context_length > 0 and not is_given(args, ("--context-length",)):
        args += ["--context-length", str(launch.context_length)]
    if launch.capabilities.get("embeddings") and not is_given(args, ("--is-embedding",)):
        args += ["--is-embedding"]
    if launch.capabilities.get("vision") and not is_given(args, ("--enable-multimodal",)):
        args += ["--enable-multimodal"]  # it leaves some families' eyes shut without
    args += ["--enable-metrics", "--served-model-name", launch.model, "--api-key", seat.key, *seat.address]
    env = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # else each look at its health generates a token
    }
    if nodes > 1 and seat.fabric_address:  # of several addresses it would choose one by itself
        env["SGLANG_HOST_IP"] = seat.fabric_address
    argv = (*seat.executable, "serve", "--model-path", seat.model_path, *args)
    return Command(argv, env, key_in_argv=seat.key)


_OPENS = "opens a file on the node"
_WRITES = "writes files on the node"
_LOADS = "loads code into the engine"
_CARDS = "takes cards that the profile does not ask for"
_LISTENS = "listens on another address"
_SENDS = "sends to an address"
_FETCHES = "fetches from an address"
_LOGS = "writes down what people ask"
_NO_HTTP = "answers no HTTP"

ADAPTER = Adapter(
    name="sglang",
    title="sglang",
    command=_command,
    executables=("sglang",),
    package="sglang",
    metrics_path="/metrics/",  # without its end it is sent elsewhere, and probes follow nobody
    running="sglang:num_running_reqs",
    waiting="sglang:num_queue_reqs",
    progress=(
        "sglang:prompt_tokens_total",
        "sglang:generation_tokens_total",
        "sglang:num_used_tokens",  # the counters above wait for a request's end
        "sglang:gen_throughput",
        "sglang:inter_token_latency_seconds_count",
    ),
    uncached_args=("--disable-radix-cache",),
    figures={
        "kv_cache_usage_ratio": ("sglang:token_usage",),
        "prompt_tokens_total": ("sglang:prompt_tokens_total",),
        "cached_tokens_total": ("sglang:cached_tokens_total",),
        "generation_tokens_total": ("sglang:generation_tokens_total",),
        "time_to_first_token_seconds": ("sglang:time_to_first_token_seconds",),
        "inter_token_latency_seconds": ("sglang:inter_token_latency_seconds",),
        "queue_seconds": ("sglang:queue_time_seconds",),
    },
    refused_args={
        "--config": _OPENS,
        "--base-gpu-id": _CARDS,
        "--chat-template": _OPENS,
        "--completion-template": _OPENS,
        "--crash-dump-folder": _LOGS,
        "--custom-sigquit-handler": _LOADS,
        "--custom-weight-loader": _LOADS,
        "--debug-tensor-dump-input-file": _OPENS,
        "--debug-tensor-dump-output-folder": _WRITES,
        "--decoupled-spec-bind-endpoint": _LISTENS,
        "--decoupled-spec-connect-endpoints": _SENDS,
        "--decrypted-config-file": _OPENS,
        "--decrypted-draft-config-file": _OPENS,
        "--delete-ckpt-after-loading": "deletes the weights",
        "--disaggregation-bootstrap-port": _LISTENS,
        "--disaggregation-mode": _LISTENS,
        "--dllm-algorithm-config": _OPENS,
        "--download-dir": _WRITES,
        "--dp-size": _CARDS,
        "--data-parallel-size": _CARDS,
        "--enable-custom-logit-processor": "runs code that clients send",
        "--enable-http-worker-reuseport": _LISTENS,
        "--enable-trace": _SENDS,
        "--encoder-bootstrap-port": _LISTENS,
        "--encoder-register-urls": _SENDS,
        "--encoder-urls": _SENDS,
        "--engine-info-bootstrap-port": _LISTENS,
        "--export-metrics-to-file": _WRITES,
        "--export-metrics-to-file-dir": _WRITES,
        "--fastapi-root-path": "moves the routes that the agent and the gateway call",
        "--file-storage-path": _WRITES,
        "--flexkv-config-file": _OPENS,
        "--forward-hooks": _LOADS,
        "--gated-launch-port": _LISTENS,
        "--gpu-id-step": _CARDS,
        "--grpc-mode": _NO_HTTP,
        "--grpc-port": _LISTENS,
        "--hicache-storage-backend": _LOADS,
        "--hicache-storage-backend-extra-config": _LOADS,
        "--init-expert-location": _OPENS,
        "--kt-weight-path": _OPENS,
        "--kv-events-config": _SENDS,
        "--lmcache-config-file": _OPENS,
        "--load-publish-endpoint": _LISTENS,
        "--log-requests": _LOGS,
        "--log-requests-format": _LOGS,
        "--log-requests-level": _LOGS,
        "--log-requests-target": _LOGS,
        "--lora-paths": _OPENS,
        "--model-loader-extra-config": _OPENS,
        "--modelexpress-config": _FETCHES,
        "--modelopt-checkpoint-restore-path": _OPENS,
        "--modelopt-checkpoint-save-path": _WRITES,
        "--modelopt-export-path": _WRITES,
        "--msprobe-dump-config": _OPENS,
        "--otlp-traces-endpoint": _SENDS,
        "--pdmux-config-path": _OPENS,
        "--ple-offload-dir": _WRITES,
        "--quantization-param-path": _OPENS,
        "--remote-instance-weight-loader-backend": _FETCHES,
        "--remote-instance-weight-loader-seed-instance-ip": _FETCHES,
        "--sidecar": _LOADS,
        "--sidecar-args": _LOADS,
        "--smg-grpc-mode": _NO_HTTP,
        "--smg-http-sidecar-port": _LISTENS,
        "--spec-trace-dir": _LOGS,
        "--speculative-adaptive-config": _OPENS,
        "--speculative-draft-model": _OPENS,
        "--speculative-draft-model-path": _OPENS,
        "--speculative-dspark-confidence-sts-path": _OPENS,
        "--speculative-dspark-sps-table-path": _OPENS,
        "--speculative-ngram-external-corpus-path": _OPENS,
        "--speculative-token-map": _OPENS,
        "--ssl-ca-certs": _OPENS,
        "--ssl-certfile": _OPENS,
        "--ssl-keyfile": _OPENS,
        "--ssl-keyfile-password": "shows a secret to everybody on the node",
        "--stat-loggers": _LOADS,
        "--tokenizer-path": _OPENS,
        "--tool-server": "runs programs on the node",
        "--trust-request-chat-template": "lets clients hand the engine more than text",
        "--unified-cache-external-linker-config": _LOADS,
        "--uno-lora-path": _OPENS,
        "--watermark-key": "shows a secret to everybody on the node",
        "--watermark-key-b": "shows a secret to everybody on the node",
        "--weight-cache-socket": _OPENS,
    },
    harmless_args=frozenset({"--dllm-algorithm", "--quantization", "--speculative-adaptive"}),
    refused_env={
        "NCCL_CONF_FILE": _OPENS,
        "NCCL_NET_PLUGIN": _LOADS,
        "NCCL_PROFILER_PLUGIN": _LOADS,
        "NCCL_TUNER_PLUGIN": _LOADS,
        "SGLANG_HTTP_SERVER_APP_PATH": _LOADS,
        "SGLANG_PLUGINS": _LOADS,
        "SGLANG_TEST_": _LOADS,
    },
    remark=(
        "sglang takes its key on the command line alone, where everybody with a login on the node reads it; "
        "let nobody log in there who may not use the model"
    ),
)
