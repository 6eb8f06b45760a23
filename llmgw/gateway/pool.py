"""The connections to one replica: kept for the next request, opened as needed, and never more than so many.

Who finds none waits in line, and whoever came first is served first. Whatever becomes of a connection, its
place in the count is given back once, when its socket is closed.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from urllib.parse import urlsplit

from llmgw.gateway.connection import Broken, Connection
from nodes.certificates import is_shown, unproven


class Absent(Exception):
    """No connection was made. The text finishes the sentence "the replica ..."."""


class Pool:
    """`origin` is `http://host:port`, or https and then nobody's who does not show `certificate`. At most
    `limit` connections at a time."""

    def __init__(
        self, origin: str, loop: asyncio.AbstractEventLoop, *, limit: int, certificate: str = ""
    ) -> None:
        parts = urlsplit(origin)
        self._host, self._certificate = parts.hostname or "", certificate
        self._trust = unproven() if parts.scheme == "https" else None
        self._port = parts.port or (80 if self._trust is None else 443)
        self._loop, self._limit = loop, limit
        self._all: set[Connection] = set()
        self._idle: dict[Connection, None] = {}
        self._waiting: deque[asyncio.Future[Connection]] = deque()

    @property
    def is_empty(self) -> bool:
        return not self._all and not self._waiting

    def take(self) -> Connection | None:
        """The one that was used last, so that those that are too many expire."""
        while self._idle:
            connection, _ = self._idle.popitem()
            if self._loop.time() < connection.kept_until_s and connection.is_open:
                return connection
            connection.abort()
        return None

    async def another(self, connect_s: float) -> Connection:
        """A new one; where there may be no more, the next that is free. Raises Absent."""
        if self._waiting or len(self._all) >= self._limit:
            self._close_idle()  # their places are as good as free
            connection = await self._turn()
            if connection.is_open:
                return connection
        else:
            connection = self._place()
        is_made = False
        try:
            async with asyncio.timeout(connect_s):
                transport, _ = await self._loop.create_connection(
                    lambda: connection, self._host, self._port, ssl=self._trust
                )
            if self._trust is not None and not is_shown(transport, self._certificate):
                raise Absent("shows another certificate than it was started with")
            is_made = True
        except TimeoutError as error:
            raise Absent("did not accept a connection in time") from error
        except ssl.SSLError as error:
            raise Absent("does not speak TLS as its node tells") from error
        except (OSError, UnicodeError) as error:  # a name that cannot be one is the latter
            raise Absent("refused the connection") from error
        finally:
            if not is_made:
                connection.abort()
                self._forget(connection)
        return connection

    def expire(self, now_s: float) -> None:
        for connection in [each for each in self._idle if now_s >= each.kept_until_s]:
            del self._idle[connection]
            connection.abort()

    async def close(self) -> None:
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_exception(Broken("closed the connection"))
        await asyncio.gather(*(connection.end() for connection in list(self._all)))

    # --- places ---------------------------------------------------------------------------------------------

    def _place(self) -> Connection:
        connection = Connection(self._loop, self._keep, self._forget)
        self._all.add(connection)
        return connection

    async def _turn(self) -> Connection:
        """A connection that is open, or the place for one."""
        waiting: asyncio.Future[Connection] = self._loop.create_future()
        self._waiting.append(waiting)
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled() and waiting.exception() is None:
                connection = waiting.result()
                if connection.is_open:
                    self._keep(connection)
                else:
                    self._forget(connection)
            raise

    def _next(self) -> asyncio.Future[Connection] | None:
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                return waiting
        return None

    def _keep(self, connection: Connection) -> None:
        if self._waiting and (waiting := self._next()) is not None:
            waiting.set_result(connection)
            return
        connection.kept_until_s = self._loop.time() + connection.keep_alive_s
        self._idle[connection] = None

    def _forget(self, connection: Connection) -> None:
        if connection not in self._all:
            return
        self._all.remove(connection)
        self._idle.pop(connection, None)
        if (waiting := self._next()) is not None:
            waiting.set_result(self._place())

    def _close_idle(self) -> None:
        while self._idle:
            self._idle.popitem()[0].abort()
