"""What engines' logs say when they fail, as recorded from real ones, and the sentence for each."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nodes.protocol import CAPACITY, CONFIGURATION, NODE, TRANSIENT


@dataclass(frozen=True, slots=True)
class Symptom:
    """A line of a log that tells the cause. sentence names groups of the pattern; kind: what would end it."""

    cause: str
    engines: frozenset[str]  # empty: any
    pattern: re.Pattern[str]
    sentence: str
    kind: str


def _row(cause: str, engines: str, pattern: str, sentence: str, kind: str) -> Symptom:
    return Symptom(cause, frozenset(engines.split()), re.compile(pattern, re.MULTILINE), sentence, kind)


# In the order in which they are tried.
SYMPTOMS = (
    _row(
        "bind_failed",
        "llamacpp",
        r"couldn't bind HTTP server socket, hostname: (?P<host>\S+), port: (?P<port>\d+)",
        "llama-server cannot listen on {host}:{port}, which is in use or not an address of this node; "
        "another port is tried.",
        TRANSIENT,
    ),
    _row(
        "bad_argument",
        "llamacpp",
        r"^error: invalid argument: (?P<argument>.+)",
        "llama-server does not know the argument {argument}; correct the profile's args for this version.",
        CONFIGURATION,
    ),
    _row(
        "bad_argument",
        "llamacpp",
        r'error while handling argument "(?P<argument>[^"]+)": (?P<why>.*)',
        "llama-server cannot read the value of {argument} ({why}); correct the profile's args.",
        CONFIGURATION,
    ),
    _row(
        "no_tls",
        "llamacpp",
        r"(?i:server is built without SSL support)",
        "This build of llama-server speaks no TLS, which --engine-tls asks for; put one that was built with "
        "OpenSSL on the node, or start its agent without --engine-tls.",
        NODE,
    ),
    _row(
        "bad_chat_template",
        "llamacpp",
        r"failed to initialize chat template|supplied chat template is not supported",
        "llama-server rejects the chat template; correct --chat-template in the profile's args.",
        CONFIGURATION,
    ),
    _row(
        "unknown_arch",
        "llamacpp",
        r"unknown model architecture: '(?P<arch>[^']+)'",
        "This build of llama-server does not know the architecture {arch}; put a newer one on the node.",
        CONFIGURATION,
    ),
    _row(
        "model_path_missing",
        "llamacpp",
        r"failed to open GGUF file '(?P<path>[^']+)' \((?P<why>[^)]+)\)",
        "llama-server cannot open {path} ({why}); check the model's source on this node.",
        NODE,
    ),
    _row(
        "corrupt_weights",
        "llamacpp",
        r"(?P<why>invalid magic characters|failed to read magic|failed to read key-value pairs"
        r"|data is not within the file bounds)",
        "The weights are no whole GGUF file ({why}); fetch them again or correct the model's source.",
        CONFIGURATION,
    ),
    _row(
        "gpu_oom",
        "llamacpp",
        r"cudaMalloc failed: out of memory|failed to allocate CUDA\d+ buffer|ErrorOutOfDeviceMemory",
        "The GPU's memory does not hold the weights and the context; give a smaller context, fewer parallel "
        "slots or a larger card.",
        CAPACITY,
    ),
    _row(
        "host_oom",
        "llamacpp",
        r"failed to allocate buffer for kv cache|failed to allocate CPU buffer"
        r"|unable to allocate backend buffer",
        "The node's memory does not hold the weights and the context; give a smaller context, fewer parallel "
        "slots or a node with more memory.",
        CAPACITY,
    ),
    _row(
        "port_in_use",
        "vllm sglang",
        r"OSError: \[Errno 98\] Address already in use"
        r"|\w[\w ]* at \d+ is not available in \d+ seconds|is used by a process already",
        "The engine's port is in use on this node; another one is tried.",
        TRANSIENT,
    ),
    _row(
        "bad_argument",
        "vllm sglang",
        r"^(?:vllm|sglang|launch_server\.py)(?: serve)?: error: (?P<why>.+)",
        "The engine rejects its arguments ({why}); correct the profile's args for this version.",
        CONFIGURATION,
    ),
    _row(
        "bad_argument",
        "vllm sglang",
        r"invalid tool call parser: (?P<parser>[^\s'\"]+)",
        "The engine has no tool-call parser {parser}; correct --tool-call-parser in the profile's args.",
        CONFIGURATION,
    ),
    _row(
        "bad_chat_template",
        "vllm",
        r"The supplied chat template .*",
        "vllm finds no chat template where --chat-template says; correct it in the profile's args.",
        CONFIGURATION,
    ),
    _row(
        "tp_indivisible",
        "vllm",
        r"Total number of attention heads \((?P<heads>\d+)\) must be divisible by tensor parallel size "
        r"\((?P<tp>\d+)\)",
        "tp {tp} does not divide the model's {heads} attention heads; choose one that does.",
        CONFIGURATION,
    ),
    _row(
        "tp_indivisible",
        "sglang",
        r"AssertionError: (?P<number>\d+) is not divisible by (?P<tp>\d+)",
        "{tp} does not divide {number} of the model's heads or layers; choose another tp.",
        CONFIGURATION,
    ),
    _row(
        "too_few_gpus",
        "vllm",
        r"World size \((?P<wanted>\d+)\) is larger than the number of available GPUs \((?P<there>\d+)\)",
        "vllm wants {wanted} GPUs and sees {there}; correct tp, pp and what in the args takes more.",
        CONFIGURATION,
    ),
    _row(
        "gated_repo",
        "vllm sglang",
        r"You are trying to access a gated repo|GatedRepoError|401 Client Error"
        r"|Access to model \S+ is restricted",
        "The engine asks a hub for a repository that is gated; give it nothing but the model's own source.",
        CONFIGURATION,
    ),
    _row(
        "repo_not_found",
        "vllm sglang",
        r"RepositoryNotFoundError|404 Client Error",
        "The engine asks a hub for a repository that is not there; correct the profile's args.",
        CONFIGURATION,
    ),
    _row(
        "model_path_missing",
        "vllm sglang",
        r"HFValidationError: Repo id must be in the form .*?: '(?P<path>[^']+)'",
        "The engine finds nothing at {path}; check the model's source on this node.",
        NODE,
    ),
    _row(
        "not_cached_offline",
        "vllm sglang",
        r"LocalEntryNotFoundError|outgoing traffic has been disabled",
        "The engine wants more than is in the model's source, and engines fetch nothing themselves; correct "
        "the profile's args, or the source.",
        CONFIGURATION,
    ),
    _row(
        "no_config",
        "vllm sglang",
        r"Invalid repository ID or local directory specified",
        "There is no config.json beside the weights; correct the model's source.",
        CONFIGURATION,
    ),
    _row(
        "unknown_arch",
        "vllm sglang",
        r"model type `(?P<arch>[^`]+)` but Transformers does not recognize",
        "This version of the engine does not know the model type {arch}; put a newer one on the node.",
        CONFIGURATION,
    ),
    _row(
        "unknown_arch",
        "vllm",
        r"Model architectures (?P<arch>\[.*?\]) are not supported",
        "This version of vllm does not know the architecture {arch}; put a newer one on the node.",
        CONFIGURATION,
    ),
    _row(
        "corrupt_weights",
        "vllm sglang",
        r"SafetensorError: (?P<why>.+)",
        "A file of the weights is cut or broken ({why}); fetch it again or correct the model's source.",
        CONFIGURATION,
    ),
    _row(
        "no_weights",
        "vllm sglang",
        r"Cannot find any model weights with",
        "There are no files of weights where the model's source leads; correct it.",
        CONFIGURATION,
    ),
    _row(
        "kv_too_small",
        "vllm",
        r"max seq len \((?P<context>\d+)\).*?(?P<need>[\d.]+) GiB KV cache is needed, which is larger than "
        r"the available KV cache memory \((?P<have>[\d.]+) GiB\)",
        "A context of {context} tokens needs {need} GiB of KV cache and {have} GiB are left; give a smaller "
        "context_length, more cards, or more of their memory (--gpu-memory-utilization).",
        CONFIGURATION,
    ),
    _row(
        "kv_too_small",
        "vllm",
        r"No available memory for the cache blocks",
        "The weights leave no memory for the KV cache; give more cards, larger ones, or more of their memory "
        "(--gpu-memory-utilization).",
        CONFIGURATION,
    ),
    _row(
        "kv_too_small",
        "sglang",
        r"Not enough memory\. Please try to increase --mem-fraction-static",
        "The weights leave no memory for the KV cache; raise --mem-fraction-static, or give more or larger "
        "cards.",
        CONFIGURATION,
    ),
    _row(
        "gpu_busy",
        "vllm",
        r"Free memory on device (?P<device>\S+) \((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup",
        "Of GPU {device} only {free} of {total} GiB are free, as something else holds the rest; end that, or "
        "another node is tried.",
        NODE,
    ),
    _row(
        "gpu_busy",
        "sglang",
        r"The memory capacity is unbalanced",
        "Something else holds memory of one of the GPUs; end that, or another node is tried.",
        NODE,
    ),
    _row(
        "host_oom",
        "vllm",
        r"Available memory on node \d+ \((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on kv cache allocation",
        "The node's memory ({free} of {total} GiB free) does not hold the KV cache; give the profile a "
        "min_memory_gb that does.",
        CAPACITY,
    ),
    _row(
        "gpu_oom",
        "vllm sglang",
        r"torch\.(?:cuda\.)?OutOfMemoryError|CUDA out of memory",
        "The GPU's memory ran out; give a smaller context_length, fewer requests at once, or more or larger "
        "cards.",
        CAPACITY,
    ),
    _row(
        "ctx_too_long",
        "vllm",
        r"User-specified max_model_len \((?P<context>\d+)\) is greater than the derived max_model_len "
        r"\((?:\w+=)?(?P<most>\d+)",
        "A context of {context} tokens is more than the {most} that the model was made for; lower "
        "context_length.",
        CONFIGURATION,
    ),
    _row(
        "ctx_too_long",
        "sglang",
        r"context_length \((?P<context>\d+)\) is greater than the derived context_length \((?P<most>\d+)\)",
        "A context of {context} tokens is more than the {most} that the model was made for; lower "
        "context_length.",
        CONFIGURATION,
    ),
    _row(
        "no_gpu",
        "vllm sglang",
        r"Failed to infer device type|No CUDA GPUs are available|libcuda\.so\.1: cannot open",
        "The engine sees no GPU that it can use; check the driver on this node.",
        NODE,
    ),
    _row(
        "gpu_unsupported",
        "vllm sglang",
        r"no kernel image is available for execution|CUDA driver version is insufficient"
        r"|Bfloat16 is only supported on GPUs",
        "The GPU or its driver is too old for this build of the engine; put another on the node.",
        NODE,
    ),
    _row(
        "shm_small",
        "vllm sglang",
        r"Error while creating shared memory segment /dev/shm|posix_fallocate failed",
        "This node's shared memory (/dev/shm) is too small for several GPUs; make it larger (--shm-size in a "
        "container).",
        NODE,
    ),
    _row(
        "net_iface",
        "vllm sglang",
        r"Gloo connectFullMesh failed|Unable to resolve hostname to a \(local\) address",
        "The ranks do not reach each other; set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME for this node's "
        "agent.",
        NODE,
    ),
    _row(
        "dist_timeout",
        "vllm sglang",
        r"Watchdog caught collective operation timeout|DistStoreError: Timed out"
        r"|client socket has timed out after|wait timeout after",
        "The GPUs did not come together in time; it is tried again.",
        TRANSIENT,
    ),
    _row(
        "nccl",
        "vllm sglang",
        r"NCCL error(?: in)?: ?(?P<why>[^\n(]*)|DistBackendError",
        "The GPUs could not talk to each other (NCCL: {why}); it is tried again.",
        TRANSIENT,
    ),
    _row(
        "start_timeout",
        "vllm",
        r"Timed out waiting for engine core processes to start",
        "vllm's engine core was not ready in time; give the profile a longer startup_timeout, or look into "
        "its log.",
        TRANSIENT,
    ),
    # Its other processes only say that the core is gone; the first error of its own is the cause.
    _row(
        "engine_died",
        "vllm",
        r"^\((?:EngineCore|Worker)\S* pid=\d+\) ERROR .*?\] (?P<why>[\w.]*(?:Error|Exception): \S.*)",
        "vllm's engine core ended ({why}); its log tells more, and it is tried again.",
        TRANSIENT,
    ),
    _row(
        "engine_died",
        "vllm",
        r"EngineDeadError",
        "vllm's engine core ended without a word of its own; it is tried again.",
        TRANSIENT,
    ),
    _row(
        "port_in_use",
        "sim",
        r"^sim: cannot listen on (?P<address>\S+): (?P<why>.+)",
        "The sim engine cannot listen on {address} ({why}); another port is tried.",
        TRANSIENT,
    ),
    _row(
        "bad_argument",
        "sim",
        r"^sim: error: (?P<why>.+)",
        "The sim engine rejects its arguments ({why}); correct the profile's args.",
        CONFIGURATION,
    ),
    _row(
        "killed",
        "",
        r"^Killed$|oom-kill",
        "The engine was killed, most likely because the node ran out of memory; it is tried again.",
        TRANSIENT,
    ),
    _row(
        "killed",
        "",
        r"Illegal instruction",
        "The engine needs processor instructions that this node lacks; put a build for its processor on it.",
        NODE,
    ),
)
