"""Clients that leave: a request that nobody waits for any more is ended, wherever it stands.

It is ended by cancelling the task that works on it, which others may do as well: who it was is told apart
here.
"""

from __future__ import annotations

import asyncio
from typing import Any

from llmgw.gateway.bodies import ClientGone, Receive


class Leaving:
    """Ends a request, which is what this task works on, once its client has left."""

    def __init__(self, serving: asyncio.Task[Any]) -> None:
        self._serving, self._has_left = serving, False
        self._task: asyncio.Task[None] | None = None

    def leave(self) -> None:
        self._has_left = self._serving.cancel()

    def look_out(self, receive: Receive) -> None:
        """For it to leave, where nobody tells: in a task, and most requests are answered sooner than one is
        worth."""
        self._task = asyncio.create_task(self._look_out(receive))

    async def _look_out(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.leave()

    def check(self) -> None:
        """Raises ClientGone where that, and nobody else, is why the request was cancelled."""
        if self._has_left and not self._serving.uncancel():
            raise ClientGone from None

    def end(self) -> None:
        if self._task is not None:
            self._task.cancel()
