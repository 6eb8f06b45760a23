"""What goes wrong in the sim engine, on command: answers that stall, a process that hangs or crashes, workers
that survive it, memory that it never gives back.

Nothing goes wrong by chance, and nothing lasts: memory has a limit, and what survives ends by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NoReturn

from nodes.agent.sim.ends import End
from nodes.agent.sim.options import Options
from nodes.agent.sim.recordings import SPEAKS_AS_VLLM

CORE_DEATH_S = 0.5  # from the death of vllm's engine core to the end of its process, as recorded
GROWTH_STEPS_A_SECOND = 10
WORKER_POLL_S = 0.1
MIB = 1024 * 1024

CORE_DIED = "EngineCore encountered an issue. See stack trace (above) for the root cause."


class CoreDied(Exception):
    """The engine's core is gone while its door is still open."""


class Troubles:
    """What befalls answers. `end` ends the process in good order."""

    def __init__(self, options: Options, end: Callable[[End], None]) -> None:
        self._options, self._end = options, end
        afters = (options.stall_after, options.hang_after, options.crash_after)
        self._marks = sorted(after for after in afters if after)
        self._is_stalled = False
        self._is_core_dead = False
        self._answering: set[asyncio.Task[Any]] = set()

    @property
    def is_core_dead(self) -> bool:
        return self._is_core_dead

    @contextlib.contextmanager
    def befalling(self) -> Iterator[None]:
        """Around an answer: it breaks off with CoreDied, wherever it waits."""
        task = asyncio.current_task()
        assert task is not None
        if self._is_core_dead:
            raise CoreDied
        self._answering.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self.is_core_dead and task.uncancel() == 0:
                raise CoreDied from None
            raise
        finally:
            self._answering.discard(task)

    async def before_token(self) -> None:
        if self._is_stalled:
            await asyncio.Event().wait()

    def bound(self, told: int, due: int) -> int:
        """How many of the due tokens are told before something happens."""
        return next((mark for mark in self._marks if told < mark <= due), due)

    async def after_token(self, told: int) -> None:
        """told: how many an answer has now."""
        if told == self._options.stall_after:
            self._is_stalled = True
        if told == self._options.hang_after:
            _hang()
        if told == self._options.crash_after:
            self._crash(told)
            await asyncio.sleep(0)  # this answer breaks off here, too

    def _crash(self, told: int) -> None:
        print(f"RuntimeError: crashed on command after {told} tokens", file=sys.stderr, flush=True)
        if self._options.crash_how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._options.crash_how == "exit":
            os._exit(1)
        self._is_core_dead = True
        for task in self._answering:
            task.cancel()
        words = f"{SPEAKS_AS_VLLM}\nvllm.v1.engine.exceptions.EngineDeadError: {CORE_DIED}"
        asyncio.get_running_loop().call_later(CORE_DEATH_S, self._end, End(0, words))


def _hang() -> NoReturn:
    """Within the event loop, which so comes to no signal either."""
    while True:
        time.sleep(60)


async def grow_memory(mib_a_second: int, limit_mib: int) -> None:
    held: list[bytes] = []
    step_bytes = mib_a_second * MIB // GROWTH_STEPS_A_SECOND
    while step_bytes and (len(held) + 1) * step_bytes <= limit_mib * MIB:
        held.append(b"\1" * step_bytes)  # not zeros, which the system would only promise
        await asyncio.sleep(1 / GROWTH_STEPS_A_SECOND)
    await asyncio.Event().wait()


class Workers:
    """Processes of the same group that end with the engine, unless it is killed or crashes.

    To be entered while there is but one thread, as they are forks.
    """

    def __init__(self, count: int, outlive_s: float) -> None:
        self._count, self._outlive_s = count, outlive_s
        self._pids: list[int] = []

    def __enter__(self) -> None:
        engine = os.getpid()
        for _ in range(self._count):
            pid = os.fork()
            if pid == 0:
                _work_for(engine, self._outlive_s)
            self._pids.append(pid)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _work_for(engine: int, outlive_s: float) -> NoReturn:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    while os.getppid() == engine:
        time.sleep(WORKER_POLL_S)
    time.sleep(outlive_s)
    os._exit(0)
