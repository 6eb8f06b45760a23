"""The Event of a change: who did what to what, and why."""

from __future__ import annotations

from typing import Any

from catalog.models import Event
from catalog.reading import storable


def record(
    verb: str,
    kind: str,
    subject: str,
    *,
    subject_key: object = "",
    by: str,
    door: str,
    why: str = "",
    detail: dict[str, Any] | None = None,
    revision: int = 0,
) -> None:
    """Write it, in the change's own transaction. `subject_key` names the row whatever it will be called."""
    Event.objects.create(
        verb=verb,
        kind=kind,
        subject=subject,
        subject_key=str(subject_key),
        by=by,
        door=door,
        why=storable(why),
        detail=detail or {},
        revision=revision,
    )
