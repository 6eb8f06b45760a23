"""What a profile will run, said before anything runs, by the very code that agents render with."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog.spec import ENGINES, ModelSpec, ProfileSpec
from nodes.preview import Preview, preview

PROFILE: dict[str, Any] = {"name": "p", "engine": "vllm", "gpu_class": "h100-80g"}


def previewed(fields: dict[str, Any] | None = None, **profile: Any) -> Preview:
    raw = {"name": "m", "source": "org/m", "profiles": [PROFILE | profile]} | (fields or {})
    model = ModelSpec.load(raw)
    return preview(model, model.profiles[0], "abc123")


COMMANDS = {
    "vllm": (
        {"tp": 2},
        (
            "vllm serve '<weights>' --tensor-parallel-size 2 --max-model-len 4096 --shutdown-timeout 20"
            " --middleware nodes.agent.guard.Guard --served-model-name m --host '<address>' --port '<port>'"
        ),
    ),
    "sglang": (
        {"tp": 2},
        (
            "sglang serve --model-path '<weights>' --tp-size 2 --context-length 4096 --enable-metrics"
            " --served-model-name m --api-key '<key>' --host '<address>' --port '<port>'"
        ),
    ),
    "llamacpp": (
        {"gpu_class": "", "args": ["--threads", "4"]},
        (
            "llama-server --threads 4 --parallel 4 --ctx-size 16384 --no-kv-unified --metrics --alias m"
            " --model '<weights>' --host '<address>' --port '<port>'"
        ),
    ),
}


@pytest.mark.parametrize("engine", COMMANDS)
def test_the_command_is_the_agents_with_its_choices_left_open(engine: str) -> None:
    fields, told = COMMANDS[engine]
    found = previewed({"context_length": 4096}, engine=engine, **fields)
    assert found.command_line == told
    assert shlex.split(told) == list(found.command)
    assert found.refusal == ""


def test_the_environment_is_shown_without_its_secrets() -> None:
    env = {"HF_TOKEN": "hf_abc", "S3_TOKEN": "secret:S3", "THREADS": "2", "VLLM_PORT": "1"}
    found = previewed(env=env, tp=2)
    node = {
        "CUDA_VISIBLE_DEVICES": "<gpu 1>,<gpu 2>",
        "VLLM_API_KEY": "<key>",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_ENGINE_READY_TIMEOUT_S": "1200",
    }
    theirs = {"HF_TOKEN": "(hidden)", "S3_TOKEN": "secret:S3", "THREADS": "2"}
    assert found.as_dict(sees_env=True)["env"] == node | theirs
    assert found.as_dict()["env"] == node | dict.fromkeys(theirs, "(hidden)")
    assert "hf_abc" not in repr(found)


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        pytest.param({}, "1 node with vllm, 1 x h100-80g", id="a card"),
        pytest.param({"engine": "llamacpp", "gpu_class": ""}, "1 node with llamacpp", id="no card"),
        pytest.param(
            {"tp": 16, "nodes": 2},
            "2 nodes in one fabric, each with vllm, 8 x h100-80g",
            id="two nodes that share a fabric",
        ),
        pytest.param(
            {"min_memory_gb": 64, "min_disk_gb": 140, "node_selector": {"zone": "a"}},
            "1 node with vllm, 1 x h100-80g, 64 GB of memory, 140 GB of disk, the label zone=a",
            id="everything else",
        ),
    ],
)
def test_what_it_needs_is_one_line(profile: dict[str, Any], words: str) -> None:
    assert str(previewed(**profile).needs) == words


def test_over_several_nodes_it_is_rank_0_that_is_shown() -> None:
    found = previewed(tp=16, nodes=2)
    assert "--nnodes 2 --node-rank 0 --master-addr '<address of rank 0>'" in found.command_line
    assert found.remarks == ("this is what rank 0 is given; every other rank gets its own --node-rank",)


def test_what_cannot_run_says_so_instead() -> None:
    found = previewed(args=["--config", "/x"])
    assert found.refusal.startswith('model "m" profile "p": --config opens a file on the node')
    assert (found.command, found.env, found.command_line) == ((), {}, "")


def test_a_profile_of_before_the_law_says_so_too() -> None:
    spec = ModelSpec(name="m", source="org/m", profiles=(ProfileSpec(name="p", engine="tgi"),))
    assert 'cannot run the engine "tgi"' in preview(spec, spec.profiles[0], "").refusal


def test_sglangs_key_on_its_command_line_is_said() -> None:
    assert "takes its key on the command line alone" in previewed(engine="sglang").remarks[0]


def test_the_fingerprint_is_the_profiles() -> None:
    model = ModelSpec.load({"name": "m", "source": "org/m", "profiles": [PROFILE]})
    assert preview(model, model.profiles[0], "").fingerprint == model.profiles[0].fingerprint()


@given(
    st.sampled_from(ENGINES),
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=9), max_size=3
    ),
    st.integers(1, 3),
)
def test_every_profile_that_is_lawful_has_a_command_or_a_reason(
    engine: str, args: list[str], nodes: int
) -> None:
    lawful = ["x" + word.lstrip("-") for word in args]
    found = previewed(engine=engine, args=lawful, nodes=nodes, tp=nodes)
    assert bool(found.command) is not bool(found.refusal)
    assert shlex.split(found.command_line) == list(found.command)
    json.dumps(found.as_dict())
