"""API keys: minted once, shown once, revoked for good."""

from __future__ import annotations

import secrets

from django.conf import settings
from django.contrib.auth.models import User
from django.db import transaction
from django.db.models.functions import Now

from catalog.actions.events import record
from catalog.keys import ID_BYTES, SECRET_BYTES, KeyText
from catalog.models import Key, Revision
from catalog.reading import NAME_LIMIT, CatalogError, Fault


def mint_key(name: str, *, user: User, scope: str, by: str, door: str) -> tuple[Key, str]:
    """A new API key and its text, which is not kept: only this answer ever shows it."""
    if not name.strip() or len(name) > NAME_LIMIT or not name.isprintable():
        says = f"a key needs a name of at most {NAME_LIMIT} visible characters, telling what it is for"
        raise CatalogError([Fault("", "", "name", "required", says)])
    text = KeyText.from_bytes(secrets.token_bytes(ID_BYTES), secrets.token_bytes(SECRET_BYTES))
    with transaction.atomic():
        row = Key.objects.create(
            id=text.id,
            name=name,
            user=user,
            scope=Key.Scope(scope),
            digest=text.digest(settings.LLMGW_KEY_PEPPER),
            revision=Revision.advance(),
        )
        record(
            "mint",
            "key",
            text.id,
            subject_key=text.id,
            by=by,
            door=door,
            detail={"name": name, "scope": row.scope},
        )
    return row, text.reveal()


def revoke_key(key_id: str, *, by: str, door: str, why: str = "") -> bool:
    """End a key for good. False where it had ended already, or there is none."""
    with transaction.atomic():
        ended = Key.objects.filter(pk=key_id, revoked_at=None).update(
            revoked_at=Now(), revision=Revision.advance()
        )
        if ended:
            record("revoke", "key", key_id, subject_key=key_id, by=by, door=door, why=why)
    return ended == 1
