"""llama-server's command line.

A request's context is what the catalog says: with slots and unified KV left to the engine, every slot
advertises the whole context and together they overrun it, which ends all requests at once. So both are given.
"""

from __future__ import annotations

from collections.abc import Sequence

from catalog.arguments import LLAMA_SLOTS, is_given, last_given
from nodes.engines.adapter import Adapter, Command, RenderError, Seat, number_of, profile_args, subject
from nodes.protocol import Launch

_SLOTS = ("-np", "--parallel")
_CONTEXT = ("-c", "--ctx-size")
_UNIFIED = ("-kvu", "--kv-unified", "-no-kvu", "--no-kv-unified", "--kv-unified-per-slot")
_EMBEDDINGS = ("--embedding", "--embeddings")
_SPLIT = ("-sm", "--split-mode")


def _command(launch: Launch, seat: Seat) -> Command:
    if number_of(launch, "nodes") > 1:
        raise RenderError(f"{subject(launch)}: llama-server runs on one node; set nodes to 1.")
    args = profile_args(launch)
    slots = _slots(launch, args)
    if not is_given(args, _SLOTS):
        args += ["--parallel", str(slots)]
    if launch.context_length > 0 and not is_given(args, _CONTEXT):
        args += ["--ctx-size", str(slots * launch.context_length)]
    if not is_given(args, _UNIFIED):
        args += ["--no-kv-unified"]
    if launch.capabilities.get("embeddings") and not is_given(args, _EMBEDDINGS):
        args += ["--embeddings"]
    if len(seat.gpus) > 1 and not is_given(args, _SPLIT):
        # tp splits each layer over the cards, pp gives whole layers to each.
        args += ["--split-mode", "row" if number_of(launch, "tp") > 1 else "layer"]
    args += ["--metrics", "--alias", launch.model, "--model", seat.model_path, *seat.address]
    env = {"LLAMA_API_KEY": seat.key}
    if not seat.gpus:
        env["GGML_VK_VISIBLE_DEVICES"] = ""  # a Vulkan build does not heed CUDA_VISIBLE_DEVICES
    return Command((*seat.executable, *args), env)


def _slots(launch: Launch, args: Sequence[str]) -> int:
    """How many requests run at once; the last --parallel counts, as it does for the engine."""
    given = last_given(args, _SLOTS)
    if given is None:
        return LLAMA_SLOTS
    option, value = given
    if not value.isdecimal() or int(value) < 1:
        raise RenderError(
            f"{subject(launch)}: {option} {value} is not a number of slots, and without one a "
            f"request's context cannot be told; give 1 or more, or leave it out."
        )
    return int(value)


_OPENS = "opens a file on the node"
_FETCHES = "fetches from an address"
_RUNS = "runs programs on the node"

ADAPTER = Adapter(
    name="llamacpp",
    title="llama-server",
    command=_command,
    executables=("llama-server", "llama-server-vulkan"),
    running="llamacpp:requests_processing",
    waiting="llamacpp:requests_deferred",
    progress=("llamacpp:prompt_tokens_total", "llamacpp:tokens_predicted_total", "llamacpp:n_decode_total"),
    figures={
        # The first counts what it had to compute, and not what it had already.
        "prompt_tokens_total": ("llamacpp:prompt_tokens_total", "llamacpp:prompt_tokens_cached_total"),
        "cached_tokens_total": ("llamacpp:prompt_tokens_cached_total",),
        "generation_tokens_total": ("llamacpp:tokens_predicted_total",),
    },
    tls_options=("--ssl-cert-file", "--ssl-key-file"),
    uncached_args=("--no-cache-prompt",),
    context_path="/props",
    context_keys=("default_generation_settings", "n_ctx"),  # of a slot, and not of them all
    refused_args={
        "--agent": _RUNS,
        "-ag": _RUNS,
        "--api-prefix": "moves the routes that the agent and the gateway call",
        "--chat-template-file": _OPENS,
        "--control-vector": _OPENS,
        "--control-vector-scaled": _OPENS,
        "--grammar-file": _OPENS,
        "--hf-repo-draft": _FETCHES,
        "-hfd": _FETCHES,
        "-hfrd": _FETCHES,
        "--spec-draft-hf": _FETCHES,
        "--json-schema-file": _OPENS,
        "-jf": _OPENS,
        "--log-file": _OPENS,
        "--log-prompts-dir": "writes what people ask to a folder",
        "--lookup-cache-dynamic": _OPENS,
        "-lcd": _OPENS,
        "--lookup-cache-static": _OPENS,
        "-lcs": _OPENS,
        "--lora": _OPENS,
        "--lora-scaled": _OPENS,
        "--mcp-servers-config": _RUNS,
        "--mcp-servers-json": _RUNS,
        "--media-path": "lets clients read files of the node",
        "--mmproj": _OPENS,
        "-mm": _OPENS,
        "--mmproj-url": _FETCHES,
        "-mmu": _FETCHES,
        "--model-draft": _OPENS,
        "-md": _OPENS,
        "--spec-draft-model": _OPENS,
        "--path": "serves files of the node",
        "--slot-save-path": "writes files on the node",
        "--ssl-cert-file": _OPENS,
        "--ssl-key-file": _OPENS,
        "--tools": _RUNS,
        "--tools-runtime": _RUNS,
        "--ui-config-file": _OPENS,
        "--webui-config-file": _OPENS,
        "--ui-mcp-proxy": "lets clients reach other hosts through the node",
        "--webui-mcp-proxy": "lets clients reach other hosts through the node",
        "--video-ffmpeg-dir": _RUNS,
    },
    refused_env={
        "GGML_BACKEND": "it loads code into the engine",
        "LLAMA_ARG_": "it stands for an option of llama-server, which belongs among the profile's args",
    },
)
