"""What an engine's answer becomes on its way: usage obtained, silences filled, plain answers put together."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from pytest_django import DjangoDbBlocker

from catalog.durations import SECOND
from catalog.models import Fallback, Key, Model
from llmgw.gateway.admission import ModelEntry
from nodes.models import Unplaced
from tests.stage import (
    MESSAGES,
    Play,
    Script,
    begin_stream,
    change,
    chat_answer,
    chat_event,
    drop,
    make_model,
    make_replica,
    never,
    playing_engine,
    playing_for_many,
    saying,
    well_behaved,
)
from tests.waiting import wait_until

pytestmark = [pytest.mark.lasting_database, pytest.mark.one_database]


@dataclass
class Stage:
    """A play whose engine serves "tiny" as the sim engine, "lama" as llama.cpp and "vast" as vllm, and the
    log of the requests that have ended."""

    play: Play
    log: Path
    asked: int = 0

    @property
    def request_id(self) -> str:
        return f"asked.by-me_{self.asked}"

    def ask(self, **fields: Any) -> tuple[dict[str, str], bytes]:
        """Headers and body of the answer to a chat, as they came."""
        self.asked += 1
        body = json.dumps({"model": "tiny", "messages": MESSAGES, **fields}).encode()
        headers = {"Authorization": f"Bearer {self.play.key}", "X-Request-Id": self.request_id}
        request = urllib.request.Request(f"{self.play.web.url}/v1/chat/completions", body, headers)
        with urllib.request.urlopen(request, timeout=20) as response:
            return {name.lower(): value for name, value in response.headers.items()}, response.read()

    def stream(self, **fields: Any) -> list[bytes]:
        """The frames of a stream, which is made of nothing else."""
        _, body = self.ask(stream=True, **fields)
        frames = body.split(b"\n\n")
        assert frames.pop() == b""
        assert all(re.fullmatch(rb"(?:: |data: )[^\n]*", frame) for frame in frames), "no frame is torn"
        return frames

    def told(self) -> dict[str, Any]:
        """The line of the request that was asked last."""

        def own() -> list[dict[str, Any]]:
            lines = self.log.read_text().splitlines() if self.log.exists() else []
            return [told for line in lines if (told := json.loads(line))["request"] == self.request_id]

        return wait_until(own, "the request to be told of")[0]


@pytest.fixture(scope="module")
def all_stages(
    django_db_setup: None, django_db_blocker: DjangoDbBlocker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    log = tmp_path_factory.mktemp("log") / "access.jsonl"
    settings = {"HOLD_S": 1, "IDLE_S": 0.5, "FIRST_BYTE_S": 1, "COMMENT_S": 0.25, "ACCESS_LOG": str(log)}
    with playing_for_many(
        django_db_blocker, **{f"LLMGW_{name}": value for name, value in settings.items()}
    ) as play:
        for name, engine in (("lama", "llamacpp"), ("vast", "vllm")):
            launch = {"model": name, "source": "/weights", "profile": {"engine": engine}}
            replica = make_replica(make_model(name), play.engine, state="starting")
            change(replica, launch=launch, state="ready")
            play.wait_until_known(name)
        yield Stage(play, log)


@pytest.fixture
def stage(all_stages: Stage) -> Stage:
    all_stages.play.begin_anew()
    return all_stages


def _heard(stage: Stage) -> dict[str, Any]:
    return stage.play.engine.heard[-1].fields


USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
DETAILED = {**USAGE, "prompt_tokens_details": {"cached_tokens": 8}}


def _streaming(*words: str, pause_s: float = 0, first_s: float = 0, usage: Any = DETAILED) -> Script:
    """A chat in words, and usage for who asks for it, as engines do."""

    async def script(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(first_s)
        response = await begin_stream(request)
        for word in words:
            await response.write(chat_event(fields, word))
            await asyncio.sleep(pause_s)
        if (fields.get("stream_options") or {}).get("include_usage"):
            chunk = {"id": "chatcmpl-1", "model": fields["model"], "choices": [], "usage": usage}
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    return script


# --- usage --------------------------------------------------------------------------------


def test_usage_is_obtained_and_kept_from_who_did_not_ask_for_it(stage: Stage) -> None:
    stage.play.engine.script = _streaming("One", " two", " three")
    frames = stage.stream(stream_options={"continuous": 1})
    assert len(frames) == 4
    assert b"usage" not in b"".join(frames)
    assert _heard(stage)["stream_options"] == {"continuous": 1, "include_usage": True}
    told = stage.told()
    tokens = [told[f"{name}_tokens"] for name in ("prompt", "cached", "completion")]
    assert tokens == [9, 8, 3]


def test_usage_that_was_asked_for_is_passed_on(stage: Stage) -> None:
    stage.play.engine.script = _streaming("One")
    *_, usage, done = stage.stream(stream_options={"include_usage": True})
    assert json.loads(usage.removeprefix(b"data: "))["usage"] == DETAILED
    assert done == b"data: [DONE]"


def test_llamacpp_is_not_asked_for_usage_and_its_timings_stay(stage: Stage) -> None:
    timings = {"cache_n": 24, "prompt_n": 5, "predicted_n": 6, "predicted_per_second": 10.9}

    async def script(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
        assert "stream_options" not in fields
        response = await begin_stream(request)
        await response.write(chat_event(fields, "One"))
        last = [{"index": 0, "delta": {}, "finish_reason": "stop"}]
        await _chunk(response, {"model": fields["model"], "timings": timings}, last)
        await response.write(b"data: [DONE]\n\n")
        return response

    stage.play.engine.script = script
    *_, last, done = stage.stream(model="lama")
    assert json.loads(last.removeprefix(b"data: "))["timings"] == timings
    assert done == b"data: [DONE]"
    told = stage.told()
    assert [told[f"{name}_tokens"] for name in ("prompt", "cached", "completion")] == [29, 24, 6]


@pytest.mark.parametrize("options", [pytest.param("x", id="a text"), pytest.param([1], id="a list")])
def test_options_of_another_shape_are_for_the_engine_to_refuse(stage: Stage, options: Any) -> None:
    stage.stream(stream_options=options)
    assert _heard(stage)["stream_options"] == options


# --- headers ------------------------------------------------------------------------------


@pytest.mark.parametrize("is_stream", [pytest.param(False, id="plain"), pytest.param(True, id="streamed")])
def test_an_answer_tells_how_it_came_about(stage: Stage, is_stream: bool) -> None:
    headers, _ = stage.ask(model="small", stream=is_stream)
    assert headers["x-request-id"] == stage.request_id
    assert headers["x-llmgw-model"] == "tiny"
    assert headers["x-llmgw-replica"] == str(stage.play.replica.pk)
    assert headers["x-llmgw-route"] == "only"
    assert headers["x-llmgw-simulated"] == "true"
    assert 0 <= float(headers["x-llmgw-overhead-ms"]) < 1000


def test_the_engines_own_time_is_no_overhead(stage: Stage) -> None:
    stage.play.engine.script = _streaming("One", first_s=0.09)
    headers, _ = stage.ask(stream=True)
    assert float(headers["x-llmgw-overhead-ms"]) < 90


# --- silence ------------------------------------------------------------------------------


def test_a_silence_is_filled_with_comments_before_the_first_word_and_between_words(stage: Stage) -> None:
    stage.play.engine.script = _streaming("One", " two", pause_s=0.4, first_s=0.4)
    frames = stage.stream()
    first = next(at for at, frame in enumerate(frames) if b"One" in frame)
    second = next(at for at, frame in enumerate(frames) if b"two" in frame)
    assert set(frames[:first]) == set(frames[first + 1 : second]) == {b": waiting"}
    assert frames[-1] == b"data: [DONE]"


def test_a_comment_does_not_keep_a_request_from_another_replica(stage: Stage) -> None:
    async def waits_and_drops(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(0.6)
        drop(request)
        return web.Response()

    with stage.play.another_engine(waits_and_drops) as bad:
        wait_until(lambda: stage.stream() and bad.heard, "the bad replica to be asked")
        bad.heard.clear()
        while not bad.heard:
            frames = stage.stream()
        assert frames[0] == b": waiting"
        assert frames[-1] == b"data: [DONE]"


def test_a_refusal_after_a_comment_is_the_streams_last_event(stage: Stage) -> None:
    async def waits_and_refuses(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(0.6)
        return web.json_response({"error": {"message": "too long"}}, status=400)

    stage.play.engine.script = waits_and_refuses
    comment, *_, last = stage.stream()
    assert comment == b": waiting"
    assert json.loads(last.removeprefix(b"data: "))["error"]["message"] == "too long"


async def _three_words_and_pings(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
    response = await begin_stream(request)
    for word in ("One", " two", " three"):
        await response.write(chat_event(fields, word))
    while True:
        await asyncio.sleep(0.1)
        await response.write(b":\n\n")


def test_pings_of_a_stuck_engine_are_no_sign_of_progress(stage: Stage) -> None:
    stage.play.engine.script = _three_words_and_pings
    body = json.dumps({"model": "tiny", "messages": MESSAGES, "stream": True}).encode()
    with stage.play.web.connection() as connection:
        connection.sendall(stage.play.request(body))
        received = b""
        while b"stream_cut" not in received:
            received += connection.recv(10_000) or pytest.fail("it ended without a word")
    assert b"its replica was silent for too long" in received
    assert b"[DONE]" not in received
    wait_until(lambda: stage.play.engine.heard[0].is_gone, "the engine to be left", timeout_s=1)


@pytest.mark.parametrize("is_stream", [pytest.param(False, id="plain"), pytest.param(True, id="streamed")])
def test_an_engine_that_never_begins_is_given_up(stage: Stage, is_stream: bool) -> None:
    stage.play.engine.script = never
    if is_stream:
        last = stage.stream()[-1]
        error = json.loads(last.removeprefix(b"data: "))["error"]
    else:
        error = stage.play.refused().body
    assert error["code"] == "engine_unreachable"
    assert "was silent for too long" in error["message"]
    wait_until(lambda: all(heard.is_gone for heard in stage.play.engine.heard), "the engine to be left")


def test_a_models_own_time_outs_count(stage: Stage) -> None:
    change(stage.play.model, timeout_first_byte_ns=250_000_000)
    stage.play.engine.script = _streaming("One", first_s=0.6)
    wait_until(lambda: stage.stream()[-1] != b"data: [DONE]", "the edit to count")
    change(stage.play.model, timeout_first_byte_ns=0)
    wait_until(lambda: stage.stream()[-1] == b"data: [DONE]", "the edit to be taken back")


def test_a_stream_is_over_with_its_last_word_even_where_its_engine_lingers(stage: Stage) -> None:
    async def lingers(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
        await _streaming("One")(request, fields)
        return await never(request, fields)

    change(stage.play.model, timeout_idle_ns=60_000_000_000)
    stage.play.engine.script = _streaming("One", pause_s=0.7)
    wait_until(lambda: stage.stream()[-1] == b"data: [DONE]", "the edit to count")
    stage.play.engine.script = lingers
    assert stage.stream()[-1] == b"data: [DONE]"
    change(stage.play.model, timeout_idle_ns=0)
    stage.play.engine.script = _streaming("One", pause_s=0.7)
    wait_until(lambda: b"stream_cut" in stage.stream()[-1], "the edit to be taken back")


# --- plain answers of engines that cannot cancel them -------------------------------------


def test_llamacpp_is_asked_for_a_stream_that_becomes_a_plain_answer(stage: Stage) -> None:
    async def script(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
        assert fields["stream"] is True
        return await _streaming("One", " two")(request, fields)

    async def finishing(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        head = {"id": "chatcmpl-1", "created": 1, "object": "chat.completion.chunk", "model": fields["model"]}
        for delta, finish in (({"role": "assistant", "content": None}, None), ({"content": "One"}, None)):
            await _chunk(response, head, [{"index": 0, "delta": delta, "finish_reason": finish}])
        await _chunk(response, head, [{"index": 0, "delta": {}, "finish_reason": "stop"}])
        await _chunk(response, {**head, "usage": DETAILED}, [])
        await response.write(b"data: [DONE]\n\n")
        return response

    stage.play.engine.script = finishing
    headers, body = stage.ask(model="lama", temperature=0)
    assert _heard(stage) == {
        "model": "lama",
        "messages": MESSAGES,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert headers["content-type"] == "application/json"
    assert json.loads(body) == {
        "id": "chatcmpl-1",
        "created": 1,
        "object": "chat.completion",
        "model": "lama",
        "choices": [
            {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "One"}}
        ],
        "usage": DETAILED,
    }
    assert stage.told()["cached_tokens"] == 8
    stage.play.engine.script = script
    assert stage.play.refused(model="lama").status == 502, "no word of a finish"


async def _chunk(response: web.StreamResponse, head: dict[str, Any], choices: list[Any]) -> None:
    await response.write(b"data: " + json.dumps({**head, "choices": choices}).encode() + b"\n\n")


def test_a_plain_answer_that_breaks_off_inside_is_refused_as_the_engine_does(stage: Stage) -> None:
    async def breaks(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        await response.write(chat_event(fields, "One"))
        await response.write(b'data: {"error":{"message":"Context size has been exceeded.","code":500}}\n\n')
        return response

    stage.play.engine.script = breaks
    refusal = stage.play.refused(model="lama")
    assert (refusal.status, refusal.body["message"]) == (500, "Context size has been exceeded.")


def test_an_engine_that_works_on_a_plain_answer_is_left_with_its_client(stage: Stage) -> None:
    stage.play.engine.script = _three_words_and_pings
    body = json.dumps({"model": "lama", "messages": MESSAGES}).encode()
    with stage.play.web.connection() as connection:
        connection.sendall(stage.play.request(body))
        wait_until(lambda: stage.play.engine.heard, "the engine to be asked")
    wait_until(lambda: stage.play.engine.heard[0].is_gone, "the engine to be left", timeout_s=1)


# --- what keeps caches apart --------------------------------------------------------------


def test_keys_of_one_scope_share_what_vllm_has_cached_and_nobody_guesses_into_it(stage: Stage) -> None:
    stage.ask(model="vast")
    assert "cache_salt" not in _heard(stage)
    key = Key.objects.get()
    change(key, cache_scope="team")

    def salt(**fields: Any) -> str:
        stage.ask(model="vast", **fields)
        return str(_heard(stage).get("cache_salt", ""))

    try:
        wait_until(lambda: salt() == '["team", null]', "the scope to count")
        assert salt(cache_salt="own") == '["team", "own"]'
        stage.ask(cache_salt="own")
        assert _heard(stage)["cache_salt"] == "own", "for another engine it is a field like any other"
    finally:
        change(key, cache_scope="")
    wait_until(lambda: salt() == "", "the scope to be gone")
    assert salt(cache_salt='["team", null]') == '["", "[\\"team\\", null]"]'


# --- what is no answer --------------------------------------------------------------------


def _plain(body: bytes, **headers: str) -> Script:
    async def script(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
        whole = {"Content-Type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
        response = web.StreamResponse(headers=whole)
        await response.prepare(request)
        await response.write(body)
        return response

    return script


WHOLE = json.dumps(chat_answer({"model": "tiny"})).encode()


@pytest.mark.parametrize(
    ("script", "code"),
    [
        pytest.param(_plain(b"\x00\xff\x17garbage"), "engine_unreadable", id="garbage"),
        pytest.param(_plain(b'{"id": garbage}'), "engine_unreadable", id="garbage in brackets"),
        pytest.param(_plain(b"{}"), "engine_unreadable", id="an object with nothing in it"),
        pytest.param(_plain(b'{"choices":[]}'), "engine_unreadable", id="no choice"),
        pytest.param(_plain(WHOLE, Content_Length="5000"), "engine_unreachable", id="less than it promised"),
        pytest.param(_plain(WHOLE, Content_Length="20"), "engine_unreadable", id="more than it promised"),
        pytest.param(_plain(WHOLE, Content_Encoding="gzip"), "engine_unreachable", id="no gzip"),
        pytest.param(_plain(b'{"error":{"message":"no"}}'), "engine_error", id="an error under a 200"),
        pytest.param(
            _plain(json.dumps(chat_answer({"model": "other"})).encode()), "replica_moved", id="another model"
        ),
        pytest.param(
            _plain(b"data: [DONE]\n\n", Content_Type="text/event-stream"), "engine_unreadable", id="SSE"
        ),
    ],
)
def test_what_is_no_answer_is_never_passed_on_as_one(stage: Stage, script: Script, code: str) -> None:
    stage.play.engine.script = script
    refusal = stage.play.refused()
    assert refusal.status >= 500
    assert refusal.body["code"] == code
    assert "garbage" not in refusal.body["message"]
    stage.play.engine.script = well_behaved
    assert stage.play.chat().choices, "the next one meets a clean connection"


def _events(*events: bytes) -> Script:
    async def script(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        for event in events:
            await response.write(event)
        return response

    return script


@pytest.mark.parametrize(
    ("script", "code"),
    [
        pytest.param(_events(b"data: [DONE]\n\n"), "engine_unreachable", id="a last word alone"),
        pytest.param(_events(b": ping\n\n"), "engine_unreachable", id="a ping alone"),
        pytest.param(_events(b"<html>"), "engine_unreachable", id="a page"),
        pytest.param(
            _events(chat_event({"model": "other"}, "One"), b"data: [DONE]\n\n"),
            "replica_moved",
            id="another model",
        ),
    ],
)
def test_a_stream_without_an_answer_is_no_success(stage: Stage, script: Script, code: str) -> None:
    stage.play.engine.script = script
    refusal = stage.play.refused(stream=True)
    assert refusal.status >= 500
    assert refusal.body["code"] == code


def test_an_answer_that_was_compressed_unasked_is_read(stage: Stage) -> None:
    stage.play.engine.script = _plain(gzip.compress(WHOLE), Content_Encoding="gzip")
    headers, body = stage.ask()
    assert json.loads(body) == json.loads(WHOLE)
    assert "content-encoding" not in headers


# --- other models -------------------------------------------------------------------------


@pytest.fixture
def standing_in(stage: Stage) -> Iterator[Stage]:
    """ "lama" may answer for "tiny", on an engine of its own."""
    model = stage.play.model
    with playing_engine(stage.play.thread, well_behaved) as engine:
        other = make_model("other")
        replica = make_replica(other, engine)
        Fallback.objects.create(model=model, name_id="other", position=0)
        change(model)
        stage.play.wait_until_known("other")
        wait_until(lambda: _fallbacks() == ("other",), "the edit to arrive")
        yield stage
        Fallback.objects.all().delete()
        change(model)
        change(replica, state="stopped")
        wait_until(lambda: _fallbacks() == (), "the edit to be taken back")
        other.names.all().delete()
        other.delete()


def _fallbacks() -> tuple[str, ...]:
    return _entry("tiny").fallbacks


def _entry(name: str) -> ModelEntry:
    from llmgw import asgi

    assert asgi._gateway is not None
    model = asgi._gateway.table.current.find(name)
    assert model is not None
    return model


async def _drops(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
    drop(request)
    return web.Response()


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(_drops, id="drops the connection"),
        pytest.param(saying(500, {"error": {"message": "EngineCore encountered an issue"}}), id="is broken"),
        pytest.param(saying(503, {"error": {"message": "busy"}}), id="is busy"),
        pytest.param(_plain(b"garbage"), id="talks nonsense"),
    ],
)
def test_another_model_stands_in_for_one_whose_replica(standing_in: Stage, script: Script) -> None:
    standing_in.play.engine.script = script
    for is_stream in (False, True):
        headers, body = standing_in.ask(stream=is_stream)
        if b": waiting" not in body:  # on a busy machine a comment, and with it the head, may come first
            assert headers["x-llmgw-model"] == "other"
        assert b'"tiny"' in body
        assert b'"other"' not in body, "the client hears the name that it used"
        assert standing_in.told()["model"] == "other"


def test_another_model_stands_in_for_one_without_a_replica(standing_in: Stage) -> None:
    replica = standing_in.play.replica
    change(replica, state="starting")
    wait_until(lambda: str(replica.pk) not in standing_in.play.web.targets(), "the replica to be gone")
    assert standing_in.ask()[0]["x-llmgw-model"] == "other"
    change(replica, state="ready")
    wait_until(lambda: standing_in.ask()[0]["x-llmgw-model"] == "tiny", "the replica to be back")


def test_who_would_wait_for_room_goes_to_a_model_that_is_ready(standing_in: Stage) -> None:
    model, replica = standing_in.play.model, standing_in.play.replica
    change(model, timeout_hold_ns=600 * SECOND)
    Unplaced.objects.create(model=model, missing=1, why="0 of 1 nodes: 1 lacks a card.")
    change(replica, state="stopped")
    wait_until(lambda: str(replica.pk) not in standing_in.play.web.targets(), "the replica to be gone")
    assert standing_in.ask()[0]["x-llmgw-model"] == "other"
    Unplaced.objects.all().delete()
    change(replica, state="ready")
    change(model, timeout_hold_ns=0)
    wait_until(lambda: standing_in.ask()[0]["x-llmgw-model"] == "tiny", "the replica to be back")


def test_a_model_that_stands_in_keeps_to_its_own_limits(standing_in: Stage) -> None:
    change(Model.objects.get(name="other"), requests_per_minute=1)
    wait_until(lambda: _entry("other").limits.requests_per_minute == 1, "the edit to arrive")
    standing_in.play.engine.script = saying(503, {"error": {"message": "busy"}})
    assert standing_in.ask()[0]["x-llmgw-model"] == "other"
    refusal = standing_in.play.refused()
    assert (refusal.status, refusal.body["message"]) == (503, "busy"), "as if there were no other"


def test_no_other_model_is_asked_what_the_client_got_wrong(standing_in: Stage) -> None:
    standing_in.play.engine.script = saying(400, {"error": {"message": "too long"}})
    refusal = standing_in.play.refused()
    assert (refusal.status, refusal.body["message"]) == (400, "too long")
