"""Asks an engine or a gateway for streams at set times, and notes when their tokens came.

All of a bench that opens a socket. It lives in a thread with an event loop of its own, so that whoever starts
it may talk to a database meanwhile, and it never waits for an answer before it sends what is due. When it is
left, every connection is closed, which is how an engine learns that nobody listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import uvloop

from nodes.bench.answers import TOKEN, count, has_token, message_of, usage_of
from nodes.bench.asks import Ask
from nodes.bench.figures import Outcome
from nodes.certificates import is_shown, unproven

CONNECT_S = 10.0
SILENCE_S = 60.0
"""A request that hears nothing for so long has failed."""
KEPT_S = 4.0
"""Below the 5 s after which engines close an idle connection, so that none is used as it closes."""
CLOSING_S = 2.0
SPIN_S = 0.0025
"""A loop's timers are up to milliseconds late, so that the last of a wait is not left to them."""
TAIL_BYTES = 8_192
SAID_BYTES = 4_096
PROBLEM_LIMIT = 200

PATH = "/v1/chat/completions"
ERROR = b'data: {"error"'


@dataclass(frozen=True, slots=True)
class Aim:
    """Where requests go. certificate: the checksum of the one that an engine must show; empty where the
    system's authorities vouch for whatever is there, as for a gateway. `place` raises ValueError where the
    origin is no address."""

    origin: str
    key: str = field(repr=False)
    certificate: str = ""

    @property
    def place(self) -> tuple[str, int, bool]:
        """Host, port, and whether by TLS."""
        parts = urlsplit(self.origin)
        is_tls = parts.scheme == "https"
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{self.origin} is no address such as http://127.0.0.1:8000")
        return parts.hostname, parts.port or (443 if is_tls else 80), is_tls


class Volley:
    """The requests of one step, while they go on and afterwards. Any thread may read it; `outcomes` only
    grows."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.outcomes: list[Outcome] = []
        self.began_s = time.perf_counter()
        self._loop = loop
        self._open: dict[int, _Exchange] = {}
        self._over = threading.Event()
        self._ended = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_cut = False

    def wait(self, timeout_s: float) -> bool:
        """Whether all of it is over."""
        return self._over.wait(timeout_s)

    def cut(self) -> None:
        """Ask no more, and leave what is open. Those have no outcome, and stay among `open_dues_s`."""
        self._is_cut = True
        self._loop.call_soon_threadsafe(self._leave)

    @property
    def now_s(self) -> float:
        return time.perf_counter() - self.began_s

    def open_dues_s(self) -> list[float]:
        return [each.ask.due_s for each in list(self._open.values())]

    def waiting_dues_s(self) -> list[float]:
        """Of those that have not had a token."""
        return [each.ask.due_s for each in list(self._open.values()) if each.first_s is None]

    # --- in the loop

    async def fire(
        self, connections: _Connections, asks: Sequence[Ask], body: Callable[[Ask], bytes]
    ) -> None:
        self._task = asyncio.current_task()
        self.began_s = time.perf_counter()
        try:
            for ask in asks:
                exchange = _Exchange(self, ask, body(ask))
                due_s = self.began_s + ask.due_s
                if (left_s := due_s - time.perf_counter() - SPIN_S) > 0:
                    await asyncio.sleep(left_s)
                await asyncio.sleep(0)
                while time.perf_counter() < due_s:  # noqa: ASYNC110 -- no event comes so punctually
                    await asyncio.sleep(0)
                self._open[ask.number] = exchange
                connections.send(exchange)
            while self._open:
                self._ended.clear()
                await self._ended.wait()
        finally:
            self._over.set()

    def end(self, outcome: Outcome) -> None:
        if not self._is_cut and self._open.pop(outcome.number, None) is not None:
            self.outcomes.append(outcome)
            self._ended.set()

    def give_up_on_silence(self) -> None:
        now_s = self.now_s
        for each in list(self._open.values()):
            if now_s - each.heard_s > SILENCE_S:
                each.fail(f"it was silent for {SILENCE_S:g} s")

    def _leave(self) -> None:
        for each in list(self._open.values()):
            each.leave()
        if self._task is not None:
            self._task.cancel()


class Generator:
    """Use as a context: the thread lives in it, and no connection outlives it."""

    def __init__(self, aim: Aim) -> None:
        self._aim = aim
        self._loop = uvloop.new_event_loop()
        self._connections = _Connections(aim)
        self._thread = threading.Thread(target=self._run, name="bench", daemon=True)

    def __enter__(self) -> Generator:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def begin(self, asks: Sequence[Ask], body: Callable[[Ask], bytes]) -> Volley:
        volley = Volley(self._loop)
        asyncio.run_coroutine_threadsafe(self._fire(volley, asks, body), self._loop)
        return volley

    async def _fire(self, volley: Volley, asks: Sequence[Ask], body: Callable[[Ask], bytes]) -> None:
        watching = asyncio.create_task(self._watch(volley))
        try:
            await volley.fire(self._connections, asks, body)
        finally:
            watching.cancel()

    async def _watch(self, volley: Volley) -> None:
        while True:
            await asyncio.sleep(1)
            volley.give_up_on_silence()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._end())
            self._loop.close()

    async def _end(self) -> None:
        self._connections.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._connections.closed()


class _Connections:
    """Those that are idle, the last used first, and those on their way."""

    def __init__(self, aim: Aim) -> None:
        self._host, self._port, is_tls = aim.place
        self._certificate = aim.certificate
        self._ssl = _trust(aim.certificate) if is_tls else None
        host = f"[{self._host}]" if ":" in self._host else self._host
        self._head = (
            f"POST {PATH} HTTP/1.1\r\nHost: {host}:{self._port}\r\nAuthorization: Bearer {aim.key}\r\n"
            "Content-Type: application/json\r\nAccept-Encoding: identity\r\nContent-Length: "
        ).encode()
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._lost = asyncio.Event()

    def send(self, exchange: _Exchange) -> None:
        exchange.request = self._head + b"%d\r\n\r\n" % len(exchange.body) + exchange.body
        now_s = time.perf_counter()
        while self._idle:
            connection = self._idle.pop()
            if now_s - connection.idle_since_s < KEPT_S and connection.is_open:
                connection.ask(exchange, is_kept=True)
                return
            connection.abort()
        self.send_anew(exchange)

    def send_anew(self, exchange: _Exchange) -> None:
        task = asyncio.create_task(self._connect(exchange))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, exchange: _Exchange) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                transport, connection = await loop.create_connection(
                    lambda: _Connection(self), self._host, self._port, ssl=self._ssl
                )
        except TimeoutError:
            exchange.fail("it did not accept a connection in time")
        except ssl.SSLCertVerificationError:
            exchange.fail("its certificate is not trusted")
        except ssl.SSLError:
            exchange.fail("it does not speak TLS")
        except (OSError, UnicodeError):  # a name that cannot be one is the latter
            exchange.fail("it refused the connection")
        else:
            if self._certificate and not is_shown(transport, self._certificate):
                connection.abort()
                exchange.fail("it shows another certificate than it was started with")
                return
            connection.ask(exchange)

    def put_back(self, connection: _Connection) -> None:
        connection.idle_since_s = time.perf_counter()
        self._idle.append(connection)

    def know(self, connection: _Connection) -> None:
        self._all.add(connection)

    def forget(self, connection: _Connection) -> None:
        self._all.discard(connection)
        self._lost.set()

    def close(self) -> None:
        for connection in list(self._all):
            connection.leave()

    async def closed(self) -> None:
        """Once every socket is."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSING_S):
                while self._all:
                    self.close()
                    self._lost.clear()
                    await self._lost.wait()


def _trust(certificate: str) -> ssl.SSLContext:
    return unproven() if certificate else ssl.create_default_context()


class _Connection(asyncio.Protocol):
    """One request at a time. Also what the parser of its answer calls."""

    def __init__(self, connections: _Connections) -> None:
        self._connections = connections
        self._exchange: _Exchange | None = None
        self._is_kept = False
        self.idle_since_s = 0.0
        self.is_open = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._connections.know(self)

    def ask(self, exchange: _Exchange, *, is_kept: bool = False) -> None:
        if exchange.is_over:  # given up while it was connecting
            self._connections.put_back(self)
            return
        self._exchange, self._is_kept, exchange.connection = exchange, is_kept, self
        self._parser = httptools.HttpResponseParser(self)
        exchange.sent_s = exchange.heard_s = exchange.volley.now_s
        self._transport.write(exchange.request)

    def data_received(self, data: bytes) -> None:
        if self._exchange is None:
            self.abort()
            return
        self._exchange.heard_s = self._exchange.volley.now_s
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fail("it does not speak HTTP")

    def on_body(self, body: bytes) -> None:
        if self._exchange is not None:
            self._exchange.hear(body, is_stream=self._parser.get_status_code() == 200)

    def on_message_complete(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        exchange.finish(self._parser.get_status_code())
        if self._parser.should_keep_alive() and self.is_open:
            # The parser may not be put aside while it speaks.
            asyncio.get_running_loop().call_soon(self._connections.put_back, self)
        else:
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        self._connections.forget(self)
        exchange, self._exchange = self._exchange, None
        if exchange is None or exchange.is_over:
            return
        if self._is_kept and exchange.heard_s == exchange.sent_s:  # it was closed as the request went out
            self._connections.send_anew(exchange)
        else:
            exchange.fail("it broke off" if exchange.first_s is not None else "it closed the connection")

    def abort(self) -> None:
        self.is_open = False
        self._transport.abort()

    def leave(self) -> None:
        """Its request has no outcome."""
        if self._exchange is not None:
            self._exchange.is_over = True
        self.abort()

    def _fail(self, problem: str) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.fail(problem)
        self.abort()


class _Exchange:
    """One request and what came of it. Moments in seconds since the volley began."""

    def __init__(self, volley: Volley, ask: Ask, body: bytes) -> None:
        self.volley, self.ask, self.body = volley, ask, body
        self.request = b""
        self.connection: _Connection | None = None
        self.sent_s = self.heard_s = ask.due_s
        self.first_s: float | None = None
        self.last_s: float | None = None
        self.is_over = False
        self._chunks = 0
        self._text = b""
        self._error = ""

    def hear(self, body: bytes, *, is_stream: bool) -> None:
        self._text += body
        if not is_stream:
            self._text = self._text[:SAID_BYTES]
            return
        if self.first_s is None and any(map(has_token, self._text.split(b"\n\n"))):
            self.first_s = self.heard_s
        if TOKEN in body:
            self.last_s = self.heard_s
            self._chunks += body.count(TOKEN)
        if ERROR in self._text and not self._error:
            self._error = message_of(self._text[self._text.index(ERROR) + len(b"data: ") :].split(b"\n\n")[0])
        if len(self._text) > TAIL_BYTES and self.first_s is not None:
            self._text = self._text[-TAIL_BYTES // 2 :]

    def finish(self, status: int) -> None:
        if status != 200:
            says = message_of(self._text)
            self.fail(f"status {status}: {says}" if says else f"status {status}")
        elif self._error:
            self.fail(f"an error in the stream: {self._error}")
        elif b"data: [DONE]" not in self._text:
            self.fail("its stream ended early")
        elif self.first_s is None:
            self.fail("its stream had no token")
        else:
            self._end(usage_of(self._text))

    def fail(self, problem: str) -> None:
        if not self.is_over:
            self._end({}, problem[:PROBLEM_LIMIT])
            if self.connection is not None:
                self.connection.abort()

    def leave(self) -> None:
        """Without an outcome."""
        self.is_over = True
        if self.connection is not None:
            self.connection.abort()

    def _end(self, usage: Mapping[str, Any], problem: str = "") -> None:
        self.is_over = True
        details = usage.get("prompt_tokens_details")
        self.volley.end(
            Outcome(
                number=self.ask.number,
                due_s=self.ask.due_s,
                sent_s=self.sent_s,
                first_s=self.first_s,
                last_s=self.last_s,
                output_tokens=count(usage, "completion_tokens") or self._chunks,
                prompt_tokens=count(usage, "prompt_tokens"),
                cached_tokens=count(details, "cached_tokens"),
                problem=problem,
            )
        )
