"""An engine's log file, which it writes itself so that it goes on without its agent, kept within bounds."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from nodes.engines.adapter import SHOWN_KEY

LIMIT_BYTES = 8 * 1024 * 1024
KEPT_BYTES = 1024 * 1024
TAIL_LIMIT_BYTES = 64 * 1024
BITE_BYTES = 256 * 1024  # that a reader who follows a log is given at once
CUT = b"[the agent cut this log here]\n"


def bound_log(path: Path) -> None:
    """Keep a log's end when it has grown too long. The engine appends, so it goes on at the new end.

    A log that cannot be cut just now is cut later: it is no reason to do anything to the engine.
    """
    with contextlib.suppress(OSError):
        if path.stat().st_size > LIMIT_BYTES:
            kept = read_tail(path, KEPT_BYTES)
            with path.open("r+b") as file:
                file.truncate(0)
            with path.open("ab") as file:
                file.write(CUT + kept)


def read_words(path: Path, *, key: str, limit_bytes: int = TAIL_LIMIT_BYTES) -> str:
    """The log's end as it may be told."""
    return _shown(read_tail(path, limit_bytes), key)


def read_tail(path: Path, limit_bytes: int = TAIL_LIMIT_BYTES) -> bytes:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - limit_bytes))
            return file.read(limit_bytes)
    except FileNotFoundError:
        return b""


class Follower:
    """One reader of a log that is being written. It is given whole lines: no half of a key slips by."""

    def __init__(self, path: Path, *, key: str) -> None:
        self._path, self._key = path, key
        self._offset = 0

    def begin(self, lines: int, limit_bytes: int) -> str:
        """The last lines that are there."""
        size, told = self._read(-limit_bytes, limit_bytes)
        whole = told[: told.rfind(b"\n") + 1]
        self._offset = size - (len(told) - len(whole))
        return _shown(b"".join(whole.splitlines(keepends=True)[-lines:]), self._key)

    def more(self, *, is_over: bool) -> str:
        """What was written since. is_over: nothing more will be, so a line without an end is told, too."""
        size, told = self._read(self._offset, BITE_BYTES)
        if size < self._offset:  # it was cut, and what is left of it is known
            self._offset = size
            return ""
        end = told.rfind(b"\n") + 1
        is_rest = is_over and self._offset + len(told) == size
        if not is_rest and (end or len(told) < BITE_BYTES):
            told = told[:end]
        self._offset += len(told)
        return _shown(told, self._key)

    def _read(self, offset: int, limit_bytes: int) -> tuple[int, bytes]:
        """The log's size, and what stands at the offset (below 0: from its end)."""
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size + offset) if offset < 0 else offset)
                return size, file.read(min(limit_bytes, size))
        except FileNotFoundError:
            return 0, b""


def _shown(told: bytes, key: str) -> str:
    """Engines print their options, and one has its key among them."""
    words = told.decode("utf-8", "replace")
    return words.replace(key, SHOWN_KEY) if key else words
