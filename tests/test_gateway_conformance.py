"""The clients that people use, before a real gateway process, before real engines.

Sim always, llama-server where one runs on this processor, vllm where LLMGW_TEST_VLLM names one.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import httpx2
import openai
import pydantic
import pytest
from django.core.management import call_command
from pytest_django import DjangoDbBlocker

from tests.agent_process import gguf, llama_server
from tests.conformance import Room, Served, open_room
from tests.stage import MESSAGES, text_of
from tests.vllm_program import PROGRAM, make_vllm_model
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.lasting_database,
    pytest.mark.one_database,
    pytest.mark.timeout(900 if PROGRAM else 180),
]

SIM, LLAMACPP = pytest.param("sim"), pytest.param("llamacpp")
VLLM = pytest.param("vllm", marks=pytest.mark.skipif(not PROGRAM, reason="LLMGW_TEST_VLLM names no vllm"))

on_all = pytest.mark.parametrize("served", [SIM, LLAMACPP, VLLM], indirect=True)
on_real = pytest.mark.parametrize("served", [LLAMACPP, VLLM], indirect=True)
# The model of chance that vllm has here finishes no JSON text, and knows no embeddings.
on_able = pytest.mark.parametrize("served", [SIM, LLAMACPP], indirect=True)


@pytest.fixture(scope="module")
def room(
    django_db_setup: None, django_db_blocker: DjangoDbBlocker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Room]:
    with django_db_blocker.unblock():
        try:
            with open_room(tmp_path_factory.mktemp("conformance"), LLMGW_HOLD_S="1") as room:
                yield room
        finally:
            call_command("flush", verbosity=0, interactive=False)


@pytest.fixture(scope="module")
def sim(room: Room) -> Iterator[Served]:
    program = (sys.executable, "-m", "nodes.agent.sim")
    pace = ("--ttft", "5ms", "--tpot", "20ms")
    with room.serving(
        "sim",
        program,
        Path("sim"),
        *pace,
        context_length=1024,
        can_tools=True,
        can_vision=True,
        can_embeddings=True,
    ) as served:
        yield served


@pytest.fixture(scope="module")
def llamacpp(room: Room, pytestconfig: pytest.Config) -> Iterator[Served]:
    program = llama_server()
    if program is None:
        pytest.skip("no llama-server that runs on this processor")
    weights = gguf(pytestconfig.cache.mkdir("gguf"))  # type: ignore[union-attr]
    args = ("--threads", "2", "--parallel", "2", "--pooling", "mean")
    with room.serving(
        "llamacpp",
        (program,),
        weights,
        *args,
        context_length=1024,
        can_vision=True,
        can_embeddings=True,
    ) as served:
        yield served


@pytest.fixture(scope="module")
def vllm(room: Room) -> Iterator[Served]:
    """On one core: its processes wait for each other by spinning, and on all of them keep a gateway and its
    clients from running for seconds, until the answer has ended."""
    args = ("--enforce-eager", "--dtype", "float32")
    with room.serving(
        "vllm",
        ("taskset", "--cpu-list", str(min(os.sched_getaffinity(0))), PROGRAM),
        make_vllm_model(room.folder),
        *args,
        context_length=4096,
        environment={"VLLM_CPU_KVCACHE_SPACE": "1"},
        timeout_s=600,
        can_vision=True,
    ) as served:
        yield served


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Served:
    found: Served = request.getfixturevalue(request.param)
    return found


# --- what OpenAI's client asks ------------------------------------------------------------


def asking(served: Served, max_tokens: int = 6, **fields: Any) -> Any:
    return {"model": served.alias, "messages": MESSAGES, "max_tokens": max_tokens, "temperature": 0} | fields


@on_all
def test_a_chat_is_answered_under_the_name_it_was_asked_by(room: Room, served: Served) -> None:
    answer = room.openai.chat.completions.with_raw_response.create(**asking(served))
    made = answer.parse()
    assert made.model == served.alias
    assert (made.choices[0].message.role, made.choices[0].finish_reason) == ("assistant", "length")
    assert made.choices[0].message.content
    assert made.usage is not None
    assert made.usage.completion_tokens == 6
    assert made.usage.total_tokens == made.usage.prompt_tokens + 6
    assert answer.headers["x-llmgw-model"] == served.name
    assert answer.request_id == answer.headers["x-request-id"]


@on_all
def test_a_chat_streams_with_usage_for_who_asks_for_it(room: Room, served: Served) -> None:
    create = room.openai.chat.completions.create
    chunks = list(create(**asking(served), stream=True))
    *told, last = create(**asking(served), stream=True, stream_options={"include_usage": True})
    assert text_of(told)
    assert told[-1].choices[0].finish_reason == "length"
    assert (last.choices, last.usage.completion_tokens) == ([], 6)
    assert {chunk.model for chunk in [*chunks, *told, last]} == {served.alias}
    assert all(chunk.choices for chunk in chunks)


@on_all
def test_a_text_is_completed_plain_and_streamed(room: Room, served: Served) -> None:
    asked: Any = {"model": served.alias, "prompt": "Once upon", "max_tokens": 5, "temperature": 0}
    made = room.openai.completions.create(**asked)
    assert (made.object, made.model, made.usage.completion_tokens) == ("text_completion", served.alias, 5)
    assert made.choices[0].text
    chunks = list(room.openai.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"


@on_all
def test_there_are_as_many_choices_as_were_asked_for(room: Room, served: Served) -> None:
    made = room.openai.chat.completions.create(**asking(served, n=2, temperature=1))
    assert [choice.index for choice in made.choices] == [0, 1]
    assert all(choice.message.content for choice in made.choices)


@on_real
def test_likely_words_are_told(room: Room, served: Served) -> None:
    made = room.openai.chat.completions.create(**asking(served, 3, logprobs=True, top_logprobs=2))
    assert made.choices[0].logprobs is not None
    told = made.choices[0].logprobs.content or []
    assert [len(token.top_logprobs) for token in told] == [2, 2, 2]


class Weather(pydantic.BaseModel):
    sky: Literal["clear", "grey"]
    is_wet: bool


@on_able
def test_an_answer_has_the_shape_that_was_asked_for(room: Room, served: Served) -> None:
    made = room.openai.chat.completions.parse(**asking(served, 60), response_format=Weather)
    assert isinstance(made.choices[0].message.parsed, Weather)


TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 9}},
            "required": ["city"],
        },
    },
}


def test_a_tool_is_called_plain_and_in_fragments(room: Room, sim: Served) -> None:
    asked = asking(sim, 80, tools=[TOOL], tool_choice="required")
    choice = room.openai.chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "get_weather"
    with room.openai.chat.completions.stream(**asked) as stream:
        events = list(stream)
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or []
    fragments = [each for each in events if each.type == "tool_calls.function.arguments.delta"]
    assert len(fragments) > 1
    assert "".join(each.arguments_delta for each in fragments) == streamed.function.arguments
    assert streamed.function.name == "get_weather"
    assert streamed.id
    for arguments in (call.function.arguments, streamed.function.arguments):
        json.loads(arguments)


def test_a_tools_result_is_answered(room: Room, sim: Served) -> None:
    asked = asking(sim, 80, tools=[TOOL], tool_choice="required")
    called = room.openai.chat.completions.create(**asked).choices[0].message
    assert called.tool_calls
    result = {"role": "tool", "tool_call_id": called.tool_calls[0].id, "content": "Sunny."}
    talk = [*MESSAGES, called.model_dump(exclude_none=True), result]
    answered = room.openai.chat.completions.create(
        **asking(sim, messages=talk, tools=[TOOL], tool_choice="none")
    )
    assert answered.choices[0].message.content


@on_able
def test_embeddings_are_the_same_numbers_in_both_forms(room: Room, served: Served) -> None:
    asked: Any = {"model": served.alias, "input": ["a word", "another"]}
    plain = room.openai.embeddings.create(**asked, encoding_format="float")
    packed = room.openai.embeddings.create(**asked, encoding_format="base64")
    decoded = room.openai.embeddings.create(**asked)  # asks for base64 by itself
    assert plain.model == served.alias
    assert [each.index for each in plain.data] == [0, 1]
    assert plain.usage.prompt_tokens > 0
    for left, middle, right in zip(plain.data, packed.data, decoded.data, strict=True):
        raw = base64.b64decode(str(middle.embedding))
        assert list(struct.unpack(f"<{len(raw) // 4}f", raw)) == pytest.approx(left.embedding, abs=1e-5)
        assert right.embedding == pytest.approx(left.embedding, abs=1e-5)


@on_real
def test_a_response_is_made_plain_and_streamed(room: Room, served: Served) -> None:
    asked: Any = {"model": served.alias, "input": "Hello?", "max_output_tokens": 5, "temperature": 0}
    made = room.openai.responses.create(**asked)
    assert made.model == served.alias
    assert made.usage is not None
    assert made.usage.output_tokens == 5
    *events, done = room.openai.responses.create(**asked, stream=True)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert done.type in ("response.completed", "response.incomplete")
    assert done.response.model == served.alias
    assert done.response.usage.output_tokens == 5


@on_all
def test_what_an_engine_refuses_is_raised_in_its_words(room: Room, served: Served) -> None:
    create = room.openai.chat.completions.create
    with pytest.raises(openai.BadRequestError) as wrong:
        create(**asking(served, extra_body={"temperature": "hot"}))
    assert "temperature" in str(wrong.value)
    with pytest.raises(openai.BadRequestError) as too_long:
        create(**asking(served, messages=[{"role": "user", "content": "long word " * 1_000}]))
    assert too_long.value.code == "context_length_exceeded"


SEEN = {
    "sim": (openai.BadRequestError, "cannot identify image file"),
    "llamacpp": (openai.InternalServerError, "image input is not supported"),
    "vllm": (openai.BadRequestError, "is not a multimodal model"),
}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


@on_all
def test_an_image_reaches_an_engine_that_does_not_see_it_and_goes_on(room: Room, served: Served) -> None:
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
    talk = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, image]}]
    error, words = SEEN[served.engine]
    for _ in range(6):  # more than the errors that eject a replica
        with pytest.raises(error, match=words):
            room.openai.chat.completions.create(**asking(served, messages=talk))
    assert room.openai.chat.completions.create(**asking(served)).choices


@on_all
def test_many_are_served_at_once_and_none_gets_anothers_words(room: Room, served: Served) -> None:
    async def count_to(client: openai.AsyncOpenAI, tokens: int) -> int:
        asked = asking(served, tokens, stream=True, stream_options={"include_usage": True})
        stream = await client.chat.completions.create(**asked)
        return [chunk async for chunk in stream][-1].usage.completion_tokens

    async def all_at_once() -> list[int]:
        async with openai.AsyncOpenAI(base_url=f"{room.gateway.url}/v1", api_key=room.key) as client:
            return await asyncio.gather(*(count_to(client, tokens) for tokens in range(1, 9)))

    assert asyncio.run(all_at_once()) == list(range(1, 9))


# --- what Anthropic's asks ----------------------------------------------------------------


@on_real
def test_a_message_is_answered_plain_and_streamed(room: Room, served: Served) -> None:
    asked: Any = {"model": served.alias, "messages": MESSAGES, "max_tokens": 5}
    made = room.anthropic.messages.create(**asked)
    assert (made.type, made.role, made.model) == ("message", "assistant", served.alias)
    assert (made.stop_reason, made.usage.output_tokens) == ("max_tokens", 5)
    assert made._request_id
    with room.anthropic.messages.stream(**asked) as stream:
        said = "".join(stream.text_stream)
        whole = stream.get_final_message()
    assert said == "".join(block.text for block in whole.content if block.type == "text")
    assert said or served.engine == "vllm", "whose model of chance says parts of characters here"
    assert (whole.model, whole.stop_reason, whole.usage.output_tokens) == (served.alias, "max_tokens", 5)


@on_real
def test_the_tokens_of_a_message_are_counted(room: Room, served: Served) -> None:
    asked: Any = {"model": served.alias, "messages": MESSAGES}
    counted = room.anthropic.messages.count_tokens(**asked).input_tokens
    usage = room.anthropic.messages.create(**asked, max_tokens=1).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0) > 0


# --- who leaves ---------------------------------------------------------------------------

LONG = {"sim": 400, "llamacpp": 400, "vllm": 3_000}  # tokens, which take seconds


def _close_a_stream(room: Room, served: Served) -> None:
    with room.openai.chat.completions.create(**asking(served, LONG[served.engine]), stream=True) as stream:
        next(stream)
        wait_until(served.running, "the engine to work")


def _close_a_stream_of_messages(room: Room, served: Served) -> None:
    with room.anthropic.messages.stream(
        model=served.alias, messages=MESSAGES, max_tokens=LONG[served.engine]
    ) as stream:
        next(stream)
        wait_until(served.running, "the engine to work")


def _cancel(room: Room, served: Served, path: str, **fields: Any) -> None:
    """A plain request, once the engine works at it."""
    asked = {"model": served.alias, **fields}
    client = openai.AsyncOpenAI(base_url=f"{room.gateway.url}/v1", api_key=room.key, max_retries=0)

    async def leave() -> None:
        async with client:
            asking = asyncio.ensure_future(client.post(path, body=asked, cast_to=httpx2.Response))
            await asyncio.to_thread(wait_until, served.running, "the engine to work")
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking

    asyncio.run(leave())


def _cancel_a_chat(room: Room, served: Served) -> None:
    _cancel(room, served, "/chat/completions", messages=MESSAGES, max_tokens=LONG[served.engine])


def _cancel_a_text(room: Room, served: Served) -> None:
    _cancel(room, served, "/completions", prompt="Once", max_tokens=LONG[served.engine])


def _cancel_a_message(room: Room, served: Served) -> None:
    _cancel(room, served, "/messages", messages=MESSAGES, max_tokens=LONG[served.engine])


def _cancel_a_response(room: Room, served: Served) -> None:
    _cancel(room, served, "/responses", input="Hello?", max_output_tokens=LONG[served.engine])


Leave = Callable[[Room, Served], None]


@on_all
@pytest.mark.parametrize(
    "leave",
    [
        pytest.param(_close_a_stream, id="a stream"),
        pytest.param(_cancel_a_chat, id="a plain chat"),
        pytest.param(_cancel_a_text, id="a plain text"),
    ],
)
def test_an_engine_is_free_soon_after_a_client_left(room: Room, served: Served, leave: Leave) -> None:
    leave(room, served)
    wait_until(lambda: served.running() == 0, "the engine to stop, long before its end", timeout_s=2)


@on_real
@pytest.mark.parametrize(
    "leave",
    [
        pytest.param(_close_a_stream_of_messages, id="a stream of messages"),
        pytest.param(_cancel_a_message, id="a plain message"),
        pytest.param(_cancel_a_response, id="a plain response"),
    ],
)
def test_an_engine_is_free_soon_after_another_client_left(room: Room, served: Served, leave: Leave) -> None:
    leave(room, served)
    wait_until(lambda: served.running() == 0, "the engine to stop, long before its end", timeout_s=2)
