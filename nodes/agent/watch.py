"""Asks an engine how it is for as long as its process runs: until it is ready, idle, or stuck.

No question is asked before the last one was answered or given up, and none waits behind users: after the
first token, which proves that an engine is ready, nothing is generated any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from nodes.agent.clock import now_s
from nodes.agent.liveness import Liveness
from nodes.agent.probes import Load, Probe
from nodes.agent.processes import Process

READINESS_POLL_S = 0.1
LIVENESS_POLL_S = 1.5
DRAIN_POLL_S = 0.2
DRAIN_LEAST_S = 0.5  # a request that was routed just before the drain began is still on its way

T = TypeVar("T")


class Ended(Exception):
    """The process ended while something was asked of it."""


class Watch:
    """Of one process. probe: None for a rank without a door, which is as well as its process.

    note: what is worth saying just now. load: what it said last. context_length: of one request, as it said
    when it became ready.
    """

    def __init__(self, process: Process, probe: Probe | None) -> None:
        self._process, self._probe = process, probe
        self.note = ""
        self.load = Load()
        self.context_length: int | None = None

    async def until_ready(self, within_s: float) -> bool:
        """Whether it became ready in that time; `note` says what was in the way. Raises Ended."""
        if (probe := self._probe) is None:
            return True
        try:
            async with asyncio.timeout(within_s):
                while obstacle := await self._while_it_runs(probe.obstacle()):
                    self.note = f"not ready yet: {obstacle}"
                    await self._while_it_runs(asyncio.sleep(READINESS_POLL_S))
                self.load = await self._while_it_runs(probe.load())
                self.context_length = await self._while_it_runs(probe.context_length())
        except TimeoutError:
            self.note = self.note or "it did not answer"
            return False
        return True

    async def until_stuck(self, stuck_after_s: float, look_after: Callable[[], Awaitable[None]]) -> str:
        """The sentence of one that is stuck. look_after: called after each look. Raises Ended."""
        liveness = Liveness(stuck_after_s)
        looked_s = now_s()
        while not liveness.verdict:
            if self._probe is not None:
                is_healthy = await self._while_it_runs(self._probe.is_healthy())
                self.load = await self._while_it_runs(self._probe.load())
                elapsed_s, looked_s = now_s() - looked_s, now_s()
                liveness.look(is_healthy=is_healthy, load=self.load, elapsed_s=elapsed_s)
                self.note = liveness.note
            await look_after()
            await self._while_it_runs(asyncio.sleep(LIVENESS_POLL_S))
        return liveness.verdict

    async def until_idle(self, deadline_s: Callable[[], float]) -> None:
        """Without a door nobody knows whether it is: then until the deadline. Raises Ended."""
        told_s = now_s()
        while (left_s := deadline_s() - now_s()) > 0:
            if self._probe is not None:
                self.load = await self._while_it_runs(self._probe.load())
                if self.load.is_idle and now_s() - told_s >= DRAIN_LEAST_S:
                    return
            self.note = self._waits_for()
            await self._while_it_runs(asyncio.sleep(min(DRAIN_POLL_S, left_s)))

    def _waits_for(self) -> str:
        if self.load.running is None:
            return "waits for its running requests, whose number it does not tell"
        return f"waits for {self.load.requests} requests to finish"

    async def _while_it_runs(self, work: Coroutine[Any, Any, T]) -> T:
        """The work's result; raises Ended as soon as the process ends."""
        task = asyncio.ensure_future(work)
        end = asyncio.ensure_future(self._process.ended())
        try:
            await asyncio.wait([task, end], return_when=asyncio.FIRST_COMPLETED)
            if end.done():
                raise Ended
            return task.result()
        finally:
            for each in (task, end):
                each.cancel()
            await asyncio.wait([task, end])
