"""What the names of models have against each other: claimed twice, pointing nowhere, still needed.

Judges some models against the names of the others, so that one edit never reads the whole catalog.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING

from catalog.reading import Fault, quote, shown

if TYPE_CHECKING:
    from catalog.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The names of the models that are not being judged: canonical ones, and aliases with their models.

    `is_whole` says that nothing else exists, so that an unknown fallback is a fault.
    """

    names: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict, hash=False)
    is_whole: bool = True


def declared_twice(name: str) -> Fault:
    return Fault(shown(name), "", "name", "duplicate", f"model {quote(name)} is declared twice")


def _is_there(name: str) -> Fault:
    sentence = f"model {quote(name)} is in the catalog already; edit it, or choose another name"
    return Fault(shown(name), "", "name", "duplicate", sentence)


def _collides(model: str, alias: str) -> Fault:
    sentence = f"model {quote(model)}: alias {quote(alias)} collides with another model name"
    return Fault(shown(model), "", "aliases", "duplicate", sentence)


def removed_meanwhile(name: str) -> Fault:
    sentence = f"model {quote(name)} was removed by somebody else just now; add it anew if it is still wanted"
    return Fault(shown(name), "", "", "conflict", sentence)


def faults_among(models: Sequence[ModelSpec], neighbours: Neighbours) -> list[Fault]:
    """What the names of these models have against each other and against those of their neighbours."""
    models = [model for model in models if model.name]
    faults = [_is_there(model.name) for model in models if model.name in neighbours.names]
    names = neighbours.names | {model.name for model in models}
    aliases = neighbours.aliases
    faults += [_collides(aliases[model.name], model.name) for model in models if model.name in aliases]
    owners = dict(aliases)
    for model in models:
        for alias in model.aliases:
            if alias in names:
                faults.append(_collides(model.name, alias))
            elif alias in owners:
                both = f"{quote(owners[alias])} and {quote(model.name)}"
                sentence = f"alias {quote(alias)} is claimed by both {both}"
                faults.append(Fault(shown(model.name), "", "aliases", "duplicate", sentence))
            else:
                owners[alias] = model.name
    for model in models:
        for fallback in model.fallbacks:
            says = ""
            if fallback == model.name or fallback in model.aliases:
                says = "is the model itself; name another model"
            elif neighbours.is_whole and fallback not in names and fallback not in owners:
                says = "is not in the catalog"
            if says:
                sentence = f"model {quote(model.name)}: fallback {quote(fallback)} {says}"
                faults.append(Fault(shown(model.name), "", "fallbacks", "fallback", sentence))
    return faults


def faults_of_removal(model: str, users: Iterable[tuple[str, str]]) -> list[Fault]:
    """Why names of this model cannot go: `users` are pairs of another model and the fallback it names."""
    faults = []
    for user, name in users:
        what = f"model {quote(model)}" + ("" if name == model else f": alias {quote(name)}")
        why = f"model {quote(user)} falls back to it; change that model's fallbacks first"
        field_ = "name" if name == model else "aliases"
        faults.append(Fault(shown(model), "", field_, "in_use", f"{what} cannot be removed: {why}"))
    return faults


def ways_that_end(falls_back_to: Mapping[str, Sequence[str]]) -> list[str]:
    """The models from which every way along fallbacks ends, each after those it falls back to. From the
    others some way leads into a circle. All names are canonical."""
    sorter = TopologicalSorter(falls_back_to)
    with suppress(CycleError):  # the others are never ready
        sorter.prepare()
    ended: list[str] = []
    while sorter.is_active():
        ready = sorter.get_ready()
        ended += ready
        sorter.done(*ready)
    return ended


def users_first(models: Sequence[ModelSpec]) -> list[str]:
    """The order in which to remove models one after another, so that none of them falls back to the
    next by then. Those of `knotted` come first."""
    falls_back_to = _among(models)
    ended = dict.fromkeys(ways_that_end(falls_back_to))
    return [*(name for name in falls_back_to if name not in ended), *reversed(ended)]


def knotted(models: Sequence[ModelSpec]) -> tuple[str, ...]:
    """Those from which some way leads into a circle, where each is in another's way: they go together."""
    falls_back_to = _among(models)
    ended = frozenset(ways_that_end(falls_back_to))
    return tuple(name for name in falls_back_to if name not in ended)


def _among(models: Sequence[ModelSpec]) -> dict[str, list[str]]:
    """Which of each other they fall back to, by canonical names."""
    owner = {name: model.name for model in models for name in (model.name, *model.aliases)}
    return {model.name: [owner[name] for name in model.fallbacks if name in owner] for model in models}


def circle(model: str, falls_back_to: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The shortest way from a model along fallbacks back to itself, told with both its ends. Empty: there is
    none. All names are canonical."""
    came_from: dict[str, str] = {}
    here = [model]
    while here:
        ahead = []
        for each in here:
            for fallback in falls_back_to.get(each, ()):
                if fallback == model:
                    way = [model, each]
                    while way[-1] != model:
                        way.append(came_from[way[-1]])
                    return tuple(reversed(way))
                if fallback not in came_from:
                    came_from[fallback] = each
                    ahead.append(fallback)
        here = ahead
    return ()


def warnings_of_circle(model: str, falls_back_to: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """A circle of fallbacks is allowed, and said: it may not be what somebody meant."""
    way = circle(model, falls_back_to)
    if not way:
        return ()
    told = " -> ".join(quote(name) for name in way)
    sentence = (
        f"model {quote(model)}: its fallbacks lead back to it ({told}); a request asks each of them once and"
        " then ends, so name another model as the last one if it should go on"
    )
    return (sentence,)
