"""Doors for those who watch this process: /healthz and /readyz, which are open to all, and /metrics, which
wants a key of its own scope.

Nothing here keeps a request from being served: a scrape waits for the database, in a thread of its own, and
is told of the last figures when that is away.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from time import monotonic

import msgspec

from llmgw.gateway import admission
from llmgw.gateway.admission import Refused
from llmgw.gateway.app import GatewayApp, Receive, Scope, Send
from llmgw.gateway.database import DatabaseThread
from llmgw.gateway.metrics import CONTENT_TYPE, Figures, Own, read_figures, render
from llmgw.gateway.surface import OPENAI, error_body

log = logging.getLogger(__name__)

PATHS = ("/healthz", "/readyz", "/metrics")

FIGURES_S = 1.0
"""So old may figures be that are told again: however many scrape, the database is asked once a second."""
SCRAPE_S = 5.0
"""The longest that a scrape waits for the database."""


class Probes:
    """Answers PATHS for one gateway, until `stop`."""

    def __init__(self, gateway: GatewayApp, is_draining: Callable[[], bool]) -> None:
        self._gateway, self._is_draining = gateway, is_draining
        self._thread = DatabaseThread("figures")
        self._figures, self._read_at_s = Figures(), float("-inf")
        self._reading: asyncio.Task[None] | None = None
        self._is_database_there = True

    async def stop(self) -> None:
        await self._thread.stop()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["path"] == "/metrics":
                await self._gateway.entrance.let_in(scope["scheme"], scope["headers"], for_metrics=True)
            if scope["method"] not in ("GET", "HEAD"):
                raise admission.wrong_method(scope["method"], scope["path"], "GET")
            if scope["path"] == "/metrics":
                await _answer(send, 200, await self._metrics(), CONTENT_TYPE)
            elif scope["path"] == "/readyz":
                status, sentence = self.readiness()
                await _answer(send, status, f"{sentence}\n".encode())
            else:
                await _answer(send, 200, b"ok\n")
        except Refused as refused:
            body = msgspec.json.encode(error_body(refused, OPENAI))
            await _answer(send, refused.status, body, "application/json", *refused.headers())

    def readiness(self) -> tuple[int, str]:
        """Whether new requests should come here, and the sentence that says why not, or how well."""
        table = self._gateway.table
        if self._is_draining():
            return 503, "This process is stopping: it finishes what it has begun, and takes nothing new."
        if table.current.revision < 0:
            return 503, "The routing table has not been read yet, because the database does not answer."
        serving = f"Serving from a table {monotonic() - table.current.read_at_s:.0f} s old"
        if not table.is_fresh():
            serving += ", the database is away"
        if self._gateway.is_redis_away:
            serving += ", Redis is away and limits are kept by each process's share"
        return 200, f"{serving}."

    async def _metrics(self) -> bytes:
        if self._reading is None and monotonic() - self._read_at_s >= FIGURES_S:
            self._reading = asyncio.create_task(self._read())
        if self._reading is not None:
            await asyncio.wait((self._reading,), timeout=SCRAPE_S)
        table = self._gateway.table.current
        own = Own(
            is_database_there=self._is_database_there and self._reading is None,
            table_age_s=None if table.revision < 0 else monotonic() - table.read_at_s,
            lines_dropped=self._gateway.accounts.lines_dropped,
        )
        return render(self._figures, own)

    async def _read(self) -> None:
        try:
            self._figures = await self._thread.run(read_figures)
            self._read_at_s, self._is_database_there = monotonic(), True
        except Exception as error:  # the last figures are told on
            if self._is_database_there:
                log.error("Figures for /metrics cannot be read: %s", error)
            self._is_database_there = False
        finally:
            self._reading = None


async def _answer(
    send: Send, status: int, body: bytes, kind: str = "text/plain; charset=utf-8", *more: tuple[bytes, bytes]
) -> None:
    headers = [
        (b"content-type", kind.encode()),
        (b"content-length", str(len(body)).encode()),
        (b"cache-control", b"no-store"),
        (b"x-content-type-options", b"nosniff"),
        *more,
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
