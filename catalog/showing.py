"""What doors show of keys and events, and to whom: a row that one may not see is not there; by what they
narrow keys and models; and what is so where a model says nothing.

Reads, and changes nothing. Whether a key has expired is for the database's clock to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any

from django.conf import settings
from django.db.models import BooleanField, ExpressionWrapper, Q, QuerySet
from django.db.models.functions import Coalesce, Now

from catalog.durations import SECOND
from catalog.hiding import SEE_ENV, hide_all
from catalog.models import Event, Key
from catalog.parts import Timeouts

ANY_KEY = "catalog.any_key"

KEY_STATES: Mapping[str, Q] = {
    "live": Q(revoked_at=None) & (Q(expires_at=None) | Q(expires_at__gt=Now())),
    "expired": Q(revoked_at=None, expires_at__lte=Now()),
    "revoked": Q(revoked_at__isnull=False),
}
SCALINGS: Mapping[str, Q] = {
    "kept": Q(scaling_min__gt=0),
    "on-demand": Q(scaling_min=0, scaling_max__gt=0),
    "off": Q(scaling_max=0),
}


def default_timeouts() -> Timeouts:
    """The cluster's, which those of a model are where they are 0."""
    waits_s = (settings.LLMGW_HOLD_S, settings.LLMGW_CONNECT_S, settings.LLMGW_FIRST_BYTE_S)
    return Timeouts(*(round(each * SECOND) for each in (*waits_s, settings.LLMGW_IDLE_S)))


def keys() -> QuerySet[Key]:
    """All keys, with whatever a door shows of them. Two queries."""
    is_over = Coalesce(Q(expires_at__lte=Now()), False, output_field=BooleanField())
    rows = Key.objects.select_related("user").prefetch_related("opened")
    return rows.annotate(is_expired=ExpressionWrapper(is_over, output_field=BooleanField()))


def keys_for(user: Any) -> QuerySet[Key]:
    """The keys that this user may see: their own, or everybody's."""
    return keys() if user.has_perm(ANY_KEY) else keys().filter(user=user)


def key_state(key: Key) -> str:
    """Of a row of `keys()`: live, expired or revoked."""
    if key.revoked_at:
        return "revoked"
    return "expired" if key.is_expired else "live"  # type: ignore[attr-defined]  # annotated


def key_as_dict(key: Key) -> dict[str, Any]:
    """A row of `keys()` as REST and `--json` tell it; nothing here opens a door. `models` None: every one."""
    reach = key.reach
    return {
        "id": key.pk,
        "name": key.name,
        "user": key.user.get_username(),
        "scope": key.scope,
        "state": key_state(key),
        "created_at": key.created_at.isoformat(),
        "expires_at": _moment(key.expires_at),
        "revoked_at": _moment(key.revoked_at),
        "models": None if reach.models is None else list(reach.models),
        **asdict(reach.limits),
        "cache_scope": reach.cache_scope,
    }


def events_for(user: Any) -> QuerySet[Event]:
    """The history that this user may see: all of it, keys of others apart."""
    events = Event.objects.all()
    if user.has_perm(ANY_KEY):
        return events
    return events.exclude(Q(kind="key") & ~Q(subject__in=keys_for(user).values("pk")))


def event_as_dict(event: Event, user: Any) -> dict[str, Any]:
    """An event as this user may see it."""
    return {
        "id": event.pk,
        "at": event.at.isoformat(),
        "by": event.by,
        "door": event.door,
        "verb": event.verb,
        "kind": event.kind,
        "subject": event.subject,
        "why": event.why,
        "revision": event.revision,
        "detail": hide_all(event.detail, sees_env=user.has_perm(SEE_ENV)),
    }


def _moment(at: datetime | None) -> str | None:
    return at.isoformat() if at else None
