"""When an engine or a client fails: each request ends once, whole or with an error that its client sees."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterator
from itertools import count
from typing import Any

import openai
import pytest
from aiohttp import web
from pytest_django import DjangoDbBlocker

from nodes.models import Demand
from tests.stage import (
    MESSAGES,
    Engine,
    Play,
    Script,
    begin_stream,
    change,
    chat_event,
    drop,
    never,
    playing_for_many,
    saying,
    text_of,
    well_behaved,
)
from tests.waiting import wait_until

pytestmark = [pytest.mark.lasting_database, pytest.mark.one_database]


@pytest.fixture(scope="module")
def all_plays(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[Play]:
    with playing_for_many(django_db_blocker, LLMGW_HOLD_S=1) as play:
        play.model.profiles.update(weight=2)  # one of 1 stands for none
        change(play.model, can_embeddings=True)
        yield play


@pytest.fixture
def play(all_plays: Play) -> Play:
    return all_plays.begin_anew()


def _in_flight(play: Play) -> int | None:
    """What the reconciler is told to be under way. None before it was told anything."""
    return Demand.objects.filter(model=play.model).values_list("in_flight", flat=True).first()


# --- a client that leaves -----------------------------------------------------------------


async def _three_words_and_silence(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
    response = await begin_stream(request)
    for word in ("One", " two", " three"):
        await response.write(chat_event(fields, word))
    return await never(request, fields)


async def _a_head_and_silence(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
    await begin_stream(request)
    return await never(request, fields)


async def _half_an_answer_and_silence(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(b'{"id":')
    return await never(request, fields)


@pytest.mark.parametrize(
    ("script", "is_stream"),
    [
        pytest.param(never, True, id="before the first byte of a stream"),
        pytest.param(_a_head_and_silence, True, id="between the head and the first word"),
        pytest.param(_three_words_and_silence, True, id="in the middle of a stream"),
        pytest.param(never, False, id="before a plain answer"),
        pytest.param(_half_an_answer_and_silence, False, id="in the middle of a plain answer"),
    ],
)
def test_an_engine_is_left_within_a_second_of_its_client_leaving(
    play: Play, script: Script, is_stream: bool
) -> None:
    play.engine.script = script
    body = json.dumps({"model": "tiny", "messages": MESSAGES, "stream": is_stream}).encode()
    with play.web.connection() as connection:
        connection.sendall(play.request(body))
        wait_until(lambda: play.engine.heard, "the engine to be asked")
        if script is _three_words_and_silence:
            received = b""
            while b" three" not in received:
                received += connection.recv(10_000)
        wait_until(lambda: _in_flight(play) == 1, "the request to be counted")
    wait_until(lambda: play.engine.heard[0].is_gone, "the engine to notice", timeout_s=1)
    wait_until(lambda: _in_flight(play) == 0, "the request to be counted off")


def test_a_client_that_stops_reading_chunks_frees_the_engine(play: Play) -> None:
    play.engine.script = _three_words_and_silence
    with play.web.client(play.key) as client:
        stream = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        assert [next(stream).choices[0].delta.content for _ in range(3)] == ["One", " two", " three"]
        stream.close()
        wait_until(lambda: play.engine.heard[0].is_gone, "the engine to notice", timeout_s=1)


# --- an engine that fails before it has said anything -------------------------------------


async def _drops(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
    drop(request)
    return web.Response()


async def _drops_after_its_head(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
    response = await begin_stream(request)
    drop(request)
    return response


async def _drops_in_a_plain_answer(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"id":')
    drop(request)
    return response


BUSY = {"error": {"message": "The engine is currently busy", "type": "Service Unavailable", "code": 503}}
OTHER_MODEL = {
    "error": {"message": "The model `tiny` does not exist.", "type": "NotFoundError", "param": "model"}
}

FAILURES = [
    pytest.param(_drops, False, "engine_unreachable", id="drops the connection"),
    pytest.param(
        _drops_after_its_head, True, "engine_unreachable", id="drops a stream before its first word"
    ),
    pytest.param(_drops_in_a_plain_answer, False, "engine_unreachable", id="drops in a plain answer"),
    pytest.param(saying(200, b""), False, "engine_unreadable", id="sends an empty success"),
    pytest.param(saying(200, b"<html>It works!</html>"), False, "engine_unreadable", id="sends a page"),
    pytest.param(
        saying(502, b"<html>Bad Gateway</html>"), False, "engine_unreadable", id="is behind a bad proxy"
    ),
    pytest.param(saying(503, BUSY), False, "engine_error", id="is busy"),
    pytest.param(saying(401, {"error": "Unauthorized"}), False, "replica_moved", id="does not know our key"),
    pytest.param(saying(404, OTHER_MODEL), False, "replica_moved", id="serves another model"),
    pytest.param(saying(404, b"<html>nginx</html>"), False, "replica_moved", id="is no engine at all"),
]


@pytest.mark.parametrize(("script", "is_stream", "code"), FAILURES)
def test_another_replica_answers_for_one_that(play: Play, script: Script, is_stream: bool, code: str) -> None:
    def is_answered() -> bool:
        text = text_of(play.chunks()) if is_stream else play.chat().choices[0].message.content
        return bool(text == "Hello from here.")

    with play.another_engine(script) as bad:
        for _ in range(2):
            bad.heard.clear()
            while not bad.heard:
                assert is_answered()


@pytest.mark.parametrize(("script", "is_stream", "code"), FAILURES)
def test_without_another_replica_the_client_is_told_to_try_again_after_one_that(
    play: Play, script: Script, is_stream: bool, code: str
) -> None:
    play.engine.script = script
    refusal = play.refused(stream=is_stream)
    assert refusal.status in (502, 503)
    assert refusal.body["code"] == code
    assert refusal.headers["retry-after"] == "1"
    assert "127.0.0.1" not in refusal.body["message"]
    assert "html" not in refusal.body["message"]


def test_an_engine_that_is_gone_is_passed_over_and_then_told_of(play: Play) -> None:
    with play.another_engine(well_behaved) as other:
        wait_until(lambda: play.chat() and other.heard, "the second replica to be asked")
        play.thread.run(play.engine.close())
        for _ in range(4):
            assert play.chat().choices
        play.thread.run(other.close())
        refusal = play.refused()
        assert (refusal.status, refusal.body["code"]) == (503, "unavailable")
        assert "is not there after 1 s, because its replica refused the connection" in refusal.body["message"]
        assert refusal.headers["retry-after"] == "10"
        play.thread.run(other.open())
        play.thread.run(play.engine.open())


def test_who_was_cut_off_waits_for_the_replica_that_is_away(play: Play) -> None:
    """Of two, the one that is asked first takes the other away for a while, and breaks off each time."""
    breaking: list[Engine] = []
    returning: list[asyncio.Task[None]] = []

    def taking_away(own: Engine, other: Engine) -> Script:
        async def script(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
            if not breaking:
                breaking.append(own)
                await other.close()
                loop = asyncio.get_running_loop()
                loop.call_later(0.2, lambda: returning.append(loop.create_task(other.open())))
            return await (_drops if own is breaking[0] else well_behaved)(request, fields)

        return script

    change(play.model, timeout_hold_ns=10_000_000_000)
    with play.another_engine(well_behaved) as other:
        # What tests before have made of the first is forgotten with it.
        change(play.replica, state="starting")
        wait_until(lambda: list(play.web.targets()) != [str(play.replica.pk)], "the second to be known")
        wait_until(lambda: str(play.replica.pk) not in play.web.targets(), "the first to be gone")
        assert play.chat().choices
        change(play.replica, state="ready")
        play.engine.heard.clear()
        talks = ([{"role": "user", "content": f"Talk {number}"}] for number in count())
        wait_until(
            lambda: play.chat(messages=next(talks)) and other.heard and play.engine.heard, "both to be asked"
        )
        other.script, play.engine.script = taking_away(other, play.engine), taking_away(play.engine, other)
        assert play.chat().choices
        assert len(returning) == 1
    change(play.model, timeout_hold_ns=0)


def test_a_kept_connection_that_the_engine_has_closed_is_not_held_against_it(play: Play) -> None:
    dropped: list[bool] = []

    async def drops_once(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
        if not dropped:
            dropped.append(True)
            return await _drops(request, fields)
        return await well_behaved(request, fields)

    assert play.chat().choices
    play.engine.script = drops_once
    assert play.chat().choices
    assert dropped


def test_a_request_is_tried_twice_and_no_more(play: Play) -> None:
    play.engine.script = _drops
    with play.another_engine(_drops) as second, play.another_engine(_drops) as third:
        engines = (play.engine, second, third)
        wait_until(lambda: play.refused() and all(engine.heard for engine in engines), "all to be asked")
        for engine in engines:
            engine.heard.clear()
        play.refused()
        assert sum(len(engine.heard) for engine in engines) == 2


def test_being_busy_does_not_make_up_for_failures(play: Play) -> None:
    """An engine that answers 429 is not well because of that: five failures leave it out all the same."""
    says = iter([500, 500, 500, 500, 429, 500])

    async def script(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no"}}, status=next(says))

    body = json.dumps({"model": "tiny", "messages": MESSAGES}).encode()
    with play.another_engine(script) as bad:

        def is_left_out() -> bool:
            play.send("POST", "/v1/chat/completions", body)
            return len(bad.heard) == 6

        wait_until(is_left_out, "it to fail five times")
        assert [play.send("POST", "/v1/chat/completions", body).status for _ in range(6)] == [200] * 6
        assert len(bad.heard) == 6


# --- an engine that says no ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        pytest.param(
            400,
            {"error": {"message": "too long", "type": "exceed_context_size_error", "code": 400}},
            openai.BadRequestError,
            id="a prompt that is too long",
        ),
        pytest.param(
            422,
            {"object": "error", "message": "no", "type": "x"},
            openai.UnprocessableEntityError,
            id="a wrong field",
        ),
        pytest.param(
            500,
            {"error": {"message": "image input is not supported"}},
            openai.InternalServerError,
            id="an image",
        ),
    ],
)
def test_an_engines_no_reaches_the_client_in_its_own_words_and_is_not_tried_elsewhere(
    play: Play, status: int, body: dict[str, Any], kind: type[openai.APIStatusError]
) -> None:
    play.engine.script = saying(status, body)
    with pytest.raises(kind) as caught:
        play.chat()
    assert caught.value.status_code == status
    assert body.get("error", body)["message"] in str(caught.value)
    assert len(play.engine.heard) == 1


@pytest.mark.parametrize(
    "body",
    [
        pytest.param({"detail": "Not Found"}, id="vllm"),
        pytest.param({"error": {"message": "File Not Found", "type": "not_found_error"}}, id="llama.cpp"),
    ],
)
def test_an_engine_without_the_endpoint_is_the_clients_mistake(play: Play, body: dict[str, Any]) -> None:
    play.engine.script = saying(404, body)
    refusal = play.send("POST", "/v1/embeddings", b'{"model":"tiny","input":"x"}')
    assert (refusal.status, refusal.body["code"]) == (400, "unsupported_endpoint")
    assert 'model "tiny" does not serve /v1/embeddings' in refusal.body["message"]


# --- an engine that fails in the middle ---------------------------------------------------


def _three_words_and(end: Callable[[web.StreamResponse, web.Request], Awaitable[None]]) -> Script:
    async def script(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        for word in ("One", " two", " three"):
            await response.write(chat_event(fields, word))
            await asyncio.sleep(0)
        await end(response, request)
        return response

    return script


async def _cut(response: web.StreamResponse, request: web.Request) -> None:
    drop(request)


async def _cut_within_an_event(response: web.StreamResponse, request: web.Request) -> None:
    await response.write(b'data: {"id":"chatcmpl-1","choi')
    drop(request)


async def _end_without_a_word(response: web.StreamResponse, request: web.Request) -> None:
    pass


async def _babble(response: web.StreamResponse, request: web.Request) -> None:
    for _ in range(9):
        await response.write(b"x" * 1024 * 1024)


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(_cut, id="the connection breaks"),
        pytest.param(_cut_within_an_event, id="the connection breaks within an event"),
        pytest.param(_end_without_a_word, id="it ends without its last word"),
        pytest.param(_babble, id="it goes on with something else"),
    ],
)
def test_a_stream_that_is_cut_ends_with_an_error_and_never_as_if_it_were_done(
    play: Play, end: Any, caplog: pytest.LogCaptureFixture
) -> None:
    play.engine.script = _three_words_and(end)
    with play.web.client(play.key) as client:
        raw = client.chat.completions.with_raw_response.create(model="tiny", messages=MESSAGES, stream=True)
        sent = raw.http_response.read()
    *events, last, nothing = sent.split(b"\n\n")
    assert len(events) == 3
    assert nothing == b""
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert error["code"] == "stream_cut"
    assert b"[DONE]" not in sent
    with pytest.raises(openai.APIError, match="ends unfinished"):
        play.chunks()
    assert len(play.engine.heard) == 2, "what was begun is not tried elsewhere"
    told = [
        record
        for record in caplog.records
        if record.name.startswith("llmgw") and "in the middle of a stream" in record.message
    ]
    assert told
    assert "three" not in caplog.text, "what models say is nobody's to log"
    wait_until(lambda: _in_flight(play) == 0, "the requests to be counted off")


def test_an_engines_own_error_in_a_stream_is_its_last_word(play: Play) -> None:
    async def say_why(response: web.StreamResponse, request: web.Request) -> None:
        error = {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "code": 500}
        await response.write(b"data: " + json.dumps({"error": error}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")

    play.engine.script = _three_words_and(say_why)
    with play.web.client(play.key) as client:
        raw = client.chat.completions.with_raw_response.create(model="tiny", messages=MESSAGES, stream=True)
        *events, last, nothing = raw.http_response.read().split(b"\n\n")
    assert (len(events), nothing) == (3, b"")
    assert json.loads(last.removeprefix(b"data: "))["error"] == {
        "message": "EngineCore encountered an issue.",
        "type": "InternalServerError",
        "param": None,
        "code": "engine_error",
    }


def test_an_engines_error_before_its_first_word_is_a_status(play: Play) -> None:
    async def refuse(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        await response.write(b'data: {"error":{"message":"too long","code":400}}\n\ndata: [DONE]\n\n')
        return response

    play.engine.script = refuse
    refusal = play.refused(stream=True)
    assert (refusal.status, refusal.body["message"]) == (400, "too long")


# --- counts -------------------------------------------------------------------------------


def test_counts_return_to_nothing_after_every_kind_of_end(play: Play) -> None:
    for script in (well_behaved, _drops, saying(400, {"error": {"message": "no"}}), _three_words_and(_cut)):
        play.engine.script = script
        for is_stream in (True, False):
            with contextlib.suppress(openai.APIError):
                play.chunks() if is_stream else play.chat()
    wait_until(lambda: _in_flight(play) == 0, "the counts to return to nothing")
    rows = Demand.objects.filter(model=play.model)
    assert [(row.waiting, row.in_flight) for row in rows] == [(0, 0)]


def test_what_is_under_way_is_counted(play: Play) -> None:
    play.engine.script = _three_words_and_silence
    with play.web.client(play.key) as client:
        streams = [
            client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True) for _ in range(3)
        ]
        wait_until(lambda: _in_flight(play) == 3, "three requests to be counted")
        for stream in streams:
            stream.close()
    wait_until(lambda: _in_flight(play) == 0, "none to be counted")
