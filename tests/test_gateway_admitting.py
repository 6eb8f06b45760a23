"""What the gateway refuses before a replica is used, and what it gives back however a request ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from aiohttp import web
from django.db import transaction
from pytest_django import DjangoDbBlocker

from catalog.models import Key, Model, Revision
from nodes.models import Rank
from tests.stage import (
    MESSAGES,
    Play,
    begin_stream,
    change,
    chat_answer,
    chat_event,
    drop,
    make_key,
    make_model,
    make_replica,
    never,
    playing_for_many,
    saying,
)
from tests.waiting import wait_until

pytestmark = [pytest.mark.lasting_database, pytest.mark.on_postgresql]


@pytest.fixture(scope="module")
def access_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "access.log"


@pytest.fixture(scope="module")
def all_plays(django_db_setup: None, django_db_blocker: DjangoDbBlocker, access_log: Path) -> Iterator[Play]:
    with playing_for_many(
        django_db_blocker,
        LLMGW_ACCESS_LOG=str(access_log),
        LLMGW_MEDIA_HOSTS=["images.example"],
        LLMGW_TABLE_POLL_S=0.05,
    ) as play:
        yield play


@pytest.fixture
def play(all_plays: Play) -> Play:
    return all_plays.begin_anew()


def _open(row: Key, *models: Model) -> None:
    """What `key_edit` does: these models and no others."""
    with transaction.atomic():
        row.opened.set(models)
        Key.objects.filter(pk=row.pk).update(opens_all=False, revision=Revision.advance())


def _ask(play: Play, path: str, key: str, **fields: Any) -> tuple[int, Any, dict[str, str]]:
    """As any program would: a status, JSON, and headers."""
    body = json.dumps({"model": "tiny", "messages": MESSAGES, **fields}).encode()
    headers = {"X-Api-Key": key, "anthropic-version": "2023-06-01"}
    request = urllib.request.Request(play.web.url + path, data=body, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.status, json.load(response), {**response.headers}
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error), {**error.headers}


@contextlib.contextmanager
def _on_engine(play: Play, engine: str, name: str = "real", **columns: Any) -> Iterator[str]:
    """A model that this kind of engine serves, which is the play's own."""
    model = make_model(name, **columns)
    model.profiles.update(engine=engine)
    replica = make_replica(model, play.engine)
    change(replica, launch={**replica.launch, "profile": {"engine": engine}})
    play.wait_until_known(name)
    try:
        yield name
    finally:
        change(replica, state="stopped")
        wait_until(lambda: str(replica.pk) not in play.web.targets(), "the replica to be forgotten")


# --- who may use what ---------------------------------------------------------------------------------------


def test_a_key_knows_of_the_models_on_its_list_alone(play: Play) -> None:
    secret, other = make_model("secret-1", "secret-alias"), make_model("other-1")
    row, key = make_key()
    _open(row, other)
    bearer = {"Authorization": f"Bearer {key}"}

    def listed() -> set[str]:
        return {each["id"] for each in play.send("GET", "/v1/models", **bearer).body["data"]}

    wait_until(lambda: listed() == {"other-1"}, "the list to be known")
    nowhere = play.send("GET", "/v1/models/secret-0", **bearer)
    for name in ("secret-1", "secret-alias", "tiny"):
        hidden = play.send("GET", f"/v1/models/{name}", **bearer)
        assert (hidden.status, hidden.body["code"]) == (404, "model_not_found")
        assert hidden.body["message"].replace(name, "secret-0") == nowhere.body["message"]
        body = json.dumps({"model": name, "messages": MESSAGES}).encode()
        asked = play.send("POST", "/v1/chat/completions", body, **bearer)
        assert (asked.status, asked.body["message"]) == (404, hidden.body["message"])
    assert not play.engine.heard
    _open(row, other, secret)
    wait_until(lambda: listed() == {"other-1", "secret-1", "secret-alias"}, "the longer list to be known")


def test_a_model_is_shown_with_what_a_request_may_really_use(play: Play) -> None:
    with _on_engine(play, "vllm", "shown-1", context_length=32_768, max_output=100, can_tools=True) as name:
        rank = Rank.objects.get(replica__model__name=name)
        Rank.objects.filter(pk=rank.pk).update(context_length=4096)
        change(rank.replica)
        wait_until(lambda: play.shown(name).get("context_length") == 4096, "the engine's own word to count")
        shown = play.shown(name)
        assert (shown["status"], shown["reason"], shown["max_output"]) == ("ready", "", 100)
        assert (shown["object"], shown["owned_by"], shown["simulated"]) == ("model", "llmgw", False)
        assert shown["capabilities"] == {"tools": True, "vision": False, "embeddings": False}
        assert isinstance(shown["created"], int)


# --- what an engine speaks, and what a model can ------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/rerank", "/v1/score"])
def test_an_endpoint_that_the_engine_does_not_speak_is_refused(play: Play, path: str) -> None:
    status, body, _ = _ask(play, path, play.key)
    assert (status, body["error"]["code"]) == (400, "unsupported_endpoint")
    assert "its engine sim does not speak it" in body["error"]["message"]
    assert not play.engine.heard


@pytest.mark.parametrize(
    ("path", "key", "status", "kind"),
    [
        pytest.param("/v1/messages", "", 400, "invalid_request_error", id="an engine that does not speak it"),
        pytest.param("/v1/messages/count_tokens", "", 400, "invalid_request_error", id="nor counts tokens"),
        pytest.param("/v1/messages", "nonsense", 401, "authentication_error", id="a bad key"),
    ],
)
def test_anthropics_clients_are_refused_in_their_own_words(
    play: Play, path: str, key: str, status: int, kind: str
) -> None:
    told, body, headers = _ask(play, path, key or play.key, max_tokens=5)
    assert (told, body["type"], body["error"]["type"]) == (status, "error", kind)
    assert headers["x-request-id"].startswith("req_")


def test_what_an_engine_speaks_is_passed_through(play: Play) -> None:
    answer = {"id": "msg_1", "type": "message", "role": "assistant", "model": "real-2", "content": []}
    play.engine.script = saying(200, answer)
    with _on_engine(play, "vllm", "real-2"):
        status, body, _ = _ask(play, "/v1/messages", play.key, model="real-2", max_tokens=5)
    assert (status, body) == (200, answer)
    (heard,) = play.engine.heard
    assert (heard.path, heard.fields["max_tokens"]) == ("/v1/messages", 5)
    assert "x-api-key" not in {name.lower() for name in heard.headers}


def test_a_model_that_cannot_do_it_names_those_that_the_key_may_use(play: Play) -> None:
    row, key = make_key()
    able, hidden = make_model("able-1", can_tools=True), make_model("hidden-1", can_tools=True)
    _open(row, play.model, able)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]

    def refusal() -> str:
        return str(_ask(play, "/v1/chat/completions", key, tools=tools)[1]["error"]["message"])

    wait_until(lambda: "able-1" in refusal(), "the models to be known")
    status, body, _ = _ask(play, "/v1/chat/completions", key, tools=tools)
    assert (status, body["error"]["code"]) == (400, "unsupported_capability")
    assert hidden.name not in body["error"]["message"]
    assert not play.engine.heard


def test_media_from_an_allowed_host_passes(play: Play) -> None:
    parts = [{"type": "image_url", "image_url": {"url": "https://images.example/a.png"}}]
    with _on_engine(play, "vllm", "sees-1", can_vision=True, context_length=1000, max_output=10):
        chat = {"model": "sees-1", "messages": [{"role": "user", "content": parts}]}
        assert play.chat(**chat).choices
        parts[0]["image_url"] = {"url": "https://images.example.evil.example/a.png"}
        assert play.refused(**chat).body["code"] == "remote_media"
    assert [heard.path for heard in play.engine.heard] == ["/v1/chat/completions"], (
        "no tokenizer counts images"
    )


# --- context and output -------------------------------------------------------------------------------------


def _counting(tokens: int) -> Callable[..., Any]:
    """vllm's tokenizer beside an answer to chats."""

    async def script(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
        if request.path == "/tokenize":
            return web.json_response(
                {"count": tokens, "max_model_len": 1000, "tokens": [], "token_strs": None}
            )
        return web.json_response(chat_answer(fields))

    return script


def _long(size: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": "x" * size}]


def test_a_prompt_that_cannot_fit_is_refused_without_asking_anybody(play: Play) -> None:
    with _on_engine(play, "vllm", "short-1", context_length=1000):
        refusal = play.refused(model="short-1", messages=_long(130_000), max_tokens=100)
        assert (refusal.status, refusal.body["code"]) == (400, "context_length_exceeded")
        assert "takes 1000 in all" in refusal.body["message"]
        assert play.refused(model="short-1", max_tokens=1001).body["code"] == "context_length_exceeded"
    assert not play.engine.heard


@pytest.mark.parametrize(
    ("tokens", "is_refused"),
    [pytest.param(901, True, id="one too many"), pytest.param(900, False, id="it just fits")],
)
def test_near_the_limit_the_engines_own_tokenizer_is_asked(play: Play, tokens: int, is_refused: bool) -> None:
    play.engine.script = _counting(tokens)
    with _on_engine(play, "vllm", "near-1" if is_refused else "near-2", context_length=1000) as name:
        chat: dict[str, Any] = {"model": name, "messages": _long(5000), "max_tokens": 100}
        if is_refused:
            refusal = play.refused(**chat)
            assert refusal.body["code"] == "context_length_exceeded"
            assert "needs 1001 tokens, 901 for the prompt and 100 for the answer" in refusal.body["message"]
        else:
            assert play.chat(**chat).choices
        assert play.chat(model=name, max_tokens=5).choices, "a short prompt asks nobody"
    paths = [heard.path for heard in play.engine.heard]
    assert paths == ["/tokenize", *["/v1/chat/completions"] * (1 if is_refused else 2)]


@pytest.mark.parametrize("script", [never, saying(500, b"<html>"), saying(200, {"count": "many"})])
def test_an_engine_whose_tokenizer_does_not_answer_judges_the_request_itself(play: Play, script: Any) -> None:
    async def silent_tokenizer(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
        if request.path == "/tokenize":
            answer: web.StreamResponse = await script(request, fields)
            return answer
        return web.json_response(chat_answer(fields))

    play.engine.script = silent_tokenizer
    with _on_engine(play, "vllm", f"silent-{id(script)}", context_length=1000) as name:
        assert play.chat(model=name, messages=_long(5000), max_tokens=100).choices


@pytest.mark.parametrize(
    ("choice", "asked", "heard"),
    [
        pytest.param("clamp", {"max_tokens": 500}, {"max_tokens": 50}, id="cut down"),
        pytest.param(
            "clamp", {"max_completion_tokens": 500}, {"max_completion_tokens": 50}, id="by its name"
        ),
        pytest.param("", {"max_tokens": 50}, {"max_tokens": 50}, id="as much as may be"),
        pytest.param("", {}, {"max_tokens": 50}, id="left open"),
        pytest.param("", {"max_tokens": 51}, None, id="refused"),
    ],
)
def test_an_answer_is_as_long_as_the_operator_allows(
    play: Play, choice: str, asked: dict[str, int], heard: dict[str, int] | None
) -> None:
    name = f"bounded-{choice}-{len(asked)}-{sum(asked.values())}-{'-'.join(asked)}"
    with _on_engine(play, "vllm", name, max_output=50, over_max_output=choice):
        if heard is None:
            assert play.refused(model=name, **asked).body["code"] == "max_output_exceeded"
            assert not play.engine.heard
            return
        play.chat(model=name, **asked)
    told = play.engine.heard[0].fields
    assert {key: value for key, value in told.items() if "tokens" in key} == heard


# --- limits -------------------------------------------------------------------------------------------------


def test_a_key_over_its_limit_hears_which_and_until_when(play: Play) -> None:
    _, key = make_key(requests_per_minute=2)
    with play.web.client(key) as client:
        for _ in range(2):
            assert client.chat.completions.create(model="tiny", messages=MESSAGES).choices
        with pytest.raises(openai.RateLimitError, match="may have 2 requests a minute") as caught:
            client.chat.completions.create(model="tiny", messages=MESSAGES)
        assert 1 <= int(caught.value.response.headers["retry-after"]) <= 120
        assert client.models.list().data, "what costs nothing is not counted"
    assert len(play.engine.heard) == 2


def test_a_model_over_its_limit_says_so_to_every_key(play: Play) -> None:
    with _on_engine(play, "vllm", "busy-1", requests_per_minute=1):
        play.chat(model="busy-1")
        _, key = make_key()
        status, body, headers = _ask(play, "/v1/chat/completions", key, model="busy-1")
    assert (status, body["error"]["code"]) == (429, "rate_limit_exceeded")
    assert body["error"]["message"].startswith('The model "busy-1" may have 1 requests a minute')
    assert "retry-after" in headers


def test_tokens_count_as_the_engine_counted_them(play: Play) -> None:
    async def costly(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
        usage = {"prompt_tokens": 700, "completion_tokens": 300, "total_tokens": 1000}
        return web.json_response({**chat_answer(fields), "usage": usage})

    play.engine.script = costly
    _, key = make_key(tokens_per_minute=900)
    assert _ask(play, "/v1/chat/completions", key)[0] == 200
    status, body, _ = _ask(play, "/v1/chat/completions", key)
    assert status == 429
    assert "may have 900 tokens a minute" in body["error"]["message"]


async def _half_a_stream(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
    response = await begin_stream(request)
    await response.write(chat_event(fields, "Hel"))
    drop(request)
    return response


def _leave(play: Play, key: str) -> None:
    """Ask, and leave before there is an answer."""
    body = json.dumps({"model": "tiny", "messages": MESSAGES}).encode()
    with play.web.connection() as connection:
        connection.sendall(play.request(body).replace(play.key.encode(), key.encode()))
        wait_until(lambda: play.engine.heard, "the engine to be asked")


def _send(play: Play, key: str, **fields: Any) -> None:
    with contextlib.suppress(Exception), play.web.client(key) as client:
        answer = client.chat.completions.create(model="tiny", messages=MESSAGES, **fields)
        if fields.get("stream"):
            list(answer)


@pytest.mark.parametrize(
    ("script", "act"),
    [
        pytest.param(None, _send, id="an answer"),
        pytest.param(None, lambda play, key: _send(play, key, stream=True), id="a stream"),
        pytest.param(saying(400, {"error": {"message": "No."}}), _send, id="an engine's refusal"),
        pytest.param(None, lambda play, key: _send(play, key, n=1000), id="a refusal of ours"),
        pytest.param(saying(500, b"<html>"), _send, id="an engine's fault"),
        pytest.param(_half_a_stream, lambda play, key: _send(play, key, stream=True), id="half a stream"),
        pytest.param(never, _leave, id="a client that left"),
    ],
)
def test_a_request_gives_back_what_it_took_however_it_ends(play: Play, script: Any, act: Any) -> None:
    _, key = make_key(concurrency=1)
    for _ in range(2):
        play.engine.script = script or play.engine.script
        act(play, key)
        play.begin_anew()
        wait_until(lambda: _ask(play, "/v1/chat/completions", key)[0] == 200, "the key to be let in again")
        play.begin_anew()


def test_requests_at_once_are_counted_while_they_run(play: Play) -> None:
    _, key = make_key(concurrency=2)
    ready = asyncio.Event()

    async def waiting(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
        await ready.wait()
        return web.json_response(chat_answer(fields))

    play.engine.script = waiting
    answers: list[int] = []
    threads = [
        threading.Thread(target=lambda: answers.append(_ask(play, "/v1/chat/completions", key)[0]))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(play.engine.heard) == 2, "both to be with the engine")
    status, body, _ = _ask(play, "/v1/chat/completions", key)
    assert (status, "2 requests at once" in body["error"]["message"]) == (429, True)
    play.thread.loop.call_soon_threadsafe(ready.set)
    for thread in threads:
        thread.join(10)
    assert answers == [200, 200]


# --- the record of a request --------------------------------------------------------------------------------


def _lines(access_log: Path) -> list[dict[str, Any]]:
    text = access_log.read_text() if access_log.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def _recorded(access_log: Path, **wanted: Any) -> dict[str, Any]:
    """The one line that says so."""

    def found() -> list[dict[str, Any]]:
        return [line for line in _lines(access_log) if wanted.items() <= line.items()]

    wait_until(found, f"a line with {wanted}")
    assert len(found()) == 1, "a request ends once"
    return found()[0]


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [
        pytest.param("trace-1.A_b", True, id="a harmless one"),
        pytest.param("x" * 128, True, id="a long one"),
        pytest.param("x" * 129, False, id="one that is too long"),
        pytest.param("a b", False, id="one with a space"),
        pytest.param('a"b', False, id="one with a quote"),
    ],
)
def test_a_request_keeps_the_name_that_its_client_gave_it(play: Play, given: str, is_kept: bool) -> None:
    told = play.send("GET", "/v1/models/tiny", X_Request_Id=given).headers["x-request-id"]
    assert (told == given) is is_kept
    assert is_kept or told.startswith("req_")


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        pytest.param({}, 200, "", id="an answer"),
        pytest.param({"stream": True}, 200, "", id="a stream"),
        pytest.param({"n": 1000}, 400, "out_of_bounds", id="a refusal"),
        pytest.param({"model": "nobody"}, 404, "model_not_found", id="an unknown model"),
    ],
)
def test_every_request_is_recorded_once_with_its_end(
    play: Play, access_log: Path, fields: dict[str, Any], status: int, code: str
) -> None:
    name = f"recorded-{status}-{len(fields)}-{'-'.join(fields)}"
    body = json.dumps({"model": "tiny", "messages": MESSAGES, **fields}).encode()
    headers = (b"Content-Length: %d" % len(body), b"X-Request-Id: " + name.encode(), b"Connection: close")
    with play.web.connection() as connection:
        connection.sendall(play.request(body, *headers))
        while connection.recv(1 << 16):
            pass  # whoever leaves in the middle of a stream is recorded as one that left
    line = _recorded(access_log, request=name)
    assert (line["status"], line.get("code", "")) == (status, code)


def test_a_client_that_left_is_recorded_as_one(play: Play, access_log: Path) -> None:
    play.engine.script = never
    body = json.dumps({"model": "tiny", "messages": MESSAGES}).encode()
    with play.web.connection() as connection:
        connection.sendall(play.request(body, b"Content-Length: %d" % len(body), b"X-Request-Id: left-1"))
        wait_until(lambda: play.engine.heard, "the engine to be asked")
    assert _recorded(access_log, request="left-1")["status"] == 499
    wait_until(lambda: play.engine.heard[0].is_gone, "the engine to be left")
