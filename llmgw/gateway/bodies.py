"""Taking in requests' bodies: counted as they arrive, in bounded time and in bounded room.

One process holds so many bytes of requests and no more, whatever stage they are in: half sent by a slow
client, waiting for a model to load, or with an engine while another may have to be asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from llmgw.gateway import admission
from llmgw.gateway.patience import Watch

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class ClientGone(Exception):
    """The client left before its answer was whole: there is nobody to tell."""


class Room:
    """What one request holds of the process's room: `give_back` once, however it ended."""

    __slots__ = ("_bodies", "size")

    def __init__(self, bodies: Bodies) -> None:
        self._bodies, self.size = bodies, 0

    def give_back(self) -> None:
        self._bodies.held_bytes -= self.size


class Bodies:
    def __init__(self, *, max_body_bytes: int, max_held_bytes: int, body_s: float) -> None:
        self.max_held_bytes = max_held_bytes
        self._max_body_bytes, self._body_s = max_body_bytes, body_s
        self.held_bytes = 0

    def room(self) -> Room:
        return Room(self)

    def take(self, piece: bytes, room: Room) -> bytes:
        """What has come of a body, where there is room for it."""
        if room.size + len(piece) > self._max_body_bytes:
            raise admission.body_too_large(self._max_body_bytes)
        admission.check_room(len(piece), self.held_bytes, self.max_held_bytes)
        self.held_bytes += len(piece)
        room.size += len(piece)
        return piece

    async def read(self, length: bytes | None, receive: Receive, room: Room, watch: Watch) -> bytes:
        """What its length claims is believed only to refuse sooner."""
        limit = self._max_body_bytes
        if length is not None and int(length) > limit:
            raise admission.body_too_large(limit)
        pieces = []
        clock = asyncio.get_running_loop().time
        until_s = clock() + self._body_s
        try:
            while True:
                message = await watch.within(until_s - clock(), receive())
                if message["type"] == "http.disconnect":
                    raise ClientGone
                pieces.append(self.take(message.get("body", b""), room))
                if not message.get("more_body", False):
                    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
        except TimeoutError:
            raise admission.body_too_slow(self._body_s) from None
