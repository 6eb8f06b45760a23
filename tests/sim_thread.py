"""The sim engine's server in a thread of this process: starts at once, with whatever key a replica has."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from nodes.agent.sim.ends import End
from nodes.agent.sim.engine import Engine
from nodes.agent.sim.options import read_options

MODEL = "my-model"
ABLE = ("--enable-auto-tool-choice", "--tool-call-parser", "sim", "--vision", "--context-length", "4096")
QUICK = ("--ttft", "2ms", "--tpot", "0.5ms")


class SimThread:
    def __init__(self, options: list[str], key: str) -> None:
        self._options, self._key = read_options([*options, "--port", "1"], key=key), key
        self._loop = asyncio.new_event_loop()
        self._ended, self._is_up = asyncio.Event(), threading.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()))
        self.port = 0

    async def _serve(self) -> None:
        engine = Engine(self._options, end=self._end)
        runner = web.AppRunner(
            engine.app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.01
        )
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.port = runner.addresses[0][1]
        self._is_up.set()
        await self._ended.wait()
        await runner.cleanup()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:  # of answers that nobody reads any more
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    def _end(self, end: End) -> None:
        self._ended.set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._thread.start()
        assert self._is_up.wait(10)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(10)
        self._loop.close()


@contextmanager
def serving(*options: str, key: str = "test", model: str = MODEL) -> Iterator[SimThread]:
    sim = SimThread(["--model", model, *QUICK, *options], key)
    sim.start()
    try:
        yield sim
    finally:
        sim.stop()
