"""HTTP as uvicorn speaks it, with bounds on what does not reach whoever answers a request, and a shorter way
for /v1/.

uvicorn with httptools keeps headers and trailers without end for a client that goes on sending them, and
waits without end for one that does not, be it to be told something or to be read. What a request does between
the two is bounded by whoever answers it. Whoever leaves ends the request that is being answered, too, where
another was sent behind it. Who asks for another protocol is answered in this one.
"""

from __future__ import annotations

import asyncio
import re
from functools import lru_cache
from math import inf
from typing import Any

import httptools
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from llmgw.exchange import EXTENSION, Closable, Exchange

_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-type: text/plain; charset=utf-8\r\ncontent-length: 52\r\nconnection: close\r\n\r\n"
    b"The request's headers are too large: send fewer ones"
)
_INVALID = (
    b"HTTP/1.1 400 Bad Request\r\n"
    b"content-type: text/plain; charset=utf-8\r\ncontent-length: 30\r\nconnection: close\r\n\r\n"
    b"Invalid HTTP request received."
)

_PLAIN_PATH, _LONGEST = re.compile(rb"/v1/[A-Za-z0-9/_.-]*"), 200
DIRECT = "llmgw.direct"
"""In the state that an application fills as it starts up: what answers an `Exchange`, so that what is under
/v1/ need not pass all the others."""
_POST = {"method": "POST"}
"""All that uvicorn asks of a scope as it sends an answer."""
_BY_ALL = frozenset((b"expect", b"upgrade"))
"""Headers that mean something to uvicorn."""
_BY_ALL_LOGGED = _BY_ALL | {b"x-forwarded-for", b"x-forwarded-proto"}
"""And to its access log, which is told of the client that a proxy forwards for."""
_PROXYS = b"x-forwarded-proto"
_SCHEMES = frozenset(("http", "https", "ws", "wss"))
"""As in uvicorn: whatever else a proxy says, it has said nothing."""


@lru_cache(maxsize=256)
def _plain_path(url: bytes) -> str:
    """Of what has many requests: there is nothing in it to decode, and nothing to cut off. Empty where that
    is not so. What clients send is kept here: not to be asked of any that is longer than `_LONGEST`."""
    return url.decode() if _PLAIN_PATH.fullmatch(url) else ""


class _Unfit(Exception):
    """Makes httptools stop reading."""


class _Line:
    """What answers are written to: the transport, but for its end."""

    __slots__ = ("_protocol", "abort", "write")

    def __init__(self, transport: asyncio.Transport, protocol: BoundedProtocol) -> None:
        self.write, self.abort, self._protocol = transport.write, transport.abort, protocol

    def close(self) -> None:
        self._protocol.end()

    def is_closing(self) -> bool:
        return self._protocol.is_ending


class BoundedProtocol(HttpToolsProtocol):
    """One connection.

    What is plainly a request for /v1/ is an `Exchange`. One task answers all exchanges of a connection, as
    making a task costs more than handing it the next request.

    Its requests' first lines and headers come within `head_s`, and so does the rest of one that was answered
    before it was whole. `head_bytes` bound those, trailers, and whatever else is part of no body;
    `behind_bytes` what is sent behind a request that is not answered yet, and `behind` how many requests. Who
    takes nothing of what it is sent for `unread_s` has left, where nobody else finds out before.
    """

    head_s = 30.0
    head_bytes = 64 * 1024
    behind_bytes = 1024 * 1024
    behind = 100
    unread_s = 300.0

    _is_in_head = _is_in_message = _has_gone_on = False
    _taken_bytes = _sent_behind_bytes = 0
    _rests_since_s = _unread_bytes = inf
    _unread_since_s = 0.0
    _look_timer: asyncio.TimerHandle | None = None
    _timer: asyncio.TimerHandle | None = None
    _answering: RequestResponseCycle | None = None
    _is_for_all = _is_proxy = False
    _proxys_word: bytes | None = None
    _line: Any = None
    _due: Exchange | None = None
    _next: Exchange | None = None
    _task: asyncio.Task[None] | None = None
    _rest: asyncio.Future[None] | None = None
    _event: asyncio.Event | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._line = _Line(transport, self)
        # Uvicorn asks its logger alone, which others may have given a handler meanwhile.
        self.access_log = self.access_log and self.config.access_log
        self._by_all = _BY_ALL_LOGGED if self.access_log else _BY_ALL
        self._is_said, self._once_more = False, b""  # asked for often, and so not left to the class
        self._is_proxy = isinstance(self.app, ProxyHeadersMiddleware) and (
            (self.client[0] if self.client else None) in self.app.trusted_hosts
        )
        self._wait()
        self._look_after(self.timeout_keep_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        if self._look_timer is not None:
            self._look_timer.cancel()
        super().connection_lost(exc)
        self._leave()
        self._wake()
        # Or they would keep each other alive:
        self.cycle = self._answering = self._line = None  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if self._is_said:
            return
        self._has_gone_on = False
        self._read(data)
        if self._is_said or self.transport.is_closing():
            return
        if self._due is not None:
            due, self._due = self._due, None
            self._answer(due)
        is_due = self._is_in_message and not self._has_gone_on
        self._taken_bytes = self._taken_bytes + len(data) if is_due else 0
        if self._taken_bytes > self.head_bytes:
            if self._is_in_head and not self._is_answering:
                self._refuse(_TOO_LARGE)
            else:
                self._cut()
        elif self.pipeline:
            self._sent_behind_bytes += len(data)
            if self._sent_behind_bytes > self.behind_bytes:
                self._cut()
            else:
                self.flow.resume_reading()  # or nobody would notice that the client leaves
        if self._is_in_message and not self._is_answering:
            self._wait()
        elif self._answering is not None:  # or there are but empty lines, which may come before a request
            self._stop_waiting()

    def _read(self, data: bytes) -> None:
        """As uvicorn's `data_received`, but for requests to go on in another protocol. The parser leaves what
        follows to that: so they are read once more as if they had not asked."""
        while data:
            try:
                self.parser.feed_data(data)
                data = b""
            except httptools.HttpParserUpgrade as asked:
                data = self._once_more + data[asked.args[0] :]
                self._once_more = b""
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            except httptools.HttpParserError:  # anybody may send one, so it is not logged
                self._refuse_invalid()
                data = b""

    def on_message_begin(self) -> None:
        self.url, self.headers, self.expect_100_continue = b"", [], False
        self._is_in_head = self._is_in_message = True
        self._is_for_all, self._proxys_word = False, None
        self._taken_bytes = 0
        self._rests_since_s = inf

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_head:  # a trailer is nobody's business
            return
        name = name.lower()
        if name in self._by_all:
            self._is_for_all = True
            super().on_header(name, value)
        else:
            if name == _PROXYS:
                self._proxys_word = value  # the last one counts
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._is_in_head, self._has_gone_on = False, True
        parser = self.parser
        if parser.should_upgrade():
            self._once_more = self._head_without_upgrade()
        elif (
            parser.get_method() == b"POST"
            and len(self.url) <= _LONGEST
            and (path := _plain_path(self.url))
            and parser.get_http_version() == "1.1"
            and self.limit_concurrency is None
            and (self.cycle is None or self.cycle.response_complete)
        ):
            self._begin_exchange(path)
        elif len(self.pipeline) >= self.behind:
            raise _Unfit
        else:
            self._make_scope()
            super().on_headers_complete()
            self.cycle.transport = self._line

    def _head_without_upgrade(self) -> bytes:
        method = self.parser.get_method()
        if method == b"CONNECT":
            raise _Unfit
        first = b"%b %b HTTP/%b" % (method, self.url, self.parser.get_http_version().encode())
        lines = [b"%b: %b" % (name, value) for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join([first, *lines, b"", b""])

    def _make_scope(self) -> None:
        """As uvicorn does as a message begins. Most need none."""
        url, headers, is_expecting = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, is_expecting
        self.headers += headers

    def _begin_exchange(self, path: str) -> None:
        """As uvicorn begins its cycles, for a request that has nothing out of the ordinary."""
        answers = None if self._is_for_all else self.app_state.get(DIRECT)
        path = self.root_path + path
        scope: Any = _POST
        if answers is None or self.access_log:
            self._make_scope()
            scope = self.scope
            scope["method"], scope["query_string"] = "POST", b""
            scope["path"], scope["raw_path"] = path, path.encode()
        self.cycle = self._due = self._answering = exchange = Exchange(
            scope,
            path,
            self.scheme or "" if self._proxys_word is None else self._scheme(self._proxys_word),
            self.headers,
            self._line,
            self.flow,
            self.server_state.default_headers,
            self._event_anew(),
            self.on_response_complete,
            answers,
            access_log=self.access_log,
            is_asking_first=self.expect_100_continue,
            keep_alive=self.parser.should_keep_alive(),
        )
        if answers is None:
            scope["extensions"] = {EXTENSION: exchange}

    def _scheme(self, proxys_word: bytes) -> str:
        """As uvicorn's middleware finds it: what a proxy that is believed says its client came by."""
        word = proxys_word.decode("latin-1").strip()
        return word if self._is_proxy and word in _SCHEMES else self.scheme or ""

    def _event_anew(self) -> asyncio.Event:
        """Nobody waits for the one before, as that is answered."""
        if self._event is None:
            self._event = asyncio.Event()
        else:
            self._event.clear()
        return self._event

    def _answer(self, exchange: Exchange) -> None:
        self._next = exchange
        if self._task is None:
            self._task = self.loop.create_task(self._answer_all())
        else:
            self._wake()  # it may not have come to its end with the one before, and will look then

    def _wake(self) -> None:
        if self._rest is not None and not self._rest.done():
            self._rest.set_result(None)

    async def _answer_all(self) -> None:
        """The task of this connection. It ends with that, and where one of its requests was cancelled."""
        task = asyncio.current_task()
        assert task is not None, "this is one"
        kept: Closable | None = None
        try:
            while not task.cancelling():
                exchange, self._next = self._next, None
                if exchange is not None:
                    exchange.kept = kept
                    self.tasks.add(task)
                    try:
                        if exchange.answers is None:
                            await exchange.run_asgi(self.app)
                        else:
                            await exchange.answers(exchange)
                    except asyncio.CancelledError:  # by a server that has waited long enough
                        pass
                    except Exception:
                        self.logger.exception("What answers requests under %s failed.", exchange.path)
                    self.tasks.discard(task)
                    if not exchange.response_complete:
                        self.transport.close()
                    kept = exchange.kept
                elif not self.transport.is_closing():
                    self._rest = self.loop.create_future()
                    await self._rest
                else:
                    break
        finally:
            self.tasks.discard(task)
            self._task = None
            if kept is not None:
                kept.close()
        if self._next is not None:
            self._answer(self._next)

    def on_body(self, body: bytes) -> None:
        self._has_gone_on = True
        cycle = self.cycle
        if isinstance(cycle, Exchange) and not (cycle.response_complete or self._once_more):
            cycle.hear(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._once_more:
            return
        self._is_in_message = False
        cycle = self.cycle
        if cycle.response_complete:
            self._rests_since_s = self.loop.time()
        else:
            cycle.more_body = False
            cycle.message_event.set()

    def on_response_complete(self) -> None:
        """As uvicorn's, without a timer for each rest, and without what came of a body that nobody wanted."""
        self.server_state.total_requests += 1
        if self._answering is not None and self._answering.body:
            self._answering.body = bytearray()
        if self._is_said or self.transport.is_closing():
            return
        if self.flow.read_paused:
            self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self._is_in_message:
            self._wait()
        else:
            self._rests_since_s = self.loop.time()
        if not self.pipeline:
            self._sent_behind_bytes = 0

    def _look_after(self, seconds: float) -> None:
        self._look_timer = self.loop.call_later(seconds, self._look)

    def _look(self) -> None:
        """Whether it has rested for too long, or its client has taken nothing: once in many requests. What
        takes a while is looked at again."""
        now_s, transport = self.loop.time(), self.transport
        is_full = transport.is_closing() or self.flow.write_paused  # and nothing comes on top
        unread_bytes = transport.get_write_buffer_size() if is_full else 0
        if not unread_bytes or unread_bytes < self._unread_bytes:
            self._unread_bytes, self._unread_since_s = unread_bytes or inf, now_s
        elif now_s - self._unread_since_s >= self.unread_s:
            transport.abort()
            return
        rest_s = max(now_s - self._rests_since_s, 0)
        if rest_s >= self.timeout_keep_alive:
            transport.close()
            rest_s = 0
        self._look_after(min(self.timeout_keep_alive - rest_s, self.unread_s))

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread_bytes = inf

    @property
    def is_ending(self) -> bool:
        return self._is_said or self.transport.is_closing()

    def end(self) -> None:
        """All is said. A connection that is closed with something unread in it is reset, and who is still
        sending would lose what was said: so what comes is thrown away until the client has heard the end."""
        if self._is_in_message and not self.is_ending and self.transport.can_write_eof():
            self._is_said = True
            self.transport.write_eof()
            self.flow.resume_reading()
            self._wait()
        else:
            self.transport.close()

    def _refuse_invalid(self) -> None:
        """The request that is a bad one. Where another is being answered, it would be taken for that
        answer, or a part of it."""
        answering = self._answering
        is_its_own = self._is_in_message and not self._is_in_head and self.cycle is answering
        if not self._is_answering or (is_its_own and not self.cycle.response_started):
            self._refuse(_INVALID)
        else:
            self._cut()

    def _refuse(self, answer: bytes) -> None:
        self.transport.write(answer)
        self.end()
        self._leave()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    @property
    def _is_answering(self) -> bool:
        return self._answering is not None and not self._answering.response_complete

    def _cut(self) -> None:
        self.transport.close()
        self._leave()

    def _leave(self) -> None:
        """Nobody is there for an answer. uvicorn tells the last request that came, which may only wait."""
        self.pipeline.clear()
        self._due = None
        if (answering := self._answering) is None or answering.response_complete:
            return
        if isinstance(answering, Exchange):
            answering.leave()
        else:
            answering.disconnected = True
            answering.message_event.set()

    def _wait(self) -> None:
        if self._timer is None and not self.transport.is_closing():
            self._timer = self.loop.call_later(self.head_s, self._give_up)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if not self.transport.is_closing():
            self._cut()
