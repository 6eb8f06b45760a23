"""Asking engines by aiohttp, as the gateway once did: what its own way of asking is held against."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import aiohttp

from llmgw.gateway.patience import Watch
from llmgw.gateway.routing import Target


class EngineAway(Exception):
    def __init__(self, error: Exception) -> None:
        super().__init__(_cause(error))
        self.is_absent = isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError))
        self.was_dropped = not (self.is_absent or isinstance(error, TimeoutError))


class Answer:
    def __init__(self, response: aiohttp.ClientResponse, watch: Watch) -> None:
        self._response, self._watch = response, watch
        self.status, self.content_type = response.status, response.content_type

    async def piece(self, patience_s: float) -> bytes:
        try:
            return await self._watch.within(patience_s, self._response.content.readany())
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise EngineAway(error) from error

    def close(self) -> None:
        if not self._response.content.is_eof():
            self._response.close()


class Upstream:
    async def start(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0),
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept"),
            trust_env=False,
        )

    async def stop(self) -> None:
        await self._session.close()
        await asyncio.sleep(0)  # its transports close a turn later

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
        headers = {
            "Authorization": f"Bearer {target.key}",
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
            **client_headers,
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_s)
        asking = self._session.post(
            target.origin + path, data=body, headers=headers, allow_redirects=False, timeout=timeout
        )
        try:
            return Answer(await watch.within(first_byte_s, asking), watch)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise EngineAway(error) from error


def _cause(error: Exception) -> str:
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
