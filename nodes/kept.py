"""What was read from a row's JSON, for as long as that JSON is the same.

To read a report or a launch takes many times longer than to see that it is as it was. A process that looks at
all of them every few seconds keeps what it read; what is kept is never more than what the rows say.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Kept(Generic[T]):
    """The last value of each key, read anew when its JSON differs."""

    def __init__(self, read: Callable[[Any], T]) -> None:
        self._read = read
        self._values: dict[object, tuple[Any, T]] = {}

    def get(self, key: object, raw: Any) -> T:
        known = self._values.get(key)
        if known is None or known[0] != raw:
            known = self._values[key] = (raw, self._read(raw))
        return known[1]

    def keep_only(self, keys: Collection[object]) -> None:
        """Forget the others."""
        if len(self._values) > len(keys):
            self._values = {key: value for key, value in self._values.items() if key in keys}
