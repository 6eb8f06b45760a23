"""The sim engine: its refusals are vllm's own, recorded; its tokens, counts and slots are what it says."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import struct
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest

from nodes.agent.sim.asks import count_tokens
from tests.agent_process import Stream, ask
from tests.sim_process import KEY, Sim, running_sim
from tests.waiting import wait_until

RECORDED = Path(__file__).parent / "data" / "engines" / "vllm"


@pytest.fixture(scope="module")
def sim() -> Iterator[Sim]:
    with running_sim("--ttft", "1ms", "--tpot", "0s") as sim:
        yield sim


@pytest.fixture
def client(sim: Sim) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{sim.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


REFUSALS = sorted(path for path in RECORDED.glob("*.txt") if "HTTP/1.1 4" in path.read_text())


@pytest.mark.parametrize("recording", REFUSALS, ids=lambda path: path.stem)
def test_it_refuses_as_vllm_did(sim: Sim, recording: Path) -> None:
    text = recording.read_text()
    sent = re.search(r"^### body: (.*)$", text, re.MULTILINE)
    body = (
        sent[1].encode()
        if sent
        else json.dumps(
            {"model": "my-model", "messages": [{"role": "user", "content": "word " * 1000}]}
        ).encode()
    )
    key = re.search(r"Authorization: Bearer (\w+)", text)
    status = re.search(r"^HTTP/1.1 (\d+)", text, re.MULTILINE)
    assert status
    answer = sim.post("/v1/chat/completions", body, key=key[1] if key else KEY)
    assert answer.status == int(status[1])
    assert answer.json == json.loads(text.strip().rpartition("\n")[2])


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "is_taken"),
    [
        pytest.param(500, 12, True, id="what just fits"),
        pytest.param(501, 12, False, id="one token too many"),
        pytest.param(511, None, True, id="room for one token"),
        pytest.param(512, None, False, id="room for none"),
    ],
)
def test_prompt_and_answer_share_the_context(
    sim: Sim, prompt_tokens: int, max_tokens: int | None, is_taken: bool
) -> None:
    body = {"model": "my-model", "prompt": "abcd" * prompt_tokens, "max_tokens": max_tokens}
    answer = sim.post("/v1/completions", body)
    assert answer.status == (200 if is_taken else 400), answer.body
    if is_taken:
        assert answer.json["usage"]["total_tokens"] <= 512
    else:
        assert "maximum context length is 512 tokens" in answer.json["error"]["message"]


def test_a_chat_has_the_tokens_it_was_asked_for(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model="my-model", messages=[{"role": "user", "content": "hi"}], max_tokens=7
    )
    assert made.choices[0].finish_reason == "length"
    assert count_tokens(made.choices[0].message.content or "") == 7
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (1 + 4, 7)


def test_an_answer_without_a_limit_ends_by_itself(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(model="my-model", messages=[{"role": "user", "content": "hi"}])
    assert made.choices[0].finish_reason == "stop"
    assert made.usage is not None
    assert made.usage.completion_tokens == 64


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    asked: Any = {
        "model": "my-model",
        "messages": [{"role": "user", "content": "hi"}],
        "n": 2,
        "max_tokens": 9,
    }
    whole = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant", "assistant"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    for choice in whole.choices:
        mine = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == choice.index]
        assert "".join(each.delta.content or "" for each in mine) == choice.message.content
        assert mine[-1].finish_reason == "length"


def test_usage_is_not_streamed_unless_it_is_asked_for(client: openai.OpenAI) -> None:
    chunks = client.completions.create(model="my-model", prompt="hi", max_tokens=2, stream=True)
    assert all(chunk.usage is None for chunk in chunks)


def test_a_stop_text_ends_an_answer_before_it(client: openai.OpenAI) -> None:
    said = client.completions.create(model="my-model", prompt="hi", max_tokens=20).choices[0].text
    stop = said[10:15]
    made = client.completions.create(model="my-model", prompt="hi", max_tokens=20, stop=[stop])
    assert made.choices[0].text == said[: said.index(stop)]
    assert made.choices[0].finish_reason == "stop"


def test_embeddings_are_unit_vectors_of_their_text(client: openai.OpenAI, sim: Sim) -> None:
    made = client.embeddings.create(model="my-model", input=["one", "two", "one"])
    first, second, third = (each.embedding for each in made.data)
    assert first == third != second
    assert sum(value * value for value in first) == pytest.approx(1, abs=1e-3)
    plain = sim.post("/v1/embeddings", {"model": "my-model", "input": "one"}).json["data"][0]["embedding"]
    assert plain == pytest.approx(first)
    packed = sim.post("/v1/embeddings", {"model": "my-model", "input": "one", "encoding_format": "base64"})
    raw = base64.b64decode(packed.json["data"][0]["embedding"])
    assert struct.unpack(f"<{len(raw) // 4}f", raw) == pytest.approx(first)


def test_health_and_metrics_are_open_as_vllms_are(sim: Sim) -> None:
    assert ask(f"{sim.url}/health").status == 200
    assert ask(f"{sim.url}/v1/models").status == 401
    before = (
        sim.metric("vllm:generation_tokens_total"),
        sim.metric("vllm:time_to_first_token_seconds_count"),
    )
    sim.post("/v1/completions", {"model": "my-model", "prompt": "hi", "max_tokens": 5, "n": 3})
    after = sim.metric("vllm:generation_tokens_total"), sim.metric("vllm:time_to_first_token_seconds_count")
    assert (after[0] - before[0], after[1] - before[1]) == (15, 1)


def test_tokens_come_at_the_set_pace() -> None:
    with running_sim("--ttft", "300ms", "--tpot", "20ms") as sim:
        body = json.dumps({"model": "my-model", "prompt": "hi", "max_tokens": 20, "stream": True}).encode()
        request = urllib.request.Request(
            f"{sim.url}/v1/completions", data=body, headers={"Authorization": f"Bearer {KEY}"}
        )
        started = time.monotonic()
        with urllib.request.urlopen(request) as answer:
            answer.readline()
            first = time.monotonic() - started
            answer.read()
        whole = time.monotonic() - started
    assert 0.3 <= first < 0.6
    assert 0.3 + 19 * 0.02 <= whole < 1.4


def test_more_requests_than_slots_wait_and_one_that_leaves_gives_its_slot_on() -> None:
    with running_sim("--max-num-seqs", "1", "--tpot", "50ms") as sim:
        first = Stream(sim.port, max_tokens=400, model="my-model", key=KEY)
        assert sim.metric("vllm:num_requests_running") == 1
        late = {"model": "my-model", "prompt": "hi", "max_tokens": 1}
        for body in ({**late, "stream": True}, late):  # both kinds leave while they wait
            with pytest.raises(TimeoutError), contextlib.closing(_hurried(sim, body)):
                pass
            wait_until(lambda: sim.metric("vllm:num_requests_waiting") == 0, "the queue to be empty")
        first.leave()
        wait_until(lambda: sim.metric("vllm:num_requests_running") == 0, "the slot to be free")
        assert sim.complete().status == 200


def _hurried(sim: Sim, body: Any) -> Any:
    request = urllib.request.Request(
        f"{sim.url}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {KEY}"},
    )
    return urllib.request.urlopen(request, timeout=0.3)


def test_when_as_many_wait_as_may_the_next_is_refused_as_vllm_did() -> None:
    with running_sim("--max-num-seqs", "1", "--max-num-queued-reqs", "0", "--tpot", "50ms") as sim:
        first = Stream(sim.port, max_tokens=400, model="my-model", key=KEY)
        refused = sim.complete()
        first.leave()
        assert refused.status == 503
        assert refused.json["error"] == {
            "message": "The engine is currently busy and cannot accept new requests. Please try again later "
            "or on a different instance.",
            "type": "Service Unavailable",
            "param": None,
            "code": 503,
        }
        assert sim.metric("vllm:admission_rejections_total") == 1


# --- the prefix cache -----------------------------------------------------------------------------------


def test_a_prompt_that_is_known_comes_sooner_and_is_counted() -> None:
    options = ("--ttft", "800ms", "--tpot", "0s", "--enable-prompt-tokens-details")
    with running_sim(*options) as sim:
        told = []
        for prompt in ("abcd" * 320, "abcd" * 320, "abcd" * 160 + "dcba" * 160):
            started = time.monotonic()
            usage = sim.complete(prompt).json["usage"]
            told.append((usage["prompt_tokens_details"]["cached_tokens"], time.monotonic() - started))
        cached, seconds = zip(*told, strict=True)
        assert cached == (0, 304, 160), "whole blocks of 16, and never the last token"
        assert seconds[0] >= 0.8
        assert 0.04 <= seconds[1] < seconds[2] < seconds[0]
        assert seconds[2] >= 0.4
        assert sim.metric("vllm:prefix_cache_queries_total") == 960
        assert sim.metric("vllm:prefix_cache_hits_total") == 464
        assert sim.metric("vllm:prompt_tokens_cached_total") == 464


def test_the_next_turn_of_a_talk_finds_the_answer_before_it() -> None:
    with running_sim("--ttft", "1ms", "--tpot", "0s", "--block-size", "1") as sim:
        talk: list[dict[str, str]] = [{"role": "user", "content": "How are you today?"}]
        body = {"model": "my-model", "messages": talk, "max_tokens": 20}
        first = sim.post("/v1/chat/completions", body).json
        talk.append(first["choices"][0]["message"])
        talk.append({"role": "user", "content": "And tomorrow?"})
        before = sim.metric("vllm:prefix_cache_hits_total")
        sim.post("/v1/chat/completions", body)
        found = sim.metric("vllm:prefix_cache_hits_total") - before
        assert found == first["usage"]["total_tokens"] + 4  # the header of the answer that came back


def test_a_cache_that_is_off_finds_nothing() -> None:
    with running_sim("--ttft", "1ms", "--tpot", "0s", "--no-enable-prefix-caching") as sim:
        for _ in range(2):
            sim.complete("abcd" * 320)
        assert sim.metric("vllm:prefix_cache_queries_total") == 0
        assert sim.metric("vllm:prefix_cache_hits_total") == 0


def test_running_requests_hold_blocks_of_the_cache() -> None:
    with running_sim("--tpot", "50ms", "--kv-blocks", "50") as sim:
        stream = Stream(sim.port, max_tokens=390, model="my-model", key=KEY)
        assert sim.metric("vllm:kv_cache_usage_perc") == 0.5  # 390 tokens, and 8 of the prompt
        stream.leave()
        wait_until(lambda: sim.metric("vllm:kv_cache_usage_perc") == 0, "the blocks to be given back")


# --- tools and JSON -------------------------------------------------------------------------------------

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
            "required": ["city"],
        },
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "get_time"}}


@pytest.fixture(scope="module")
def tool_sim() -> Iterator[Sim]:
    options = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--ttft", "1ms", "--tpot", "0s")
    with running_sim(*options) as sim:
        yield sim


@pytest.fixture
def tool_client(tool_sim: Sim) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tool_sim.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def asking(said: str, **more: Any) -> dict[str, Any]:
    return {
        "model": "my-model",
        "messages": [{"role": "user", "content": said}],
        "tools": [WEATHER, CLOCK],
        **more,
    }


CHOSEN = {
    "a tool that the message names": (asking("Please get_time now"), "get_time", "tool_calls"),
    "no tool, where none is named": (asking("Hello", max_tokens=3), None, "length"),
    "a tool that must be": (asking("Hello", tool_choice="required"), "get_weather", "tool_calls"),
    "a tool that the request names": (
        asking("Hello", tool_choice={"type": "function", "function": {"name": "get_time"}}),
        "get_time",
        "stop",
    ),
    "no tool, where none may be": (
        asking("get_time", tool_choice="none", max_tokens=3),
        None,
        "length",
    ),
}


@pytest.mark.parametrize(("body", "tool", "finish_reason"), CHOSEN.values(), ids=CHOSEN)
def test_a_tool_is_called(
    tool_client: openai.OpenAI, body: dict[str, Any], tool: str | None, finish_reason: str
) -> None:
    choice = tool_client.chat.completions.create(**body).choices[0]
    calls = choice.message.tool_calls or []
    assert [call.function.name for call in calls] == ([tool] if tool else [])
    assert choice.finish_reason == finish_reason


def test_a_streamed_call_is_put_together_from_its_fragments(tool_client: openai.OpenAI) -> None:
    asked = asking("Hello", tool_choice="required")
    whole = tool_client.chat.completions.create(**asked).choices[0].message.tool_calls[0].function
    chunks = [chunk.choices[0] for chunk in tool_client.chat.completions.create(**asked, stream=True)]
    calls = [chunk.delta.tool_calls[0] for chunk in chunks if chunk.delta.tool_calls]
    assert calls[0].id.startswith("chatcmpl-tool-")
    assert calls[0].function.name == "get_weather"
    assert "".join(call.function.arguments or "" for call in calls) == whole.arguments
    assert chunks[-1].finish_reason == "tool_calls"
    arguments = json.loads(whole.arguments)
    assert arguments["city"]
    assert arguments["days"] >= 1


def test_a_tools_result_is_answered_and_not_called_for_again(tool_client: openai.OpenAI) -> None:
    asked = asking("get_time")
    call = tool_client.chat.completions.create(**asked).choices[0].message
    asked["messages"] += [
        call.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "get_time: noon"},
    ]
    assert tool_client.chat.completions.create(**asked, max_tokens=3).choices[0].message.content


TOOLS_REFUSED = {
    "a tool that is not there": (
        {"tool_choice": {"type": "function", "function": {"name": "nope"}}},
        "does not match any of the specified `tools`",
    ),
    "a choice that is none": ({"tool_choice": 7}, "Input should be a valid tool choice"),
    "a choice without tools": ({"tools": None, "tool_choice": "auto"}, "`tools` must be set"),
    "a tool without a name": ({"tools": [{"type": "function", "function": {}}]}, "Field required"),
    "tools that are no list": ({"tools": "all"}, "Input should be a valid list"),
    "arguments beyond it": (
        {
            "tool_choice": "required",
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
        },
        "The JSON schema's keyword not is not supported.",
    ),
}


@pytest.mark.parametrize(("more", "words"), TOOLS_REFUSED.values(), ids=TOOLS_REFUSED)
def test_what_is_wrong_with_tools_is_said(tool_sim: Sim, more: dict[str, Any], words: str) -> None:
    refused = tool_sim.post("/v1/chat/completions", asking("Hello", **more))
    assert refused.status == 400
    assert words in refused.json["error"]["message"]


class Person(pydantic.BaseModel):
    name: str
    age: int = pydantic.Field(ge=18, le=99)
    mood: Literal["good", "bad"]
    friends: list[Person]


def test_a_structured_answer_is_read_by_the_client_that_asked_for_it(client: openai.OpenAI) -> None:
    made = client.chat.completions.parse(
        model="my-model", messages=[{"role": "user", "content": "Who?"}], response_format=Person
    )
    person = made.choices[0].message.parsed
    assert person is not None
    assert 18 <= person.age <= 99
    assert made.choices[0].finish_reason == "stop"


def test_any_json_object_is_one(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model="my-model",
        messages=[{"role": "user", "content": "Tell me in JSON."}],
        response_format={"type": "json_object"},
    )
    assert isinstance(json.loads(made.choices[0].message.content or ""), dict)


@pytest.mark.parametrize(
    ("response_format", "words"),
    [
        pytest.param({"type": "poem"}, "text, json_object or json_schema", id="a form nobody knows"),
        pytest.param({"type": "json_schema"}, "Field required", id="a schema that is missing"),
        pytest.param("json", "text, json_object or json_schema", id="a form that is no object"),
        pytest.param(
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "thing"}}},
            "type is not one of JSON's",
            id="a schema that is none",
        ),
    ],
)
def test_a_form_that_cannot_be_followed_is_refused(sim: Sim, response_format: Any, words: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "response_format": response_format}
    refused = sim.post("/v1/chat/completions", body)
    assert refused.status == 400
    assert words in refused.json["error"]["message"]
