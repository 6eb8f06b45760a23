"""The command and the environment that a launch becomes, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog.durations import SECOND
from catalog.owned import OWNED_ENV
from nodes.agent.sim.options import read_options as read_sim_options
from nodes.engines import ENGINES, RenderError, Seat, render
from nodes.protocol import Launch

KEY = "replica-key-0123456789"


def launch(
    *args: str,
    engine: str = "llamacpp",
    context_length: int = 0,
    env: Mapping[str, str] | None = None,
    embeddings: bool = False,
    tools: bool = False,
    vision: bool = False,
    **profile: Any,
) -> Launch:
    return Launch(
        model="org/m",
        source="org/m",
        profile={"name": "p", "engine": engine, "args": list(args), "env": dict(env or {}), **profile},
        context_length=context_length,
        capabilities={"embeddings": embeddings, "tools": tools, "vision": vision},
    )


def seat(**changes: Any) -> Seat:
    given: dict[str, Any] = {
        "executable": ["/opt/engine"],
        "host": "127.0.0.1",
        "port": 18000,
        "key": KEY,
        "model_path": "/w/m.gguf",
    }
    return Seat(**{**given, **changes})


OURS = "--metrics --alias org/m --model /w/m.gguf --host 127.0.0.1 --port 18000"
TWO_CARDS = ("GPU-a", "GPU-b")

LLAMA_COMMANDS: dict[str, tuple[Launch, Sequence[str], str]] = {
    "slots are given even when nobody asked": (launch(), (), "--parallel 4 --no-kv-unified"),
    "each of the slots has the catalog's context": (
        launch(context_length=2048), (), "--parallel 4 --ctx-size 8192 --no-kv-unified",
    ),
    "as many slots as the operator says": (
        launch("--parallel", "2", context_length=2048), (), "--parallel 2 --ctx-size 4096 --no-kv-unified",
    ),
    "slots under their short name": (
        launch("-np", "8", context_length=100), (), "-np 8 --ctx-size 800 --no-kv-unified",
    ),
    "the last number of slots counts": (
        launch("-np", "8", "-np", "2", context_length=100), (), "-np 8 -np 2 --ctx-size 200 --no-kv-unified",
    ),
    "an operator's own context stays": (
        launch("-c", "9000", context_length=2048), (), "-c 9000 --parallel 4 --no-kv-unified",
    ),
    "an operator's own cache stays": (launch("--kv-unified"), (), "--kv-unified --parallel 4"),
    "embeddings": (launch(embeddings=True), (), "--parallel 4 --no-kv-unified --embeddings"),
    "embeddings, said twice": (launch("--embedding", embeddings=True), (),
                               "--embedding --parallel 4 --no-kv-unified"),
    "tensor parallelism over two cards": (
        launch(tp=2), TWO_CARDS, "--parallel 4 --no-kv-unified --split-mode row",
    ),
    "pipeline parallelism over two cards": (
        launch(tp=1, pp=2), TWO_CARDS, "--parallel 4 --no-kv-unified --split-mode layer",
    ),
    "an operator's own split": (
        launch("-sm", "tensor", tp=2), TWO_CARDS, "-sm tensor --parallel 4 --no-kv-unified",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("launch", "gpus", "args"), LLAMA_COMMANDS.values(), ids=LLAMA_COMMANDS)
def test_llama_server_is_told(launch: Launch, gpus: Sequence[str], args: str) -> None:
    command = render(launch, seat(gpus=gpus))
    assert " ".join(command.argv) == f"/opt/engine {args} {OURS}"


MEETING = "--master-addr 10.0.0.1 --master-port 29501"
MEETING_BY_IPV6 = "--master-addr fd00::1 --master-port 29501"

VLLM_COMMANDS: dict[str, tuple[Launch, dict[str, Any], str]] = {
    "no more than it needs": (launch(engine="vllm"), {}, ""),
    "how many cards, in both ways": (
        launch(engine="vllm", tp=4, pp=2), {},
        "--tensor-parallel-size 4 --pipeline-parallel-size 2",
    ),
    "the catalog's context": (
        launch(engine="vllm", context_length=8192), {}, "--max-model-len 8192",
    ),
    "an operator's own context stays": (
        launch("--max_model_len=4096", engine="vllm", context_length=8192), {},
        "--max_model_len=4096",
    ),
    "embeddings": (launch(engine="vllm", embeddings=True), {}, "--runner pooling"),
    "embeddings as the operator says": (
        launch("--convert", "embed", engine="vllm", embeddings=True), {}, "--convert embed",
    ),
    "tools with their parser": (
        launch("--tool-call-parser", "hermes", engine="vllm", tools=True), {},
        "--tool-call-parser hermes --enable-auto-tool-choice",
    ),
    "tools without one": (launch(engine="vllm", tools=True), {}, ""),
    "code of the model's author, by the operator's choice": (
        launch("--trust-remote-code", engine="vllm"), {}, "--trust-remote-code",
    ),
    "an option whose name only begins a refused one": (
        launch("--reasoning-parser", "qwen3", engine="vllm"), {}, "--reasoning-parser qwen3",
    ),
    "tensor parallelism alone": (launch(engine="vllm", tp=8), {}, "--tensor-parallel-size 8"),
    "pipeline parallelism alone": (launch(engine="vllm", tp=1, pp=2), {}, "--pipeline-parallel-size 2"),
    "one of everything is not said": (launch(engine="vllm", tp=1, pp=1, nodes=1), {}, ""),
    "a context that the engine chooses": (
        launch("--max-model-len", "auto", engine="vllm", context_length=8192), {}, "--max-model-len auto",
    ),
    "embeddings as the operator says, in one word": (
        launch("--runner=pooling", engine="vllm", embeddings=True), {}, "--runner=pooling",
    ),
    "images need no word": (launch(engine="vllm", vision=True), {}, ""),
    "how many images a prompt may have": (
        launch("--limit-mm-per-prompt", '{"image":2}', engine="vllm", vision=True), {},
        '--limit-mm-per-prompt {"image":2}',
    ),
    "tools that are parsed when a client asks": (
        launch("--tool-call-parser=hermes", "--no-enable-auto-tool-choice", engine="vllm", tools=True), {},
        "--tool-call-parser=hermes --no-enable-auto-tool-choice",
    ),
    "tools and thoughts": (
        launch("--tool-call-parser", "qwen3_coder", "--reasoning-parser", "qwen3", engine="vllm", tools=True),
        {}, "--tool-call-parser qwen3_coder --reasoning-parser qwen3 --enable-auto-tool-choice",
    ),
    "a parser without the capability": (
        launch("--tool-call-parser", "hermes", engine="vllm"), {}, "--tool-call-parser hermes",
    ),
    "how much of a card it may take": (
        launch("--gpu-memory-utilization", "0.85", engine="vllm"), {}, "--gpu-memory-utilization 0.85",
    ),
    "how many run and wait": (
        launch("--max-num-seqs", "64", "--max-num-queued-reqs", "128", engine="vllm"), {},
        "--max-num-seqs 64 --max-num-queued-reqs 128",
    ),
    "weights and cache in fewer bits": (
        launch("--quantization", "fp8", "--kv-cache-dtype", "fp8", engine="vllm"), {},
        "--quantization fp8 --kv-cache-dtype fp8",
    ),
    "a gang of four, its last, with stages": (
        launch(engine="vllm", tp=8, pp=4, nodes=4), {"meeting": ("10.0.0.1", "29501"), "rank": 3},
        f"--tensor-parallel-size 8 --pipeline-parallel-size 4 --nnodes 4 --node-rank 3 {MEETING} --headless",
    ),
    "a gang that meets again, elsewhere": (
        launch(engine="vllm", tp=8, nodes=2), {"meeting": ("10.0.0.1", "29502")},
        "--tensor-parallel-size 8 --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --master-port 29502",
    ),
    "a gang that meets by IPv6": (
        launch(engine="vllm", tp=8, nodes=2), {"meeting": ("fd00::1", "29501"), "rank": 1},
        f"--tensor-parallel-size 8 --nnodes 2 --node-rank 1 {MEETING_BY_IPV6} --headless",
    ),
    "a program of several words": (
        launch(engine="vllm"), {"executable": ["/opt/python", "-m", "vllm.entrypoints.cli.main"]}, "",
    ),
    "the first of two nodes": (
        launch(engine="vllm", tp=8, nodes=2), {"meeting": ("10.0.0.1", "29501")},
        f"--tensor-parallel-size 8 --nnodes 2 --node-rank 0 {MEETING}",
    ),
    "the second of two nodes": (
        launch(engine="vllm", tp=8, nodes=2), {"meeting": ("10.0.0.1", "29501"), "rank": 1},
        f"--tensor-parallel-size 8 --nnodes 2 --node-rank 1 {MEETING} --headless",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("launch", "changes", "args"), VLLM_COMMANDS.values(), ids=VLLM_COMMANDS)
def test_vllm_is_told(launch: Launch, changes: dict[str, Any], args: str) -> None:
    command = render(launch, seat(**changes))
    ours = "--shutdown-timeout 20 --middleware nodes.agent.guard.Guard --served-model-name org/m"
    program = " ".join(changes.get("executable", ["/opt/engine"]))
    assert " ".join(command.argv).split() == (
        f"{program} serve /w/m.gguf {args} {ours} --host 127.0.0.1 --port 18000".split()
    )


def test_an_operators_own_grace_for_vllm_stays() -> None:
    argv = render(launch("--shutdown-timeout=5", engine="vllm"), seat()).argv
    assert [word for word in argv if "shutdown" in word] == ["--shutdown-timeout=5"]


SGLANG_COMMANDS: dict[str, tuple[Launch, dict[str, Any], str]] = {
    "no more than it needs": (launch(engine="sglang"), {}, ""),
    "how many cards, in both ways": (launch(engine="sglang", tp=4, pp=2), {}, "--tp-size 4 --pp-size 2 "),
    "the catalog's context": (launch(engine="sglang", context_length=8192), {}, "--context-length 8192 "),
    "an operator's own context stays": (
        launch("--context-length", "9", engine="sglang", context_length=8192), {}, "--context-length 9 ",
    ),
    "embeddings": (launch(engine="sglang", embeddings=True), {}, "--is-embedding "),
    "embeddings, said twice": (
        launch("--is-embedding", engine="sglang", embeddings=True), {}, "--is-embedding ",
    ),
    "images": (launch(engine="sglang", vision=True), {}, "--enable-multimodal "),
    "images, said twice": (
        launch("--enable-multimodal", engine="sglang", vision=True), {}, "--enable-multimodal ",
    ),
    "tensor parallelism alone": (launch(engine="sglang", tp=8), {}, "--tp-size 8 "),
    "pipeline parallelism alone": (launch(engine="sglang", tp=1, pp=2), {}, "--pp-size 2 "),
    "one of everything is not said": (launch(engine="sglang", tp=1, pp=1, nodes=1), {}, ""),
    "an operator's own context stays, in one word": (
        launch("--context-length=9", engine="sglang", context_length=8192), {}, "--context-length=9 ",
    ),
    "tools with their parser, in one flag": (
        launch("--tool-call-parser", "qwen25", engine="sglang", tools=True), {}, "--tool-call-parser qwen25 ",
    ),
    "tools without one": (launch(engine="sglang", tools=True), {}, ""),
    "thoughts": (
        launch("--reasoning-parser", "deepseek-r1", engine="sglang"), {}, "--reasoning-parser deepseek-r1 ",
    ),
    "how much of a card its weights and cache may take": (
        launch("--mem-fraction-static", "0.8", engine="sglang"), {}, "--mem-fraction-static 0.8 ",
    ),
    "how many run and wait": (
        launch("--max-running-requests", "64", "--max-queued-requests", "128", engine="sglang"), {},
        "--max-running-requests 64 --max-queued-requests 128 ",
    ),
    "weights in fewer bits": (launch("--quantization", "fp8", engine="sglang"), {}, "--quantization fp8 "),
    "what of a prompt was known is told": (
        launch("--enable-cache-report", engine="sglang"), {}, "--enable-cache-report ",
    ),
    "the first of two nodes": (
        launch(engine="sglang", tp=8, nodes=2), {"meeting": ("10.0.0.1", "29501")},
        "--tp-size 8 --nnodes 2 --node-rank 0 --dist-init-addr 10.0.0.1:29501 ",
    ),
    "a gang of four, its last, with stages": (
        launch(engine="sglang", tp=8, pp=4, nodes=4), {"meeting": ("10.0.0.1", "29501"), "rank": 3},
        "--tp-size 8 --pp-size 4 --nnodes 4 --node-rank 3 --dist-init-addr 10.0.0.1:29501 ",
    ),
    "a gang that meets by IPv6": (
        launch(engine="sglang", tp=8, nodes=2), {"meeting": ("fd00::1", "29501"), "rank": 1},
        "--tp-size 8 --nnodes 2 --node-rank 1 --dist-init-addr [fd00::1]:29501 ",
    ),
    "the second of two nodes": (
        launch(engine="sglang", tp=8, nodes=2), {"meeting": ("10.0.0.1", "29501"), "rank": 1},
        "--tp-size 8 --nnodes 2 --node-rank 1 --dist-init-addr 10.0.0.1:29501 ",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("launch", "changes", "args"), SGLANG_COMMANDS.values(), ids=SGLANG_COMMANDS)
def test_sglang_is_told(launch: Launch, changes: dict[str, Any], args: str) -> None:
    command = render(launch, seat(**changes))
    ours = "--enable-metrics --served-model-name org/m --api-key <key> --host 127.0.0.1 --port 18000"
    told = f"/opt/engine serve --model-path /w/m.gguf {args}{ours}"
    assert " ".join(command.shown) == told
    assert " ".join(command.argv) == told.replace("<key>", KEY)


SIM_COMMANDS: dict[str, tuple[Launch, dict[str, Any], str]] = {
    "the catalog's context": (
        launch("--ttft", "1ms", engine="sim", context_length=512), {}, "--context-length 512 --ttft 1ms",
    ),
    "an operator's own context": (
        launch("--context-length", "9", engine="sim", context_length=512), {},
        "--context-length 512 --context-length 9",
    ),
    "tools": (
        launch(engine="sim", tools=True), {}, "--enable-auto-tool-choice --tool-call-parser sim",
    ),
    "the second of two nodes": (
        launch(engine="sim", tp=8, nodes=2), {"meeting": ("10.0.0.1", "29501"), "rank": 1},
        "--nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 29501",
    ),
    "nothing more than it needs": (launch(engine="sim"), {}, ""),
}  # fmt: skip


@pytest.mark.parametrize(("launch", "changes", "args"), SIM_COMMANDS.values(), ids=SIM_COMMANDS)
def test_the_sim_engine_is_told(launch: Launch, changes: dict[str, Any], args: str) -> None:
    command = render(launch, seat(executable=["python", "-m", "nodes.agent.sim"], **changes))
    words = f"python -m nodes.agent.sim {args} --model org/m --host 127.0.0.1 --port 18000".split()
    assert list(command.argv) == words
    read_sim_options(command.argv[3:], key=KEY)  # it understands what it is told


@pytest.mark.parametrize(
    ("engine", "gpus", "env"),
    [
        pytest.param(
            "llamacpp",
            (),
            {"LLAMA_API_KEY": KEY, "CUDA_VISIBLE_DEVICES": "", "GGML_VK_VISIBLE_DEVICES": ""},
            id="a processor alone sees no card",
        ),
        pytest.param(
            "llamacpp",
            TWO_CARDS,
            {"LLAMA_API_KEY": KEY, "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"},
            id="two cards by their UUIDs",
        ),
        pytest.param(
            "vllm",
            TWO_CARDS,
            {
                "VLLM_API_KEY": KEY,
                "HF_HUB_OFFLINE": "1",
                "TRANSFORMERS_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "DO_NOT_TRACK": "1",
                "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b",
            },
            id="vllm asks nobody outside",
        ),
        pytest.param(
            "sglang",
            TWO_CARDS,
            {
                "HF_HUB_OFFLINE": "1",
                "TRANSFORMERS_OFFLINE": "1",
                "DO_NOT_TRACK": "1",
                "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
                "CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b",
            },
            id="sglang has its key elsewhere",
        ),
        pytest.param(
            "sim", ("sim-1",), {"VLLM_API_KEY": KEY, "CUDA_VISIBLE_DEVICES": "sim-1"}, id="a made-up card"
        ),
    ],
)
def test_an_engine_sees_its_key_and_its_cards(engine: str, gpus: Sequence[str], env: dict[str, str]) -> None:
    command = render(launch(engine=engine), seat(gpus=gpus))
    assert command.env == env


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("engine", "name"), [("vllm", "VLLM_HOST_IP"), ("sglang", "SGLANG_HOST_IP")])
def test_each_rank_of_a_gang_is_told_its_own_address(engine: str, name: str, rank: int) -> None:
    where = {"meeting": ("10.0.0.1", "29501"), "rank": rank, "fabric_address": f"10.0.0.{rank + 1}"}
    assert render(launch(engine=engine, tp=8, nodes=2), seat(**where)).env[name] == f"10.0.0.{rank + 1}"
    assert name not in render(launch(engine=engine, tp=8), seat(fabric_address="10.0.0.1")).env


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llamacpp"])
def test_a_slice_of_a_card_is_named_by_its_own_id(engine: str) -> None:
    """By an index it could not be."""
    gpu = "MIG-1c2f5f4c-6d0a-5c28-9b3e-1d0f6b1e1a11"
    assert render(launch(engine=engine), seat(gpus=[gpu])).env["CUDA_VISIBLE_DEVICES"] == gpu


def test_the_nodes_environment_wins_over_the_profiles() -> None:
    theirs = {"CUDA_VISIBLE_DEVICES": "GPU-other", "VLLM_API_KEY": "mine", "VLLM_PORT": "1", "THREADS": "2"}
    env = render(launch(engine="sim", env=theirs), seat(gpus=["GPU-a"])).env
    assert env == {"CUDA_VISIBLE_DEVICES": "GPU-a", "VLLM_API_KEY": KEY, "THREADS": "2"}


def test_vllm_waits_for_its_core_as_long_as_the_profile_says() -> None:
    env = render(launch(engine="vllm", startup_timeout=90 * SECOND + 1), seat()).env
    assert env["VLLM_ENGINE_READY_TIMEOUT_S"] == "91"


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_a_profile_is_warned_of_whatever_the_node_sets(engine: str) -> None:
    command = render(launch(engine=engine, startup_timeout=SECOND), seat())
    assert set(command.env) <= OWNED_ENV


REFUSED: dict[str, tuple[Launch, dict[str, Any], str]] = {
    "an engine it does not have": (launch(engine="tgi"), {}, 'cannot run the engine "tgi"'),
    "llama-server over two nodes": (launch(nodes=2), {}, "llama-server runs on one node; set nodes to 1"),
    "a configuration file for vllm": (launch("--config", "/x", engine="vllm"), {}, "--allow-arg=--config"),
    "a plug-in for vllm, under a short name": (
        launch("--tool-parser=/x.py", engine="vllm"), {}, "--allow-arg=--tool-parser-plugin",
    ),
    "an option for vllm, with underscores": (
        launch("--worker_cls=evil.Worker", engine="vllm"), {}, "loads code into the engine",
    ),
    "a key of an option's JSON": (launch("-cc.backend=evil.f", engine="vllm"), {}, "--allow-arg=-cc"),
    "vllm's counts turned off": (launch("--disable-log-stats", engine="vllm"), {}, "a drain goes by"),
    "vllm's developers' routes": (
        launch(engine="vllm", env={"VLLM_SERVER_DEV_MODE": "1"}), {}, "opens routes that stop",
    ),
    "code that clients send to sglang": (
        launch("--enable-custom-logit-processor", engine="sglang"), {}, "runs code that clients send",
    ),
    "sglang's reader of another folder": (launch("--tokenizer-p", "/x", engine="sglang"), {}, "opens a file"),
    "a port that does not exist": (launch(), {"port": 99_999}, "Port 99999 does not exist"),
    "a model path of the profile's": (launch("-m", "/x"), {}, "-m is from the model's source"),
    "an address of the profile's": (launch("--host=0.0.0.0"), {}, "--host is chosen on the node"),
    "a key of the profile's": (launch("--api-key-file", "/x"), {}, "--api-key-file is made for each"),
    "an option that runs programs": (launch("--tools", "all"), {}, "--tools runs programs on the node"),
    "an option that opens files": (launch("--grammar-file", "/x"), {}, "--allow-arg=--grammar-file"),
    "an option that writes prompts down": (launch("--log-prompts-dir", "/x"), {}, "writes what people ask"),
    "a number of slots that is none": (launch("--parallel", "many"), {}, "--parallel many is not a number"),
    "slots left to the engine": (launch("-np", "-1"), {}, "-np -1 is not a number of slots"),
    "slots without a number": (launch("--parallel"), {}, "--parallel  is not a number of slots"),
    "a library to load": (launch(env={"LD_PRELOAD": "/x"}), {}, "env may not set LD_PRELOAD"),
    "a backend to load": (launch(env={"GGML_BACKEND_PATH": "/x"}), {}, "GGML_BACKEND_PATH"),
    "an option in disguise": (launch(env={"LLAMA_ARG_HOST": "::"}), {}, "among the profile's args"),
    "another replica's mark": (launch(env={"LLMGW_REPLICA": "x"}), {}, "marks its processes"),
    "a name that is none": (launch(env={"A=B": "x"}), {}, "cannot be an environment variable"),
    "an argument with NUL": (launch("a\0b"), {}, "NUL character"),
    "arguments that are no list": (Launch("m", "s", {"engine": "sim", "args": "-x"}), {},
                                   "args is not a list of texts"),
    "an environment that is no map": (Launch("m", "s", {"engine": "sim", "env": {"A": 1}}), {},
                                      "env is not a map of texts"),
}  # fmt: skip


@pytest.mark.parametrize(("launch", "changes", "words"), REFUSED.values(), ids=REFUSED)
def test_a_launch_is_refused_in_one_sentence(launch: Launch, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RenderError) as refused:
        render(launch, seat(**changes))
    assert words in str(refused.value)
    assert str(refused.value).endswith(".")


def test_the_nodes_own_configuration_lets_an_option_through() -> None:
    command = render(launch("--grammar-file", "/x"), seat(allowed_args=frozenset({"--grammar-file"})))
    assert "--grammar-file" in command.argv


@given(
    engine=st.sampled_from(sorted(ENGINES)),
    args=st.lists(
        st.text(max_size=12) | st.sampled_from(["-np", "4", "--parallel", "-c", "--port"]), max_size=5
    ),
    env=st.dictionaries(st.text(max_size=12), st.text(max_size=12), max_size=3),
    context_length=st.integers(0, 10**6),
)
def test_no_launch_moves_an_engine_or_shows_its_key(
    engine: str, args: list[str], env: dict[str, str], context_length: int
) -> None:
    try:
        command = render(
            launch(*args, engine=engine, env=env, context_length=context_length), seat(gpus=["GPU-a"])
        )
    except RenderError:
        return
    assert command.argv[-4:] == ("--host", "127.0.0.1", "--port", "18000")
    assert KEY not in "".join(command.shown)
    assert command.env["CUDA_VISIBLE_DEVICES"] == "GPU-a"
    assert KEY in (*command.env.values(), command.key_in_argv)
