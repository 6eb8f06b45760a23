"""How a rank fails: its cause, and what is kept of the process that ended."""

from __future__ import annotations

import os
from dataclasses import replace

from nodes.agent.clock import now_s
from nodes.agent.state import ATTEMPTS_KEPT, Record
from nodes.engines.causes import Cause, classify
from nodes.protocol import CAPACITY, DISK, AttemptReport

_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
_PORT_LOST = frozenset({"port_in_use", "bind_failed"})
_COULD_BE_MEMORY = frozenset({"killed", "unknown"})
_COULD_BE_ITS_LOG = frozenset({"unknown"})


class Failed(Exception):
    def __init__(self, cause: Cause) -> None:
        super().__init__(cause.sentence)
        self.cause = cause

    @property
    def is_of_its_port(self) -> bool:
        """The agent chose the port, and somebody else was faster: another one will do."""
        return self.cause.cause in _PORT_LOST


def cause_of_end(
    engine: str,
    log_tail: str,
    exit_code: int | None,
    *,
    is_short_of_memory: bool = False,
    full_disk: str = "",
) -> Cause:
    """exit_code: below 0 a signal, None where nobody saw it. is_short_of_memory: whether the kernel has ended
    a process for want of it just now. full_disk: the sentence where its log could not grow."""
    cause = classify(engine, log_tail, exit_code, signal_in(exit_code))
    if is_short_of_memory and cause.cause in _COULD_BE_MEMORY:
        sentence = (
            "The node ran out of memory, and its kernel ended the engine; raise the profile's min_memory_gb, "
            "or run less on this node."
        )
        return Cause("host_oom", sentence, CAPACITY)
    if full_disk and cause.cause in _COULD_BE_ITS_LOG:
        return Cause("disk_full", full_disk, DISK)
    return cause


def signal_in(exit_code: int | None) -> int | None:
    return -exit_code if exit_code is not None and exit_code < 0 else None


def with_end(record: Record, *, cause: str, reason: str, exit_code: int | None, was_seen: bool) -> Record:
    """The record, and in it the end of its process. was_seen: whether the agent was there."""
    lasted_s = None
    if was_seen and record.started is not None:
        lasted_s = round(max(0.0, now_s() - record.started / _TICKS_A_SECOND), 3)
    ended = AttemptReport(
        number=record.attempt,
        generation=record.assignment.generation,
        duration_s=lasted_s,
        exit_code=exit_code,
        signal=signal_in(exit_code),
        cause=cause,
        reason=reason,
    )
    return replace(record, attempts=(*record.attempts, ended)[-ATTEMPTS_KEPT:])
