"""What a model becomes when only some of its fields are sent (RFC 7396, JSON merge patch).

A field that is null is taken back to what it is when left out; a list is replaced whole.
"""

from collections.abc import Mapping
from typing import Any

from catalog.spec import SLO_KEYS, ModelSpec


def patched(stored: ModelSpec, patch: object) -> Any:
    """The model's JSON form with the patch applied, for the law to judge. What is no map stays as it is."""
    slo = patch.get("slo") if isinstance(patch, Mapping) else None
    if isinstance(patch, Mapping) and isinstance(slo, Mapping):
        # Either spelling means the same field, and in one form both would contradict each other.
        written = {other: key for key, other in SLO_KEYS.items() if not (key in slo and other in slo)}
        patch = {**patch, "slo": {written.get(key, key): value for key, value in slo.items()}}
    return _merged(stored.as_text_dict(), patch)


def _merged(was: Any, patch: Any) -> Any:
    if not isinstance(patch, Mapping):
        return patch
    merged = dict(was) if isinstance(was, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merged(merged.get(key), value)
    return merged
