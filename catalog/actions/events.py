"""The Event of a change: who did what to what, and why; and what others did since somebody looked."""

from __future__ import annotations

from typing import Any

from catalog.models import Event
from catalog.reading import CatalogError, Fault, quote, shown, storable


class ChangedSince(CatalogError):
    """Somebody has changed the row since the caller read it, at the revision that was `expected`. `events`
    are those changes, oldest first."""

    def __init__(self, kind: str, name: str, subject_key: object, expected: int) -> None:
        since = Event.objects.filter(kind=kind, subject_key=str(subject_key), revision__gt=expected)
        self.events = tuple(since.order_by("id"))
        who = ", ".join(dict.fromkeys(shown(event.by) or "llmgw" for event in self.events)) or "somebody else"
        sentence = (
            f"{kind} {quote(name)} was changed by {who} since you read it; read it again, and repeat the edit"
        )
        about = name if kind == "model" else ""
        super().__init__([Fault(about, "", "", "changed_since", sentence)])


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
