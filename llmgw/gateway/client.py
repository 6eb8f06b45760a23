"""The answering side of one request: a status once, then bytes, and comments while there is nothing to say.

Every answer carries what the request's passage has learned until then; of a stream that a comment began
before a replica was chosen, that is the request's id alone. A client that does not read is not waited for
without end, since an engine's slot is held for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from functools import lru_cache
from time import monotonic
from typing import Any
from urllib.parse import quote

import msgspec

from llmgw.exchange import Exchange
from llmgw.gateway import streams
from llmgw.gateway.admission import Refused
from llmgw.gateway.passage import Passage
from llmgw.gateway.patience import Watch
from llmgw.gateway.streams import Dialect
from llmgw.gateway.surface import ANTHROPIC, OPENAI, error_body

Header = tuple[bytes, bytes]

_COMMON_HEADERS = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))
_JSON_HEADERS = (*_COMMON_HEADERS, (b"content-type", b"application/json"))
_STREAM_HEADERS = (*_COMMON_HEADERS, (b"content-type", b"text/event-stream; charset=utf-8"))


def _written(headers: Iterable[Header]) -> bytes:
    """As lines. What a client said is in none of them but its request's id, which the door has checked."""
    return b"".join([b"%b: %b\r\n" % header for header in headers])


_JSON_LINES, _STREAM_LINES = _written(_JSON_HEADERS), _written(_STREAM_HEADERS)


def _waiting() -> str:
    return "waiting"


class ClientStalled(Exception):
    """The client has stopped reading: what it was sent waits in front of it, and nothing more is taken."""


class Client:
    """Raises ClientStalled where what it is sent is not taken within `stall_s`. What can be sent at once goes
    through the exchange, where there is one."""

    _loop: asyncio.AbstractEventLoop
    _dialect: Dialect | None = None
    _words: Callable[[], str] = staticmethod(_waiting)
    _spoke_at_s = 0.0

    def __init__(
        self,
        receive: Callable[[], Awaitable[MutableMapping[str, Any]]],
        send: Callable[[MutableMapping[str, Any]], Awaitable[None]],
        exchange: Exchange | None,
        passage: Passage,
        *,
        stall_s: float,
        comment_s: float,
    ) -> None:
        self.receive, self._send, self.exchange, self._passage = receive, send, exchange, passage
        self._stall_s, self._comment_s = stall_s, comment_s
        self.shape, self.has_begun = OPENAI, False
        self._watch: Watch | None = None
        self._beat: asyncio.TimerHandle | None = None
        self._commenting: asyncio.Task[None] | None = None

    def watched_by(self, watch: Watch) -> None:
        """From now on this watch ends what is sent and not taken."""
        self._watch = watch

    @property
    def is_silent(self) -> bool:
        """Nothing was said, and nothing is about to be."""
        return not self.has_begun and self._commenting is None

    async def write(self, data: bytes, *, is_last: bool = False) -> None:
        if is_last or self._commenting is not None:
            await self._settle(goes_on=not is_last)
        elif self._beat is not None:
            self._spoke_at_s = self._loop.time()
        if not self._is_written(data, is_last=is_last):
            message = {"type": "http.response.body", "body": data, "more_body": not is_last}
            await self._taken(self._send(message))

    def _is_written(self, data: bytes, *, is_last: bool) -> bool:
        exchange = self.exchange
        if exchange is None:
            return False
        return exchange.end(data) if is_last else bool(data) and exchange.write(data)

    def write_at_once(self, data: bytes) -> bool:
        """Of a stream that has begun and goes on. Where it says False, it has said nothing."""
        if self._commenting is not None or self.exchange is None or not self.exchange.write(data):
            return False
        self._spoke_at_s = self._loop.time()
        return True

    async def answer(self, body: bytes, status: int = 200, *headers: Header) -> None:
        """A whole one, to a client that is silent."""
        if self._beat is not None or self._commenting is not None:
            await self._settle(goes_on=False)
        if not headers and self.answer_at_once(body, status):
            return
        length = (b"content-length", b"%d" % len(body))
        head = self._head(status, _JSON_HEADERS, length, *headers)
        await self._taken(self._send_whole(_start(status, head), body))

    def answer_at_once(self, body: bytes, status: int = 200) -> bool:
        """A whole one, to a client that is silent. Where it says False, it has said nothing."""
        if self.exchange is None or self._beat is not None or self._commenting is not None:
            return False
        lines = self._lines(status, b"%bcontent-length: %d\r\n" % (_JSON_LINES, len(body)))
        return self.exchange.answer(status, lines, body)

    async def answer_json(self, value: object) -> None:
        await self.answer(msgspec.json.encode(value))

    async def refuse(self, refused: Refused) -> None:
        """With a status, or as the last event of a stream that has begun."""
        await self._settle(goes_on=False)
        self._passage.code = refused.code
        if not self.has_begun:
            body = msgspec.json.encode(error_body(refused, self.shape))
            await self.answer(body, refused.status, *refused.headers())
        elif self._dialect is not None:
            await self.write(self._dialect.error_event(refused), is_last=True)

    # --- streams --------------------------------------------------------------------------------------------

    def keep_company(self, dialect: Dialect, after_s: float, words: Callable[[], str] = _waiting) -> None:
        """For a client that asked for a stream: whenever there was nothing to say for a while, the first time
        after so long, it is sent a comment, which begins the stream."""
        self._dialect, self._words, self._loop = dialect, words, asyncio.get_running_loop()
        self._spoke_at_s = self._loop.time()
        self._set_beat(after_s)

    async def begin_stream(self, first: bytes) -> None:
        """Where no comment did. What comes first goes out with the head."""
        if not self.has_begun:
            if self.exchange is not None and self.exchange.begin(200, self._lines(200, _STREAM_LINES), first):
                self._spoke_at_s = self._loop.time()
                return
            await self._taken(self._send(_start(200, self._head(200, _STREAM_HEADERS))))
        await self.write(first)

    async def be_quiet(self) -> None:
        """The last word is about to be said: no comment comes after it."""
        await self._settle(goes_on=False)

    def close(self) -> None:
        """Nothing comes after this but a refusal, however the request ended."""
        self._watch = None
        if self._beat is not None:
            self._beat.cancel()
        if self._commenting is not None:
            self._commenting.cancel()

    async def _settle(self, *, goes_on: bool) -> None:
        """No comment is half said after this, and none comes where nothing goes on."""
        if self._beat is not None and not goes_on:
            self._beat.cancel()
            self._beat = None
        if self._commenting is not None:
            await self._taken(asyncio.wait((self._commenting,)))

    def _set_beat(self, after_s: float) -> None:
        if self._beat is not None:
            self._beat.cancel()
        self._beat = self._loop.call_later(after_s, self._look, after_s)

    def _look(self, after_s: float) -> None:
        left_s = self._spoke_at_s + after_s - self._loop.time()
        if left_s > 0.01:
            self._beat = self._loop.call_later(left_s, self._look, after_s)
            return
        if self._commenting is None:
            self._commenting = self._loop.create_task(self._comment())
        self._set_beat(self._comment_s)

    async def _comment(self) -> None:
        try:
            if not self.has_begun:
                await self._send(_start(200, self._head(200, _STREAM_HEADERS)))
            body = streams.comment(self._words())
            self._spoke_at_s = self._loop.time()
            await self._send({"type": "http.response.body", "body": body, "more_body": True})
        finally:
            self._commenting = None

    # --- what is sent ---------------------------------------------------------------------------------------

    def _lines(self, status: int, lines: bytes) -> bytes:
        """What `_head` has, as it is written."""
        passage = self._passage
        self.has_begun, passage.status = True, status
        own = passage.request_id.encode()
        if passage.replica:
            served = _lines_of_served(passage.model, passage.replica, passage.route, passage.is_simulated)
            lines += b"%bx-llmgw-overhead-ms: %.1f\r\n" % (served, _overhead_s(passage) * 1000)
        if self.shape == ANTHROPIC:
            lines += b"request-id: %b\r\n" % own
        return b"%bx-request-id: %b\r\n" % (lines, own)

    def _head(self, status: int, headers: tuple[Header, ...], *more: Header) -> list[Header]:
        passage = self._passage
        self.has_begun, passage.status = True, status
        told = [*headers, *more, (b"x-request-id", passage.request_id.encode())]
        if passage.replica:
            told += _served_by(passage.model, passage.replica, passage.route, passage.is_simulated)
            told.append((b"x-llmgw-overhead-ms", b"%.1f" % (_overhead_s(passage) * 1000)))
        if self.shape == ANTHROPIC:
            told.append((b"request-id", passage.request_id.encode()))
        return told

    async def _send_whole(self, start: MutableMapping[str, Any], body: bytes) -> None:
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body})

    async def _taken(self, sending: Awaitable[object]) -> None:
        """Waits while the server's buffer for this client is full."""
        try:
            if self._watch is not None:
                await self._watch.within(self._stall_s, sending)
                return
            async with asyncio.timeout(self._stall_s):
                await sending
        except TimeoutError:
            raise ClientStalled from None


def _start(status: int, headers: list[Header]) -> MutableMapping[str, Any]:
    return {"type": "http.response.start", "status": status, "headers": headers}


@lru_cache(maxsize=4096)
def _served_by(model: str, replica: str, route: str, is_simulated: bool) -> tuple[Header, ...]:
    told = [
        (b"x-llmgw-model", quote(model, safe=_PLAIN).encode()),
        (b"x-llmgw-replica", replica.encode()),
        (b"x-llmgw-route", route.encode()),
    ]
    if is_simulated:
        told.append((b"x-llmgw-simulated", b"true"))
    return tuple(told)


@lru_cache(maxsize=4096)
def _lines_of_served(model: str, replica: str, route: str, is_simulated: bool) -> bytes:
    return _written(_served_by(model, replica, route, is_simulated))


_PLAIN = "".join(map(chr, range(0x21, 0x7F))).replace("%", "")


def _overhead_s(passage: Passage) -> float:
    """What the request has taken until now, less what its engine took and what it waited for one."""
    now_s = monotonic()
    engine_s = 0.0
    if passage.sent_at_s is not None:
        engine_s = (now_s if passage.first_byte_at_s is None else passage.first_byte_at_s) - passage.sent_at_s
    return max(now_s - passage.begun_at_s - engine_s - passage.held_s, 0.0)
