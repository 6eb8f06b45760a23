"""How long a request waits for each thing, with one timer for all of its waits.

A time-out of its own for every piece of a stream would cost as much as passing the piece on. Here the timer
is set once and looks, when it goes off, whether what it was set for is long past.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from typing import TypeVar

from llmgw.gateway.admission import NO_TIMEOUTS, Timeouts

LATE_S = 0.02
"""A timer that goes off so much too late tells more of this process than of who is waited for."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long things may take, where a model does not say otherwise: a replica to be there, its engine to
    take the connection, the first byte of an answer, each further one. `stall_s` is how long a client may
    read nothing, `grace_s` how long a stream that is held stays without a status, `comment_s` how long any
    stream stays without a word."""

    hold_s: float
    connect_s: float
    first_byte_s: float
    idle_s: float
    stall_s: float
    grace_s: float
    comment_s: float

    @property
    def shortest_s(self) -> float:
        """Of the waits that are for each piece of an answer."""
        return min(self.first_byte_s, self.idle_s, self.stall_s)

    def of(self, own: Timeouts) -> Patience:
        return self if own == NO_TIMEOUTS else _patience(self, own)


@lru_cache(maxsize=1024)
def _patience(common: Patience, own: Timeouts) -> Patience:
    return replace(
        common,
        hold_s=common.hold_s if own.hold_s is None else own.hold_s,
        connect_s=common.connect_s if own.connect_s is None else own.connect_s,
        first_byte_s=common.first_byte_s if own.first_byte_s is None else own.first_byte_s,
        idle_s=common.idle_s if own.idle_s is None else own.idle_s,
    )


class Watch:
    """For the task that makes it, for as long as that lives or until it is closed. `shortest_s` is the
    shortest wait of those that are usual: the timer is set for that, and set anew where a wait is shorter. It
    runs out where nothing is waited for."""

    def __init__(self, shortest_s: float = 10.0) -> None:
        task = asyncio.current_task()
        assert task is not None, "a watch is for a task"
        self.task = task
        self._loop = asyncio.get_running_loop()
        self._shortest_s = shortest_s
        self._due_s: float | None = None
        self._was_late = False
        self._timer: asyncio.TimerHandle | None = None
        self._has_called = False
        self._then: Callable[[], object] | None = None
        self._then_at_s = 0.0
        self._set_for_s = inf

    async def within(self, seconds: float, work: Awaitable[T]) -> T:
        """What the work gives, or TimeoutError when it takes longer. The work is cancelled then."""
        with self.over(seconds):
            return await work

    def over(self, seconds: float) -> Watch:
        """For a `with` around one await, as `within`."""
        now_s = self._loop.time()
        self._due_s = due_s = now_s + seconds
        self._was_late = False
        if due_s < self._set_for_s:
            self._set(min(due_s, now_s + self._shortest_s))
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._due_s = None
        if self._has_called and kind is asyncio.CancelledError:
            self._has_called = False
            if self.task.uncancel() == 0:
                raise TimeoutError from None

    def renew(self, seconds: float) -> None:
        """The work that is waited for goes on, and has so long from now. It is not made shorter."""
        self._due_s = self._loop.time() + seconds
        self._was_late = False

    def call_later(self, seconds: float, then: Callable[[], object]) -> None:
        """Calls it once, unless closed before."""
        self._then, self._then_at_s = then, self._loop.time() + seconds
        if self._then_at_s < self._set_for_s:
            self._set(self._then_at_s)

    def close(self) -> None:
        self._then = None
        if self._timer is not None:
            self._timer.cancel()

    def _set(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._set_for_s = at_s
        self._timer = self._loop.call_at(at_s, self._look)

    def _look(self) -> None:
        now_s, self._timer, self._set_for_s = self._loop.time(), None, inf
        if self._then is not None and now_s >= self._then_at_s:
            then, self._then = self._then, None
            then()
        if self._due_s is not None and now_s >= self._due_s + LATE_S and not self._was_late:
            # This loop was held up: what has come meanwhile is heard before it is called missing.
            self._was_late = True
            self._due_s = now_s + LATE_S
            self._set(self._due_s)
        elif self._due_s is not None and now_s >= self._due_s:
            self._has_called = True
            self.task.cancel()
        elif self._due_s is not None or self._then is not None:
            later_s = now_s + self._shortest_s
            if self._due_s is not None:
                later_s = min(later_s, self._due_s)
            self._set(later_s if self._then is None else min(later_s, self._then_at_s))
