"""One request under /v1/ and its answer, in the bytes that go out.

What uvicorn makes of a request is made for any application. This is for one that knows what it is handed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

EXTENSION = "llmgw.exchange"


class Closable(Protocol):
    def close(self) -> None: ...


def exchange_of(scope: MutableMapping[str, Any]) -> Exchange | None:
    """The short way to answer this request, for one who asks; None where another server speaks, or it is out
    of the ordinary. It is taken out, as scope and exchange would keep each other alive."""
    found: Exchange | None = scope.pop("extensions", {}).get(EXTENSION)
    return found


class Exchange(RequestResponseCycle):
    """`kept` is the same for all exchanges of a connection that are served by one task, and closed with it.

    Beside ASGI's messages it takes an answer in the bytes that go out, without a message, a coroutine and a
    look at each header for every piece. Each of these ways says False where it did nothing, as when the
    client's buffer is full: then ASGI's `send`, which waits, is the one to use. They may be mixed.
    `head` is whole header lines, free of what a client could have put into them, and of `connection`.
    """

    _served_headers: list[tuple[bytes, bytes]] = []
    _served_lines = b""

    # What uvicorn's cycle sets in each, and few of these are ever asked for. What is asked for often is set:
    # of all that Python 3.11 looks up, what an object has from its class takes longest.
    logger, access_logger = logging.getLogger("uvicorn.error"), logging.getLogger("uvicorn.access")
    expected_content_length = 0

    def __init__(
        self,
        scope: Any,
        path: str,
        scheme: str,
        headers: list[tuple[bytes, bytes]],
        transport: Any,
        flow: FlowControl,
        default_headers: list[tuple[bytes, bytes]],
        message_event: asyncio.Event,
        on_response: Callable[[], None],
        answers: Callable[[Exchange], Awaitable[None]] | None,
        *,
        access_log: bool,
        is_asking_first: bool,
        keep_alive: bool,
    ) -> None:
        self.scope, self.path, self.scheme, self.headers = scope, path, scheme, headers
        self.transport, self.flow, self.default_headers = transport, flow, default_headers
        self.message_event, self.on_response, self.answers = message_event, on_response, answers
        self.access_log, self.keep_alive = access_log, keep_alive
        self.waiting_for_100_continue = is_asking_first
        self.body: Any = b""
        self.more_body = True
        self.disconnected = self.response_started = self.response_complete = False
        self.chunked_encoding: bool | None = None
        self.kept: Closable | None = None
        self._when_left: Callable[[], object] | None = None

    def hear(self, piece: bytes) -> None:
        """Of its body. Most come in one piece, which is kept as it is."""
        if not self.body:
            self.body = piece
        else:
            if type(self.body) is bytes:
                self.body = bytearray(self.body)
            self.body += piece
        if len(self.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        self.message_event.set()

    def take_body(self) -> bytes | None:
        """All of it, where it has come: then it has not to be received, and is kept here no longer."""
        if self.more_body:
            return None
        body, self.body = bytes(self.body), b""
        return body

    def abandon(self) -> None:
        """The client takes nothing: what waits in front of it is not kept for it any longer."""
        self.disconnected = True
        self.transport.abort()

    def watch_for_leaving(self, when_left: Callable[[], object]) -> None:
        """To be called once the client leaves, until the answer is complete or this is taken back."""
        self._when_left = when_left
        if self.flow.read_paused:
            self.flow.resume_reading()  # a large body paused it, and a connection that is not read never ends

    def stop_watching(self) -> None:
        self._when_left = None

    def leave(self) -> None:
        self.disconnected = True
        self.message_event.set()
        when_left, self._when_left = self._when_left, None
        if when_left is not None:
            when_left()

    def answer(self, status: int, head: bytes, body: bytes) -> bool:
        """A whole one; its head has its length."""
        if not self._is_ordinary():
            return False
        self.response_started, self.waiting_for_100_continue = True, False
        self.transport.write(b"%b%b%b\r\n%b" % (STATUS_LINE[status], self._server_lines(), head, body))
        self._complete()
        return True

    def begin(self, status: int, head: bytes, piece: bytes) -> bool:
        """One that comes in pieces; the first one goes out with the head."""
        if not self._is_ordinary():
            return False
        self.response_started, self.waiting_for_100_continue = True, False
        self.chunked_encoding = True
        self.transport.write(
            b"%b%b%btransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n"
            % (STATUS_LINE[status], self._server_lines(), head, len(piece), piece)
        )
        return True

    def write(self, piece: bytes) -> bool:
        """Of one that has begun and goes on; there is something in it."""
        if self.flow.write_paused or self.disconnected:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        return True

    def end(self, piece: bytes) -> bool:
        """Of one that has begun: its last piece, which may be empty, and its end."""
        if not (self._is_ordinary() and self.chunked_encoding):
            return False
        last = b"%x\r\n%b\r\n" % (len(piece), piece) if piece else b""
        self.transport.write(last + b"0\r\n\r\n")
        self._complete()
        return True

    def _complete(self) -> None:
        self.response_complete = True
        self.message_event.set()
        self.on_response()

    def _is_ordinary(self) -> bool:
        return self.keep_alive and not (self.flow.write_paused or self.disconnected or self.access_log)

    def _server_lines(self) -> bytes:
        """The date, and what else the server says of itself: made anew when that is, once a second."""
        if self.default_headers is not Exchange._served_headers:
            Exchange._served_headers = self.default_headers
            Exchange._served_lines = b"".join(b"%b: %b\r\n" % pair for pair in self.default_headers)
        return Exchange._served_lines
