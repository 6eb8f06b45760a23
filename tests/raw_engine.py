"""An engine that says bytes, whatever they are: the far end of a connection, as whoever asks may meet it.

And those who ask.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import cast

from llmgw.gateway.patience import Watch
from llmgw.gateway.routing import Target
from llmgw.gateway.upstream import Answer, EngineAway, Upstream

OK = b"HTTP/1.1 200 OK\r\n"
HI = OK + b"Content-Length: 2\r\n\r\nhi"
FINE = (200, b"hi", "whole")

STAYS, ENDS, RESETS, HALF = "stays", "ends", "resets", "says nothing more, and still listens"


@dataclass(frozen=True)
class Turn:
    """What one request is answered with: pieces, each read before the next is sent, and what becomes of the
    connection. `at_head`: it does not wait for the body. `after`: but for this."""

    pieces: Sequence[bytes] = ()
    then: str = STAYS
    at_head: bool = False
    after: asyncio.Event | None = None


def says(*pieces: bytes, then: str = STAYS, at_head: bool = False) -> Turn:
    return Turn(pieces, then, at_head)


@dataclass
class RawEngine:
    """The turns are of the requests in their order, whatever connection they come on; the last one stays."""

    turns: list[Turn]
    requests: list[bytes] = field(default_factory=list)
    connections: list[_Line] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    server: asyncio.Server = field(init=False)
    target: Target = field(default_factory=lambda: Target("replica", "m", "", ""))

    async def closed(self) -> None:
        """Returns when the connections are that there are; they are to be soon."""
        async with asyncio.timeout(5):
            await asyncio.gather(*(line.over for line in self.connections))

    async def heard(self, requests: int) -> None:
        await self._until(lambda: len(self.requests) >= requests)

    async def received(self, size: int) -> None:
        await self._until(lambda: sum(line.received for line in self.connections) >= size)

    async def _until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not is_so():
                self.news.clear()
                await self.news.wait()

    def next_turn(self) -> Turn:
        return self.turns.pop(0) if len(self.turns) > 1 else self.turns[0]


class _Line(asyncio.Protocol):
    def __init__(self, engine: RawEngine) -> None:
        self.engine = engine
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.received = 0
        self._heard = bytearray()
        self._whole = 0
        self._is_answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.engine.connections.append(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.over.set_result(None)

    def data_received(self, data: bytes) -> None:
        self.received += len(data)
        self._heard += data
        self.engine.news.set()
        if not self._whole and (head := self._heard.find(b"\r\n\r\n") + 4) > 3:
            self._whole = head + int(self._heard[:head].lower().partition(b"content-length: ")[2].split()[0])
        is_whole = self._whole == len(self._heard)
        if self._whole and not self._is_answered and (is_whole or self.engine.turns[0].at_head):
            self._is_answered = True
            self.engine.requests.append(bytes(self._heard))
            self._saying = asyncio.create_task(self._say(self.engine.next_turn()))
        if is_whole:
            self._heard.clear()
            self._whole, self._is_answered = 0, False

    async def _say(self, turn: Turn) -> None:
        if turn.after is not None:
            await turn.after.wait()
        for piece in turn.pieces:
            if self.over.done():
                return
            self.transport.write(piece)
            for _ in range(3):  # on this loop, it is read by then
                await asyncio.sleep(0)
        if turn.then == ENDS:
            self.transport.close()
        elif turn.then == HALF:
            self.transport.write_eof()
        elif turn.then == RESETS:
            made = self.transport.get_extra_info("socket")
            made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()


@asynccontextmanager
async def playing(
    *turns: Turn, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None
) -> AsyncIterator[RawEngine]:
    engine = RawEngine([*turns] or [Turn()])
    server = await asyncio.get_running_loop().create_server(lambda: _Line(engine), host, 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    engine.server = server
    engine.target = Target("replica", "m", f"http{'s' * bool(tls)}://{shown}:{port}", "key")
    try:
        yield engine
    finally:
        server.close()
        for line in engine.connections:
            line.transport.abort()
        await server.wait_closed()


@asynccontextmanager
async def asking(**options: int) -> AsyncIterator[Upstream]:
    upstream = Upstream(**options)
    await upstream.start()
    try:
        yield upstream
    finally:
        await upstream.stop()


@contextmanager
def watching() -> Iterator[Watch]:
    watch = Watch()
    try:
        yield watch
    finally:
        watch.close()


async def ask(
    upstream: Upstream,
    target: Target,
    watch: Watch,
    body: bytes = b"{}",
    headers: Mapping[str, str] | None = None,
) -> Answer:
    return await upstream.ask(target, "/v1", body, headers or {}, watch, connect_s=5, first_byte_s=5)


async def outcome(
    upstream: Upstream, engine: RawEngine, body: bytes = b"{}", patience_s: float = 5
) -> tuple[int | str, bytes, str]:
    """Its status or why there is none, its body as far as it came, and how it ended."""
    with watching() as watch:
        try:
            answer = await ask(upstream, engine.target, watch, body)
        except EngineAway as away:
            return str(away), b"", ""
        heard = b""
        try:
            while piece := await answer.piece(patience_s):
                heard += piece
        except EngineAway as away:
            return answer.status, heard, str(away)
        finally:
            answer.close()
        return answer.status, heard, "whole"


@contextmanager
def deaf() -> Iterator[Target]:
    """Nothing answers there, as with a machine whose packets are lost."""
    with ExitStack() as stack:
        listening = stack.enter_context(socket.socket())
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for _ in range(4):  # once its line is full, the kernel drops who knocks
            knocking = stack.enter_context(socket.socket())
            knocking.setblocking(False)
            knocking.connect_ex(listening.getsockname())
        yield Target("replica", "m", f"http://127.0.0.1:{listening.getsockname()[1]}", "key")
