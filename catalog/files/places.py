"""What was read of a file: the models, the line of each of their parts, and what is wrong on which line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from catalog.differences import MODEL_KEYS, PROFILE_KEYS
from catalog.reading import Fault, shown

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Placed:
    """A fault, and the line it is about. 0 where no line of the file is."""

    line: int
    fault: Fault

    def __str__(self) -> str:
        return f"line {self.line}: {self.fault.sentence}" if self.line else self.fault.sentence


class FileError(ValueError):
    """A file that cannot be read as a catalog. `placed` lists every reason found; the text is the first."""

    def __init__(self, placed: Sequence[Placed]) -> None:
        self.placed = tuple(placed)
        super().__init__(self.placed)

    def __str__(self) -> str:
        return str(self.placed[0])


def placed_fault(line: int, code: str, sentence: str) -> Placed:
    return Placed(line, Fault("", "", "", code, sentence))


def refused(line: int, code: str, sentence: str) -> FileError:
    return FileError([placed_fault(line, code, sentence)])


@dataclass(frozen=True, slots=True)
class CatalogFile:
    """The models as the law reads them, and on which line each part of them stands."""

    models: Sequence[object]
    lines: Mapping[Path, int] = field(default_factory=dict, hash=False)
    root: Path = ()

    def placed(self, fault: Fault, number: int | None) -> Placed:
        """The fault at its line; `number` counts the file's models from 0, None is a model not in it."""
        return Placed(0 if number is None else self._line(fault, number), fault)

    def _line(self, fault: Fault, number: int) -> int:
        """Of the field; where that is not there, of what it is missing from."""
        model: Path = (*self.root, number)
        holders = [(*model, "profiles", each) for each in _profiles_of(fault, self.models[number])] or [model]
        if fault.code == "required":
            holders = holders[:1]
        parts = fault.field.split(".")
        paths = [tuple(parts[:length]) for length in range(len(parts), 0, -1)]
        places = [(*holder, *path) for path in [(fault.field,), *paths] for holder in holders]
        return next((self.lines[place] for place in [*places, *holders] if place in self.lines), 0)


def _profiles_of(fault: Fault, model: object) -> list[int]:
    """Which of the model's profiles the fault may be about, the likeliest first."""
    profiles = model.get("profiles") if isinstance(model, Mapping) else None
    lacks_name = fault.model and (fault.field, fault.code) == ("name", "required")
    is_of_profile = fault.profile or lacks_name or fault.field in set(PROFILE_KEYS) - set(MODEL_KEYS)
    if not is_of_profile or not isinstance(profiles, list):
        return []
    names = [profile.get("name", "") if isinstance(profile, Mapping) else None for profile in profiles]
    called = [
        number for number, name in enumerate(names) if isinstance(name, str) and shown(name) == fault.profile
    ]
    return called[::-1] if (fault.field, fault.code) == ("name", "duplicate") else called
