"""What an API key opens, and how much of it may be used: judged here for every door, like a model.

Names are as typed until a verb has found the models; from then on they are canonical, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from catalog.parts import LIMIT_KEYS, Limits
from catalog.reading import CatalogError, Fault, Reader, quote
from catalog.typed import limits_words

REACH_KEYS = ("models", *LIMIT_KEYS, "cache_scope")
_NAMED = 5  # models of a sentence


@dataclass(frozen=True, slots=True)
class Reach:
    """`models` None: every model, those to come as well. Keys of one `cache_scope` may share what engines
    have cached of a prompt; those without one share with each other."""

    models: tuple[str, ...] | None = None
    limits: Limits = Limits()
    cache_scope: str = ""

    @classmethod
    def load(cls, raw: object) -> Reach:
        """Raises CatalogError with all that cannot be. That no model is named is for `fault_of_nothing`."""
        faults: list[Fault] = []
        reader = Reader(raw, faults, subject="the key", model="")
        reader.refuse_unknown_keys(REACH_KEYS)
        names = reader.texts("models", are_names=True)
        models = tuple(dict.fromkeys(names)) if reader.has("models") else None
        reach = cls(models, Limits.read(reader), reader.name("cache_scope"))
        if faults:
            raise CatalogError(faults)
        return reach

    def as_dict(self) -> dict[str, Any]:
        """JSON, which `load` reads back: zeros and empty texts are left out, and an empty list is not."""
        models = {} if self.models is None else {"models": list(self.models)}
        scope = {"cache_scope": self.cache_scope} if self.cache_scope else {}
        return models | self.limits.written() | scope

    def is_within(self, other: Reach) -> bool:
        """Whether it opens no model, lets through no request and shares no cache that the other does not."""
        return self.cache_scope == other.cache_scope and not self.faults_beyond(other)

    def faults_beyond(self, other: Reach) -> list[Fault]:
        """Why a key that was asked for with another key cannot have this reach: it would do more."""
        faults = []
        if other.models is not None:
            beyond = [name for name in self.models or () if name not in other.models]
            if beyond or self.models is None:
                advice = f"leave out {_listed(beyond)}" if beyond else "name models among those"
                faults.append(_beyond("models", f"which opens {_listed(other.models)} alone; {advice}"))
        for key in self.limits.beyond(other.limits):
            bound = getattr(other.limits, key)
            faults.append(_beyond(key, f"whose {key} is {bound}; give one of 1 to {bound}"))
        if other.cache_scope not in ("", self.cache_scope):
            scope = quote(other.cache_scope)
            faults.append(_beyond("cache_scope", f"whose cache_scope is {scope}; give the same"))
        return faults


def fault_of_nothing() -> Fault:
    says = "the key: models names none, and it would open nothing; name one, or leave models out to open all"
    return Fault("", "", "models", "required", says)


def fault_of_unknown_model(name: str) -> Fault:
    says = f"the key: model {quote(name)} is not in the catalog; check the spelling"
    return Fault("", "", "models", "unknown", says)


def fault_of_widening() -> Fault:
    says = (
        "you may narrow what a key opens and nothing else, since you may make no keys; ask somebody who may"
    )
    return Fault("", "", "", "permission", says)


def _beyond(field: str, says: str) -> Fault:
    sentence = f"a key may do no more than the key that it is asked for with, {says}"
    return Fault("", "", field, "range", sentence)


def _listed(names: Sequence[str]) -> str:
    told = [quote(name) for name in names[:_NAMED]]
    more = [f"{len(names) - _NAMED} more"] * (len(names) > _NAMED)
    return " and ".join([*filter(None, [", ".join(told)]), *more]) or "no model"


# --- words to read --------------------------------------------------------------------------------


def opens_words(reach: Reach) -> str:
    if reach.models is None:
        return "every model"
    return ", ".join(reach.models) or "no model"


def reach_words(reach: Reach) -> str:
    """All of it, what it opens first."""
    scope = f"cache scope {reach.cache_scope}" if reach.cache_scope else ""
    return "; ".join(filter(None, (opens_words(reach), limits_words(reach.limits), scope)))
