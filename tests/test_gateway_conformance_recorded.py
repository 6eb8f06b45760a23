"""What vllm and llama.cpp have answered, recorded, on its way through the gateway to the clients people use.

An answer reaches the client as it is, but for the name of the model, which is the one that the client wrote.
What an engine refuses is raised by the client as what it is. Every recording has its row.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from aiohttp import web
from pytest_django import DjangoDbBlocker

from nodes.models import Replica
from tests.stage import (
    MESSAGES,
    Play,
    Script,
    begin_stream,
    change,
    chat_event,
    drop,
    make_model,
    make_replica,
    playing_for_many,
)

pytestmark = [pytest.mark.lasting_database, pytest.mark.one_database]

ENGINES = Path(__file__).parent / "data" / "engines"
SERVED = "my-model"
CHAT, MESSAGES_PATH = "/v1/chat/completions", "/v1/messages"


@dataclass(frozen=True)
class Recording:
    """One answer of an engine: its status, its kind of content, its bytes; and what it was asked."""

    path: Path

    @property
    def engine(self) -> str:
        return self.path.relative_to(ENGINES).parts[0]

    @property
    def name(self) -> str:
        return f"{self.engine}/{self.path.stem}"

    @cached_property
    def _parts(self) -> tuple[str, bytes]:
        head, _, body = self.path.read_bytes().replace(b"\r\n", b"\n").partition(b"\n\n")
        return head.decode(), body.removesuffix(b"\n")

    @property
    def status(self) -> int:
        return int(re.findall(r"^HTTP/1.1 (\d+)", self._parts[0], re.MULTILINE)[0])

    @property
    def content_type(self) -> str:
        return re.findall(r"(?im)^content-type: (.*)$", self._parts[0])[0]

    @property
    def is_stream(self) -> bool:
        return self.content_type.startswith("text/event-stream")

    @property
    def body(self) -> bytes:
        return self._parts[1] + b"\n\n" if self.is_stream else self._parts[1]

    @property
    def endpoint(self) -> str:
        asked = re.findall(r"^### POST (/v1/\S+)", self._parts[0], re.MULTILINE)
        return asked[0] if asked else CHAT

    async def __call__(self, request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
        """As the engine said it; a stream in pieces that end anywhere."""
        if not self.is_stream:
            headers = {"Content-Type": self.content_type}
            return web.Response(status=self.status, body=self.body, headers=headers)
        response = await begin_stream(request)
        for at in range(0, len(self.body), 97):
            await response.write(self.body[at : at + 97])
        return response


RECORDINGS = {
    recording.name: recording
    for path in sorted([*ENGINES.glob("llamacpp/*.txt"), *ENGINES.glob("vllm/**/*.txt")])
    if (recording := Recording(path))
}
ANSWERS = [
    *(f"llamacpp/{name}" for name in ("chat", "chat_stream", "chat_stream_nousage", "chat_tools")),
    *(f"llamacpp/{name}" for name in ("completions", "completions_stream", "count_tokens")),
    *(f"llamacpp/{name}" for name in ("ctx_hit_during_gen", "jsonschema", "logprobs", "max0", "n2")),
    *(f"llamacpp/{name}" for name in ("messages", "messages_stream", "responses", "responses_stream")),
    "llamacpp/unknown_model",  # it answers to every name, with its own
    *(f"vllm/{name}" for name in ("cached", "chat", "chat_stream", "chat_stream_cont", "completions", "n2")),
    *(f"vllm/{name}" for name in ("tool_named", "tool_required", "tool_required_stream")),
]

# --- the stage ----------------------------------------------------------------------------


@dataclass
class Stage:
    """A play whose engine is taken for llama.cpp by "lama" and for vllm by "vast", also "vastr". Both were
    started under another name."""

    play: Play
    openai: openai.OpenAI
    anthropic: anthropic.Anthropic
    strangers: set[str] = field(default_factory=set)

    def replay(
        self, recording: Recording, model: str, *, is_plain: bool = False, **options: Any
    ) -> httpx2.Response:
        """The answer as it reached the client of that endpoint."""
        self.play.engine.script = recording
        fields: dict[str, Any] = {"model": model, "messages": MESSAGES, "prompt": "Hello?", "input": "Hello?"}
        if recording.is_stream and not is_plain:
            fields["stream"] = True
            if recording.endpoint in (CHAT, "/v1/completions") and b'"usage"' in recording.body:
                fields["stream_options"] = {"include_usage": True}
        client: Any = self.openai
        path = recording.endpoint.removeprefix("/v1")
        if recording.endpoint.startswith(MESSAGES_PATH):
            client, path, fields["max_tokens"] = self.anthropic, recording.endpoint, 4
        answer: httpx2.Response = client.with_options(**options).post(
            path, body=fields, cast_to=httpx2.Response
        )
        return answer

    def begin_anew(self) -> Stage:
        """An engine that was taken for a stranger is asked nothing for a second, unless it starts anew."""
        self.play.begin_anew()
        for name in self.strangers:
            replica = Replica.objects.get(model__name=name)
            change(replica, generation=replica.generation + 1)
        self.strangers.clear()
        return self


NAMES = {"llamacpp": "lama", "vllm": "vast"}


@pytest.fixture(scope="module")
def all_stages(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[Stage]:
    with playing_for_many(
        django_db_blocker, LLMGW_HOLD_S=2, LLMGW_COMMENT_S=0.05, LLMGW_TABLE_POLL_S=0.05
    ) as play:
        for engine, name in NAMES.items():
            model = make_model(name, f"{name}r", can_vision=True, can_tools=True, can_embeddings=True)
            model.profiles.update(engine=engine)
            replica = make_replica(model, play.engine, state="starting")
            launch = {"model": SERVED, "source": "/weights", "profile": {"engine": engine}}
            change(replica, launch=launch, state="ready")
            play.wait_until_known(name)
        options: Any = {"api_key": play.key, "max_retries": 0, "timeout": 20}
        with (
            openai.OpenAI(base_url=f"{play.web.url}/v1", **options) as chats,
            anthropic.Anthropic(base_url=play.web.url, **options) as talks,
        ):
            yield Stage(play, chats, talks)


@pytest.fixture
def stage(all_stages: Stage) -> Stage:
    return all_stages.begin_anew()


# --- answers ------------------------------------------------------------------------------


def test_every_recording_has_its_row() -> None:
    assert sorted(RECORDINGS) == sorted([*ANSWERS, *REFUSED, *BROKEN])


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_arrives_as_it_was_but_for_the_name(stage: Stage, name: str) -> None:
    recording = RECORDINGS[name]
    asked = NAMES[recording.engine]
    answer = stage.replay(recording, asked)
    assert answer.status_code == 200
    assert answer.content == recording.body.replace(f'"{SERVED}"'.encode(), f'"{asked}"'.encode())
    kind = answer.headers["content-type"].partition(";")[0]
    assert kind == recording.content_type.partition(";")[0]
    assert answer.headers["x-llmgw-model"] == asked
    assert "server" not in answer.headers or "llama" not in answer.headers["server"]


def test_a_name_that_is_an_alias_comes_back_as_it_was_written(stage: Stage) -> None:
    stage.play.engine.script = RECORDINGS["vllm/chat_stream"]
    chunks = list(stage.openai.chat.completions.create(model="vastr", messages=MESSAGES, stream=True))
    assert {chunk.model for chunk in chunks} == {"vastr"}
    assert all(chunk.choices for chunk in chunks), "usage was not asked for"


def test_a_streamed_call_is_put_together_by_the_client(stage: Stage) -> None:
    stage.play.engine.script = RECORDINGS["vllm/tool_required_stream"]
    tool: Any = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
    chats = stage.openai.chat.completions
    with chats.stream(model="vast", messages=MESSAGES, tools=[tool]) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls is not None
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [
        ("get_weather", "false")
    ]


def test_what_an_engine_takes_for_an_answer_that_is_put_together_here_is_no_overhead(stage: Stage) -> None:
    async def slowly(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        await response.write(chat_event(fields, "One"))
        await asyncio.sleep(0.3)
        end = {"id": "1", "model": fields["model"], "created": 1, "object": "chat.completion.chunk"}
        end["choices"] = [{"index": 0, "delta": {}, "finish_reason": "stop"}]
        await response.write(b"data: " + json.dumps(end).encode() + b"\n\ndata: [DONE]\n\n")
        return response

    stage.play.engine.script = slowly
    answer = stage.openai.chat.completions.with_raw_response.create(model="lama", messages=MESSAGES)
    assert float(answer.headers["x-llmgw-overhead-ms"]) < 250


def test_a_stream_of_messages_is_put_together_by_its_client(stage: Stage) -> None:
    stage.play.engine.script = RECORDINGS["llamacpp/messages_stream"]
    with stage.anthropic.messages.stream(model="lama", messages=MESSAGES, max_tokens=4) as stream:
        message = stream.get_final_message()
    assert (message.model, message.stop_reason, message.usage.output_tokens) == ("lama", "max_tokens", 4)
    assert message.usage.cache_read_input_tokens == 20


def test_a_streamed_response_is_put_together_by_its_client(stage: Stage) -> None:
    stage.play.engine.script = RECORDINGS["llamacpp/responses_stream"]
    events = list(stage.openai.responses.create(model="lama", input="Hi", stream=True))
    done = events[-1]
    assert done.type == "response.completed"
    assert (done.response.model, done.response.usage.output_tokens) == ("lama", 4)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == (
        done.response.output_text
    )


@pytest.mark.parametrize("name", ["chat", "completions", "messages", "responses"])
def test_who_asks_llamacpp_plainly_is_answered_from_its_stream(stage: Stage, name: str) -> None:
    """It would compute a plain answer to its end, whether or not its client is still there."""
    recording = RECORDINGS[f"llamacpp/{name}_stream"]
    answer = stage.replay(recording, "lama", is_plain=True).json()
    assert stage.play.engine.heard[-1].fields["stream"] is True
    plain = json.loads(RECORDINGS[f"llamacpp/{name}"].body)
    assert answer.keys() - {"timings"} == plain.keys() - {"timings", "completed_at"}
    assert [answer.get(key) for key in ("object", "type")] == [plain.get(key) for key in ("object", "type")]
    assert answer["model"] == "lama"
    assert answer["usage"].keys() == plain["usage"].keys()


def _slowly(recording: Recording) -> Script:
    async def script(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(0.12)
        response = await begin_stream(request)
        half = recording.body.index(b"\n\n", len(recording.body) // 2) + 2
        await response.write(recording.body[:half])
        await asyncio.sleep(0.12)
        await response.write(recording.body[half:])
        return response

    return script


def test_no_client_sees_what_is_said_to_keep_it_company(stage: Stage) -> None:
    stage.play.engine.script = _slowly(RECORDINGS["llamacpp/chat_stream_nousage"])
    chats = stage.openai.chat.completions
    asked: Any = {"model": "lama", "messages": MESSAGES, "stream": True}
    with chats.with_streaming_response.create(**asked) as answer:
        assert answer.read().count(b": waiting\n") >= 2, "before the first event and between events"
    chunks = list(chats.create(**asked))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Say hello.<"
    stage.play.engine.script = _slowly(RECORDINGS["llamacpp/messages_stream"])
    with stage.anthropic.messages.stream(model="lama", messages=MESSAGES, max_tokens=4) as stream:
        assert stream.get_final_message().stop_reason == "max_tokens"


# --- what is asked ------------------------------------------------------------------------

PIXEL = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(400)).decode()


def test_an_image_reaches_the_engine_as_it_was_sent(stage: Stage) -> None:
    parts: Any = [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}", "detail": "low"}},
    ]
    stage.play.engine.script = RECORDINGS["vllm/chat"]
    asked: Any = {"model": "vast", "messages": [{"role": "user", "content": parts}]}
    stage.openai.chat.completions.create(**asked)
    assert stage.play.engine.heard[-1].fields["messages"] == asked["messages"]
    parts[1]["image_url"]["url"] = "https://example.com/cat.png"
    with pytest.raises(openai.BadRequestError, match="is not fetched"):
        stage.openai.chat.completions.create(**asked)
    source: Any = {"type": "base64", "media_type": "image/png", "data": PIXEL}
    image: Any = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    stage.play.engine.script = RECORDINGS["llamacpp/messages"]
    stage.anthropic.messages.create(model="lama", max_tokens=4, messages=image)
    assert stage.play.engine.heard[-1].fields["messages"] == image


# --- refusals -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Refusal:
    """What the client raises, and what it tells. `retries`: whether the client is to ask again by itself."""

    error: type[openai.APIStatusError] | type[anthropic.APIStatusError]
    status: int
    code: str
    words: str
    retries: bool = False


def _bad(words: str, code: str = "engine_error", error: Any = openai.BadRequestError) -> Refusal:
    return Refusal(error, 400, code, words)


MOVED = Refusal(openai.InternalServerError, 503, "replica_moved", "is changing replicas", retries=True)
NOT_SERVED = _bad("because its engine does not", "unsupported_endpoint")
NO_ROOM = "context_length_exceeded"

REFUSED = {
    "llamacpp/bad_json": _bad("parse error at line 1"),
    "llamacpp/bad_temp": _bad("type must be number, but is string"),
    "llamacpp/no_messages": _bad("'messages' is required"),
    "llamacpp/wrong_type": _bad("Expected 'messages' to be an array"),
    "llamacpp/messages_no_max": _bad("Field 'max_tokens'", error=anthropic.BadRequestError),
    "llamacpp/ctx_overflow_long": _bad("request (3024 tokens) exceeds", NO_ROOM),
    "llamacpp/pool_full": Refusal(openai.InternalServerError, 500, NO_ROOM, "size has been exceeded"),
    "llamacpp/pool_full_stream": Refusal(openai.InternalServerError, 500, NO_ROOM, "size has been exceeded"),
    "llamacpp/image": Refusal(openai.InternalServerError, 500, "engine_error", "image input is not"),
    "llamacpp/embeddings_disabled": Refusal(
        openai.InternalServerError, 501, "engine_error", "does not support embeddings"
    ),
    "llamacpp/not_found": NOT_SERVED,
    "llamacpp/badkey": MOVED,
    "llamacpp/loading": Refusal(
        openai.InternalServerError, 503, "engine_error", "Loading model", retries=True
    ),
    "llamacpp/no_slot": Refusal(openai.InternalServerError, 503, "engine_error", "no slot", retries=True),
    "vllm/bad_json": _bad("JSON decode error"),
    "vllm/bad_temp": _bad("temperature must be in [0, 2]"),
    "vllm/chat_tools_noparser": _bad("requires --enable-auto-tool-choice"),
    "vllm/chat_tools_required": _bad("requires --tool-call-parser"),
    "vllm/chat_tools_required_stream": _bad("requires --tool-call-parser"),
    "vllm/ctx_overflow_long_v": _bad("maximum context length is 512", NO_ROOM),
    "vllm/max0": _bad("max_tokens must be at least 1"),
    "vllm/max_too_big": _bad("cannot be greater than max_model_len=512", NO_ROOM),
    "vllm/no_messages": _bad("Field required"),
    "vllm/wrong_type": _bad("Input should be a valid list"),
    "vllm/image": _bad("is not a multimodal model"),
    "vllm/embeddings": NOT_SERVED,
    "vllm/not_found": NOT_SERVED,
    "vllm/badkey": MOVED,
    "vllm/unknown_model": MOVED,
    "vllm/draining": MOVED,
    "vllm/queue_full": Refusal(
        openai.InternalServerError, 503, "engine_error", "currently busy", retries=True
    ),
    "vllm/core_died": Refusal(
        openai.InternalServerError, 500, "engine_error", "EngineCore encountered", retries=True
    ),
}


@pytest.mark.parametrize(("name", "expected"), REFUSED.items(), ids=REFUSED)
def test_a_refusal_is_raised_as_what_it_is(stage: Stage, name: str, expected: Refusal) -> None:
    recording = RECORDINGS[name]
    if expected is MOVED:
        stage.strangers.add(NAMES[recording.engine])
    with pytest.raises(expected.error) as raised:
        stage.replay(recording, NAMES[recording.engine])
    error: Any = raised.value
    told: Any = error.body
    told = told.get("error", told) if isinstance(error, anthropic.APIStatusError) else told
    assert error.status_code == expected.status
    assert told["code"] == expected.code
    assert expected.words in told["message"]
    headers = error.response.headers
    assert error.request_id == headers["x-request-id"], "each client finds it under a name of its own"
    if expected.status >= 500:
        assert ("retry-after" in headers, "x-should-retry" in headers) == (
            (True, False) if expected.retries else (False, True)
        )


def test_a_refusal_that_stays_is_not_asked_for_again(stage: Stage) -> None:
    """Both clients repeat what fails with a status from 500 on, unless they are told not to."""
    for name, model in (("llamacpp/image", "lama"), ("llamacpp/embeddings_disabled", "lama")):
        with pytest.raises(openai.InternalServerError):
            stage.replay(RECORDINGS[name], model, max_retries=2)
    assert len(stage.play.engine.heard) == 2


# --- what breaks off ----------------------------------------------------------------------

BROKEN = ["vllm/core_died_stream"]


def test_a_stream_that_ends_in_an_error_is_no_whole_one_though_the_engine_says_so(stage: Stage) -> None:
    stage.play.engine.script = RECORDINGS["vllm/core_died_stream"]
    stream = stage.openai.chat.completions.create(model="vast", messages=MESSAGES, stream=True)
    assert next(stream).choices[0].delta.content == "ld"
    with pytest.raises(openai.APIError, match="EngineCore encountered an issue") as raised:
        next(stream)
    assert not isinstance(raised.value, openai.APIConnectionError), "it was told, not cut"


def _cut(recording: Recording) -> Script:
    async def script(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        await response.write(recording.body[: len(recording.body) // 2])
        await asyncio.sleep(0.05)
        drop(request)
        return response

    return script


def _read_chat(stage: Stage) -> None:
    list(stage.openai.chat.completions.create(model="lama", messages=MESSAGES, stream=True))


def _read_messages(stage: Stage) -> None:
    list(stage.anthropic.messages.create(model="lama", messages=MESSAGES, max_tokens=4, stream=True))


def _read_response(stage: Stage) -> None:
    list(stage.openai.responses.create(model="lama", input="Hi", stream=True))


@pytest.mark.parametrize(
    ("name", "read", "error"),
    [
        pytest.param("chat_stream", _read_chat, openai.APIError, id="a chat"),
        pytest.param("messages_stream", _read_messages, anthropic.APIStatusError, id="messages"),
        pytest.param("responses_stream", _read_response, openai.APIError, id="a response"),
    ],
)
def test_what_is_cut_short_is_raised_and_said(
    stage: Stage, name: str, read: Callable[[Stage], None], error: type[Exception]
) -> None:
    stage.play.engine.script = _cut(RECORDINGS[f"llamacpp/{name}"])
    with pytest.raises(error, match="ends unfinished"):
        read(stage)
