"""Tells which paths exist on this node, and what lies there. Reads names and sizes, never contents."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from itertools import islice

from nodes.protocol import PathReport

WEIGHT_FILES = (".gguf", ".safetensors", ".bin")
ENTRIES_LIMIT = 10_000  # of one folder that are looked at
FILES_LIMIT = 1_000  # names in a report: a large model has some hundreds of shards
PATH_LIMIT = 4096


def is_outside(path: str, roots: Sequence[str]) -> bool:
    """Whether it leads out of the folders that the node allows, by whatever links. None are all."""
    real = os.path.realpath(path)
    return bool(roots) and not any(os.path.commonpath((root, real)) == root for root in roots)


def look_at(path: str, roots: Sequence[str] = ()) -> PathReport:
    """roots: the folders that it may lead into, none for anywhere."""
    if not path.startswith("/"):
        return PathReport(path, False, reason="it is not an absolute path")
    if "\0" in path or ".." in path.split("/") or len(path) > PATH_LIMIT:
        return PathReport(path, False, reason="it is not a plain path")
    if is_outside(path, roots):
        return PathReport(path, False, reason="it is outside the folders that the node's --root allows")
    try:
        found = os.stat(path)
        if stat.S_ISREG(found.st_mode):
            files = (os.path.basename(path),) if path.endswith(WEIGHT_FILES) else ()
            return PathReport(path, True, "file", found.st_size, files)
        if not stat.S_ISDIR(found.st_mode):
            return PathReport(path, False, reason="it is neither a file nor a directory")
        sizes = {}
        with os.scandir(path) as entries:
            for entry in islice(entries, ENTRIES_LIMIT):
                if entry.name.endswith(WEIGHT_FILES) and entry.is_file():
                    sizes[entry.name] = entry.stat().st_size
    except FileNotFoundError:
        return PathReport(path, False)
    except (OSError, ValueError) as error:
        return PathReport(path, False, reason=getattr(error, "strerror", None) or "it cannot be looked up")
    return PathReport(path, True, "directory", sum(sizes.values()), tuple(sorted(sizes)[:FILES_LIMIT]))
