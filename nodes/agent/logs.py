"""An engine's log file, which it writes itself so that it goes on without its agent, kept within bounds."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from nodes.engines.adapter import SHOWN_KEY

LIMIT_BYTES = 8 * 1024 * 1024
KEPT_BYTES = 1024 * 1024
TAIL_LIMIT_BYTES = 64 * 1024


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
                file.write(b"[the agent cut this log here]\n" + kept)


def read_words(path: Path, *, key: str, limit_bytes: int = TAIL_LIMIT_BYTES) -> str:
    """The log's end as it may be told: engines print their options, and one has its key among them."""
    words = read_tail(path, limit_bytes).decode("utf-8", "replace")
    return words.replace(key, SHOWN_KEY) if key else words


def read_tail(path: Path, limit_bytes: int = TAIL_LIMIT_BYTES) -> bytes:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - limit_bytes))
            return file.read(limit_bytes)
    except FileNotFoundError:
        return b""
