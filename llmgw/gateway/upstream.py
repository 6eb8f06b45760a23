"""Talking to engines: the only module that does.

A request goes to a path from a table, with headers from an allow-list and the replica's own key. Closing an
answer before its end closes the connection, which is how an engine learns that nobody listens. Every failure
is an EngineAway whose text finishes the sentence "the replica ...".
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from functools import lru_cache

import aiohttp
from yarl import URL

from llmgw.gateway.routing import Target

CONNECT_S = 3.0
"""Engines are machines next door. Longer than this is an engine that is gone, and another may be tried."""
ANSWER_S = 600.0
"""To the first byte. A plain answer sends none until it is whole; this is how long OpenAI's clients wait,
too."""
IDLE_S = 300.0
"""Between two pieces of an answer that has begun; no engine computes one token for so long."""
KEEP_ALIVE_S = 4.0
"""Below the 5 s after which vllm and llama.cpp close an idle connection, so that none is used as it
closes."""

CLIENT_HEADERS = ("traceparent", "tracestate")
"""What of a client's headers reaches an engine."""


class EngineAway(Exception):
    """The replica did not answer, or stopped in the middle. `was_dropped`: it closed a connection that may
    have been an old one, kept from an earlier request."""

    def __init__(self, error: Exception) -> None:
        super().__init__(_cause(error))
        self.was_dropped = isinstance(
            error, (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, ConnectionError)
        ) and not isinstance(error, aiohttp.ClientConnectorError)


class Answer:
    """A response whose head has arrived. Its body is read once; `close` may come at any time and more than
    once."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.status = response.status
        self.content_type = response.content_type

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it arrives; a body that ends too early raises."""
        try:
            while True:
                async with asyncio.timeout(IDLE_S):
                    piece = await self._response.content.readany()
                if not piece:
                    return
                yield piece
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise EngineAway(error) from error

    async def read(self, limit_bytes: int) -> bytes | None:
        """The whole body, None if it is larger than the limit."""
        body = bytearray()
        async for piece in self.pieces():
            body += piece
            if len(body) > limit_bytes:
                return None
        return bytes(body)

    def close(self) -> None:
        """Gives the connection back if the body was read to its end, and ends it otherwise."""
        if self._response.content.is_eof():
            self._response.release()
        else:
            self._response.close()


class Upstream:
    """One pool of connections to all engines. Lives on one event loop, from `start` to `stop`."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S, use_dns_cache=True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept"),
            trust_env=False,  # a proxy in the environment is for the world outside
        )

    async def stop(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def ask(self, target: Target, path: str, body: bytes, client_headers: Mapping[str, str]) -> Answer:
        """`path` is the gateway's, never the client's. Returns when the engine has sent its status."""
        assert self._session is not None, "start comes first"
        headers = {
            "Authorization": f"Bearer {target.key}",
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
            **{name: client_headers[name] for name in CLIENT_HEADERS if name in client_headers},
        }
        try:
            async with asyncio.timeout(ANSWER_S):
                response = await self._session.post(
                    _url(target.origin, path), data=body, headers=headers, allow_redirects=False
                )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise EngineAway(error) from error
        return Answer(response)


@lru_cache(maxsize=4096)
def _url(origin: str, path: str) -> URL:
    return URL(origin + path)


def _cause(error: Exception) -> str:
    """Without hosts and ports, which are nobody's business outside."""
    match error:
        case aiohttp.ConnectionTimeoutError():
            return f"did not accept a connection within {CONNECT_S:.0f} s"
        case aiohttp.ClientConnectorError():
            return "refused the connection"
        case TimeoutError():
            return "was silent for too long"
        case aiohttp.ClientPayloadError():
            return "broke off"
        case _:
            return "closed the connection"
