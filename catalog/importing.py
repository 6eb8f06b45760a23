"""What a file of models would make of a catalog: added, changed, removed; or every reason why it must not.

The law is judged over the catalog that would come of it: models that the file does not name stay, and are
neighbours, unless the file is to be the whole. Models are matched by their canonical names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from catalog.hiding import unhide_model
from catalog.names import Neighbours, declared_twice, faults_among, faults_of_removal, ways_that_end
from catalog.reading import FAULTS_LIMIT, CatalogError, Fault, shown, too_many
from catalog.spec import ModelSpec

FEW = 3  # models that may go without a second word, if others are there afterwards


@dataclass(frozen=True, slots=True)
class PlacedFault:
    """A fault, and which of the file's models it is about, counted from 0. None: one that is not in it."""

    fault: Fault
    number: int | None


class ImportRefused(CatalogError):
    """A file was refused. `placed` says of each fault where in the file it is."""

    def __init__(self, placed: Sequence[PlacedFault]) -> None:
        self.placed = tuple(placed)
        super().__init__([each.fault for each in placed])


@dataclass(frozen=True, slots=True)
class Edit:
    was: ModelSpec
    now: ModelSpec


@dataclass(frozen=True, slots=True)
class Import:
    """`added` and `changed` are in the file's order, `removed` and `kept` in the catalog's. `kept` are models
    that the file does not name and that stay; `number_of` is where a model is in the file. `circling` are
    the models whose fallbacks may lead back to them, and which of each other they fall back to."""

    added: tuple[ModelSpec, ...]
    changed: tuple[Edit, ...]
    removed: tuple[ModelSpec, ...]
    unchanged: int
    kept: tuple[ModelSpec, ...] = field(compare=False)
    number_of: Mapping[str, int] = field(hash=False)
    circling: Mapping[str, Sequence[str]] = field(compare=False)

    @property
    def sweeps(self) -> Fault | None:
        """Whether it takes away so much that somebody may have mistaken a part for the whole."""
        removed = len(self.removed)
        stay = len(self.changed) + len(self.kept) + self.unchanged
        before = removed + stay
        empties = not (stay or self.added)  # a file without models was written by an empty catalog
        if removed * 3 <= before or (removed <= FEW and not empties):
            return None
        sentence = (
            f"{removed} of {before} models would be removed, which is more than a third; check that"
            " the file is the whole catalog, and then say yes to it (--yes)"
        )
        return Fault("", "", "", "sweeping", sentence)


def plan_import(raws: Sequence[object], stored: Sequence[ModelSpec], *, is_whole: bool) -> Import:
    """`is_whole` removes what the file does not name. Raises ImportRefused with all that is wrong."""
    reading = _Reading({model.name: model for model in stored})
    for number, raw in enumerate(raws):
        reading.read(raw, number)
        if len(reading.placed) >= FAULTS_LIMIT:
            raise ImportRefused([*reading.placed, PlacedFault(too_many(), None)])
    others = tuple(model for model in stored if model.name not in reading.number_of)
    kept = () if is_whole else others
    placed = reading.placed + _faults_beside(reading, stored, kept)
    if placed:
        last = len(raws)
        raise ImportRefused(sorted(placed, key=lambda at: last if at.number is None else at.number))
    before = {model.name: model for model in stored}
    return Import(
        added=tuple(model for model in reading.models if model.name not in before),
        changed=tuple(
            Edit(before[model.name], model)
            for model in reading.models
            if model.name in before and before[model.name] != model
        ),
        removed=others if is_whole else (),
        unchanged=sum(before.get(model.name) == model for model in reading.models),
        kept=kept,
        number_of=reading.number_of,
        circling=_circling((*reading.models, *kept)),
    )


def _circling(models: Sequence[ModelSpec]) -> dict[str, list[str]]:
    """All but those from which every way ends: most catalogs have no others, and are looked through once."""
    owner = {name: model.name for model in models for name in (model.name, *model.aliases)}
    falls_back_to = {model.name: [owner[name] for name in model.fallbacks] for model in models}
    ended = frozenset(ways_that_end(falls_back_to))
    return {
        name: [other for other in others if other not in ended]
        for name, others in falls_back_to.items()
        if name not in ended
    }


class _Reading:
    """The file's models one after another, each under the laws of one model."""

    def __init__(self, stored: Mapping[str, ModelSpec]) -> None:
        self.models: list[ModelSpec] = []
        self.number_of: dict[str, int] = {}
        self.placed: list[PlacedFault] = []
        self.is_complete = True
        self._stored = stored

    def read(self, raw: object, number: int) -> None:
        name = raw.get("name") if isinstance(raw, Mapping) else None
        stored = self._stored.get(name) if isinstance(name, str) else None
        faults: list[Fault] = []
        try:
            raw = unhide_model(raw, stored)
        except CatalogError as no:
            faults += no.faults
        try:
            model = ModelSpec.load_edit(raw, stored) if stored else ModelSpec.load(raw)
        except CatalogError as no:
            faults += no.faults
        if isinstance(name, str) and name in self.number_of:
            faults.append(declared_twice(name))
        elif isinstance(name, str):
            self.number_of[name] = number
        self.placed += [PlacedFault(fault, number) for fault in faults]
        if faults:
            self.is_complete = False
        else:
            self.models.append(model)


def _faults_beside(
    reading: _Reading, stored: Sequence[ModelSpec], kept: Sequence[ModelSpec]
) -> list[PlacedFault]:
    """What names have against each other, in the file and beside it. What the catalog has against itself
    already is no fault of the file's."""
    neighbours = Neighbours(
        names=frozenset(model.name for model in kept),
        aliases={alias: model.name for model in kept for alias in model.aliases},
        is_whole=reading.is_complete,  # a model that could not be read might have the name
    )
    already = set(faults_among(stored, Neighbours()))
    faults = [fault for fault in faults_among(reading.models, neighbours) if fault not in already]
    faults += _faults_of_lost_names(reading, stored, kept)
    number_of = dict(reading.number_of)
    for model in kept:  # a fault of a model beside the file is the file's that takes a name of it
        for alias in model.aliases:
            if alias in reading.number_of:
                number_of[model.name] = reading.number_of[alias]
    number_as_shown = {shown(name): number for name, number in number_of.items()}
    return [PlacedFault(fault, number_as_shown.get(fault.model)) for fault in faults]


def _faults_of_lost_names(
    reading: _Reading, stored: Sequence[ModelSpec], kept: Sequence[ModelSpec]
) -> list[Fault]:
    """Names that the file takes from a model while one that it does not mention falls back to them."""
    if not reading.is_complete:
        return []
    there = {name for model in (*reading.models, *kept) for name in (model.name, *model.aliases)}
    users: dict[str, list[str]] = {}
    for model in kept:
        for fallback in model.fallbacks:
            users.setdefault(fallback, []).append(model.name)
    return [
        fault
        for model in stored
        for name in model.aliases
        if name not in there and name in users
        for fault in faults_of_removal(model.name, [(user, name) for user in users[name]])
    ]
