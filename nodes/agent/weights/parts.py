"""A file under way: written piece by piece, hashed as it comes, and whole or not at the end."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from nodes.agent.weights.store import READ_BYTES
from nodes.protocol import ListedFile


class WrongChecksum(Exception):
    """It came whole, and is not what was announced."""


class Pace:
    """No more bytes a second than this, 0 for any number; it may change while bytes flow."""

    def __init__(self) -> None:
        self.bytes_per_s = 0
        self._free_s = 0.0

    def keep(self, count: int) -> None:
        if self.bytes_per_s:
            now_s = time.monotonic()
            self._free_s = max(self._free_s, now_s) + count / self.bytes_per_s
            time.sleep(self._free_s - now_s)


class Part:
    """What of a file is there already is read once, and what comes is added. In the form that
    huggingface_hub's download writes to, and begins anew with where a hub knows no ranges."""

    def __init__(self, path: Path, listed: ListedFile, *, pace: Pace, tell: Callable[[int], None]) -> None:
        """tell: how many bytes are there so far."""
        self._path, self._listed, self._pace, self._tell = path, listed, pace, tell
        self._begin()

    def __enter__(self) -> Part:
        path = self._path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._file = open(handle, "r+b", buffering=0)
        if os.fstat(handle).st_size > self._listed.size:
            self._file.truncate(0)
        while piece := self._file.read(READ_BYTES):
            self._count(piece)
        self._tell(self.size)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _begin(self) -> None:
        self.size = 0
        self._sha256 = hashlib.sha256()
        # As git names a file; it is not there to keep an attacker out.
        self._git = hashlib.sha1(b"blob %d\0" % self._listed.size, usedforsecurity=False)

    def _count(self, piece: bytes) -> None:
        self.size += len(piece)
        self._sha256.update(piece)
        if not self._listed.sha256:
            self._git.update(piece)

    def write(self, piece: bytes) -> int:
        left = memoryview(piece)
        while left:  # of a raw file, one call may write less
            left = left[self._file.write(left) :]
        self._count(piece)
        self._tell(self.size)
        self._pace.keep(len(piece))
        return len(piece)

    def tell(self) -> int:
        return self.size

    def seek(self, position: int) -> None:
        """To the beginning, which is as far back as a download ever goes."""
        if position != self.size:
            self.restart()

    def truncate(self) -> None:
        """Nothing lies behind what was written."""

    def restart(self) -> None:
        self._file.seek(0)
        self._file.truncate(0)
        self._begin()
        self._tell(0)

    @property
    def is_whole(self) -> bool:
        return self.size == self._listed.size

    def finish(self) -> str:
        """Its SHA-256, once it is on the disk. Raises WrongChecksum, and has nothing of it then."""
        found = self._sha256.hexdigest()
        told = self._listed.sha256 or self._listed.blob_id
        is_right = told in ("", found if self._listed.sha256 else self._git.hexdigest())
        if not (self.is_whole and is_right):
            self.restart()
            raise WrongChecksum
        os.fsync(self._file.fileno())
        return found
