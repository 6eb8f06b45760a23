"""What changed between two normalised forms, field by field: for badges, history and previews."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Canonical. The order of a profile's keys is also the order in which its fingerprint hashes them.
MODEL_KEYS = (
    "name", "aliases", "description", "source", "profiles", "scaling", "fallbacks", "routing_profile", "slo",
    "context_length", "max_output", "capabilities",
)  # fmt: skip
PROFILE_KEYS = (
    "name", "engine", "gpu_class", "tp", "pp", "gpus_per_node", "nodes", "args", "env", "min_memory_gb",
    "min_disk_gb", "node_selector", "weight", "priority", "startup_timeout",
)  # fmt: skip
RESTART_FREE = frozenset({"weight", "priority"})  # fields that take effect while a replica runs


@dataclass(frozen=True, slots=True)
class Difference:
    """One field that changed. Of a map, `was` and `now` hold only the entries that differ. None is unset."""

    field: str
    was: Any
    now: Any


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[Difference, ...]:
    """What changed between two forms of as_dict(), in canonical order."""
    known = dict.fromkeys((*MODEL_KEYS, *PROFILE_KEYS))
    others = sorted((was.keys() | now.keys()) - known.keys())
    found = []
    for key in (*known, *others):
        before, after = was.get(key), now.get(key)
        if before == after:
            continue
        if isinstance(before or after, Mapping):
            old, new = before or {}, after or {}
            before = {name: value for name, value in old.items() if name not in new or new[name] != value}
            after = {name: value for name, value in new.items() if name not in old or old[name] != value}
        found.append(Difference(key, before, after))
    return tuple(found)
