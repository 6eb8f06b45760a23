"""What llmgw itself puts on an engine's command line and into its environment, and a profile may not.

Model path, served name, host, port, API key, parallelism and rendezvous come from the catalog and from the
node: given twice, the engine would listen elsewhere, answer to another name or run without its key.
Everything else (`--ctx-size`, `--max-model-len` and the like) stays the operator's.
"""

from collections.abc import Iterable, Mapping

from catalog.arguments import ABBREVIATING, option_of

_PATH = "from the model's source"
_NAME = "from the model's name"
_ADDRESS = "chosen on the node"
_KEY = "made for each replica"
_TP = "from tp"
_PP = "from pp"
_GANG = "from nodes"


def _owned(*groups: tuple[str, Iterable[str]]) -> dict[str, str]:
    return {option: owner for owner, options in groups for option in options}


# Option -> where its value comes from.
OWNED_ARGS: Mapping[str, Mapping[str, str]] = {
    "vllm": _owned(
        (_PATH, ("--model", "--model-tag", "--revision")),
        (_NAME, ("--served-model-name",)),
        (_ADDRESS, ("--host", "--port", "--uds")),
        (_KEY, ("--api-key",)),
        (_TP, ("--tensor-parallel-size", "-tp")),
        (_PP, ("--pipeline-parallel-size", "-pp")),
        (_GANG, ("--nnodes", "-n", "--node-rank", "-r", "--master-addr", "--master-port", "--headless")),
    ),
    "sglang": _owned(
        (_PATH, ("--model-path", "--model", "--revision")),
        (_NAME, ("--served-model-name",)),
        (_ADDRESS, ("--host", "--port")),
        (_KEY, ("--api-key", "--admin-api-key")),
        (_TP, ("--tp-size", "--tp", "--tensor-parallel-size")),
        (_PP, ("--pp-size", "--pp", "--pipeline-parallel-size")),
        (_GANG, ("--nnodes", "--node-rank", "--dist-init-addr", "--nccl-init-addr", "--nccl-port")),
    ),
    "llamacpp": _owned(
        (_PATH, ("-m", "--model", "-mu", "--model-url", "-dr", "--docker-repo", "-hf", "-hfr", "--hf-repo")),
        (_PATH, ("-hff", "--hf-file", "-hft", "--hf-token", "--models-dir", "--models-preset")),
        (_NAME, ("-a", "--alias")),
        (_ADDRESS, ("--host", "--port")),
        (_KEY, ("--api-key", "--api-key-file")),
        (_GANG, ("--rpc",)),
    ),
    "sim": _owned(
        (_PATH, ("--model", "--model-path")),
        (_NAME, ("--served-model-name", "--alias")),
        (_ADDRESS, ("--host", "--port")),
        (_KEY, ("--api-key",)),
        (_TP, ("--tp", "--tensor-parallel-size")),
        (_PP, ("--pp", "--pipeline-parallel-size")),
        (_GANG, ("--nnodes", "--node-rank", "--master-addr", "--master-port")),
    ),
}

# The node writes these for each launch; an operator's value is ignored, with a warning.
OWNED_ENV = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "DO_NOT_TRACK",
        "GGML_VK_VISIBLE_DEVICES",
        "HF_HUB_OFFLINE",
        "LLAMA_API_KEY",
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION",
        "SGLANG_HOST_IP",
        "TRANSFORMERS_OFFLINE",
        "VLLM_API_KEY",
        "VLLM_ENGINE_READY_TIMEOUT_S",
        "VLLM_HOST_IP",
        "VLLM_NO_USAGE_STATS",
        "VLLM_PORT",
    }
)

_SHORTEST_ABBREVIATION = len("--x")


def owner_of(argument: str, engine: str) -> str:
    """Where llmgw takes the value of this argument from, or an empty text if the argument is the operator's.

    Sees `--option=value`, `--option value` in one text, underscores for dashes, a value stuck to a one-letter
    option and, for the engines that allow them, abbreviations.
    """
    owned = OWNED_ARGS.get(engine, {})
    option = option_of(argument)
    if option in owned:
        return owned[option]
    if not option or engine not in ABBREVIATING:
        return ""
    if option.startswith("--"):
        is_long_enough = len(option) >= _SHORTEST_ABBREVIATION
        return next(
            (owner for known, owner in owned.items() if is_long_enough and known.startswith(option)), ""
        )
    return owned.get(option[:2], "") if option[2:].isdigit() else ""
