"""Connections of clients: what comes over them in other than the usual order, and what is left of them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httptools
import pytest
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.server import ServerState

from llmgw.exchange import Exchange
from llmgw.gateway.client import Client
from llmgw.gateway.passage import Passage
from llmgw.gateway.streams import dialect_of
from llmgw.gateway.surface import ENDPOINTS
from llmgw.wire import DIRECT, BoundedProtocol
from tests.waiting import wait_until

pytestmark = pytest.mark.one_database

LARGE = b"x" * 20_000_000
"""More than the kernel keeps for a client that reads nothing."""
Headers = list[tuple[bytes, bytes]]


class _Hasty(BoundedProtocol):
    head_s = unread_s = 0.3


class Echo:
    """Answers with what it was asked, the body as it came. Nobody is answered at /v1/never, nobody's body is
    waited for at /.../refused, and at /v1/large there is a lot to read."""

    left = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            self.loop = asyncio.get_running_loop()
            scope["state"][DIRECT] = self._answer_exchange
            for step in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{step}.complete"})
        else:
            await self._answer(scope["method"], scope["path"], scope["headers"], receive, send)

    def _answer_exchange(self, exchange: Exchange) -> Awaitable[None]:
        return self._answer("POST", exchange.path, exchange.headers, exchange.receive, exchange.send)

    async def _answer(self, method: str, path: str, headers: Headers, receive: Any, send: Any) -> None:
        body, goes_on = b"", not path.endswith("/refused")
        while goes_on:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left += 1
                return
            body += message["body"]
            goes_on = message["more_body"] or path == "/v1/never"
        told = dict(headers)
        asked = f"{method} {path} {told.get(b'x-id', b'').decode()}"
        answer = LARGE if path == "/v1/large" else body
        head = [
            (b"content-length", b"%d" % len(answer)),
            (b"x-asked", asked.encode()),
            (b"x-upgrade", told.get(b"upgrade", b"none")),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": answer})


class Server:
    """Echo behind the gateway's protocol, impatient."""

    def __init__(self) -> None:
        self.echo = Echo()
        config = uvicorn.Config(
            self.echo,
            port=0,
            loop="uvloop",
            http=_Hasty,
            lifespan="on",
            log_config=None,
            access_log=False,
            timeout_keep_alive=0.3,  # type: ignore[arg-type]
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        wait_until(lambda: self._server.started, "the server to start")

    @property
    def state(self) -> ServerState:
        return self._server.server_state

    def connection(self) -> socket.socket:
        return socket.create_connection(self._server.servers[0].sockets[0].getsockname(), timeout=10)

    def wait_until_left(self) -> None:
        wait_until(lambda: not self.state.connections, "its connections to be closed", every_s=0.01)
        wait_until(lambda: not self.state.tasks, "its tasks to end", every_s=0.01)

    def end(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)


@pytest.fixture(scope="module")
def all_servers() -> Iterator[Server]:
    server = Server()
    yield server
    server.end()


@pytest.fixture
def server(all_servers: Server) -> Server:
    all_servers.wait_until_left()
    all_servers.echo.left = 0
    return all_servers


class Answers:
    """What a client reads, as messages."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._parser = connection, httptools.HttpResponseParser(self)
        self.told: list[tuple[int, str, bytes]] = []
        self.is_ended = False
        self._asked, self._body = "", b""

    def on_message_begin(self) -> None:
        self._asked, self._body = "", b""

    def on_header(self, name: bytes, value: bytes) -> None:
        if name == b"x-asked":
            self._asked = value.decode().strip()
        assert (name, value) != (b"x-upgrade", b"h2c")

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self.told.append((self._parser.get_status_code(), self._asked, self._body))

    def read(self, count: int) -> list[tuple[int, str, bytes]]:
        """So many, or those before the connection's end."""
        with contextlib.suppress(ConnectionResetError):
            while len(self.told) < count:
                data = self._connection.recv(1 << 16)
                if not data:
                    self.is_ended = True
                    break
                self._parser.feed_data(data)
        return self.told


def _post(path: str, body: bytes = b"", *lines: bytes) -> bytes:
    head = [b"POST %b HTTP/1.1" % path.encode(), b"Host: localhost", *lines]
    if b"Transfer-Encoding: chunked" not in lines:
        head.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join([*head, b"", body])


GET = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"


# --- one request behind another -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 65_536, 65_537, 262_144, 1_048_576])
@pytest.mark.parametrize("piece", [1, 4_096, 10_000_000], ids=["byte by byte", "in pieces", "at once"])
def test_a_body_comes_whole_however_it_is_cut(server: Server, size: int, piece: int) -> None:
    body = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    sent = _post("/v1/echo", body)
    with server.connection() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head_ends = sent.index(b"\r\n\r\n") + 10
        pieces = [sent[at : at + piece] for at in range(0, head_ends, piece)] if piece == 1 else []
        rest = sent[head_ends:] if pieces else sent
        step = max(piece, 4_096)
        for part in [*pieces, *(rest[at : at + step] for at in range(0, len(rest), step))]:
            connection.sendall(part)
        assert Answers(connection).read(1) == [(200, "POST /v1/echo", body)]


def test_each_of_many_requests_has_its_own_answer(server: Server) -> None:
    """One behind the other, of all kinds, some with the end of the one before in one piece."""
    kinds = [
        lambda name: _post("/v1/echo", b"plain", b"X-Id: " + name),
        lambda name: _post("/v1/echo?a=b", b"with a question", b"X-Id: " + name),
        lambda name: _post(
            "/v1/echo", b"5\r\ncut u\r\n1\r\np\r\n0\r\n\r\n", b"Transfer-Encoding: chunked", b"X-Id: " + name
        ),
        lambda name: GET[:-2] + b"X-Id: " + name + b"\r\n\r\n",
        lambda name: _post("/v1/refused", b"and not read", b"X-Id: " + name),
    ]
    names = [b"%d" % number for number in range(60)]
    sent = b"".join(kinds[number % len(kinds)](name) for number, name in enumerate(names))
    for piece in (len(sent), 700, 97):
        with server.connection() as connection:
            answers = Answers(connection)
            for at in range(0, len(sent), piece):
                connection.sendall(sent[at : at + piece])
            told = answers.read(len(names))
        assert [asked.split()[2].encode() for _, asked, _ in told] == names
        assert {body for _, _, body in told} == {b"plain", b"with a question", b"cut up", b""}


@pytest.mark.parametrize("first", ["/v1/echo", "/v1/never"])
def test_who_sends_requests_without_waiting_for_answers_is_not_kept(server: Server, first: str) -> None:
    """Each of them would be kept, at a hundred times the size that it was sent in."""
    with server.connection() as connection:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            connection.sendall(_post(first) + GET * 5_000)
        answers = Answers(connection)
        answers.read(5_000)
        assert len(answers.told) < 5_000
    server.wait_until_left()


@pytest.mark.parametrize(
    ("pieces", "statuses"),
    [
        pytest.param([b"\0\r\n\r\n"], [400], id="no request"),
        pytest.param(
            [_post("/v1/echo", b"zz\r\n", b"Transfer-Encoding: chunked")], [400], id="a body that is none"
        ),
        pytest.param(
            [_post("/v1/echo", b"", b"Transfer-Encoding: chunked"), b"zz\r\n"], [400], id="later in the body"
        ),
        pytest.param([_post("/v1/echo") + b"\0\r\n\r\n"], [], id="together with a request"),
        pytest.param([GET + b"\0\r\n\r\n"], [], id="together with a request of another kind"),
        pytest.param([_post("/v1/never"), b"\0\r\n\r\n"], [], id="behind a request"),
        pytest.param([_post("/v1/echo"), b"\0\r\n\r\n"], [200, 400], id="after an answer"),
        pytest.param([b"CONNECT localhost:1 HTTP/1.1\r\nHost: localhost\r\n\r\n"], [400], id="for a tunnel"),
    ],
)
def test_what_is_no_http_is_told_so_unless_it_would_be_taken_for_an_answer(
    server: Server, pieces: list[bytes], statuses: list[int]
) -> None:
    with server.connection() as connection:
        answers = Answers(connection)
        for number, piece in enumerate(pieces, 1):
            connection.sendall(piece)
            if number < len(pieces) and len(statuses) == len(pieces):
                answers.read(number)
            elif number < len(pieces):
                wait_until(lambda: server.state.tasks, "it to be asked", every_s=0.01)
        answers.read(len(statuses) + 1)
        assert [status for status, _, _ in answers.told] == statuses
        assert answers.is_ended


class _Wire(asyncio.Transport):
    """A client that takes all it is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""

    def write(self, data: Any) -> None:
        self.sent += data


def test_a_comment_that_is_due_with_the_last_word_comes_before_it() -> None:
    async def scene() -> bytes:
        wire = _Wire()
        exchange = Exchange(
            {"method": "POST"},
            "/v1/chat/completions",
            "http",
            [],
            wire,
            FlowControl(wire),
            [],
            asyncio.Event(),
            lambda: None,
            None,
            access_log=False,
            is_asking_first=False,
            keep_alive=True,
        )
        client = Client(
            exchange.receive, exchange.send, exchange, Passage("mine", 0.0), stall_s=5, comment_s=5
        )
        client.keep_company(dialect_of(ENDPOINTS["/v1/chat/completions"]), 0)
        for _ in range(2):
            await asyncio.sleep(0)
        assert (client.is_silent, client.has_begun) == (False, False), "it is about to be said"
        await client.be_quiet()
        await client.begin_stream(b"data: [DONE]\n\n")
        await client.write(b"", is_last=True)
        return wire.sent

    told = asyncio.run(scene())
    assert told.count(b"HTTP/1.1 200") == 1
    assert 0 < told.index(b": waiting") < told.index(b"data: [DONE]")
    assert told.endswith(b"0\r\n\r\n")


VAIN = _post("/v1/refused", b"", b"Connection: close").replace(b"Length: 0", b"Length: 12000000")


@pytest.mark.parametrize(
    ("vain", "status"),
    [
        pytest.param(VAIN, 200, id="a body that nobody wants"),
        pytest.param(VAIN.replace(b"/v1/", b"/api/"), 200, id="elsewhere"),
        pytest.param(VAIN.replace(b"HTTP/1.1", b"HTTP/1.0"), 200, id="by HTTP/1.0"),
        pytest.param(_post("/v1/echo", b"zz", b"Transfer-Encoding: chunked"), 400, id="no chunk"),
        pytest.param(b"GET /" + b"a" * 100_000, 431, id="a line without end"),
        pytest.param(b"\0", 400, id="no request"),
    ],
)
def test_who_is_still_sending_hears_why_that_is_in_vain(server: Server, vain: bytes, status: int) -> None:
    """Though nothing of it is read, and the connection is closed: not before the client has heard that."""
    with server.connection() as connection:
        connection.sendall(vain + b"x" * 12_000_000)
        answers = Answers(connection)
        assert [told for told, _, _ in answers.read(2)] == [status]
        assert answers.is_ended
    server.wait_until_left()


def test_who_goes_on_sending_in_vain_is_cut_off(server: Server) -> None:
    with server.connection() as connection:
        connection.sendall(VAIN)
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            while server.state.connections:
                connection.sendall(b"x" * 10_000)
    server.wait_until_left()


# --- another protocol ---------------------------------------------------------------------------------------

H2C = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA")


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([_post("/v1/echo", b"Hello", *H2C)], id="at once"),
        pytest.param([_post("/v1/echo", b"Hello", *H2C)[:-5], b"Hel", b"lo"], id="the body later"),
        pytest.param(
            [_post("/v1/echo", b"5\r\nHello\r\n0\r\n\r\n", *H2C, b"Transfer-Encoding: chunked")],
            id="in chunks",
        ),
        pytest.param(
            [*(_post("/v1/echo", b"Hello", *H2C)[at:][:7] for at in range(0, 210, 7))], id="in pieces"
        ),
    ],
)
def test_who_asks_for_another_protocol_is_answered_in_this_one(server: Server, pieces: list[bytes]) -> None:
    """As Java's client does with each first request of a connection, whose body httptools would leave to the
    other protocol."""
    with server.connection() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        answers = Answers(connection)
        for piece in pieces:
            connection.sendall(piece)
        assert answers.read(1) == [(200, "POST /v1/echo", b"Hello")]
        connection.sendall(_post("/v1/echo", b"again") + _post("/v1/echo", b"Hello", *H2C) + GET)
        assert [body for _, _, body in answers.read(4)[1:]] == [b"again", b"Hello", b""]


def test_nothing_but_http_is_spoken(server: Server) -> None:
    asked = GET[:-2] + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: YQ==\r\n\r\n"
    with server.connection() as connection:
        connection.sendall(asked + GET)
        assert Answers(connection).read(2) == [(200, "GET /v1/models", b"")] * 2


# --- ends ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pieces",
    [
        pytest.param([b"\r\n\r\n"], id="empty lines"),
        pytest.param([_post("/v1/echo"), b"\r\n"], id="an empty line after an answer"),
        pytest.param(
            [_post("/v1/refused", b"body")[:-4], b"body"], id="the body of what is answered already"
        ),
    ],
)
def test_what_comes_to_nothing_keeps_no_connection(server: Server, pieces: list[bytes]) -> None:
    with server.connection() as connection:
        answers = Answers(connection)
        for number, piece in enumerate(pieces):
            connection.sendall(piece)
            answers.read(min(number + 1, len(pieces) - 1))
        answers.read(len(pieces))
        assert (answers.is_ended, len(answers.told)) == (True, len(pieces) - 1)


@pytest.mark.parametrize("line", [b"Connection: keep-alive", b"Connection: close"])
def test_who_reads_nothing_is_left(server: Server, line: bytes) -> None:
    with server.connection() as connection:
        connection.sendall(_post("/v1/large", b"", line))
        assert connection.recv(1) == b"H"
        server.wait_until_left()


def test_who_reads_slowly_is_not_left(server: Server) -> None:
    with server.connection() as connection:
        connection.sendall(_post("/v1/large"))
        left_bytes = len(LARGE)
        pause = threading.Event()
        while left_bytes > 0:
            pause.wait(0.04)
            data = connection.recv(1 << 20)
            assert data, "it was cut off"
            left_bytes -= len(data)


def _leaves(*sent: bytes, half: bool = False) -> Callable[[socket.socket], None]:
    def leave(connection: socket.socket) -> None:
        for piece in sent:
            connection.sendall(piece)
        if half:
            connection.shutdown(socket.SHUT_WR)

    return leave


@pytest.mark.parametrize(
    "visit",
    [
        pytest.param(_leaves(), id="says nothing"),
        pytest.param(_leaves(_post("/v1/echo")[:20]), id="in the head"),
        pytest.param(_leaves(_post("/v1/echo", b"Hello")[:-2]), id="in the body"),
        pytest.param(_leaves(_post("/v1/echo", b"Hello")), id="before the answer"),
        pytest.param(_leaves(_post("/v1/never")), id="without an answer"),
        pytest.param(_leaves(_post("/v1/never"), half=True), id="by half"),
        pytest.param(_leaves(_post("/v1/never"), _post("/v1/echo", b"Hello"), GET), id="with others behind"),
        pytest.param(
            _leaves(_post("/v1/never"), _post("/v1/echo", b"Hello")[:-2]), id="with half of one behind"
        ),
        pytest.param(_leaves(_post("/v1/refused", b"Hello")[:-2]), id="in a body that nobody wants"),
        pytest.param(_leaves(_post("/v1/large")), id="in the answer"),
        pytest.param(_leaves(_post("/v1/never"), b"\0\r\n"), id="after nonsense"),
        pytest.param(_leaves(_post("/v1/echo") + b"\0\r\n"), id="after nonsense that came with a request"),
        pytest.param(_leaves(_post("/v1/never", b"Hello", *H2C)), id="asking for another protocol"),
    ],
)
def test_nothing_is_left_of_who_leaves(server: Server, visit: Callable[[socket.socket], None]) -> None:
    """Nothing waits for the collector of garbage either, which a busy server seldom runs."""
    before = len(asyncio.all_tasks(server.echo.loop))
    gc.collect()
    gc.disable()
    try:
        for _ in range(20):
            with server.connection() as connection:
                visit(connection)
        server.wait_until_left()
        wait_until(lambda: len(asyncio.all_tasks(server.echo.loop)) <= before, "its tasks to end")
        wait_until(lambda: not _kept(), "nothing to be kept", tell=lambda: str(_kept()), timeout_s=5)
    finally:
        gc.enable()


def _kept() -> list[str]:
    return [type(each).__name__ for each in gc.get_objects() if isinstance(each, Exchange | BoundedProtocol)]


@pytest.mark.parametrize("path", ["/v1/echo", "/v1/refused"])
def test_a_body_is_not_kept_with_a_connection_that_rests(server: Server, path: str) -> None:
    with server.connection() as connection:
        connection.sendall(_post(path, b"x" * 60_000))
        Answers(connection).read(1)
        [protocol] = server.state.connections
        assert not protocol.cycle.body
