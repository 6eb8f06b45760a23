"""What doors show of join tokens: whom each makes, and what has become of it. No text that opens a door."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db.models import BooleanField, ExpressionWrapper, Q, QuerySet
from django.db.models.functions import Now

from nodes.models import JoinToken

TOKEN_STATES: Mapping[str, Q] = {
    "live": Q(used_at=None, revoked_at=None, expires_at__gt=Now()),
    "used": Q(used_at__isnull=False),
    "revoked": Q(revoked_at__isnull=False),
    "expired": Q(used_at=None, revoked_at=None, expires_at__lte=Now()),
}


def join_tokens() -> QuerySet[JoinToken]:
    """All join tokens, with whatever a door shows of them. One query."""
    is_over = ExpressionWrapper(Q(expires_at__lte=Now()), output_field=BooleanField())
    return JoinToken.objects.select_related("node").annotate(is_expired=is_over)


def token_state(token: JoinToken) -> str:
    """Of a row of `join_tokens()`: live, used, revoked or expired."""
    if token.used_at:
        return "used"
    if token.revoked_at:
        return "revoked"
    return "expired" if token.is_expired else "live"  # type: ignore[attr-defined]  # annotated


def token_as_dict(token: JoinToken) -> dict[str, Any]:
    """A row of `join_tokens()` as REST and `--json` tell it."""
    return {
        "id": token.pk,
        "name": token.node_name,
        "labels": token.labels,
        "by": token.by,
        "state": token_state(token),
        "created_at": token.created_at.isoformat(),
        "expires_at": token.expires_at.isoformat(),
        "used_at": token.used_at and token.used_at.isoformat(),
        "node": token.node.name if token.node else None,
    }
