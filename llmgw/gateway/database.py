"""Asking the database beside the event loop: whoever asks has a thread of its own, and waits for no other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from django.db import DatabaseError, InterfaceError, connections

T = TypeVar("T")


class DatabaseThread:
    """One thread with one connection: no query runs on the event loop."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def run(self, work: Callable[[], T]) -> T:
        """Raises DatabaseError or InterfaceError; the next call starts with a new connection then."""

        def guarded() -> T:
            try:
                return work()
            except (DatabaseError, InterfaceError):
                connections.close_all()
                raise

        return await asyncio.get_running_loop().run_in_executor(self._executor, guarded)

    async def stop(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._executor, connections.close_all)
        self._executor.shutdown(wait=False)
