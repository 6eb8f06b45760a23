"""What changed between two normalised forms, field by field: for badges, history and previews."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

# Canonical. The order of a profile's keys is also the order in which its fingerprint hashes them.
MODEL_KEYS = (
    "name", "aliases", "description", "source", "profiles", "scaling", "fallbacks", "routing_profile", "slo",
    "context_length", "max_output", "capabilities", "limits", "timeouts",
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


def model_differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """What an edit makes of a model, as JSON. Empty: nothing.

    `changed` tells of its own fields; `profiles_changed`, `profiles_added` and `profiles_removed` of profiles
    by name; `profiles_order` of those that stay and change places.
    """
    if was == now:
        return {}
    old = {profile["name"]: profile for profile in was["profiles"]}
    new = {profile["name"]: profile for profile in now["profiles"]}
    stayed, stay = [name for name in old if name in new], [name for name in new if name in old]
    own, own_now = ({key: form[key] for key in form if key != "profiles"} for form in (was, now))
    edited = {name: differences(old[name], new[name]) for name in stay if old[name] != new[name]}
    return {
        "changed": [asdict(each) for each in differences(own, own_now)],
        "profiles_changed": {name: [asdict(each) for each in fields] for name, fields in edited.items()},
        "profiles_added": [name for name in new if name not in old],
        "profiles_removed": [name for name in old if name not in new],
        # Of two profiles of one priority, the first that fits is taken.
        **({"profiles_order": list(new)} if stayed != stay else {}),
    }


def listed(told: Mapping[str, Any]) -> list[Difference]:
    """What `model_differences` tells, one after another: a profile's fields are called by its name, too."""
    found = [Difference(each["field"], each["was"], each["now"]) for each in told.get("changed", ())]
    for name, fields in told.get("profiles_changed", {}).items():
        found += [Difference(f"profile {name}: {each['field']}", each["was"], each["now"]) for each in fields]
    found += [Difference(f"profile {name}", None, "added") for name in told.get("profiles_added", ())]
    found += [Difference(f"profile {name}", "there", "removed") for name in told.get("profiles_removed", ())]
    if order := told.get("profiles_order"):
        found.append(Difference("order of profiles", "another", order))
    return found
