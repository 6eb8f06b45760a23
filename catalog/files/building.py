"""What a parser reads, put together within bounds, with the line of each part."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from catalog.files.places import FileError, Path, Placed, placed_fault, refused
from catalog.reading import quote

DEPTH_LIMIT = 20  # a catalog needs six
PARTS_LIMIT = 1_000_000  # keys and values; a model with three profiles has about a hundred
DIGITS_LIMIT = 40  # of a number
FAULTS_LIMIT = 100  # of the writing; a file that has more of them is no catalog
_LINED_DEPTH = 5  # ("models", 3, "profiles", 0, "env"): sentences are about nothing deeper


def refuse_too_deep(depth: int, line: int) -> None:
    if depth > DEPTH_LIMIT:
        says = f"the file is nested more than {DEPTH_LIMIT} deep, and a catalog is not; write it flat"
        raise refused(line, "too_deep", says)


@dataclass(slots=True)
class _Open:
    """A map or a list that is being read. A map's `key` waits for its value."""

    value: dict[str, Any] | list[Any]
    path: Path
    key: str | None = None
    keys: dict[str, int] = field(default_factory=dict)


class Building:
    """What of a file has been read so far. A key that is there twice, and what cannot be read, are noted, and
    reading goes on; what costs too much ends it with FileError."""

    def __init__(self, *, parts_limit: int = PARTS_LIMIT) -> None:
        self._parts_limit = parts_limit
        self.root: Any = None
        self.lines: dict[Path, int] = {}
        self.faults: list[Placed] = []
        self._open: list[_Open] = []
        self._parts = 0

    def refuse(self, line: int, code: str, sentence: str) -> None:
        self.faults.append(placed_fault(line, code, sentence))
        if len(self.faults) >= FAULTS_LIMIT:
            raise FileError(self.faults)

    @property
    def wants_key(self) -> bool:
        return bool(self._open) and isinstance(self._open[-1].value, dict) and self._open[-1].key is None

    def count(self, line: int) -> None:
        self._parts += 1
        if self._parts > self._parts_limit:
            says = f"the file has more than {self._parts_limit} keys and values; split the catalog"
            raise refused(line, "too_large", says)

    def key(self, key: str, line: int) -> None:
        self.count(line)
        top = self._open[-1]
        if key in top.keys:
            where = f"the key {quote(key)} is there twice, on lines {top.keys[key]} and {line}"
            self.refuse(line, "duplicate", f"{where}; keep one of the two")
        top.keys[key] = line
        top.key = key
        if len(top.path) < _LINED_DEPTH:
            self.lines[(*top.path, key)] = line

    def put(self, value: Any, line: int) -> None:
        self.count(line)
        self._place(value, line)

    def open(self, value: dict[str, Any] | list[Any], line: int) -> None:
        self.count(line)
        refuse_too_deep(len(self._open) + 1, line)
        self._open.append(_Open(value, self._place(value, line)))

    def close(self) -> None:
        self._open.pop()

    def _place(self, value: Any, line: int) -> Path:
        if not self._open:
            self.root = value
            return ()
        top = self._open[-1]
        if isinstance(top.value, list):
            path: Path = (*top.path, len(top.value))
            if len(path) <= _LINED_DEPTH:
                self.lines[path] = line
            top.value.append(value)
        else:
            assert top.key is not None
            path = (*top.path, top.key)
            top.value[top.key] = value
            top.key = None
        return path
