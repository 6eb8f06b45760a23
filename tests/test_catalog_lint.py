"""What is allowed and seldom meant: a table of models, and the sentences that they earn."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog.lint import lint
from catalog.spec import ModelSpec


def model(*profiles: dict[str, Any], **fields: Any) -> ModelSpec:
    return ModelSpec.load({"name": "m", "source": "org/m", "profiles": profiles or [profile()]} | fields)


def profile(engine: str = "vllm", *args: str, **fields: Any) -> dict[str, Any]:
    return {"name": "p", "engine": engine, "gpu_class": "h100", "args": list(args)} | fields


def llama(*args: str, context_length: int = 4096) -> ModelSpec:
    return model(profile("llamacpp", *args), context_length=context_length)


FACTS = {"commit": "abc", "bytes": 15_500_000_000, "context_length": 8192, "attention_heads": 28}
TOOLS = {"tools": True}
OF_THE_MODEL = (
    "scaling.idle_timeout",
    "context_length",
    "weight",
    "max_output",
    "limits.over_max_output",
    "limits.tokens_per_minute",
    "timeouts.hold",
    "timeouts.first_byte",
    "timeouts.idle",
)

FOUND: dict[str, tuple[ModelSpec, dict[str, Any], tuple[str, str, str]]] = {
    "an idle time-out under a minute": (
        model(scaling={"max": 1, "idle_timeout": "59s"}),
        {},
        (
            "scaling.idle_timeout",
            "idle_timeout_short",
            (
                "idle_timeout 59s is under a minute; each unloading throws away the KV cache that"
                " routing filled,"
                " so give it longer"
            ),
        ),
    ),
    "an environment that the node sets": (
        model(profile(env={"CUDA_VISIBLE_DEVICES": "0"})),
        {},
        ("env", "env_owned", "CUDA_VISIBLE_DEVICES is set by the node, whose value wins; remove it from env"),
    ),
    "a secret in plain text": (
        model(profile(env={"HF_TOKEN": "hf_abc"})),
        {},
        (
            "env",
            "plain_secret",
            (
                'the value of "HF_TOKEN" is kept in the catalog as plain text; write secret:NAME and'
                " give NAME to"
                " the agents"
            ),
        ),
    ),
    "tools without a parser, on vllm": (
        model(capabilities=TOOLS),
        {},
        (
            "args",
            "tool_parser",
            (
                "the model declares tools and there is no --tool-call-parser, so vllm refuses"
                " requests that bring"
                " tools; add one that fits it"
            ),
        ),
    ),
    "tools without a parser, on sglang": (
        model(profile("sglang"), capabilities=TOOLS),
        {},
        (
            "args",
            "tool_parser",
            (
                "the model declares tools and there is no --tool-call-parser, so sglang answers"
                " calls as plain"
                " text; add one that fits it"
            ),
        ),
    ),
    "code from the repository": (
        model(profile("vllm", "--trust_remote_code")),
        {},
        (
            "args",
            "remote_code",
            (
                "--trust-remote-code runs code from the repository on the node; leave it out unless"
                " the engine"
                " cannot do without it and you trust its author"
            ),
        ),
    ),
    "heads that tp does not divide": (
        model(profile(tp=8)),
        FACTS,
        ("tp", "tp_indivisible", "tp 8 does not divide the model's 28 attention heads; choose one that does"),
    ),
    "less disk than the weights take": (
        model(profile(min_disk_gb=15)),
        FACTS,
        (
            "min_disk_gb",
            "disk_small",
            "min_disk_gb 15 is below the 15.5 GB that the weights take; set it to 16, or leave it out",
        ),
    ),
    "more context than the model has": (
        model(context_length=8193),
        FACTS,
        (
            "context_length",
            "context_above",
            (
                "context_length 8193 is above the 8192 that the model was made for, beyond which"
                " engines refuse to"
                " start or answers turn to noise; lower it, unless args extend it"
            ),
        ),
    ),
    "weights that nobody measured": (
        model(profile(), profile(name="q")),
        {},
        (
            "weight",
            "weight_unmeasured",
            (
                "none of its 2 profiles has a weight, so requests take them for equally fast;"
                " measure them, and"
                " give each its weight"
            ),
        ),
    ),
    "less context than declared, on vllm": (
        model(profile("vllm", "--max-model-len=4096"), context_length=8192),
        {},
        (
            "args",
            "context_below",
            "--max-model-len 4096 is below the context_length 8192; give one of the two alone",
        ),
    ),
    "a context divided by the slots that llama-server gets": (
        llama("--ctx-size", "8192"),
        {},
        (
            "args",
            "context_divided",
            (
                "--ctx-size 8192 over 4 parallel slots leaves each request 2048 tokens, below the"
                " context_length"
                " 4096; give --ctx-size 16384, or leave it out"
            ),
        ),
    ),
    "a context divided by as many slots as were asked for": (
        llama("-c", "8192", "-np", "3"),
        {},
        (
            "args",
            "context_divided",
            (
                "--ctx-size 8192 over 3 parallel slots leaves each request 2730 tokens, below the"
                " context_length"
                " 4096; give --ctx-size 12288, or leave it out"
            ),
        ),
    ),
    "a context that slots share": (
        llama("-c", "8192", "--kv-unified"),
        {},
        (
            "args",
            "context_shared",
            (
                "4 requests at once share --ctx-size 8192, and each may fill the context_length"
                " 4096: when they"
                " overrun it together all of them end; give --ctx-size 16384, or leave it out"
            ),
        ),
    ),
    "a slot with less than declared": (
        llama("--kv-unified-per-slot", "2048"),
        {},
        ("args", "context_below", "--kv-unified-per-slot 2048 is below the context_length 4096; raise it"),
    ),
    "more output than context": (
        model(context_length=4096, max_output=5000),
        {},
        (
            "max_output",
            "output_above",
            (
                "max_output 5000 is above the context_length 4096, which ends every answer before; lower it,"
                " or leave it out"
            ),
        ),
    ),
    "a way with long answers, and no length": (
        model(limits={"over_max_output": "clamp"}),
        {},
        (
            "limits.over_max_output",
            "output_unlimited",
            (
                "over_max_output clamp is for requests that ask for more than max_output, and there is none;"
                " set max_output, or leave it out"
            ),
        ),
    ),
    "fewer tokens a minute than a request may have": (
        model(context_length=4096, limits={"tokens_per_minute": 4095}),
        {},
        (
            "limits.tokens_per_minute",
            "tokens_below",
            (
                "tokens_per_minute 4095 is below the context_length 4096, so that one request may need more"
                " than a minute has; raise it"
            ),
        ),
    ),
    "fewer tokens a minute than an answer may have": (
        model(max_output=100, limits={"tokens_per_minute": 99}),
        {},
        (
            "limits.tokens_per_minute",
            "tokens_below",
            (
                "tokens_per_minute 99 is below the max_output 100, so that one request may need more than a"
                " minute has; raise it"
            ),
        ),
    ),
    "a hold of hours": (
        model(timeouts={"hold": "1h1s"}),
        {},
        (
            "timeouts.hold",
            "hold_long",
            (
                "hold 1h1s is longer than clients and what stands between keep a connection without a word;"
                " 1h is plenty"
            ),
        ),
    ),
    "less patience than is promised to be enough": (
        model(slo={"TTFTp99": "2s"}, timeouts={"first_byte": "1s"}),
        {},
        (
            "timeouts.first_byte",
            "promise_cut",
            "first_byte 1s gives up before the TTFTp99 of 2s that is promised; raise it",
        ),
    ),
    "less patience between tokens than is promised to be enough": (
        model(slo={"TPOTp99": "50ms"}, timeouts={"idle": "49ms"}),
        {},
        (
            "timeouts.idle",
            "promise_cut",
            "idle 49ms gives up before the TPOTp99 of 50ms that is promised; raise it",
        ),
    ),
}


@pytest.mark.parametrize(("model", "facts", "expected"), FOUND.values(), ids=FOUND)
def test_what_is_seldom_meant_is_said(
    model: ModelSpec, facts: dict[str, Any], expected: tuple[str, str, str]
) -> None:
    [found] = lint(model, facts)
    where = 'model "m" profile "p": ' if found.profile else 'model "m": '
    assert (found.field, found.code) == expected[:2]
    assert found.sentence == where + expected[2]
    assert found.profile == ("" if expected[0] in OF_THE_MODEL else "p")


PASSED: dict[str, tuple[ModelSpec, dict[str, Any]]] = {
    "an idle time-out of a minute": (model(scaling={"max": 1, "idle_timeout": "1m"}), {}),
    "a reference to a secret": (model(profile(env={"HF_TOKEN": "secret:HF_TOKEN"})), {}),
    "tools with a parser": (model(profile("vllm", "--tool-call-parser=hermes"), capabilities=TOOLS), {}),
    "tools on llama-server, which needs none": (model(profile("llamacpp"), capabilities=TOOLS), {}),
    "tp that divides the heads": (model(profile(tp=4)), FACTS),
    "tp on the sim engine, which has no heads": (model(profile("sim", tp=8)), FACTS),
    "as much disk as the weights take": (model(profile(min_disk_gb=16)), FACTS),
    "no word on the disk": (model(profile()), FACTS),
    "weights that are at a path and take no more room": (
        model(profile(min_disk_gb=1), source="/w"),
        {"bytes": 15_500_000_000},
    ),
    "all of the model's context": (model(context_length=8192), FACTS),
    "facts of another kind": (
        model(profile(tp=8), context_length=9),
        {"context_length": "8", "attention_heads": True},
    ),
    "a single profile without a weight": (model(profile()), {}),
    "two profiles of which one was measured": (model(profile(), profile(name="q", weight=2.5)), {}),
    "as much context as declared, on vllm": (
        model(profile("vllm", "--max-model-len", "4096"), context_length=4096),
        {},
    ),
    "a context in words, on vllm": (
        model(profile("vllm", "--max-model-len", "auto"), context_length=4096),
        {},
    ),
    "slots without a word on the context, which llmgw multiplies": (llama("-np", "8"), {}),
    "enough context for all slots": (llama("-c", "16384"), {}),
    "a context left to the weights": (llama("-c", "0"), {}),
    "slots that are no number, which is refused elsewhere": (llama("-c", "8192", "-np", "many"), {}),
    "a shared context that is enough for all": (llama("-c", "16384", "-kvu"), {}),
    "a cache that is unified no more": (llama("-c", "16384", "--kv-unified", "--no-kv-unified"), {}),
    "a slot with as much as declared": (llama("-c", "8192", "--kv-unified-per-slot", "4096"), {}),
    "no context declared": (llama("-c", "8", context_length=0), {}),
    "bounds that fit each other": (
        model(
            context_length=4096,
            max_output=4096,
            limits={"tokens_per_minute": 4096, "over_max_output": "refuse"},
            timeouts={"hold": "1h", "first_byte": "2s", "idle": "50ms"},
            slo={"TTFTp99": "2s", "TPOTp99": "50ms"},
        ),
        {},
    ),
}


@pytest.mark.parametrize(("model", "facts"), PASSED.values(), ids=PASSED)
def test_what_may_well_be_meant_is_not_said(model: ModelSpec, facts: dict[str, Any]) -> None:
    assert lint(model, facts) == ()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=2),
)


@given(
    st.sampled_from(["vllm", "sglang", "llamacpp", "sim"]),
    st.lists(
        st.sampled_from(["-c", "-np", "--kv-unified", "--max-model-len", "٣", "-1"]) | st.text(max_size=8)
    ),
    st.dictionaries(st.sampled_from([*FACTS, "x"]), JSON),
    st.integers(0, 2**31 - 1),
)
def test_no_facts_and_no_arguments_are_too_odd_to_judge(
    engine: str, args: list[str], facts: dict[str, Any], context_length: int
) -> None:
    judged = ModelSpec(name="m", context_length=context_length, profiles=model(profile(engine)).profiles)
    profiles = tuple(type(each)(name="p", engine=engine, args=tuple(args)) for each in judged.profiles)
    for each in lint(type(judged)(name="m", context_length=context_length, profiles=profiles), facts):
        assert each.sentence.isprintable()
