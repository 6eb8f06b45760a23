"""One connection to an engine: HTTP/1.1 from the client's end, one request at a time.

httptools reads what comes. What it lets pass and a client should not is refused here: an answer that was not
asked for, a coding that nobody knows, and lines, headers and interim answers without end. A connection is
used again only where an answer ended as it should, with nothing behind it and all of its request sent.
"""

from __future__ import annotations

import asyncio
import socket
import zlib
from collections.abc import Callable
from functools import lru_cache
from typing import cast

import httptools
import msgspec

KEEP_ALIVE_S = 4.0
"""Below the 5 s after which vllm and llama.cpp close an idle connection, so that none is used as it
closes."""
DEAD_AFTER_S, PROBE_EVERY_S = 35, 5
"""A connection whose other end is gone without a word is ended after so long, in the middle of an answer
too."""
RACE_S = 1.0
"""A kept connection that ends so soon after it was used was closed before the request came. Later, the engine
had the request, and its end may be the request's doing."""
LARGE_BYTES = 1024 * 1024
"""A body from here on goes out in pieces: at once, it would hold up all other requests."""
PIECE_BYTES = 256 * 1024
AHEAD_BYTES = 128 * 1024
"""What is read ahead of a slow client, and of one more piece of the kernel's."""
HEADERS = 100
REMEMBERED_BYTES = 256
"""Of a header whose meaning is kept for the next that is like it."""
OVERHEAD_BYTES, CHUNK_OVERHEAD_BYTES = 64 * 1024, 64
"""Of an answer, what is no body: between two pieces of it, and what each may bring along."""
UNPACKED_BYTES = 16 * 1024 * 1024
"""Of one piece of the kernel's that came packed, though nobody asked for that."""

_HEARD = frozenset(
    (b"content-type", b"content-length", b"transfer-encoding", b"content-encoding", b"keep-alive")
)
_WITHOUT_BODY = (204, 304)
_PACKED = (b"gzip", b"x-gzip", b"deflate")


class Broken(Exception):
    """The connection ended before the answer did. The text finishes the sentence "the replica ..."."""


class Stale(Broken):
    """It was kept from an earlier request, and ended before anything was answered."""


class _Unfit(Exception):
    """Makes httptools stop reading."""


class Reply(msgspec.Struct, eq=False):
    """What an engine answers, as it comes. One task reads it."""

    connection: Connection
    status: int = 0
    content_type: str = ""
    pieces: list[bytes] = []  # each its own, as msgspec has it
    size: int = 0
    is_whole: bool = False
    fault: str = ""
    waiter: asyncio.Future[None] | None = None
    taker: Callable[[bytes], bool] | None = None

    @property
    def has_news(self) -> bool:
        return bool(self.pieces or self.is_whole or self.fault)

    @property
    def is_over(self) -> bool:
        return self.is_whole and not self.pieces

    def change(self) -> asyncio.Future[None]:
        """To be awaited, once, where there is no news. What the taker takes until then, if there is one, is
        no news; it is not asked about the end."""
        self.waiter = waiter = self.connection.loop.create_future()
        return waiter

    def wake(self) -> None:
        self.taker = None
        waiter, self.waiter = self.waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def take(self) -> bytes:
        """What has come of the body; nothing, where there is news, after its end. Raises Broken once all that
        came before the break is taken."""
        pieces = self.pieces
        if not pieces:
            if self.fault:
                raise Broken(self.fault)
            return b""
        self.pieces, self.size = [], 0
        if not self.is_whole:  # or it serves another request by now
            self.connection.go_on()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        """At any time and more than once. Ends the connection, unless the answer is whole: it was given back
        then."""
        if not self.is_whole:
            self.connection.abort()


class Connection(asyncio.Protocol):
    """Starts without a transport, which it is given by whoever connects it. Calls `when_free` when it may be
    used again, and `when_lost` when it will never be."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        when_free: Callable[[Connection], object],
        when_lost: Callable[[Connection], object],
    ) -> None:
        self.loop = loop
        self._when_free, self._when_lost = when_free, when_lost
        self.kept_until_s = 0.0
        self.keep_alive_s = KEEP_ALIVE_S
        """How long it may lie idle: well below what the engine told, if it did."""
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._reply: Reply | None = None
        self._ended: asyncio.Future[None] | None = None
        self._told: dict[bytes, bytes] = {}
        self._came: list[bytes] = []  # of the body, in what is being read now
        self.on_body = self._came.append  # the parser's: a function of our own would cost more than the rest
        self._headers = self._overhead = 0
        self._unpacking: zlib._Decompress | None = None
        self._asked_at_s = 0.0
        self._was_kept = self._is_used = self._has_heard = self._ends_body = False
        self._keeps = self._is_sending = self._is_full = self._is_paused = False

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    # --- asking ---------------------------------------------------------------------------------------------

    async def ask(self, head: bytes, body: bytes, reply: Reply | None = None) -> Reply:
        """Returns when the status is there. Raises Broken, and Stale where the same may be asked again. Once
        it has raised, and if it is cancelled, the connection is at its end, or given back."""
        reply = reply or Reply(self)
        try:
            if len(body) < LARGE_BYTES:
                self.begin(reply, head + body)
            else:
                self.begin(reply, head)
                await self._send(body, reply)
            while not reply.status and not reply.fault:
                await reply.change()
            if not reply.status:
                raise self.end_of(reply)
        except BaseException:
            reply.close()  # who is cancelled as the answer is whole does not end what is another's by now
            raise
        return reply

    def begin(self, reply: Reply, request: bytes) -> None:
        """Sends it, or its beginning: the first change of the reply is its status, or a fault. Raises as
        `ask`, and whoever asks in this way closes the reply where that does."""
        self._was_kept, self._is_used = self._is_used, True
        if self._transport is None or self._transport.is_closing():
            raise (Stale if self._was_kept else Broken)("closed the connection")
        self._told, self._headers, self._overhead = {}, 0, 0
        self._keeps, self._has_heard, self._unpacking = False, False, None
        self._asked_at_s = self.loop.time()
        self._reply = reply
        self._transport.write(request)

    def end_of(self, reply: Reply) -> Broken:
        """Of one that ended before its status came."""
        is_race = self._was_kept and not self._has_heard
        is_stale = is_race and self.loop.time() - self._asked_at_s < RACE_S
        return (Stale if is_stale else Broken)(reply.fault)

    async def _send(self, body: bytes, reply: Reply) -> None:
        """As fast as the engine takes it. An answer that comes before the end is the end."""
        transport, rest = self._transport, memoryview(body)
        assert transport is not None
        self._is_sending = True
        while rest and not reply.status and not reply.fault:
            transport.write(rest[:PIECE_BYTES])
            rest = rest[PIECE_BYTES:]
            await asyncio.sleep(0)  # for all others, where the kernel takes it at once
            while self._is_full and not reply.status and not reply.fault:
                await reply.change()
        self._is_sending = bool(rest)

    def go_on(self) -> None:
        """What had come is taken."""
        if self._is_paused and self._transport is not None and not self._transport.is_closing():
            self._is_paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        """Ends it at once: an engine that is still at work learns that nobody listens."""
        if self._transport is not None:
            self._transport.abort()

    async def end(self) -> None:
        """Returns when its socket is closed."""
        if self._transport is not None and self._ended is None:
            self._ended = self.loop.create_future()
            self.abort()
            await self._ended

    # --- of the transport -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpResponseParser(self)
        notice_death(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        reply = self._reply
        if reply is None or self._parser is None:  # nobody asked, or more than was asked for
            if data.strip(b"\r\n"):  # of empty lines between answers, httptools makes nothing either
                self.abort()
            return
        status, came, is_fit = reply.status, self._came, True
        self._has_heard = True
        try:
            self._parser.feed_data(data)
            if self._unpacking is not None:
                self._unpack(reply, self._unpacking)
        except (httptools.HttpParserError, _Unfit, zlib.error):
            self._keeps = is_fit = False
        if len(came) == 1:
            piece = came.pop()
            self._overhead = len(data) - len(piece) - CHUNK_OVERHEAD_BYTES
        elif came:
            piece = b"".join(came)
            self._overhead = len(data) - len(piece) - CHUNK_OVERHEAD_BYTES * len(came)
            came.clear()
        else:
            piece = b""
            self._overhead += len(data)
        if is_fit and not reply.is_whole and self._overhead <= OVERHEAD_BYTES:
            # Nearly every piece of a stream goes no further than to its taker.
            if not (piece and reply.taker is not None and reply.taker(piece)):
                self._hand_on(reply, piece, is_headed=status != reply.status)
            return
        if piece:
            reply.pieces.append(piece)
        if reply.is_whole:
            self._reply = None
            self._let_go()
            reply.wake()
        else:
            self._give_up()

    def _unpack(self, reply: Reply, unpacking: zlib._Decompress) -> None:
        """What has come, as it was before it was packed. Raises where it was not packed so."""
        packed = self._came.copy()
        self._came.clear()
        is_whole, reply.is_whole = reply.is_whole, False
        for piece in packed:
            plain = unpacking.decompress(piece, UNPACKED_BYTES)
            if unpacking.unconsumed_tail:
                raise _Unfit
            if plain:
                self._came.append(plain)
        if is_whole and not unpacking.eof:
            raise _Unfit
        reply.is_whole = is_whole

    def _hand_on(self, reply: Reply, piece: bytes, *, is_headed: bool) -> None:
        if piece:
            reply.pieces.append(piece)
            reply.size += len(piece)
            if reply.size > AHEAD_BYTES and not self._is_paused:
                self._is_paused = True
                cast(asyncio.Transport, self._transport).pause_reading()
        if piece or is_headed:
            reply.wake()

    def eof_received(self) -> None:
        reply = self._reply
        is_unpacked = self._unpacking is None or self._unpacking.eof
        if reply is not None and reply.status and self._ends_body and is_unpacked:
            self._reply = None
            reply.is_whole = True
            reply.wake()
        self._give_up()

    def connection_lost(self, error: Exception | None) -> None:
        self._give_up()
        self._transport = self._parser = None
        self._when_lost(self)
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        if self._is_sending and self._reply is not None:
            self._reply.wake()

    def _give_up(self) -> None:
        reply, self._reply = self._reply, None
        if reply is not None:
            reply.fault = "broke off" if reply.status else "closed the connection"
            reply.wake()
        self.abort()

    def _let_go(self) -> None:
        transport = self._transport
        assert transport is not None
        if not self._keeps or self._is_sending or transport.is_closing() or transport.get_write_buffer_size():
            self.abort()
            return
        if self._is_paused:
            self._is_paused = False
            transport.resume_reading()
        self._when_free(self)

    # --- of the parser --------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._reply is None or self._reply.is_whole:
            raise _Unfit

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers += 1
        if self._headers > HEADERS:
            raise _Unfit
        name = name.lower()
        if name in _HEARD:
            before = self._told.setdefault(name, value)
            if before is not value and name != b"content-type":  # of which the first counts
                self._told[name] = before + b", " + value

    def on_headers_complete(self) -> None:
        reply, told = self._reply, self._told
        assert reply is not None
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status < 200:
            if status < 100 or status == 101:
                raise _Unfit
            return
        coding = told.get(b"transfer-encoding")
        if coding is not None and coding.lower() != b"chunked":
            raise _Unfit
        packed = told.get(b"content-encoding")
        if packed is not None and packed.lower() != b"identity":
            if packed.lower() not in _PACKED:
                raise _Unfit
            self._unpacking = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # which of them, it sees itself
        reply.status = status
        reply.content_type = _media_type(told.get(b"content-type", b"")[:REMEMBERED_BYTES])
        idle = told.get(b"keep-alive")
        self.keep_alive_s = KEEP_ALIVE_S if idle is None else _idle_s(idle[:REMEMBERED_BYTES])
        self._ends_body = not (coding or b"content-length" in told or status in _WITHOUT_BODY)

    def on_message_complete(self) -> None:
        reply, told = self._reply, self._told
        assert reply is not None
        assert self._parser is not None
        if not reply.status:  # an interim answer: the one that counts is still to come
            told.clear()
            return
        reply.is_whole = True
        # A body that was announced where none may be could still come.
        is_sure = reply.status not in _WITHOUT_BODY or told.keys().isdisjoint(
            (b"content-length", b"transfer-encoding")
        )
        self._keeps = is_sure and self._parser.should_keep_alive()


def notice_death(connected: socket.socket) -> None:
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_EVERY_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_EVERY_S)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, DEAD_AFTER_S // PROBE_EVERY_S - 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_AFTER_S * 1000)


@lru_cache(maxsize=256)
def _media_type(content_type: bytes) -> str:
    return content_type.partition(b";")[0].strip().lower().decode("latin-1")


@lru_cache(maxsize=256)
def _idle_s(keep_alive: bytes) -> float:
    for word in keep_alive.lower().split(b","):
        name, _, seconds = word.strip().partition(b"=")
        if name == b"timeout" and seconds.isdigit():
            return min(KEEP_ALIVE_S, int(seconds[:9]) - 1.0)
    return KEEP_ALIVE_S
