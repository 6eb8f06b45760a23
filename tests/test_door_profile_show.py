"""`manage.py profile_show`, as somebody at a shell reads it and as a script does."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from catalog.actions import add_model
from catalog.models import Model
from tests.cast import model_form, nobody_is_asked

pytestmark = [pytest.mark.django_db, pytest.mark.one_database]

VLLM = {"name": "big", "engine": "vllm", "gpu_class": "h100-80g", "tp": 2}
LLAMA = {"name": "small", "engine": "llamacpp", "args": ["--threads", "4"], "weight": 0.5}


def shown(*words: str) -> str:
    out = io.StringIO()
    call_command("profile_show", *words, stdout=out)
    return out.getvalue()


@pytest.fixture
def model() -> Model:
    """As a source check has left it."""
    env = {"HF_TOKEN": "abracadabra", "S3_TOKEN": "secret:S3"}
    raw = model_form("m", source="org/m", capabilities={"tools": True}, profiles=[VLLM | {"env": env}, LLAMA])
    common: dict[str, Any] = {"ask_paths": nobody_is_asked, "after_change": int}
    add_model(raw, by="alice", why="a test", door="command", skip_source_check=True, **common)
    facts = {"commit": "abc", "attention_heads": 3}
    Model.objects.update(source_facts=facts, source_revision="abc")
    return Model.objects.get()


def test_a_profile_is_told_in_a_few_lines(model: Model) -> None:
    assert shown("m", "big").splitlines() == [
        f"m/big is {model.spec.profiles[0].fingerprint()}",
        "  needs    1 node with vllm, 2 x h100-80g",
        (
            "  runs     vllm serve '<weights>' --tensor-parallel-size 2 --shutdown-timeout 20 --middleware"
            " nodes.agent.guard.Guard --served-model-name m --host '<address>' --port '<port>'"
        ),
        "  with     HF_TOKEN=(hidden)",
        "  with     S3_TOKEN=secret:S3",
        "  with     CUDA_VISIBLE_DEVICES=<gpu 1>,<gpu 2>",
        "  with     VLLM_API_KEY=<key>",
        "  with     HF_HUB_OFFLINE=1",
        "  with     TRANSFORMERS_OFFLINE=1",
        "  with     VLLM_NO_USAGE_STATS=1",
        "  with     DO_NOT_TRACK=1",
        "  with     VLLM_ENGINE_READY_TIMEOUT_S=1200",
        (
            '  warning  model "m" profile "big": the value of "HF_TOKEN" is kept in the catalog as plain'
            " text; write secret:NAME and give NAME to the agents"
        ),
        (
            '  warning  model "m" profile "big": the model declares tools and there is no --tool-call-parser,'
            " so vllm refuses requests that bring tools; add one that fits it"
        ),
        (
            '  warning  model "m" profile "big": tp 2 does not divide the model\'s 3 attention heads; choose'
            " one that does"
        ),
        "",
    ]


def test_without_a_profile_all_are_told(model: Model) -> None:
    told = shown("m")
    assert "m/big is " in told
    assert "m/small is " in told
    assert "--parallel 4 --no-kv-unified" in told


def test_a_script_gets_what_people_read(model: Model) -> None:
    told: dict[str, Any] = json.loads(shown("m", "--json"))
    big, small = told["profiles"]
    assert told["model"] == "m"
    assert (big["fingerprint"], small["fingerprint"]) == tuple(
        profile.fingerprint() for profile in model.spec.profiles
    )
    assert big["env"]["HF_TOKEN"] == "(hidden)"
    assert big["needs"]["gpus_per_node"] == 2
    assert [each["code"] for each in big["warnings"]] == ["plain_secret", "tool_parser", "tp_indivisible"]
    assert small["command"][:3] == ["llama-server", "--threads", "4"]
    assert told["warnings"] == small["warnings"] == []


def test_what_cannot_run_says_why(model: Model) -> None:
    model.profiles.filter(name="small").update(args=["--log-file", "/x\x1b[31m"])
    told = shown("m", "small")
    assert "  refused  " in told
    assert "--allow-arg=--log-file" in told
    assert "\x1b" not in told


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        pytest.param(
            ("m", "nope"), 'model "m" has no profile "nope"; it has big, small', id="no such profile"
        ),
        pytest.param(("nope",), 'model "nope" is not in the catalog; check the spelling', id="no such model"),
    ],
)
def test_a_name_that_is_none_is_one_sentence(model: Model, words: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(CommandError) as refused:
        shown(*words)
    assert str(refused.value) == sentence
