"""Clients that do as they like: whoever stays gets its own answers, in turn, and nothing stays of who leaves.

They are drawn by a seed, which is printed: SOAK_SEED has them again, and SOAK_STEPS more of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httptools
import pytest
from aiohttp import web
from pytest_django import DjangoDbBlocker

from tests.stage import MESSAGES, Play, begin_stream, chat_answer, chat_event, drop, never, playing_for_many
from tests.waiting import wait_until

pytestmark = [pytest.mark.lasting_database, pytest.mark.one_database]

SEED = int(os.environ.get("SOAK_SEED", "1"))
VISITS = 10_000 if "SOAK_STEPS" in os.environ else 60
AT_ONCE = 20


@pytest.fixture(scope="module")
def play(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[Play]:
    bounds = {"FIRST_BYTE_S": 5, "IDLE_S": 5, "STALL_S": 0.5, "COMMENT_S": 0.05}
    with playing_for_many(
        django_db_blocker, **{f"LLMGW_{name}": value for name, value in bounds.items()}
    ) as play:
        yield play


async def _as_told(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
    """What the request itself says in its `user`."""
    kind = fields["user"].split()[0]
    if kind == "never":
        return await never(request, fields)
    if kind == "dies":
        drop(request)
        return web.Response()
    words = ["word " * 40_000] * 20 if kind == "large" else ["Hello", " from", " here."]
    if not fields["stream"]:
        return web.json_response(chat_answer(fields, "".join(words)))
    response = await begin_stream(request)
    for word in words:
        await response.write(chat_event(fields, word))
        await asyncio.sleep(0.03 if kind == "slow" else 0)
    await response.write(b"data: [DONE]\n\n")
    return response


@dataclass
class Asked:
    """A request as it goes over the wire, and what may come of it."""

    name: str
    wire: bytes
    is_stream: bool
    statuses: tuple[int, ...]
    is_last: bool


@dataclass
class Got:
    status: int = 0
    name: str = ""
    body: bytes = b""


@dataclass
class Client:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    got: list[Got] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._parser, self._now = httptools.HttpResponseParser(self), Got()

    def on_message_begin(self) -> None:
        self._now = Got()

    def on_header(self, name: bytes, value: bytes) -> None:
        if name == b"x-request-id":
            self._now.name = value.decode()

    def on_body(self, body: bytes) -> None:
        self._now.body += body

    def on_message_complete(self) -> None:
        self._now.status = self._parser.get_status_code()
        if self._now.status >= 200:
            self.got.append(self._now)

    async def read(self, count: int) -> list[Got]:
        """So many answers, or those before the end."""
        while len(self.got) < count and (data := await asyncio.wait_for(self.reader.read(1 << 16), 20)):
            self._parser.feed_data(data)
        return self.got

    async def send(self, data: bytes, random: Random) -> None:
        while data:
            size = random.choice((1, 100, 5_000, 70_000, len(data)))
            self.writer.write(data[:size])
            data = data[size:]
            await asyncio.sleep(0)
        await self.writer.drain()


class Visitors:
    def __init__(self, play: Play, seed: int) -> None:
        self._play, self._random, self._number = play, Random(seed), 0

    async def come(self, count: int) -> None:
        places = asyncio.Semaphore(AT_ONCE)
        kinds: list[Callable[[Random], Any]] = [
            self._asks,
            self._asks_ahead,
            self._leaves,
            self._reads_nothing,
        ]

        async def one(kind: Callable[[Random], Any], random: Random) -> None:
            async with places:
                await kind(random)

        drawn = self._random.choices(kinds, (3, 2, 4, 0.3), k=count)
        await asyncio.gather(*(one(kind, Random(self._random.random())) for kind in drawn))

    @contextlib.asynccontextmanager
    async def _client(self) -> Any:
        host, port = self._play.web.url.removeprefix("http://").split(":")
        client = Client(*await asyncio.open_connection(host, int(port), limit=1 << 22))
        try:
            yield client
        finally:
            client.writer.close()

    def _request(self, random: Random, kinds: str = "answers slow large dies") -> Asked:
        self._number += 1
        name, kind = f"visit-{self._number}", random.choice(kinds.split())
        is_stream, is_last = random.random() < 0.5, random.random() < 0.05
        model, key = random.choice(("tiny", "tiny", "tiny", "nobody")), random.choice((True,) * 9 + (False,))
        padding = random.choice((0,) * 8 + (65_536, 262_144))
        fields = {"model": model, "messages": MESSAGES, "stream": is_stream, "user": kind + " " * padding}
        body = json.dumps(fields).encode()
        lines = [b"X-Request-Id: " + name.encode()]
        if random.random() < 0.2:
            size = random.choice((7, 1_000, 65_536)) if padding == 0 else 65_536
            cut = [body[at : at + size] for at in range(0, len(body), size)]
            body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in cut) + b"0\r\n\r\n"
            lines.append(b"Transfer-Encoding: chunked")
        else:
            lines.append(b"Content-Length: %d" % len(body))
        if is_last:
            lines.append(b"Connection: close")
        else:
            lines += random.choice(
                [
                    [],
                    [],
                    [],
                    [b"Expect: 100-continue"],
                    [b"X-Forwarded-For: 10.0.0.1"],
                    [b"Connection: Upgrade", b"Upgrade: h2c"],
                ]
            )
        wire = self._play.request(body, *lines)
        statuses: tuple[int, ...] = (200,)
        if kind == "dies":  # under a comment, where it asked for a stream
            statuses = (200, 502, 503) if is_stream else (502, 503)
        if model == "nobody":
            statuses = (404,)
        if not key:
            wire, statuses = wire.replace(self._play.key.encode(), b"nobody's"), (401,)
        return Asked(name, wire, is_stream, statuses, is_last)

    def _check(self, asked: list[Asked], got: list[Got]) -> None:
        assert [each.name for each in got] == [each.name for each in asked]
        for request, answer in zip(asked, got, strict=True):
            assert answer.status in request.statuses, answer
            if answer.status == 200 and request.statuses != (200,):
                assert b'data: {"error"' in answer.body
            elif answer.status == 200:
                assert answer.body.endswith(b"data: [DONE]\n\n" if request.is_stream else b"}}")

    async def _asks(self, random: Random) -> None:
        """One after the other on one connection."""
        async with self._client() as client:
            asked: list[Asked] = []
            while len(asked) < random.randint(1, 5) and not (asked and asked[-1].is_last):
                asked.append(self._request(random))
                await client.send(asked[-1].wire, random)
                await client.read(len(asked))
            self._check(asked, client.got)
            if asked[-1].is_last:
                assert await client.reader.read(1) == b""

    async def _asks_ahead(self, random: Random) -> None:
        async with self._client() as client:
            asked = [self._request(random)]
            while len(asked) < random.randint(2, 6) and not asked[-1].is_last:
                asked.append(self._request(random))
            await client.send(b"\r\n".join(each.wire for each in asked), random)
            self._check(asked, await client.read(len(asked)))

    async def _leaves(self, random: Random) -> None:
        """At any moment, in any way, with anything behind the request."""
        async with self._client() as client:
            wire = self._request(random, "answers slow large dies never").wire
            cut = random.choice(
                (random.randint(0, len(wire)), len(wire) - 1, len(wire), len(wire), len(wire))
            )
            behind = random.choice((b"", b"", b"\0 no request", wire, wire[:50], wire * 3))
            with contextlib.suppress(OSError, TimeoutError):
                client.writer.write(wire[:cut] + (behind if cut == len(wire) else b""))
                await asyncio.sleep(random.choice((0, 0, 0.01, 0.05)))
                if random.random() < 0.5:
                    await asyncio.wait_for(client.reader.read(random.choice((1, 5_000, 1 << 20))), 0.1)
                way = random.choice(("closes", "resets", "closes by half"))
                if way == "resets":
                    at_once = struct.pack("ii", 1, 0)
                    client.writer.get_extra_info("socket").setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, at_once
                    )
                    client.writer.transport.abort()
                elif way == "closes by half":
                    client.writer.write_eof()
                    await asyncio.wait_for(client.reader.read(), 0.1)

    async def _reads_nothing(self, random: Random) -> None:
        async with self._client() as client:
            client.reader.set_exception(ConnectionResetError())  # and what comes is not taken any more
            client.writer.transport.pause_reading()
            client.writer.write(b"".join(self._request(random, "large").wire for _ in range(5)))
            await asyncio.sleep(0.7)  # longer than the gateway waits for it


def _left(play: Play) -> dict[str, object]:
    """What a gateway holds for its clients."""
    from llmgw import asgi

    gateway, state = asgi._gateway, play.web._server.server_state
    assert gateway is not None
    return {
        "connections": len(state.connections),
        "tasks": len(state.tasks),
        "bytes of bodies": gateway._bodies.held_bytes,
        "bytes of those that wait": gateway._relay._holding._held_bytes,
        "slots": dict(gateway._relay._in_flight),
        "demand": {model: n for model, n in gateway.demand._in_flight.items() if n},
        "limits": dict(gateway._limits._running),
    }


def test_each_client_has_its_own_answers_and_nothing_is_left_of_any(play: Play) -> None:
    print(f"seed {SEED}, {VISITS} visits")
    play.engine.script = _as_told
    with play.another_engine(_as_told):
        wait_until(lambda: len(play.web.targets()) == 2, "two replicas")
        asyncio.run(Visitors(play, SEED).come(VISITS))
        wait_until(
            lambda: not any(_left(play).values()), "all to be given back", tell=lambda: str(_left(play))
        )
