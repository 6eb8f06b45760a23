"""Clients that cost little: `python -m tests.bench.load ADDRESS KEY MODEL WHAT ...` prints as JSON what they
saw.

WHAT is `requests` (each connection asks anew as soon as it has its answer), `streams` (all connections read
paced streams at once) or `leave` (each asks for a stream and goes away at its first chunk).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any, cast

import httptools
import uvloop

from tests.bench.stub_engine import CHUNKS

CONTENT = b'"content":'


class Tally:
    """What all clients of the process saw. Times in seconds."""

    def __init__(self, deadline_s: float, limit: int) -> None:
        self.deadline_s, self.left = deadline_s, limit
        self.took_s: list[float] = []
        self.first_s: list[float] = []
        self.chunks = 0
        self.failed = 0

    def take(self) -> bool:
        """Whether one more is to be asked."""
        if self.left <= 0 or time.perf_counter() > self.deadline_s:
            return False
        self.left -= 1
        return True


class Client(asyncio.Protocol):
    """One connection, over which requests go one after another. `done` is set when no more are to be."""

    def __init__(self, request: bytes, tally: Tally, done: asyncio.Future[None], what: str) -> None:
        self._request, self._tally, self._done = request, tally, done
        self._is_stream, self._leaves = what == "streams", what == "leave"
        self._is_asking = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._ask()

    def _ask(self) -> None:
        if not self._tally.take():
            self._end()
            return
        self._is_asking, self._chunks, self._tail = True, 0, b""
        self._parser = httptools.HttpResponseParser(self)
        self._began_s = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        body = self._tail + body  # what is looked for may have come in two pieces
        self._tail = body[1 - len(CONTENT) :]
        chunks = body.count(CONTENT)
        if chunks and not self._chunks:
            self._tally.first_s.append(time.perf_counter() - self._began_s)
            if self._leaves:
                self._is_asking = False
                self._end()
        self._chunks += chunks
        self._tally.chunks += chunks

    def on_message_complete(self) -> None:
        self._is_asking = False
        self._tally.took_s.append(time.perf_counter() - self._began_s)
        is_whole = self._chunks >= (CHUNKS if self._is_stream else 1)
        self._tally.failed += not is_whole or self._parser.get_status_code() != 200
        # The parser may not be put aside while it speaks.
        asyncio.get_running_loop().call_soon(self._ask)

    def connection_lost(self, error: Exception | None) -> None:
        self._tally.failed += self._is_asking
        self._end()

    def _end(self) -> None:
        self._transport.close()
        if not self._done.done():
            self._done.set_result(None)


def request_of(key: str, body: dict[str, Any]) -> bytes:
    encoded = json.dumps(body, separators=(",", ":")).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {key}\r\nContent-Length: {len(encoded)}\r\n\r\n"
    )
    return head.encode() + encoded


async def ask(options: argparse.Namespace) -> dict[str, float]:
    loop = asyncio.get_running_loop()
    host, port = options.address.removeprefix("http://").split(":")
    tally = Tally(time.perf_counter() + options.seconds, options.limit)
    is_stream, leaves = options.what != "requests", options.what == "leave"
    began_s, all_done = time.perf_counter(), []

    async def connect(number: int) -> None:
        done = loop.create_future()
        all_done.append(done)
        # A prompt of its own for each, as clients have.
        content = f"{number}: How are you? " + "x" * options.prompt_bytes
        body = {"model": options.model, "messages": [{"role": "user", "content": content}], "max_tokens": 64}
        request = request_of(options.key, body | ({"stream": True} if is_stream else {}))
        await loop.create_connection(lambda: Client(request, tally, done, options.what), host, int(port))

    if leaves:
        number = 0
        while tally.left > 0 and time.perf_counter() < tally.deadline_s:
            all_done.clear()
            await asyncio.gather(*(connect(number + each) for each in range(options.connections)))
            await asyncio.gather(*all_done)
            number += options.connections
    else:
        for number in range(options.connections):
            await connect(number)
            if is_stream:  # not all in the same instant
                await asyncio.sleep(options.spread / options.connections)
        await asyncio.gather(*all_done)
    took_s = time.perf_counter() - began_s
    return {
        "requests": len(tally.took_s) + (len(tally.first_s) if leaves else 0),
        "failed": tally.failed,
        "seconds": took_s,
        "p50_ms": _part(tally.took_s, 0.5),
        "p99_ms": _part(tally.took_s, 0.99),
        "first_p50_ms": _part(tally.first_s, 0.5),
        "chunks": tally.chunks,
    }


def _part(values: Sequence[float], part: float) -> float:
    """In milliseconds; 0 where there is none."""
    return sorted(values)[int(len(values) * part)] * 1_000 if values else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.load", description=__doc__)
    parser.add_argument("address")
    parser.add_argument("key")
    parser.add_argument("model")
    parser.add_argument("what", choices=["requests", "streams", "leave"])
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5.0, help="no request begins later")
    parser.add_argument("--limit", type=int, default=1_000_000_000, help="no more requests than this")
    parser.add_argument("--prompt-bytes", type=int, default=0)
    parser.add_argument("--spread", type=float, default=0.2, help="the seconds in which all streams begin")
    print(json.dumps(uvloop.run(ask(parser.parse_args()))))


if __name__ == "__main__":
    main()
