"""Talking to engines: the only module that does, by its pools of connections.

A request goes to a path from a table, with headers from an allow-list and the replica's own key. Closing an
answer before its end closes the connection, which is how an engine learns that nobody listens. Every failure
is an EngineAway whose text finishes the sentence "the replica ...".
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import lru_cache
from urllib.parse import urlsplit

from llmgw.gateway.connection import Broken, Reply, Stale
from llmgw.gateway.patience import Watch
from llmgw.gateway.pool import Absent, Pool
from llmgw.gateway.routing import Target

CONNECTIONS = 1_000
"""Of one process to one replica; who comes on top of that waits for one."""
LOOK_EVERY_S = 1.0
"""For connections that were kept too long, and replicas that are gone."""

CLIENT_HEADERS = ("traceparent", "tracestate")
"""What of a client's headers reaches an engine."""


class EngineAway(Exception):
    """The replica did not answer, or stopped in the middle. `is_absent`: it took no connection, so it never
    saw the request. `was_dropped`: its connection broke, which may be the end of a process that comes
    back."""

    def __init__(self, cause: str, *, is_absent: bool = False, was_dropped: bool = False) -> None:
        super().__init__(cause)
        self.is_absent, self.was_dropped = is_absent, was_dropped


class Answer:
    """A response whose head has arrived. Its body is read once; `close` may come at any time and more than
    once."""

    __slots__ = ("_loop", "_reply", "_since_s", "_watch", "content_type", "status")

    def __init__(self, reply: Reply, watch: Watch, loop: asyncio.AbstractEventLoop) -> None:
        self._reply, self._watch, self._loop = reply, watch, loop
        self._since_s: float | None = None
        self.status, self.content_type = reply.status, reply.content_type

    async def piece(self, patience_s: float, take: Callable[[bytes], bool] | None = None) -> bytes:
        """What has come, nothing after the end. A body that ends too early raises, and so does one that says
        nothing for longer than that. Comments, which engines send to keep a line open, are no sign of
        progress.

        What comes while this waits is offered to `take`, at once: to wake a task for each piece costs more
        than most pieces are worth. What that takes, which is no comment, this does not give."""
        reply = self._reply
        try:
            if not reply.has_news:
                left_s = patience_s
                if self._since_s is not None:
                    left_s = max(self._since_s + patience_s - self._loop.time(), 0)
                reply.taker = None if take is None else self._renewing(take, patience_s)
                try:
                    await self._watch.within(left_s, reply.change())
                finally:
                    reply.taker = None
            piece = reply.take()
        except (Broken, TimeoutError) as error:
            raise _away(error) from error
        if not piece.startswith(b":") or b"\ndata:" in piece:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = self._loop.time()
        return piece

    def _renewing(self, take: Callable[[bytes], bool], patience_s: float) -> Callable[[bytes], bool]:
        def takes(piece: bytes) -> bool:
            if not take(piece):
                return False
            self._since_s = None
            self._watch.renew(patience_s)
            return True

        return takes

    async def read(self, limit_bytes: int, patience_s: float) -> bytes | None:
        """The whole body, None if it is larger than the limit."""
        pieces: list[bytes] = []
        size = 0
        while piece := await self.piece(patience_s):
            size += len(piece)
            if size > limit_bytes:
                return None
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        self._reply.close()


class Upstream:
    """The pools of all replicas. Lives on one event loop, from `start` to `stop`."""

    def __init__(self, *, connections: int = CONNECTIONS) -> None:
        self._connections = connections
        self._pools: dict[str, Pool] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._look: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._look = self._loop.call_later(LOOK_EVERY_S, self._look_after)

    async def stop(self) -> None:
        if self._look is not None:
            self._look.cancel()
        await asyncio.gather(*(pool.close() for pool in self._pools.values()))

    async def ask(
        self,
        target: Target,
        path: str,
        body: bytes,
        client_headers: Mapping[str, str],
        watch: Watch,
        *,
        connect_s: float,
        first_byte_s: float,
    ) -> Answer:
        """`path` is the gateway's, never the client's. Returns when the engine has sent its status."""
        assert self._loop is not None, "start comes first"
        head = _head(target.origin, path, target.key)
        if client_headers:
            head += _own(client_headers)
        try:
            asking = self._ask(target.origin, head, body, connect_s)
            return Answer(await watch.within(first_byte_s, asking), watch, self._loop)
        except (Absent, Broken, TimeoutError) as error:
            raise _away(error) from error

    async def ask_briefly(
        self, target: Target, path: str, body: bytes, *, patience_s: float, limit_bytes: int
    ) -> bytes:
        """A question of the gateway's own. Nothing, where no 200 comes in time or it is too large."""
        try:
            async with asyncio.timeout(patience_s):
                head = _head(target.origin, path, target.key)
                reply = await self._ask(target.origin, head, body, patience_s)
                try:
                    return await _read(reply, limit_bytes) if reply.status == 200 else b""
                finally:
                    reply.close()
        except (Absent, Broken, TimeoutError):
            return b""

    async def _ask(self, origin: str, head: bytes, body: bytes, connect_s: float) -> Reply:
        """Once more where a connection that was kept had come to its end: nobody heard the request."""
        head += b"Content-Length: %d\r\n\r\n" % len(body)
        pool = self._pool(origin)
        connection = pool.take() or await pool.another(connect_s)
        try:
            return await connection.ask(head, body)
        except Stale as stale:
            try:
                connection = await self._pool(origin).another(connect_s)
            except Absent:
                raise stale from None  # it may have heard it after all
        return await connection.ask(head, body)

    def _pool(self, origin: str) -> Pool:
        pool = self._pools.get(origin)
        if pool is None:
            assert self._loop is not None, "start comes first"
            pool = self._pools[origin] = Pool(origin, self._loop, limit=self._connections)
        return pool

    def _look_after(self) -> None:
        assert self._loop is not None
        now_s = self._loop.time()
        for origin, pool in list(self._pools.items()):
            pool.expire(now_s)
            if pool.is_empty:
                del self._pools[origin]
        self._look = self._loop.call_later(LOOK_EVERY_S, self._look_after)


async def _read(reply: Reply, limit_bytes: int) -> bytes:
    told = b""
    while len(told) <= limit_bytes:
        if not reply.has_news:
            await reply.change()
        piece = reply.take()
        if not piece:
            return told
        told += piece
    return b""


def _away(error: Exception) -> EngineAway:
    match error:
        case Absent():
            return EngineAway(str(error), is_absent=True)
        case TimeoutError():
            return EngineAway("was silent for too long")
        case _:
            return EngineAway(str(error), was_dropped=True)


@lru_cache(maxsize=4096)
def _head(origin: str, path: str, key: str) -> bytes:
    """All but the length of the body, and what a client brings along."""
    return (
        f"POST {path} HTTP/1.1\r\n"
        f"Host: {urlsplit(origin).netloc}\r\n"
        f"Authorization: Bearer {key}\r\n"
        "Content-Type: application/json\r\n"
        "Accept-Encoding: identity\r\n"
    ).encode()


def _own(client_headers: Mapping[str, str]) -> bytes:
    """Nothing of a value that would end its line."""
    return "".join(
        f"{name}: {value}\r\n"
        for name in CLIENT_HEADERS
        if (value := client_headers.get(name)) is not None and value.isprintable()
    ).encode()
