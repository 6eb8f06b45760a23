"""Talking to engines: the only module that does.

A request goes to a path from a table, with headers from an allow-list and the replica's own key. Closing an
answer before its end closes the connection, which is how an engine learns that nobody listens. Every failure
is an EngineAway whose text finishes the sentence "the replica ...".
"""

from __future__ import annotations

import asyncio
import io
import socket
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from llmgw.gateway.patience import Watch
from llmgw.gateway.routing import Target

KEEP_ALIVE_S = 4.0
"""Below the 5 s after which vllm and llama.cpp close an idle connection, so that none is used as it
closes."""
DEAD_AFTER_S, PROBE_EVERY_S = 35, 5
"""A connection whose other end is gone without a word is ended after so long, in the middle of an answer
too."""
LARGE_BYTES = 1024 * 1024
"""A body from here on goes out in pieces: at once, it would hold up all other requests."""

CLIENT_HEADERS = ("traceparent", "tracestate")
"""What of a client's headers reaches an engine."""


class EngineAway(Exception):
    """The replica did not answer, or stopped in the middle. `is_absent`: it took no connection, so it never
    saw the request. `was_dropped`: its connection broke, which may have been an old one, kept from an earlier
    request, or the end of a process that comes back."""

    def __init__(self, error: Exception) -> None:
        super().__init__(_cause(error))
        self.is_absent = isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError))
        self.was_dropped = not (self.is_absent or isinstance(error, TimeoutError))


class Answer:
    """A response whose head has arrived. Its body is read once; `close` may come at any time and more than
    once."""

    def __init__(self, response: aiohttp.ClientResponse, watch: Watch) -> None:
        self._response, self._watch = response, watch
        self._loop = asyncio.get_running_loop()
        self._since_s: float | None = None
        self.status = response.status
        self.content_type = response.content_type

    async def piece(self, patience_s: float) -> bytes:
        """What has come, nothing after the end. A body that ends too early raises, and so does one that says
        nothing for longer than that. Comments, which engines send to keep a line open, are no sign of
        progress."""
        left_s = patience_s
        if self._since_s is not None:
            left_s = max(self._since_s + patience_s - self._loop.time(), 0)
        try:
            piece = await self._watch.within(left_s, self._response.content.readany())
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise EngineAway(error) from error
        if not piece.startswith(b":") or b"\ndata:" in piece:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = self._loop.time()
        return piece

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
        """Ends the connection, unless the body has come to its end: it was given back then."""
        if not self._response.content.is_eof():
            self._response.close()


class Upstream:
    """One pool of connections to all engines. Lives on one event loop, from `start` to `stop`."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, keepalive_timeout=KEEP_ALIVE_S, use_dns_cache=True, socket_factory=connecting_socket
            ),
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept"),
            trust_env=False,  # a proxy in the environment is for the world outside
        )

    async def stop(self) -> None:
        if self._session is not None:
            await self._session.close()

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
        assert self._session is not None, "start comes first"
        headers = _headers(target.key)
        if client_headers:
            headers = headers.copy()
            headers.update({name: value for name, value in client_headers.items() if name in CLIENT_HEADERS})
        asking = self._session.post(
            _url(target.origin, path),
            # aiohttp would look for the way to send bytes among all the ways that it knows.
            data=aiohttp.BytesPayload(body) if len(body) < LARGE_BYTES else io.BytesIO(body),
            headers=headers,
            allow_redirects=False,
            timeout=_timeout(connect_s),
        )
        try:
            return Answer(await watch.within(first_byte_s, asking), watch)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise EngineAway(error) from error

    async def ask_briefly(
        self, target: Target, path: str, body: bytes, *, patience_s: float, limit_bytes: int
    ) -> bytes:
        """A question of the gateway's own. Nothing, where no 200 comes in time or it is too large."""
        assert self._session is not None, "start comes first"
        headers = {"Authorization": f"Bearer {target.key}", "Content-Type": "application/json"}
        try:
            async with (
                asyncio.timeout(patience_s),
                self._session.post(
                    _url(target.origin, path), data=body, headers=headers, allow_redirects=False
                ) as response,
            ):
                told = await response.content.read(limit_bytes + 1) if response.status == 200 else b""
                while 0 < len(told) <= limit_bytes and (more := await response.content.readany()):
                    told += more
        except (aiohttp.ClientError, OSError, TimeoutError):
            return b""
        return told if len(told) <= limit_bytes else b""


def connecting_socket(address: Any) -> socket.socket:
    """One that notices when the other end is gone without a word."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_EVERY_S)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_EVERY_S)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, DEAD_AFTER_S // PROBE_EVERY_S - 1)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_AFTER_S * 1000)
    return made


@lru_cache(maxsize=256)
def _timeout(connect_s: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=None, sock_connect=connect_s)


@lru_cache(maxsize=4096)
def _headers(key: str) -> CIMultiDict[str]:
    return CIMultiDict(
        {
            "Authorization": f"Bearer {key}",
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
        }
    )


@lru_cache(maxsize=4096)
def _url(origin: str, path: str) -> URL:
    return URL(origin + path)


def _cause(error: Exception) -> str:
    """Without hosts and ports, which are nobody's business outside."""
    match error:
        case aiohttp.ConnectionTimeoutError():
            return "did not accept a connection in time"
        case aiohttp.ClientConnectorError():
            return "refused the connection"
        case TimeoutError():
            return "was silent for too long"
        case aiohttp.ClientPayloadError():
            return "broke off"
        case _:
            return "closed the connection"
