"""What an engine check makes of answers: whatever an engine sends is read, and judged in a sentence."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.agent.sim.pictures import COLOURS, NoPicture, colour_of
from nodes.checks import (
    CHECKS,
    Call,
    Claims,
    Finding,
    Reply,
    Verdict,
    Verified,
    asking,
    badges,
    claims_of,
    is_claimed,
    judging,
    read_reply,
    read_stream,
    verdict_of,
)

pytestmark = pytest.mark.one_database

DATA = Path(__file__).parent / "data" / "engines"
OK = Reply(status=200, model="m", text="Hello.", finish="stop", prompt_tokens=9, completion_tokens=3)
REFUSED = Reply(status=400, error="too much")
SILENT = Reply(trouble="gave no answer within 60 s")


def recorded(path: str) -> Reply:
    """What an engine really answered, on one day."""
    text = (DATA / path).read_text()
    status = int(text.partition("HTTP/1.1 ")[2][:3])
    body = text.partition("HTTP/1.1 ")[2].partition("\n\n")[2]
    if "text/event-stream" in text:
        return read_stream(status, body.splitlines())
    return read_reply(status, body.strip().encode())


# --- read -----------------------------------------------------------------------------------------


def test_streams_of_both_engines_are_put_together() -> None:
    llama, vllm = recorded("llamacpp/chat_stream.txt"), recorded("vllm/answers/chat_stream.txt")
    for reply in (llama, vllm):
        assert judging.judge_stream(reply).works, reply
        assert (reply.is_closed, reply.model) == (True, "my-model")
    assert (llama.prompt_tokens, llama.completion_tokens, llama.cached_tokens) == (29, 6, 24)


def test_a_tools_call_reads_the_same_whole_and_streamed() -> None:
    whole = recorded("vllm/answers/tool_required.txt")
    pieces = recorded("vllm/answers/tool_required_stream.txt")
    assert whole.calls == pieces.calls
    assert whole.calls[0].name == "get_weather"


@pytest.mark.parametrize(
    ("path", "status", "error"),
    [
        ("llamacpp/image.txt", 500, "image input is not supported - hint: if this is unexpected, you may "),
        ("llamacpp/badkey.txt", 401, "Invalid API Key"),
        ("vllm/badkey.txt", 401, "Unauthorized"),
        ("llamacpp/pool_full_stream.txt", 200, "Context size has been exceeded."),
        ("vllm/answers/core_died_stream.txt", 200, "EngineCore encountered an issue."),
        ("llamacpp/embeddings_disabled.txt", 501, "This server does not support embeddings."),
    ],
)
def test_refusals_are_told_in_the_engines_own_words(path: str, status: int, error: str) -> None:
    reply = recorded(path)
    assert (reply.status, reply.is_answered) == (status, False)
    assert reply.error.startswith(error)
    assert judging.judge_chat(reply).says.startswith(f"it answered with status {status}: {error}")


def test_a_flat_error_is_one_too() -> None:
    body = {
        "object": "error",
        "message": "The input (9 tokens) is too long.",
        "type": "BadRequest",
        "code": 400,
    }
    assert read_reply(400, json.dumps(body).encode()).error == "The input (9 tokens) is too long."


def test_a_thought_counts_as_what_a_model_said() -> None:
    told = {
        "choices": [{"message": {"content": None, "reasoning_content": "Hm."}, "finish_reason": "length"}]
    }
    reply = read_reply(200, json.dumps(told).encode())
    assert (reply.text, reply.words) == ("", "Hm.")


KEYS = (
    "choices", "message", "delta", "content", "tool_calls", "function", "arguments", "index", "usage", "data",
    "id", "embedding", "error", "prompt_tokens", "prompt_tokens_details", "object", "name",
)  # fmt: skip
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=20,
)
JUDGES = (
    judging.judge_health,
    judging.judge_chat,
    judging.judge_stream,
    judging.judge_max_tokens,
    judging.judge_schema,
    lambda reply: judging.judge_name(reply, reply, "m"),
    lambda reply: judging.judge_stop(reply, "x", reply),
    lambda reply: judging.judge_context(64, 64, reply, reply),
    lambda reply: judging.judge_tools("tools_auto", {"whole": reply}),
    lambda reply: judging.judge_vision({"red": reply, "blue": reply}),
    lambda reply: judging.judge_embeddings(reply, reply, reply),
    lambda reply: judging.judge_cancel(reply, 1, None),
    lambda reply: judging.judge_prefix([(reply, reply)], None),
)


@given(st.sampled_from([0, 200, 400, 500]), ANYTHING, st.binary(max_size=30))
def test_whatever_an_engine_sends_is_judged_in_a_sentence(status: int, value: Any, noise: bytes) -> None:
    body = json.dumps(value).encode()
    lines = [f"data: {body.decode()}", "data: [DONE]", noise.decode("utf-8", "replace")]
    for reply in (read_reply(status, body), read_reply(status, noise), read_stream(status, lines)):
        for judge in JUDGES:
            finding = judge(reply)
            assert finding.check in CHECKS
            assert finding.says
            assert json.loads(json.dumps(finding.as_dict()))["works"] in (True, False, None)


# --- judged ---------------------------------------------------------------------------------------

WEATHER = Call("weather_in", '{"city": "Paris", "days": 3}')
CALLED = Reply(status=200, finish="tool_calls", calls=(WEATHER,))


def called(arguments: Any, name: str = "weather_in") -> Mapping[str, Reply]:
    return {"whole": replace(CALLED, calls=(Call(name, json.dumps(arguments)),))}


def person(**fields: Any) -> Reply:
    return replace(OK, text=json.dumps({"name": "Ann", "age": 9, "colour": "red"} | fields))


def embedded(*values: float) -> Reply:
    return Reply(status=200, vectors=(values,))


def took(first_s: float, cached: int | None = None) -> Reply:
    return replace(OK, first_s=first_s, cached_tokens=cached)


FINDINGS: Mapping[str, tuple[Finding, bool | None, str]] = {
    "it is not healthy": (
        judging.judge_health(Reply(status=503)), False, "it answered with status 503",
    ),
    "it is not there": (judging.judge_health(SILENT), False, "it gave no answer within 60 s"),
    "it lists nothing": (
        judging.judge_name(Reply(status=200), None, "m"), False, 'it lists nothing, and not "m"',
    ),
    "its answers have another name": (
        judging.judge_name(Reply(status=200, names=("m",)), replace(OK, model="x"), "m"),
        False, 'its answers say that they are of "x"',
    ),
    "it says nothing": (judging.judge_chat(replace(OK, text=" ")), False, "its answer holds no text"),
    "it ends strangely": (
        judging.judge_chat(replace(OK, finish="abort")), False,
        'its answer ended by "abort" instead of stop or length',
    ),
    "it does not count": (
        judging.judge_chat(replace(OK, completion_tokens=None)), False,
        "it does not tell how many tokens prompt and answer have",
    ),
    "its stream is empty": (judging.judge_stream(OK), False, "no piece of its stream says anything"),
    "its stream is cut": (
        judging.judge_stream(replace(OK, pieces=3)), False, "its stream ends without [DONE]",
    ),
    "its stream has no usage": (
        judging.judge_stream(replace(OK, pieces=3, is_closed=True, prompt_tokens=None)), False,
        "its stream ends without the usage that was asked for",
    ),
    "there is nothing to stop at": (
        judging.judge_stop(OK, "", None), None, "it said nothing from which a stop text could be taken",
    ),
    "it never comes to the stop": (
        judging.judge_stop(OK, "x", replace(OK, finish="length")), None, 'it never came to the stop text "x"',
    ),
    "it thinks past the stop": (
        judging.judge_stop(OK, "x", replace(OK, thought="xyz")), False, 'it went on past the stop text "x"',
    ),
    "it is cut and does not say so": (
        judging.judge_max_tokens(replace(OK, completion_tokens=8)), False,
        'it was cut after 8 tokens, and says "stop" instead of length',
    ),
    "it ends by itself before": (judging.judge_max_tokens(OK), True, "it said 3 of 8 tokens"),
    "nobody knows its context": (
        judging.judge_context(0, 0, None, None), None,
        "neither the catalog nor the engine tells how long its context is",
    ),
    "it refuses what it should take": (
        judging.judge_context(64, 0, REFUSED, REFUSED), False,
        "just below its limit of 64 tokens it answered with status 400: too much",
    ),
    "it fails above its context": (
        judging.judge_context(64, 64, OK, Reply(status=500, error="oops")), False,
        "above its limit it answered with status 500: oops",
    ),
    "it is silent below its context": (
        judging.judge_context(64, 64, SILENT, REFUSED), None,
        "it refuses what is above 64 tokens; just below, it gave no answer within 60 s",
    ),
    "it calls another tool": (
        judging.judge_tools("tools_auto", called({}, "send_letter")), False,
        'whole: it called "send_letter" instead of weather_in',
    ),
    "it leaves out an argument": (
        judging.judge_tools("tools_auto", called({"city": "Paris"})), False,
        "whole: its arguments do not fit the tool's schema: it lacks days",
    ),
    "it has an argument of the wrong type": (
        judging.judge_tools("tools_auto", called({"city": "Paris", "days": "3"})), False,
        "whole: its arguments do not fit the tool's schema: days is no integer",
    ),
    "it has true for a number": (
        judging.judge_tools("tools_auto", called({"city": "Paris", "days": True})), False,
        "whole: its arguments do not fit the tool's schema: days is no integer",
    ),
    "it has an argument out of range": (
        judging.judge_tools("tools_auto", called({"city": "Paris", "days": 99})), False,
        "whole: its arguments do not fit the tool's schema: days is 99",
    ),
    "it invents an argument": (
        judging.judge_tools("tools_auto", called({"city": "Paris", "days": 3, "x": 1})), False,
        "whole: its arguments do not fit the tool's schema: it has \"x\" besides",
    ),
    "it calls well": (
        judging.judge_tools("tools_auto", {"whole": CALLED, "streamed": CALLED}), True,
        "it called weather_in (whole, streamed)",
    ),
    "it knows no tools": (
        judging.judge_tools("tools_auto", {"whole": REFUSED}), False,
        "whole: it answered with status 400: too much",
    ),
    "its JSON is cut": (
        judging.judge_schema(replace(OK, text='{"na', finish="length")), None,
        "its answer was cut before its JSON was whole",
    ),
    "it chooses what is no choice": (
        judging.judge_schema(person(colour="pink")), False,
        'its answer does not fit the schema: colour is "pink"',
    ),
    "it is no object": (
        judging.judge_schema(replace(OK, text="[]")), False,
        "its answer does not fit the schema: it is no object",
    ),
    "its text is too long": (
        judging.judge_schema(person(name="n" * 41)), False,
        "its answer does not fit the schema: name is too long",
    ),
    "it fits": (judging.judge_schema(person()), True, "its answer fits the schema"),
    "it guesses": (
        judging.judge_vision({"red": replace(OK, text="red or blue")}), False,
        'shown red, it said "red or blue"',
    ),
    "it thinks for too long": (
        judging.judge_vision({"red": replace(OK, text="", thought="Hm", finish="length")}), None,
        "it thought for so long that it never came to an answer",
    ),
    "its vector is empty": (
        judging.judge_embeddings(embedded(), embedded(), embedded()), False, "its answer holds no vector",
    ),
    "its vector is zero": (
        judging.judge_embeddings(embedded(0.0), embedded(0.0), embedded(1.0)), False,
        "its vector holds what is no number, or only zeros",
    ),
    "its vectors differ in length": (
        judging.judge_embeddings(embedded(1, 0), embedded(1), embedded(1)), False,
        "its vectors differ in length (2, 1, 1)",
    ),
    "it knows one vector": (
        judging.judge_embeddings(embedded(1, 0), embedded(1, 0), embedded(2, 0)), False,
        "different texts have the same vector",
    ),
    "it rounds": (
        judging.judge_embeddings(embedded(1, 0), embedded(1, 0.001), embedded(0, 1)), True,
        "2 dimensions, the same each time",
    ),
    "it tells no count": (
        judging.judge_cancel(OK, None, None), None, "it does not tell how many requests it works on",
    ),
    "it is over too soon": (
        judging.judge_cancel(OK, 0, None), None, "its answer was over before its client could leave",
    ),
    "it tells what was cached": (
        judging.judge_prefix([(took(1, 0), took(1, 512))], None), True, "asked again, 512 tokens were cached",
    ),
    "it is faster": (
        judging.judge_prefix([(took(1), took(0.2)), (took(1), took(0.5))], None), True,
        "asked again, its first token takes 50% of the time",
    ),
    "it is faster once": (
        judging.judge_prefix([(took(1), took(0.2)), (took(1), took(0.9))], None), None,
        "it tells nothing of its cache, and is no faster when asked again",
    ),
    "it caches nothing": (
        judging.judge_prefix([(took(1, 0), took(1, 0))], 0), False, "asked again, nothing was cached",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("finding", "works", "says"), FINDINGS.values(), ids=FINDINGS)
def test_a_finding_says_what_it_is(finding: Finding, works: bool | None, says: str) -> None:
    assert (finding.works, finding.says) == (works, says)


# --- asked ----------------------------------------------------------------------------------------


@given(st.integers(256, 1_048_576), st.floats(0.25, 4), st.integers(1, 100))
def test_long_prompts_come_out_on_their_side_of_the_limit(limit: int, each: float, around: int) -> None:
    """Whatever a unit costs, and whatever a chat template puts around it."""

    def cost(units: int) -> int:
        return int(units * each) + around

    few, many = (cost(units) for units in asking.UNITS)
    over, under = (
        asking.units_of(tokens, few, many) for tokens in (asking.above(limit), asking.below(limit))
    )
    assert over is not None
    assert under is not None
    assert cost(over) > limit
    assert cost(under) + asking.BELOW_TOKENS <= limit
    assert cost(under) > limit // 2


def test_units_that_cost_nothing_make_no_prompt() -> None:
    assert asking.units_of(100, 20, 20) is None


@pytest.mark.parametrize(("said", "stop"), [("a bee, a bee!", "e"), ("...", ""), ("", "")])
def test_a_stop_text_is_a_letter_that_comes_often(said: str, stop: str) -> None:
    assert asking.stop_text(said) == stop


@pytest.mark.parametrize("colour", asking.COLOURS)
def test_a_picture_is_a_png_of_one_colour(colour: str) -> None:
    body = asking.picture("m", colour, 64)
    url = body["messages"][0]["content"][0]["image_url"]["url"]
    assert colour_of(url) == colour


def drawn(bits: int = 8, filtered: int = 0, cut: int = 0) -> bytes:
    lines = (bytes([filtered]) + bytes(COLOURS["red"]) * 2) * 2
    head = struct.pack(">IIBBBBB", 2, 2, bits, 2, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(lines[: len(lines) - cut])))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + b"\0\0\0\0" for kind, data in parts
    )


def url_of(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


@pytest.mark.parametrize(
    "url",
    [
        "https://example.org/a.png",
        "data:image/jpeg;base64,AAAA",
        "data:image/png;base64,!",
        "data:image/png;base64,AAAA",
        url_of(drawn(bits=16)),
        url_of(drawn(filtered=1)),
        url_of(drawn(cut=3)),
        url_of(drawn()[:20]),
    ],
)
def test_the_sim_engine_says_of_what_is_no_picture_that_it_is_none(url: str) -> None:
    assert colour_of(url_of(drawn())) == "red"
    with pytest.raises(NoPicture):
        colour_of(url)


# --- held against what is claimed -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("claimed", "works", "verdict"),
    [
        (True, True, "verified"),
        (True, False, "claimed, failed"),
        (True, None, "could not be told"),
        (False, True, "not claimed, works"),
        (False, False, "not claimed"),
        (False, None, "not claimed"),
        (None, True, "not applicable"),
    ],
)
def test_a_verdict_holds_a_finding_against_a_claim(
    claimed: bool | None, works: bool | None, verdict: str
) -> None:
    assert verdict_of(Finding("vision", works, "it does"), claimed) == verdict


def test_what_was_never_found_out_is_no_failure() -> None:
    assert verdict_of(None, True) is Verdict.NEVER
    assert verdict_of(None, False) is Verdict.ABSENT


@pytest.mark.parametrize(
    ("engine", "args", "is_caching"),
    [
        ("vllm", [], True),
        ("vllm", ("--no-enable-prefix-caching",), False),
        ("sglang", ["--disable-radix-cache"], False),
        ("llamacpp", ["--no-cache-prompt"], False),
        ("vllm", "--no-enable-prefix-caching", True),
        ("nope", ["--no-cache-prompt"], True),
    ],
)
def test_a_profile_that_turns_the_cache_off_claims_none(engine: str, args: Any, is_caching: bool) -> None:
    assert claims_of("m", {}, 0, engine=engine, args=args).is_caching is is_caching


def test_of_what_embeds_no_talk_is_claimed() -> None:
    claims = claims_of("m", {"embeddings": True, "tools": True}, 0, engine="vllm", args=())
    assert {check for check in CHECKS if is_claimed(check, claims) is not None} == {
        "health",
        "name",
        "embeddings",
    }


def told(claims: Claims, failed: tuple[str, ...] = (), **more: Any) -> list[str]:
    checks = [check for check in CHECKS if is_claimed(check, claims)]
    findings = {check: Finding(check, check not in failed, "it does") for check in checks}
    found = Verified(findings, **({"age_s": 3 * 86_400, "engine": "vllm 0.32.0"} | more))
    return [each.says for each in badges(found, claims)]


TOOLS = Claims("m", tools=True)


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (
            told(TOOLS),
            ["engine: verified 3 days ago on vllm 0.32.0", "tools: verified 3 days ago on vllm 0.32.0"],
        ),
        (
            told(TOOLS, ("tools_named", "stop", "cancel")),
            [
                "stop text: claimed, failed 3 days ago on vllm 0.32.0",
                "cancellation: claimed, failed 3 days ago on vllm 0.32.0",
                "tools: claimed, failed 3 days ago on vllm 0.32.0",
            ],
        ),
        (
            told(TOOLS, is_older=True, age_s=5_000),
            [
                "engine: verified on an older profile, 1 hour ago",
                "tools: verified on an older profile, 1 hour ago",
            ],
        ),
        (
            told(Claims("m", embeddings=True), age_s=10, engine="llamacpp"),
            [
                "engine: verified less than an hour ago on llamacpp",
                "embeddings: verified less than an hour ago on llamacpp",
            ],
        ),
        (
            [each.says for each in badges(None, TOOLS)],
            ["engine: never checked", "tools: never checked"],
        ),
    ],
    ids=["all is well", "some fails", "an older profile", "what embeds", "never checked"],
)
def test_badges_say_it_at_a_glance(found: list[str], says: list[str]) -> None:
    assert found == says


@given(
    st.dictionaries(st.sampled_from(list(CHECKS)), st.sampled_from([True, False, None])),
    st.tuples(*[st.booleans()] * 3),
)
def test_a_failure_of_what_is_claimed_always_has_a_badge(
    works: dict[str, bool | None], claimed: tuple[bool, ...]
) -> None:
    claims = Claims("m", *claimed)
    found = Verified({check: Finding(check, each, "it") for check, each in works.items()}, 0, "vllm")
    failed = [check for check, each in works.items() if each is False and is_claimed(check, claims)]
    shown = [each for each in badges(found, claims) if each.verdict is Verdict.FAILED]
    assert bool(failed) == bool(shown)
    assert len({each.about for each in shown}) == len(shown)
