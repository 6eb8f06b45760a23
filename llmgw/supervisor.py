"""Several programs under one Ctrl-C (honcho), none of which outlives the supervisor, however that ends.

Each program has a keeper: a process that passes its output on. When the supervisor is killed, the kernel
tells the keepers, and they stop their programs as the supervisor would have; when a keeper is killed, its
program is told.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shlex
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from honcho import manager, printer, process

_PR_SET_PDEATHSIG = 1
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def signal_me_when_my_parent_dies(number: signal.Signals) -> None:
    """Linux only; elsewhere a supervisor that is killed with -9 leaves its programs running."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))


class Supervisor(manager.Manager):
    """Starts the programs in `loop()`, which returns when all have stopped. One that stops takes all along.

    `stop_s`: how long they may take to stop before they are killed. `on_started` is called, in the supervisor
    alone, once all are on their way. `was_asked_to_stop` tells a Ctrl-C from a program that failed.
    """

    def __init__(self, *, stop_s: int, on_started: Callable[[], None]) -> None:
        super().__init__(_Printer())
        manager.KILL_WAIT = stop_s  # honcho's own patience, counted from the first program that stops
        self._process_ctor = functools.partial(_Keeper, stop_s)
        self._stop_s = stop_s
        self._on_started = on_started

    @property
    def was_asked_to_stop(self) -> bool:
        return self.returncode in (128 + signal.SIGINT, 128 + signal.SIGTERM)

    def add(self, name: str, command: Sequence[str], *, env: Mapping[str, str], cwd: str) -> None:
        self.add_process(name, shlex.join(["exec", *command]), env=dict(env), cwd=cwd)

    def loop(self) -> None:
        super().loop()
        signal.alarm(0)  # or it might go off in the middle of this process's own end

    def _start(self) -> None:
        signal.signal(
            signal.SIGHUP, lambda *_: os.kill(os.getpid(), signal.SIGTERM)
        )  # the terminal was closed
        signal.signal(signal.SIGALRM, self._on_alarm)
        super()._start()
        self._on_started()

    def terminate(self) -> None:
        if not self._all_started():
            signal.setitimer(signal.ITIMER_REAL, 0.1)  # there is no process id yet to send a signal to
        elif not self._terminating:
            signal.alarm(self._stop_s)
            super().terminate()

    def _on_alarm(self, *_: object) -> None:
        if self._terminating:
            self.kill()
        else:
            self.terminate()


class _Keeper(process.Process):
    """Runs in a process of its own, between the supervisor and the program."""

    def __init__(self, stop_s: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stop_s = stop_s
        self._supervisor = os.getpid()
        self._child_ctor = _Program

    def run(self, events: Any, ignore_signals: bool = True) -> None:
        for number in _STOPPING:  # a Ctrl-C reaches the whole terminal; the supervisor answers it
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, self._on_orphaned)
        signal.signal(signal.SIGALRM, self._on_alarm)
        signal_me_when_my_parent_dies(signal.SIGUSR1)
        if os.getppid() == self._supervisor:
            super().run(events, ignore_signals=False)

    def _on_orphaned(self, *_: object) -> None:
        if self._child is None:
            os._exit(1)  # a program that is just being started is told by the kernel
        self._events.cancel_join_thread()  # nobody reads them any more
        signal.alarm(self._stop_s)
        self._signal_program(signal.SIGTERM)

    def _on_alarm(self, *_: object) -> None:
        self._signal_program(signal.SIGKILL)
        os._exit(1)

    def _signal_program(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, number)


class _Program(process.Popen):
    """Leads a process group of its own, and takes the signals that its keeper ignores."""

    def __init__(self, command: str, **kwargs: Any) -> None:
        super().__init__(command, preexec_fn=_become_a_program, **kwargs)


def _become_a_program() -> None:
    for number in _STOPPING:
        signal.signal(number, signal.SIG_DFL)
    signal_me_when_my_parent_dies(signal.SIGTERM)


class _Printer(printer.Printer):
    """A closed terminal, or a signal in the middle of a line, is no reason to stop supervising."""

    def write(self, message: printer.Message) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            super().write(message)
