"""Small files that are whole or absent, through a power cut too; those of JSON tell when a byte has turned.

Each of these carries the sum of what is in it. One without a sum is of an older version, and is believed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

DRAFT = ".draft-"
SUM = "sha256"


class Torn(ValueError):
    """It is not as it was written."""


def read_file(path: Path) -> Any:
    """What was written, as JSON. Raises OSError; ValueError or RecursionError where it is not."""
    held = json.loads(path.read_bytes())
    if isinstance(held, dict) and (told := held.pop(SUM, None)) not in (None, _sum(held)):
        raise Torn(f"its {SUM} is {told!r:.80}, and not that of what is in it")
    return held


def write_file(path: Path, value: dict[str, Any]) -> None:
    """Old or new, never torn, and on the disk before anything follows from it. Raises OSError."""
    write_text(path, json.dumps({**value, SUM: _sum(value)}))


def write_text(path: Path, text: str, mode: int = 0o600) -> None:
    """All of it or nothing, and never readable by others meanwhile. Raises OSError."""
    handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f"{DRAFT}{path.name}.")  # mode 0600
    try:
        with open(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(draft, mode)
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft)
        raise
    _sync_folder(path.parent)


def _sum(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
