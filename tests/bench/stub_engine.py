"""An engine that costs next to nothing, so that what stands in front of it is what is measured.

`python -m tests.bench.stub_engine PORT ...`. One process that listens on all the ports. It answers a chat at
once; one that asks for a stream gets its chunks at a set pace, the first one at once.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Sequence
from typing import cast

import uvloop

MODEL = "bench"
CHUNKS = 64
CHUNK_EVERY_S = 0.02

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_STREAM = re.compile(rb'"stream": ?true')
_USAGE = {"prompt_tokens": 8, "completion_tokens": CHUNKS, "total_tokens": 8 + CHUNKS}
_HEAD = {"id": "chatcmpl-1", "created": 1, "model": MODEL}


def _response(value: object) -> bytes:
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _event(value: object) -> bytes:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    event = b"data: " + data + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(event), event)


def _chunk(*choices: object, **more: object) -> bytes:
    return _event({**_HEAD, "object": "chat.completion.chunk", "choices": choices, **more})


CHAT = _response(
    {
        **_HEAD,
        "object": "chat.completion",
        "choices": [
            {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Hi there."}}
        ],
        "usage": _USAGE,
    }
)
ANYTHING_ELSE = _response({"object": "list", "data": [{"id": MODEL, "object": "model"}], "model_path": MODEL})
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
TOKEN = _chunk({"index": 0, "delta": {"content": "token "}, "finish_reason": None})
LAST = _chunk({"index": 0, "delta": {}, "finish_reason": "stop"})
USAGE = _chunk(usage=_USAGE)
DONE = _event(b"[DONE]") + b"0\r\n\r\n"


class StubEngine(asyncio.Protocol):
    """One connection, one request at a time on it."""

    def __init__(self) -> None:
        self._heard = b""
        self._next: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        if self._next is not None:
            self._next.cancel()

    def data_received(self, data: bytes) -> None:
        self._heard = self._heard + data if self._heard else data
        head = self._heard.find(b"\r\n\r\n")
        if head < 0:
            return
        length = _LENGTH.search(self._heard, 0, head)
        if len(self._heard) < head + 4 + (int(length[1]) if length else 0):
            return
        request, self._heard = self._heard, b""
        if b"/v1/chat/completions" not in request[:64]:
            self._transport.write(ANYTHING_ELSE)
        elif _STREAM.search(request, head) is None:
            self._transport.write(CHAT)
        else:
            self._wants_usage = b"include_usage" in request
            self._transport.write(STREAM_HEAD + TOKEN)
            self._due_s = asyncio.get_running_loop().time()
            self._say_next(CHUNKS - 1)

    def _say_next(self, left: int) -> None:
        self._due_s += CHUNK_EVERY_S
        self._next = asyncio.get_running_loop().call_at(self._due_s, self._say, left)

    def _say(self, left: int) -> None:
        if left:
            self._transport.write(TOKEN)
            self._say_next(left - 1)
        else:
            self._next = None
            self._transport.write(LAST + (USAGE if self._wants_usage else b"") + DONE)


async def serve(ports: Sequence[int]) -> None:
    loop = asyncio.get_running_loop()
    servers = [await loop.create_server(StubEngine, "127.0.0.1", port, backlog=1_024) for port in ports]
    print("listening", flush=True)
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    uvloop.run(serve([int(port) for port in sys.argv[1:]]))
