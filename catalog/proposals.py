"""What a source's facts propose for fields that an operator left empty. Nothing is set by itself."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from catalog.reading import INT_LIMIT, quote
from catalog.spec import ModelSpec

_GB = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Proposal:
    """A value for an empty field of the model, or of the profile where that is named, and why."""

    field: str
    value: int
    sentence: str
    profile: str = ""


def proposals(model: ModelSpec, facts: Mapping[str, Any]) -> tuple[Proposal, ...]:
    """From the facts of a Finding, as they were found or as a row has kept them."""
    found = []
    tokens, size_bytes = known_number(facts, "context_length"), known_number(facts, "bytes")
    on = f"model {quote(model.name)}"
    if tokens and not model.context_length and not model.simulated:
        says = f"the model's own context length is {tokens} tokens; set context_length to it, or to less"
        found.append(Proposal("context_length", tokens, f"{on}: {says}"))
    if not facts.get("commit"):
        return tuple(found)  # a path: its weights are on the nodes, and take no more room
    size_gb = -(-size_bytes // _GB)
    for profile in model.profiles:
        if size_gb and not profile.min_disk_gb and profile.engine != "sim":
            says = f"the weights take {size_bytes / _GB:.1f} GB; set min_disk_gb to {size_gb}, or to more"
            where = f"{on} profile {quote(profile.name)}"
            found.append(Proposal("min_disk_gb", size_gb, f"{where}: {says}", profile.name))
    return tuple(found)


def known_number(facts: Mapping[str, Any], key: str) -> int:
    """0 where it is unknown, or was written by another release as something else."""
    value = facts.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        return 0
    return value if 0 < value <= INT_LIMIT * _GB else 0
