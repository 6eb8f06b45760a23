"""Disks that are small, and can be filled to the last byte."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(path: Path, size_bytes: int) -> Iterator[None]:
    """At this folder, which is made. Skips the test where nothing may be mounted."""
    path.mkdir(mode=0o700)
    options = f"size={size_bytes},mode=700"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("no disk may be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@contextlib.contextmanager
def filled(folder: Path) -> Iterator[None]:
    """Nothing more fits until it ends."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * os.sysconf("SC_PAGE_SIZE"))
    try:
        yield
    finally:
        filler.unlink()
