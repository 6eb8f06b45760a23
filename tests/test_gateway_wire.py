"""What comes over the wire and is no ordinary request: it is answered or ended, in bounded time and room."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import resource
import select
import socket
import threading
import tracemalloc
from collections.abc import Iterator
from time import monotonic
from typing import Any

import psutil
import pytest
import uvicorn
from aiohttp import web
from pytest_django import DjangoDbBlocker

from llmgw.wire import BoundedProtocol
from nodes.models import Demand
from tests.stage import MESSAGES, Play, begin_stream, chat_event, make_model, never, playing_for_many
from tests.waiting import wait_until

BODY_S = 1.0
BODY_BYTES, HELD_BYTES = 1_000_000, 2_500_000
IDLE_CONNECTIONS = 5_000 if "SOAK_STEPS" in os.environ else 300
MIB = 1024 * 1024

pytestmark = [pytest.mark.lasting_database, pytest.mark.one_database]


@pytest.fixture(scope="module")
def all_plays(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[Play]:
    with playing_for_many(
        django_db_blocker,
        LLMGW_BODY_S=BODY_S,
        LLMGW_MAX_BODY_BYTES=BODY_BYTES,
        LLMGW_MAX_HELD_BYTES=HELD_BYTES,
    ) as play:
        yield play


@pytest.fixture
def play(all_plays: Play) -> Play:
    return all_plays.begin_anew()


def _chat(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "messages": MESSAGES, **fields}).encode()


def _read(connection: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """One answer, or what there is of it when the connection ends: its status, headers and body."""
    data = b""
    while b"\r\n\r\n" not in data and (more := connection.recv(1 << 16)):
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    length = int(headers.get("content-length", 0))
    while len(body) < length and (more := connection.recv(1 << 16)):
        body += more
    return int(first.split()[1]), headers, body


def _has_answer(connection: socket.socket) -> bool:
    return bool(select.select([connection], [], [], 0)[0])


def _code(body: bytes) -> str:
    code: str = json.loads(body)["error"]["code"]
    return code


def _is_served(play: Play) -> bool:
    with play.web.connection() as connection:
        connection.sendall(play.request(_chat()))
        return _read(connection)[0] == 200


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(b"X-A : 1", id="a header that cannot be one"),
        pytest.param(b"Connection: Upgrade\r\nUpgrade: websocket", id="a WebSocket"),
    ],
)
def test_nobody_can_fill_the_log_with_it(play: Play, line: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with play.web.connection() as connection:
        connection.sendall(play.request(_chat()).replace(b"\r\nHost:", b"\r\n" + line + b"\r\nHost:"))
        assert _read(connection)[0] in (200, 400)
    assert not [each for each in caplog.records if each.levelname != "INFO"]


def test_no_access_is_logged_whoever_listens(play: Play, caplog: pytest.LogCaptureFixture) -> None:
    """And so answers take the way here that they take in production."""
    logger = logging.getLogger("uvicorn.access")
    logger.addHandler(caplog.handler)
    try:
        assert _is_served(play)
    finally:
        logger.removeHandler(caplog.handler)
    assert not [each for each in caplog.records if each.name == logger.name]


# --- the two ways of an answer ------------------------------------------------------------------------------

_CHANGING = {"x-request-id", "x-llmgw-overhead-ms", "x-llmgw-route", "date"}
_CHUNK_SIZE = re.compile(rb"(?:^|\r\n)[0-9a-f]+\r\n")


@pytest.mark.parametrize(
    "fields", [{}, {"stream": True}, {"model": "nobody's"}], ids=["plain", "a stream", "a refusal"]
)
@pytest.mark.parametrize(
    ("plain", "other"),
    [
        pytest.param(b"/v1/chat/completions", b"/v1/chat/completions?a=b", id="a path with more behind it"),
        pytest.param(b"\r\nHost:", b"\r\nX-Forwarded-For: 10.0.0.1\r\nHost:", id="a proxy's word"),
    ],
)
def test_an_answer_is_the_same_whichever_way_it_takes(
    play: Play, plain: bytes, other: bytes, fields: dict[str, Any]
) -> None:
    """What is out of the ordinary goes through all of uvicorn, and some of it is answered by uvicorn."""
    told = []
    for line in (plain, other):
        with play.web.connection() as connection:
            request = play.request(_chat(**fields))
            assert plain in request
            connection.sendall(request.replace(plain, line))
            data = b""
            while not data.endswith((b"0\r\n\r\n", b"}")):
                data += connection.recv(1 << 16)
            head, _, body = data.partition(b"\r\n\r\n")
            lines = head.decode().split("\r\n")
            told.append((lines[0], sorted(lines[1:]), _CHUNK_SIZE.sub(b"", body)))
    (first, lines, body), (other_first, other_lines, other_body) = told
    names = [[line.partition(":")[0] for line in each] for each in (lines, other_lines)]
    assert names[0] == names[1]
    same = [
        [line for line in each if line.partition(":")[0] not in _CHANGING] for each in (lines, other_lines)
    ]
    assert (first, same[0], body) == (other_first, same[1], other_body)


def test_a_connection_serves_one_request_after_another_however_they_end(play: Play) -> None:
    """One is refused, one comes in pieces, one's client leaves: each is told apart from those before it."""
    with play.web.connection() as connection:
        for model, status in (("tiny", 200), ("nobody", 404), ("tiny", 200)):
            connection.sendall(play.request(_chat(model=model)))
            assert _read(connection)[0] == status
        whole = play.request(_chat(user="in pieces"))
        connection.sendall(whole[:-20])
        assert not _has_answer(connection)
        connection.sendall(whole[-20:])
        assert _read(connection)[0] == 200
        play.engine.script = never
        connection.sendall(play.request(_chat(user="who leaves")))
        wait_until(lambda: len(play.engine.heard) == 4, "the engine to be asked")
        wait_until(lambda: Demand.objects.filter(in_flight=1), "the request to be counted")
    wait_until(lambda: not Demand.objects.filter(in_flight__gt=0), "its slot to be given back")
    wait_until(lambda: play.engine.heard[-1].is_gone, "the engine to learn of it")
    assert [heard.fields.get("user") for heard in play.engine.heard] == [
        None,
        None,
        "in pieces",
        "who leaves",
    ]


async def _begins(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
    response = await begin_stream(request)
    await response.write(chat_event(fields, "Hello"))
    return await never(request, fields)


@pytest.mark.parametrize("query", [b"", b"?a=b"], ids=["directly", "the long way"])
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "a stream"])
def test_who_is_answered_while_the_server_stops_waiting_is_told_so(
    play: Play, query: bytes, stream: bool
) -> None:
    """As uvicorn does after the time that a shutdown may take. Another request may still come."""
    play.engine.script = _begins if stream else never
    with play.web.connection() as connection:
        request = play.request(_chat(stream=stream))
        connection.sendall(request.replace(b"completions HTTP", b"completions" + query + b" HTTP"))
        wait_until(lambda: play.engine.heard, "the engine to be asked")
        told = connection.recv(1 << 16) if stream else b""
        [task] = play.web.tasks()
        task.get_loop().call_soon_threadsafe(task.cancel)
        while not told.endswith((b"0\r\n\r\n", b"}")):
            told += connection.recv(1 << 16)
        assert told.startswith(b"HTTP/1.1 200 " if stream else b"HTTP/1.1 503 ")
        assert b'"gateway_stopping"' in told
        assert b"[DONE]" not in told
        wait_until(lambda: play.engine.heard[0].is_gone, "the engine to be left")
        play.begin_anew()
        connection.sendall(play.request(_chat()))
        assert _read(connection)[0] == 200


@pytest.mark.parametrize("line", [b"Connection: close", b"Connection: keep-alive"])
def test_a_connection_ends_where_the_client_says_so(play: Play, line: bytes) -> None:
    body = _chat()
    with play.web.connection() as connection:
        connection.sendall(play.request(body, b"Content-Length: %d" % len(body), line))
        status, headers, _ = _read(connection)
        assert (status, headers.get("connection")) == (200, "close" if line.endswith(b"close") else None)
        if line.endswith(b"close"):
            assert connection.recv(1) == b""
        else:
            connection.sendall(play.request(body))
            assert _read(connection)[0] == 200


# --- headers ------------------------------------------------------------------------------------------------


def test_an_engine_hears_nothing_that_belongs_to_the_connection_or_the_client(play: Play) -> None:
    body = _chat()
    with play.web.connection() as connection:
        connection.sendall(
            play.request(
                body,
                b"Content-Length: %d" % len(body),
                b"Connection: keep-alive, X-Secret",
                b"Keep-Alive: timeout=5",
                b"Proxy-Authorization: Basic YTpi",
                b"TE: trailers",
                b"X-Secret: mine",
                b"X-Forwarded-For: 10.0.0.1",
                b"Cookie: session=mine",
                b"Accept-Encoding: gzip",
                b"Content-Type: text/plain",
                b"Traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            )
        )
        assert _read(connection)[0] == 200
    (heard,) = play.engine.heard
    told = {name.lower(): value for name, value in heard.headers.items()}
    assert set(told) <= {
        *("host", "authorization", "content-type", "content-length", "accept-encoding", "traceparent"),
        *("connection", "accept"),
    }
    assert told["accept-encoding"] == "identity"
    assert told["content-type"] == "application/json"
    assert told["host"] != "localhost"
    assert play.key not in told["authorization"]


def test_of_paths_that_lead_nowhere_nothing_is_kept(play: Play) -> None:
    def ask(number: int) -> None:
        path = b"/v1/%04d" % number + b"x" * 60_000
        connection.sendall(play.request(_chat()).replace(b"/v1/chat/completions", path))
        assert _read(connection)[0] == 404

    with play.web.connection() as connection:
        for number in range(5):
            ask(number)
        tracemalloc.start()
        try:
            for number in range(5, 55):
                ask(number)
            kept_bytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert kept_bytes < 1_000_000 < 50 * 60_000


@pytest.mark.parametrize("ends", [b"\r\n", b"\n"], ids=["CR LF", "LF"])
@pytest.mark.parametrize("name", [b"X-Request-Id", b"Traceparent", b"X-Session-Id"])
def test_a_header_cannot_smuggle_in_another(play: Play, name: bytes, ends: bytes) -> None:
    """What comes after a line's end is a header of its own, or makes the request a bad one."""
    body = _chat()
    with play.web.connection() as connection:
        injected = name + b": a" + ends + b"X-Injected: yes"
        connection.sendall(play.request(body, b"Content-Length: %d" % len(body), injected))
        status, headers, _ = _read(connection)
    assert status in (200, 400)
    assert "x-injected" not in headers
    assert all("X-Injected" not in heard.headers for heard in play.engine.heard)


@pytest.mark.parametrize(
    "piece",
    [
        pytest.param(b"X-More: " + b"a" * 8_000 + b"\r\n", id="many headers"),
        pytest.param(b"a" * 8_000, id="one header"),
    ],
)
def test_headers_without_end_are_refused(play: Play, piece: bytes) -> None:
    """A server that kept them all would be filled by one client."""
    with play.web.connection() as connection:
        connection.sendall(play.request(b"", b"X-First: a").removesuffix(b"\r\n\r\n") + b"\r\nX-Second: a")
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            for _ in range(1_000):
                connection.sendall(piece)
                if _has_answer(connection):
                    assert b" 431 " in connection.recv(100)
                    break
            else:
                pytest.fail("8 MB of headers were taken")
    assert _is_served(play)


@pytest.mark.parametrize("key", ["", "nobody's"], ids=["while it is answered", "after it was refused"])
@pytest.mark.parametrize(
    ("body", "piece"),
    [
        pytest.param(b"0\r\n", b"X-More: " + b"a" * 8_000 + b"\r\n", id="trailers"),
        pytest.param(b"0\r\nX-More: ", b"a" * 8_000, id="a trailer"),
        pytest.param(b"5;", b"a" * 8_000, id="what is said of a chunk"),
    ],
)
def test_what_comes_beside_a_body_without_end_is_not_taken(
    play: Play, key: str, body: bytes, piece: bytes
) -> None:
    head = play.request(b"", b"Transfer-Encoding: chunked")
    with play.web.connection() as connection:
        connection.sendall((head.replace(play.key.encode(), key.encode()) if key else head) + body)
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            for _ in range(1_000):
                connection.sendall(piece)
            pytest.fail("8 MB were taken")
    assert _is_served(play)


class _Hasty(BoundedProtocol):
    head_s = 0.3


async def _hello(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"hi"})


@pytest.fixture(scope="module")
def hasty() -> Iterator[tuple[str, int]]:
    """A server that waits for nobody's headers."""
    config = uvicorn.Config(
        _hello, host="127.0.0.1", port=0, loop="uvloop", http=_Hasty, lifespan="off", log_config=None
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started, "the server to start")
    yield server.servers[0].sockets[0].getsockname()
    server.should_exit = True
    thread.join(10)


WHOLE = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


def test_a_connection_that_rests_is_closed_and_one_in_use_is_not() -> None:
    config = uvicorn.Config(
        _hello,
        port=0,
        loop="uvloop",
        http=BoundedProtocol,
        lifespan="off",
        log_config=None,
        timeout_keep_alive=1,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started, "the server to start")
    with socket.create_connection(server.servers[0].sockets[0].getsockname(), timeout=10) as connection:
        begun_s = monotonic()
        while monotonic() < begun_s + 1.3:
            connection.sendall(WHOLE)
            assert _read(connection)[0] == 200
        rests_since_s = monotonic()
        assert connection.recv(1) == b""
        assert 0.9 < monotonic() - rests_since_s < 5
    server.should_exit = True
    thread.join(10)


@pytest.mark.parametrize(
    ("said", "answers"),
    [
        pytest.param(b"", 0, id="nothing"),
        pytest.param(b"GET / HT", 0, id="half a line"),
        pytest.param(WHOLE[:-2], 0, id="headers without their end"),
        pytest.param(WHOLE + WHOLE[:-2], 1, id="half a second request"),
        pytest.param(
            WHOLE[:-2] + b"Content-Length: 9\r\n\r\nhalf", 1, id="half a body that nobody waits for"
        ),
    ],
)
def test_what_does_not_come_is_not_waited_for(hasty: tuple[str, int], said: bytes, answers: int) -> None:
    with socket.create_connection(hasty, timeout=10) as connection:
        begun_s = monotonic()
        connection.sendall(said)
        data = b""
        while more := connection.recv(1 << 16):
            data += more
    assert data.count(b"200 OK") == answers
    assert monotonic() - begun_s < 4, (
        "uvicorn alone would keep it for 5 s after an answer, and without end before"
    )


def test_a_connection_that_goes_on_is_kept(hasty: tuple[str, int]) -> None:
    begun_s = monotonic()
    with socket.create_connection(hasty, timeout=10) as connection:
        while monotonic() < begun_s + 2 * _Hasty.head_s:
            connection.sendall(WHOLE[:20])
            connection.sendall(WHOLE[20:])
            assert _read(connection)[0] == 200


# --- bodies -------------------------------------------------------------------------------------------------


def test_a_body_that_does_not_come_is_not_waited_for(play: Play) -> None:
    with play.web.connection() as connection:
        connection.sendall(play.request(b'{"model"', b"Content-Length: 100"))
        begun_s = monotonic()
        status, headers, body = _read(connection)
        assert BODY_S * 0.5 < monotonic() - begun_s < BODY_S + 5
        assert (status, _code(body), headers["connection"]) == (408, "body_too_slow", "close")
        assert connection.recv(1) == b"", "the connection is of no more use"


def test_a_hundred_megabytes_are_refused_while_they_come(play: Play) -> None:
    before = psutil.Process().memory_info().rss
    with play.web.connection() as connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(play.request(b"", b"Transfer-Encoding: chunked"))
        for _ in range(100):
            connection.sendall(b"100000\r\n" + b" " * MIB + b"\r\n")
            if _has_answer(connection):
                break
    assert psutil.Process().memory_info().rss - before < 40 * MIB
    assert not play.engine.heard
    assert _is_served(play)


def test_all_bodies_together_are_bounded_and_their_room_is_given_back(play: Play) -> None:
    """Half a body holds room, and so does one that waits for its engine; leaving gives it back."""
    play.engine.script = never
    with contextlib.ExitStack() as stack:
        waiting, half = (stack.enter_context(play.web.connection()) for _ in range(2))
        big = _chat(user="x" * 900_000)
        waiting.sendall(play.request(big))
        wait_until(lambda: play.engine.heard, "the engine to be asked")
        half.sendall(play.request(b"x" * 900_000, b"Content-Length: 999999"))

        def refusal() -> str:
            with play.web.connection() as third:
                third.sendall(play.request(_chat(model="nobody", user="x" * 900_000)))
                return _code(_read(third)[2])

        wait_until(lambda: refusal() == "out_of_room", "the room to be full")
    wait_until(lambda: refusal() == "model_not_found", "the room to be given back")


def test_bodies_that_wait_for_a_model_leave_room_for_others(play: Play) -> None:
    asleep = make_model("asleep-1", low=0)
    play.wait_until_known(asleep.name, "on_demand")
    with play.web.connection() as waiting:
        waiting.sendall(play.request(_chat(model=asleep.name, user="x" * 900_000)))
        wait_until(lambda: Demand.objects.filter(model=asleep, waiting=1), "the request to wait")
        with play.web.connection() as second:
            second.sendall(play.request(_chat(model=asleep.name, user="x" * 900_000)))
            status, headers, body = _read(second)
        assert (status, _code(body), "retry-after" in headers) == (503, "too_many_waiting", True)
        with play.web.connection() as other:
            other.sendall(play.request(_chat(user="x" * 900_000)))
            assert _read(other)[0] == 200


def test_http_1_0_is_answered_and_its_connection_ended(play: Play) -> None:
    body = _chat()
    head = play.request(body).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    with play.web.connection() as connection:
        connection.sendall(head)
        status, _, answer = _read(connection)
        assert (status, json.loads(answer)["object"]) == (200, "chat.completion")
        assert connection.recv(1) == b""


def test_requests_sent_one_behind_the_other_are_answered_in_turn(play: Play) -> None:
    with play.web.connection() as connection:
        connection.sendall(play.request(_chat(model="nobody")) + play.request(_chat()))
        data = b""
        while data.count(b"HTTP/1.1 ") < 2 or b"chat.completion" not in data:
            data += connection.recv(1 << 16)
    assert re.findall(rb"HTTP/1.1 (\d+)", data) == [b"404", b"200"]


def test_who_leaves_is_missed_though_another_request_was_sent_behind(play: Play) -> None:
    play.engine.script = never
    with play.web.connection() as connection:
        connection.sendall(play.request(_chat()) + play.request(_chat(user="x" * 100_000)))
        wait_until(lambda: play.engine.heard, "the engine to be asked")
        wait_until(lambda: Demand.objects.filter(in_flight=1), "the request to be counted")
    wait_until(lambda: not Demand.objects.filter(in_flight__gt=0), "its slot to be given back")
    assert len(play.engine.heard) == 1, "nobody is there for an answer to the second one"


@pytest.mark.parametrize(
    "behind",
    [
        pytest.param(b"\0 no request \0\r\n\r\n", id="no request"),
        pytest.param(
            b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50_000, id="requests without end"
        ),
        pytest.param(b"GET / HTTP/1.1\r\nX: " + b"a" * 1_000_000, id="headers without end"),
    ],
)
def test_what_is_no_use_behind_a_request_ends_it_as_if_its_client_had_left(
    play: Play, caplog: pytest.LogCaptureFixture, behind: bytes
) -> None:
    """It is the client's doing, and nothing is written into the middle of an answer."""
    play.engine.script = never
    with play.web.connection() as connection:
        connection.sendall(play.request(_chat()))
        wait_until(lambda: play.engine.heard, "the engine to be asked")
        wait_until(lambda: Demand.objects.filter(in_flight=1), "the request to be counted")
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(behind)
            assert connection.recv(1) == b""
        wait_until(lambda: not Demand.objects.filter(in_flight__gt=0), "its slot to be given back")
    assert "Traceback" not in caplog.text
    assert _is_served(play.begin_anew())


def test_idle_connections_cost_little_and_keep_nobody_out(play: Play) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 2 * IDLE_CONNECTIONS + 2_000), hard))
    before = psutil.Process().memory_info().rss
    try:
        with contextlib.ExitStack() as stack:
            for _ in range(IDLE_CONNECTIONS):
                idle = stack.enter_context(play.web.connection())
                idle.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n")
            assert _is_served(play)
            assert psutil.Process().memory_info().rss - before < IDLE_CONNECTIONS * 100_000
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert _is_served(play)
