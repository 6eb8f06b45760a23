"""Taking in requests' bodies: counted as they arrive, in bounded time and in bounded room.

One process holds so many bytes of requests and no more, whatever stage they are in: half sent by a slow
client, waiting for a model to load, or with an engine while another may have to be asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from llmgw.gateway import admission

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class ClientGone(Exception):
    """The client left before its answer was whole: there is nobody to tell."""


class Room:
    """What one request holds of the process's room."""

    __slots__ = ("size",)

    def __init__(self) -> None:
        self.size = 0


class Bodies:
    def __init__(self, *, max_body_bytes: int, max_held_bytes: int, body_s: float) -> None:
        self.max_held_bytes = max_held_bytes
        self._max_body_bytes, self._body_s = max_body_bytes, body_s
        self.held_bytes = 0

    @contextmanager
    def room(self) -> Iterator[Room]:
        """Given back at its end, in every outcome."""
        room = Room()
        try:
            yield room
        finally:
            self.held_bytes -= room.size

    async def read(self, headers: Iterable[tuple[bytes, bytes]], receive: Receive, room: Room) -> bytes:
        """What its length claims is believed only to refuse sooner."""
        limit = self._max_body_bytes
        for name, value in headers:
            if name == b"content-length" and int(value) > limit:
                raise admission.body_too_large(limit)
        pieces = []
        try:
            async with asyncio.timeout(self._body_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    piece = message.get("body", b"")
                    if room.size + len(piece) > limit:
                        raise admission.body_too_large(limit)
                    admission.check_room(len(piece), self.held_bytes, self.max_held_bytes)
                    self.held_bytes += len(piece)
                    room.size += len(piece)
                    pieces.append(piece)
                    if not message.get("more_body", False):
                        return pieces[0] if len(pieces) == 1 else b"".join(pieces)
        except TimeoutError:
            raise admission.body_too_slow(self._body_s) from None
