"""How a web process ends: it says so first, and takes its leave of connections one answer at a time.

A server that closes an idle connection may meet a request that is on its way through it, which then fails. So
between the signal and the server's own shutdown there is a while in which everything is still answered:
/readyz says that others should be asked, and each answer is the last of its connection.
"""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from llmgw.supervisor import signal_me_when_my_parent_dies

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Draining:
    """Comes between the signals that end a process and its server. `has_begun` after the first of them."""

    def __init__(self) -> None:
        self.has_begun = False

    def listen(self, linger_s: float) -> None:
        """From now on, where signals can be listened to: in a process's first thread."""
        self.has_begun = False
        if threading.current_thread() is not threading.main_thread():
            return
        if (parent := multiprocessing.parent_process()) is not None:
            # A worker of a server that was killed would hold its port, and serve for nobody.
            signal_me_when_my_parent_dies(signal.SIGTERM)
            if os.getppid() != parent.pid:
                os.kill(os.getpid(), signal.SIGTERM)
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            servers_own: Any = signal.getsignal(number)
            if callable(servers_own):
                signal.signal(number, functools.partial(self._on_signal, loop, servers_own, linger_s))

    def _on_signal(
        self,
        loop: asyncio.AbstractEventLoop,
        servers_own: Callable[[int, FrameType | None], None],
        linger_s: float,
        number: int,
        frame: FrameType | None,
    ) -> None:
        if self.has_begun:
            if number == signal.SIGINT:  # again: somebody is in a hurry
                servers_own(number, frame)
            return
        self.has_begun = True
        loop.call_soon_threadsafe(loop.call_later, linger_s, servers_own, number, None)
