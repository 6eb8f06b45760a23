"""The connections to engines: what the kernel is told of them, and how long silence is taken for work."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from llmgw.gateway.connection import LARGE_BYTES, notice_death
from llmgw.gateway.patience import Watch
from llmgw.gateway.routing import Target
from llmgw.gateway.upstream import EngineAway, Upstream
from tests.raw_engine import deaf

pytestmark = pytest.mark.one_database


class _Connection(asyncio.Protocol):
    """Answers a request with these bytes once it is whole, and stays open."""

    def __init__(self, pieces: tuple[bytes, ...], seen: list[int]) -> None:
        self._pieces, self._seen, self._received = pieces, seen, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, _, body = self._received.partition(b"\r\n\r\n")
        if len(body) == int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]):
            self._seen.append(len(body))
            for piece in self._pieces:
                self._transport.write(piece)


@asynccontextmanager
async def _engine(*pieces: bytes, seen: list[int] | None = None) -> AsyncIterator[Target]:
    """Tells in `seen` how long the bodies were that arrived."""

    def connection() -> _Connection:
        return _Connection(pieces, [] if seen is None else seen)

    server = await asyncio.get_running_loop().create_server(connection, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield Target("replica", "m", f"http://127.0.0.1:{port}", "key")


@asynccontextmanager
async def _upstream() -> AsyncIterator[Upstream]:
    upstream = Upstream()
    await upstream.start()
    try:
        yield upstream
    finally:
        await upstream.stop()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 1000\r\n\r\n"


async def test_a_connection_whose_other_end_is_gone_is_ended_by_the_kernel_in_35_s() -> None:
    with socket.socket() as kept:
        notice_death(kept)
        told = [
            kept.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
            kept.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
        ]
        idle, every, count = (
            kept.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
    assert told == [1, 35_000]
    assert idle + every * count == 35


async def test_a_large_body_arrives_whole() -> None:
    seen: list[int] = []
    watch = Watch()
    async with _engine(HEAD, seen=seen) as target, _upstream() as upstream:
        body = b"x" * (LARGE_BYTES + 17)
        answer = await upstream.ask(target, "/", body, {}, watch, connect_s=5, first_byte_s=5)
        answer.close()
    watch.close()
    assert seen == [len(body)]


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        pytest.param([], "was silent for too long", id="nothing at all"),
        pytest.param([HEAD], "was silent for too long", id="a head"),
        pytest.param([HEAD, b"data: 1\n\n"], "was silent for too long", id="a beginning"),
        pytest.param([b"garbage\r\n\r\n"], "closed the connection", id="something that is not HTTP"),
    ],
)
async def test_an_engine_that_says_no_more_than(pieces: list[bytes], says: str) -> None:
    watch = Watch()
    async with _engine(*pieces) as target, _upstream() as upstream:
        with pytest.raises(EngineAway, match=says) as caught:
            await _read(upstream, target, watch)
    watch.close()
    assert not caught.value.is_absent


async def _read(upstream: Upstream, target: Target, watch: Watch) -> None:
    answer = await upstream.ask(target, "/", b"{}", {}, watch, connect_s=5, first_byte_s=0.1)
    try:
        while await answer.piece(0.1):
            pass
    finally:
        answer.close()


async def test_an_engine_that_is_not_there_never_saw_the_request() -> None:
    watch = Watch()
    async with _engine() as target:
        pass
    async with _upstream() as upstream:
        with pytest.raises(EngineAway, match="refused the connection") as caught:
            await upstream.ask(target, "/", b"{}", {}, watch, connect_s=5, first_byte_s=5)
    watch.close()
    assert caught.value.is_absent
    assert not caught.value.was_dropped


async def test_an_engine_beyond_a_partition_never_saw_the_request() -> None:
    watch = Watch()
    with deaf() as target:
        async with _upstream() as upstream:
            with pytest.raises(EngineAway, match="did not accept a connection in time") as caught:
                await upstream.ask(target, "/", b"{}", {}, watch, connect_s=0.1, first_byte_s=5)
    watch.close()
    assert caught.value.is_absent
    assert not caught.value.was_dropped
