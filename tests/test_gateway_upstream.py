"""Asking an engine: what the kernel is told of a connection, and how long silence is taken for work."""

from __future__ import annotations

import socket

import pytest

from llmgw.gateway.connection import LARGE_BYTES, notice_death
from llmgw.gateway.routing import Target
from llmgw.gateway.upstream import EngineAway, Upstream
from tests.raw_engine import Turn, ask, asking, deaf, playing, says, watching

pytestmark = pytest.mark.one_database

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 1000\r\n\r\n"


def test_a_connection_whose_other_end_is_gone_is_ended_by_the_kernel_in_35_s() -> None:
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
    body = b"x" * (LARGE_BYTES + 17)
    async with playing(says(HEAD)) as engine, asking() as upstream:
        with watching() as watch:
            (await ask(upstream, engine.target, watch, body)).close()
    assert [request.partition(b"\r\n\r\n")[2] for request in engine.requests] == [body]


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
    async with playing(Turn(pieces)) as engine, asking() as upstream:
        with pytest.raises(EngineAway, match=says) as caught:
            await _read(upstream, engine.target)
        await engine.closed()
    assert not caught.value.is_absent


async def _read(upstream: Upstream, target: Target) -> None:
    with watching() as watch:
        answer = await upstream.ask(target, "/", b"{}", {}, watch, connect_s=5, first_byte_s=0.1)
        try:
            while await answer.piece(0.1):
                pass
        finally:
            answer.close()


async def test_an_engine_that_is_not_there_never_saw_the_request() -> None:
    async with playing() as engine:
        pass
    async with asking() as upstream:
        with watching() as watch, pytest.raises(EngineAway, match="refused the connection") as caught:
            await ask(upstream, engine.target, watch)
    assert caught.value.is_absent
    assert not caught.value.was_dropped


async def test_an_engine_beyond_a_partition_never_saw_the_request() -> None:
    with deaf() as target, watching() as watch:
        async with asking() as upstream:
            with pytest.raises(EngineAway, match="did not accept a connection in time") as caught:
                await upstream.ask(target, "/", b"{}", {}, watch, connect_s=0.1, first_byte_s=5)
    assert caught.value.is_absent
    assert not caught.value.was_dropped
