"""What a model becomes when only some of its fields are told (RFC 7396, JSON merge patch).

A field that is null is taken back to what it is when left out; a list is replaced whole. It judges nothing.
"""

from collections.abc import Mapping
from typing import Any

from catalog.parts import SLO_KEYS
from catalog.spec import ModelSpec, ProfileSpec


def patched(stored: ModelSpec, patch: object) -> Any:
    """The model's JSON form with the patch applied, for the law to judge. What is no map stays as it is."""
    slo = patch.get("slo") if isinstance(patch, Mapping) else None
    if isinstance(patch, Mapping) and isinstance(slo, Mapping):
        # Either spelling means the same field, and in one form both would contradict each other.
        written = {other: key for key, other in SLO_KEYS.items() if not (key in slo and other in slo)}
        patch = {**patch, "slo": {written.get(key, key): value for key, value in slo.items()}}
    return merged(stored.as_text_dict(), patch)


def patched_profile(stored: ProfileSpec, patch: Mapping[str, Any]) -> dict[str, Any]:
    """The profile's JSON form with the patch applied. GPUs per node follow tp and nodes where they did."""
    form = stored.as_text_dict()
    if stored.gpus_per_node == max(stored.tp // stored.nodes, 1):
        del form["gpus_per_node"]
    return dict(merged(form, patch))


def merged(was: Any, patch: Any) -> Any:
    """Any JSON with any patch applied."""
    if not isinstance(patch, Mapping):
        return patch
    into = dict(was) if isinstance(was, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            into.pop(key, None)
        else:
            into[key] = merged(into.get(key), value)
    return into
