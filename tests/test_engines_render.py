"""The command and the environment that a launch becomes, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.engines import ENGINES, RenderError, Seat, render
from nodes.protocol import Launch

KEY = "replica-key-0123456789"


def launch(
    *args: str,
    engine: str = "llamacpp",
    context_length: int = 0,
    env: Mapping[str, str] | None = None,
    embeddings: bool = False,
    **profile: Any,
) -> Launch:
    return Launch(
        model="org/m",
        source="org/m",
        profile={"name": "p", "engine": engine, "args": list(args), "env": dict(env or {}), **profile},
        context_length=context_length,
        capabilities={"embeddings": True} if embeddings else {},
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


SIM_COMMANDS = {
    "the catalog's context": (launch("--ttft", "1ms", engine="sim", context_length=512),
                              "--context-length 512 --ttft 1ms"),
    "an operator's own context": (launch("--context-length", "9", engine="sim", context_length=512),
                                  "--context-length 512 --context-length 9"),
    "nothing more than it needs": (launch(engine="sim"), ""),
}  # fmt: skip


@pytest.mark.parametrize(("launch", "args"), SIM_COMMANDS.values(), ids=SIM_COMMANDS)
def test_the_sim_engine_is_told(launch: Launch, args: str) -> None:
    command = render(launch, seat(executable=["python", "-m", "nodes.agent.sim"]))
    words = f"python -m nodes.agent.sim {args} --model org/m --host 127.0.0.1 --port 18000".split()
    assert list(command.argv) == words


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
            "sim", ("sim-1",), {"VLLM_API_KEY": KEY, "CUDA_VISIBLE_DEVICES": "sim-1"}, id="a made-up card"
        ),
    ],
)
def test_an_engine_sees_its_key_and_its_cards(engine: str, gpus: Sequence[str], env: dict[str, str]) -> None:
    command = render(launch(engine=engine), seat(gpus=gpus))
    assert command.env == env


def test_the_nodes_environment_wins_over_the_profiles() -> None:
    theirs = {"CUDA_VISIBLE_DEVICES": "GPU-other", "VLLM_API_KEY": "mine", "THREADS": "2"}
    env = render(launch(engine="sim", env=theirs), seat(gpus=["GPU-a"])).env
    assert env == {"CUDA_VISIBLE_DEVICES": "GPU-a", "VLLM_API_KEY": KEY, "THREADS": "2"}


REFUSED: dict[str, tuple[Launch, dict[str, Any], str]] = {
    "an engine it does not have": (launch(engine="vllm"), {}, 'cannot run the engine "vllm"'),
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
    assert KEY not in "".join(command.argv)
    assert command.env["CUDA_VISIBLE_DEVICES"] == "GPU-a"
    assert command.env[{"sim": "VLLM_API_KEY", "llamacpp": "LLAMA_API_KEY"}[engine]] == KEY
