"""An engine that says bytes, whatever they are: the far end of a connection, as whoever asks may meet it."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

from llmgw.gateway.routing import Target

STAYS, ENDS, RESETS = "stays", "ends", "resets"


@dataclass(frozen=True)
class Turn:
    """What one request is answered with: pieces, each read before the next is sent, and what becomes of the
    connection. `at_head`: it does not wait for the body."""

    pieces: Sequence[bytes] = ()
    then: str = STAYS
    at_head: bool = False


def says(*pieces: bytes, then: str = STAYS, at_head: bool = False) -> Turn:
    return Turn(pieces, then, at_head)


@dataclass
class RawEngine:
    """The turns are of the requests in their order, whatever connection they come on; the last one stays."""

    turns: list[Turn]
    requests: list[bytes] = field(default_factory=list)
    connections: list[_Line] = field(default_factory=list)
    target: Target = field(default_factory=lambda: Target("replica", "m", "", ""))

    async def closed(self) -> None:
        """Returns when the connections are that there are; they are to be soon."""
        async with asyncio.timeout(5):
            await asyncio.gather(*(line.over for line in self.connections))

    def next_turn(self) -> Turn:
        return self.turns.pop(0) if len(self.turns) > 1 else self.turns[0]


class _Line(asyncio.Protocol):
    def __init__(self, engine: RawEngine) -> None:
        self.engine = engine
        self.over = asyncio.get_running_loop().create_future()
        self.received = 0
        self._heard = b""
        self._is_waiting_for_body = False
        engine.connections.append(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self.over.set_result(None)

    def data_received(self, data: bytes) -> None:
        self.received += len(data)
        self._heard += data
        head, found, body = self._heard.partition(b"\r\n\r\n")
        if not found:
            return
        is_whole = len(body) == int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
        if not self._is_waiting_for_body and (is_whole or self.engine.turns[0].at_head):
            self._is_waiting_for_body = not is_whole
            self.engine.requests.append(self._heard)
            self._saying = asyncio.create_task(self._say(self.engine.next_turn()))
        if is_whole:
            self._heard, self._is_waiting_for_body = b"", False

    async def _say(self, turn: Turn) -> None:
        for piece in turn.pieces:
            if self.over.done():
                return
            self.transport.write(piece)
            for _ in range(3):  # on this loop, it is read by then
                await asyncio.sleep(0)
        if turn.then == ENDS:
            self.transport.close()
        elif turn.then == RESETS:
            made = self.transport.get_extra_info("socket")
            made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()


@asynccontextmanager
async def playing(*turns: Turn, host: str = "127.0.0.1", **more: object) -> AsyncIterator[RawEngine]:
    """`more` is for the server: TLS, for one."""
    engine = RawEngine([*turns] or [Turn()])
    connection: Callable[[], asyncio.Protocol] = lambda: _Line(engine)  # noqa: E731
    server = await asyncio.get_running_loop().create_server(connection, host, 0, **more)  # type: ignore
    port = server.sockets[0].getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    engine.target = Target("replica", "m", f"http{'s' * bool(more)}://{shown}:{port}", "key")
    try:
        yield engine
    finally:
        server.close()
        for line in engine.connections:
            line.transport.abort()
        await server.wait_closed()
