"""The access log: a line of JSON for each request that has ended. No prompt, no answer, no secret is in it.

A thread writes. A file that cannot be written, or a terminal that nobody reads, costs lines and no request:
only so many wait, and how many were dropped is told as soon as something can be written again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache
from time import monotonic

import msgspec

from llmgw.gateway.passage import Passage

log = logging.getLogger(__name__)

STDOUT = "-"
LINES_WAITING = 10_000
TEXT_LIMIT = 200
"""Of what a client wrote."""
_LOOK_EVERY_S = 0.05
"""A thread that is woken for every line would cost each request more than its line does."""
_LINES_AT_ONCE = 10
_WRITE_BYTES = 4096
"""A pipe takes so much at once, or nothing: lines of several processes never meet in the middle."""
_STOP_S = 2.0


class Journal:
    """Between `start` and `stop`, to a file that it opens anew once somebody has moved it away, or to stdout.

    `clock_s` tells the database's clock, None while that is unknown.
    """

    def __init__(
        self, path: str, clock_s: Callable[[], float | None], *, lines_waiting: int = LINES_WAITING
    ) -> None:
        self._path, self._clock_s = path, clock_s
        self._waiting: deque[Passage] = deque()
        self._lines_waiting = lines_waiting
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._keep_writing, name="journal", daemon=True)
        self._file = -1
        self._is_failing = self._is_torn = self._is_looked_at = False
        # Each of these is written by one thread: who notes, who writes, who writes.
        self._refused = self._unwritten = self._told = 0

    @property
    def dropped(self) -> int:
        """Lines that were noted and are not in the file."""
        return self._refused + self._unwritten

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Writes what waits, unless nobody takes it."""
        self._is_stopping.set()
        self._thread.join(_STOP_S)

    def note(self, passage: Passage) -> None:
        """The passage is not changed any more."""
        if len(self._waiting) >= self._lines_waiting:
            self._refused += 1
        else:
            self._waiting.append(passage)

    def _keep_writing(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._is_stopping.wait(_LOOK_EVERY_S)
            self._is_looked_at = False
            for _ in range(0, len(self._waiting), _LINES_AT_ONCE):
                # Few at once: between two writes the requests have the interpreter.
                count = min(len(self._waiting), _LINES_AT_ONCE)
                clock_s, now_s = self._clock_s(), monotonic()
                self._write([line_of(self._waiting.popleft(), clock_s, now_s) for _ in range(count)])
        if self._file > 1:
            os.close(self._file)

    def _write(self, lines: list[bytes]) -> None:
        try:
            if not self._is_looked_at:
                self._open()
                self._is_looked_at = True
            if untold := self.dropped - self._told:
                self._put([msgspec.json.encode({"dropped": untold}) + b"\n"])
                self._told += untold
            while lines:
                self._put(lines)
        except OSError as error:
            self._unwritten += len(lines)
            self._is_looked_at = False
            if not self._is_failing:
                log.error("The access log cannot be written to %s: %s", self._path, error)
            self._is_failing = True
        else:
            self._is_failing = False

    def _put(self, lines: list[bytes]) -> None:
        """As many of the first as go into one piece; those that are in the file leave the list, whatever
        happens. A disk that is full takes half a line, and the next one begins on a line of its own."""
        data = b"".join([b"\n"] * self._is_torn + lines[: _fitting(lines)])
        whole = -self._is_torn
        try:
            while data:
                taken = os.write(self._file, data)
                whole += data.count(b"\n", 0, taken)
                self._is_torn = data[taken - 1 : taken] != b"\n"
                data = data[taken:]
        finally:
            del lines[: max(whole, 0)]

    def _open(self) -> None:
        if self._path == STDOUT:
            self._file = 1
            return
        with contextlib.suppress(OSError):
            if self._file > 1 and os.path.samestat(os.fstat(self._file), os.stat(self._path)):
                return
        if self._file > 1:
            os.close(self._file)
            self._file = -1
        self._is_torn = False
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _fitting(lines: list[bytes]) -> int:
    """How many of the first go into one piece."""
    size = 0
    for count, line in enumerate(lines):
        size += len(line)
        if size > _WRITE_BYTES and count:
            return count
    return len(lines)


class _Line(msgspec.Struct, frozen=True, gc=False):
    """Times are milliseconds."""

    at: str | None
    request: str
    key: str
    endpoint: str
    asked_as: str
    model: str
    replica: str
    route: str
    status: int
    code: str
    stream: bool
    simulated: bool
    attempts: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    hold_ms: float | None
    queue_ms: float | None
    ttft_ms: float | None
    tpot_ms: float | None
    duration_ms: float | None


_encode = msgspec.json.Encoder().encode


def line_of(passage: Passage, clock_s: float | None, now_s: float) -> bytes:
    """`clock_s` is the database's clock at `now_s`, which is monotonic."""
    ended_at_s = now_s if passage.ended_at_s is None else passage.ended_at_s
    line = _Line(
        None if clock_s is None else _moment(clock_s - (now_s - ended_at_s)),
        passage.request_id,
        passage.key,
        passage.endpoint,
        passage.asked_as[:TEXT_LIMIT],
        passage.model,
        passage.replica,
        passage.route,
        passage.status,
        passage.code[:TEXT_LIMIT],
        passage.is_streamed,
        passage.is_simulated,
        passage.attempts,
        passage.prompt_tokens,
        passage.cached_tokens,
        passage.completion_tokens,
        _ms(passage.held_s),
        _ms(passage.queued_s),
        _ms(passage.ttft_s),
        _ms(passage.tpot_s),
        _ms(passage.duration_s),
    )
    return _encode(line) + b"\n"


def _moment(seconds: float) -> str:
    second, microseconds = divmod(round(seconds * 1_000_000), 1_000_000)
    return f"{_second(second)}.{microseconds // 1000:03}Z"


@lru_cache(maxsize=4)
def _second(number: int) -> str:
    return datetime.fromtimestamp(number, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else int(seconds * 10_000 + 0.5) / 10  # never negative
