"""A wire that can be cut: a proxy between two that talk over TCP, whose ways are closed, slowed and opened.

What is sent into a closed way is held, and goes on late once the way is open again, although its sender may
have given up long since.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.stage import LoopThread

READ_BYTES = 1 << 16


@dataclass
class Way:
    """One direction: so many bytes at a time, each a while after the other. `holds` says of the first bytes
    of a connection whether it is held."""

    delay_s: float = 0.0
    bytes_at_a_time: int = READ_BYTES
    holds: Callable[[bytes], bool] | None = None
    held: list[bytes] = field(default_factory=list)
    is_open: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class FaultProxy:
    """Between whoever connects to `port` and `target`, a port or the path of a socket. there: towards the
    target; back: its answers. Where `path` is given, it listens there."""

    target: int | str
    path: str = ""
    is_refusing: bool = False
    there: Way = field(default_factory=Way)
    back: Way = field(default_factory=Way)
    requests: list[bytes] = field(default_factory=list)
    answers: list[bytes] = field(default_factory=list)
    port: int = 0
    _alive: set[asyncio.StreamWriter] = field(default_factory=set)

    @contextlib.contextmanager
    def running(self) -> Iterator[FaultProxy]:
        with LoopThread() as self._thread:
            self._thread.run(self._open())
            try:
                yield self
            finally:
                self._thread.run(self._close())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def refuse(self) -> None:
        """As a machine that is gone: who is connected is cut off, and nobody gets in."""
        self.is_refusing = True
        self._thread.run(self._cut())

    def accept(self) -> None:
        self.is_refusing = False

    def hold(self, way: Way, which: Callable[[bytes], bool] = bool) -> None:
        """From now on, until `release`. `which` tells by the first bytes of a connection."""
        way.holds = which
        way.is_open.clear()

    def release(self) -> None:
        """What was held goes on, and what comes passes."""
        for way in (self.there, self.back):
            way.holds = None
            way.held.clear()
            self._thread.loop.call_soon_threadsafe(way.is_open.set)

    # --- on the loop ------------------------------------------------------------------

    async def _open(self) -> None:
        if self.path:
            self._server: asyncio.Server = await asyncio.start_unix_server(self._serve, self.path)
            return
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        self._server.close()
        await self._cut()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _cut(self) -> None:
        for writer in tuple(self._alive):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_refusing:
            writer.transport.abort()
            return
        try:
            if isinstance(self.target, str):
                far_reader, far_writer = await asyncio.open_unix_connection(self.target)
            else:
                far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, far_writer}
        self._alive |= both
        try:
            # Each way ends by itself: what was sent arrives, though nobody waits for an answer any more.
            asked: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
            async with asyncio.TaskGroup() as ways:
                ways.create_task(self._pass_on(self.there, reader, far_writer, asked))
                ways.create_task(self._pass_on(self.back, far_reader, writer, asked))
        finally:
            self._alive -= both
            for each in both:
                each.transport.abort()

    async def _pass_on(
        self,
        way: Way,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        asked: asyncio.Future[bytes],
    ) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(way.bytes_at_a_time):
                (self.requests if way is self.there else self.answers).append(chunk)
                if not asked.done():
                    asked.set_result(chunk)
                if way.holds and way.holds(asked.result()):
                    way.held.append(chunk)
                    await way.is_open.wait()
                await asyncio.sleep(way.delay_s)
                writer.write(chunk)
                await writer.drain()
        with contextlib.suppress(OSError, RuntimeError):
            writer.write_eof()
