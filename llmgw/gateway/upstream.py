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

from llmgw.gateway.connection import LARGE_BYTES, Broken, Reply, Stale
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


class Answer(Reply, kw_only=True, eq=False):
    """What an engine answers a client's request. Its body is read once; `close` may come at any time and more
    than once."""

    watch: Watch
    patience_s: float = 0.0
    since_s: float | None = None
    """Since when it says comments alone."""
    take_at_once: Callable[[bytes], bool] | None = None

    async def piece(self, patience_s: float, take: Callable[[bytes], bool] | None = None) -> bytes:
        """What has come, nothing after the end. A body that ends too early raises, and so does one that says
        nothing for longer than that. Comments, which engines send to keep a line open, are no sign of
        progress.

        What comes while this waits is offered to `take`, at once: to wake a task for each piece costs more
        than most pieces are worth. What that takes, which is no comment, this does not give."""
        try:
            if not self.has_news:
                left_s = patience_s
                if self.since_s is not None:
                    left_s = max(self.since_s + patience_s - self.connection.loop.time(), 0)
                if take is not None:
                    self.take_at_once, self.patience_s, self.taker = take, patience_s, self._pass_on
                try:
                    with self.watch.over(left_s):
                        await self.change()
                finally:
                    self.taker = None
            piece = self.take()
        except (Broken, TimeoutError) as error:
            raise _away(error) from error
        if not piece.startswith(b":") or b"\ndata:" in piece:
            self.since_s = None
        elif self.since_s is None:
            self.since_s = self.connection.loop.time()
        return piece

    def _pass_on(self, piece: bytes) -> bool:
        if self.take_at_once is None or not self.take_at_once(piece):
            return False
        self.since_s = None
        self.watch.renew(self.patience_s)
        return True

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


class Upstream:
    """The pools of all replicas. Lives on one event loop, from `start` to `stop`."""

    def __init__(self, *, connections: int = CONNECTIONS) -> None:
        self._connections = connections
        self._pools: dict[str, Pool] = {}  # by where each is and its certificate, which most have not
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
        head = _head(target.origin, path, target.key)
        if client_headers:
            head += _own(client_headers)
        head = b"%bContent-Length: %d\r\n\r\n" % (head, len(body))
        stale = None
        try:
            pool = self._pools.get(target.origin + target.certificate)
            if pool is not None and (kept := pool.take()) is not None:
                answer = Answer(kept, watch=watch)
                try:
                    if len(body) < LARGE_BYTES:  # nearly always, and so without a coroutine for each step
                        kept.begin(answer, head + body)
                        with watch.over(first_byte_s):
                            await answer.change()
                        if not answer.status:
                            raise kept.end_of(answer)
                    else:
                        await watch.within(first_byte_s, kept.ask(head, body, answer))
                    return answer
                except Stale as error:  # nobody heard the request, which is sent once more
                    stale = error
                except BaseException:
                    answer.close()
                    raise
            asking = self._ask_anew(target, head, body, watch, connect_s)
            return await watch.within(first_byte_s, asking)
        except Absent as absent:
            raise _away(stale or absent) from absent  # who was there a moment ago may have heard it after all
        except (Broken, TimeoutError) as error:
            raise _away(error) from error

    async def ask_briefly(
        self, target: Target, path: str, body: bytes, *, patience_s: float, limit_bytes: int
    ) -> bytes:
        """A question of the gateway's own. Nothing, where no 200 comes in time or it is too large."""
        watch = Watch()
        try:
            async with asyncio.timeout(patience_s):
                answer = await self.ask(
                    target, path, body, {}, watch, connect_s=patience_s, first_byte_s=patience_s
                )
                try:
                    return await answer.read(limit_bytes, patience_s) or b"" if answer.status == 200 else b""
                finally:
                    answer.close()
        except (EngineAway, TimeoutError):
            return b""
        finally:
            watch.close()

    async def _ask_anew(
        self, target: Target, head: bytes, body: bytes, watch: Watch, connect_s: float
    ) -> Answer:
        connection = await self._pool(target).another(connect_s)
        answer = Answer(connection, watch=watch)
        await connection.ask(head, body, answer)
        return answer

    def _pool(self, target: Target) -> Pool:
        where = target.origin + target.certificate
        pool = self._pools.get(where)
        if pool is None:
            assert self._loop is not None, "start comes first"
            pool = self._pools[where] = Pool(
                target.origin, self._loop, limit=self._connections, certificate=target.certificate
            )
        return pool

    def _look_after(self) -> None:
        assert self._loop is not None
        now_s = self._loop.time()
        for where, pool in list(self._pools.items()):
            pool.expire(now_s)
            if pool.is_empty:
                del self._pools[where]
        self._look = self._loop.call_later(LOOK_EVERY_S, self._look_after)


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
