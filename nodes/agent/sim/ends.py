"""How the sim engine's process ends: the first thing that comes decides."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class End:
    """An exit code, and last words for the log."""

    code: int = 0
    words: str = ""


class Ends:
    """What may end the process from several sides, and who waits for it."""

    def __init__(self) -> None:
        self._end: asyncio.Future[End] = asyncio.get_running_loop().create_future()

    def come(self, end: End) -> None:
        if not self._end.done():
            self._end.set_result(end)

    async def within(self, seconds: float | None) -> End | None:
        """The end, if it comes in that time."""
        await asyncio.wait([self._end], timeout=seconds)
        return self._end.result() if self._end.done() else None

    async def wait(self) -> End:
        return await asyncio.shield(self._end)
