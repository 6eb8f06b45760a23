"""One timer for the many waits of a request."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from llmgw.gateway.admission import Timeouts
from llmgw.gateway.patience import Patience, Watch

pytestmark = pytest.mark.one_database


def _run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 10))


def test_what_takes_too_long_is_ended_and_what_does_not_is_not() -> None:
    async def scene() -> None:
        watch, never = Watch(), asyncio.Event()
        for _ in range(3):
            assert await watch.within(5, asyncio.sleep(0, "in time")) == "in time"
            with pytest.raises(TimeoutError):
                await watch.within(0.01, never.wait())
        await watch.within(5, asyncio.sleep(0.03))
        watch.close()
        assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]

    _run(scene())


def test_a_short_wait_after_a_long_one_is_short() -> None:
    async def scene() -> None:
        watch = Watch()
        loop = asyncio.get_running_loop()
        await watch.within(60, asyncio.sleep(0))
        begun_s = loop.time()
        with pytest.raises(TimeoutError):
            await watch.within(0.02, asyncio.Event().wait())
        assert loop.time() - begun_s < 5
        watch.close()

    _run(scene())


def test_work_that_goes_on_has_so_long_from_its_last_word() -> None:
    async def scene() -> None:
        watch, loop = Watch(), asyncio.get_running_loop()
        begun_s = loop.time()
        loop.call_later(0.05, watch.renew, 0.2)
        with pytest.raises(TimeoutError):
            await watch.within(0.1, asyncio.Event().wait())
        assert 0.24 < loop.time() - begun_s < 5
        watch.close()

    _run(scene())


def test_being_cancelled_from_outside_is_no_time_out() -> None:
    async def work() -> None:
        watch = Watch()
        try:
            await watch.within(5, asyncio.Event().wait())
        finally:
            watch.close()

    async def scene() -> None:
        task = asyncio.create_task(work())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    _run(scene())


def test_a_closed_watch_calls_nobody() -> None:
    async def scene() -> None:
        watch = Watch()
        await watch.within(0.01, asyncio.sleep(0))
        watch.close()
        await asyncio.sleep(0.03)

    _run(scene())


def test_what_came_while_the_loop_was_held_up_is_no_time_out() -> None:
    async def scene() -> None:
        loop, watch = asyncio.get_running_loop(), Watch(60)
        near, far = socket.socketpair()
        with near, far:
            near.setblocking(False)
            loop.call_soon(far.send, b"in time")
            loop.call_soon(time.sleep, 0.1)
            assert await watch.within(0.05, loop.sock_recv(near, 100)) == b"in time"
            loop.call_soon(time.sleep, 0.1)
            with pytest.raises(TimeoutError):
                await watch.within(0.05, loop.sock_recv(near, 100))
        watch.close()

    _run(scene())


def test_what_is_to_be_called_later_is_called_once_unless_the_watch_is_closed() -> None:
    async def scene() -> None:
        watch, closed, called = Watch(60), Watch(60), asyncio.Event()
        calls: list[float] = []
        loop = asyncio.get_running_loop()

        def call() -> None:
            calls.append(loop.time())
            called.set()

        begun_s = loop.time()
        closed.call_later(0.01, lambda: calls.append(0))
        closed.close()
        watch.call_later(0.02, call)
        await called.wait()
        with pytest.raises(TimeoutError):  # and goes on to watch
            await watch.within(0.02, asyncio.Event().wait())
        watch.close()
        assert len(calls) == 1
        assert 0.02 <= calls[0] - begun_s < 5

    _run(scene())


def test_a_model_has_its_own_patience_where_it_says_so() -> None:
    common = Patience(60, 3, 600, 300, 30, 2, 10)
    assert common.of(Timeouts()) == common
    assert common.of(Timeouts(1, 2, 3, 4)) == Patience(1, 2, 3, 4, 30, 2, 10)
