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


class Bodies:
    def __init__(self, *, max_body_bytes: int, max_held_bytes: int, body_s: float) -> None:
        self.max_held_bytes = max_held_bytes
        self._max_body_bytes, self._body_s = max_body_bytes, body_s
        self.held_bytes = 0

    def take(self, piece: bytes, *, held: int = 0) -> bytes:
        """What has come of a body of which so much is held already, where there is room for it. It is to be
        given back once, however its request ends."""
        if held + len(piece) > self._max_body_bytes:
            raise admission.body_too_large(self._max_body_bytes)
        admission.check_room(len(piece), self.held_bytes, self.max_held_bytes)
        self.held_bytes += len(piece)
        return piece

    def give_back(self, size: int) -> None:
        self.held_bytes -= size

    async def read(self, length: bytes | None, receive: Receive, watch: Watch) -> bytes:
        """As `take`, of one that is still to come; where it raises, nothing is held. What its length claims
        is believed only to refuse sooner."""
        limit = self._max_body_bytes
        if length is not None and int(length) > limit:
            raise admission.body_too_large(limit)
        pieces, held = [], 0
        clock = asyncio.get_running_loop().time
        until_s = clock() + self._body_s
        try:
            while True:
                message = await watch.within(until_s - clock(), receive())
                if message["type"] == "http.disconnect":
                    raise ClientGone
                pieces.append(self.take(message.get("body", b""), held=held))
                held += len(pieces[-1])
                if not message.get("more_body", False):
                    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
        except BaseException as error:
            self.give_back(held)
            if isinstance(error, TimeoutError):
                raise admission.body_too_slow(self._body_s) from None
            raise
