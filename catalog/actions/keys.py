"""API keys: minted once, shown once, revoked for good."""

from __future__ import annotations

import secrets
from datetime import timedelta

from django.conf import settings
from django.contrib.auth.models import Permission, User
from django.db import transaction
from django.db.models import Q, QuerySet
from django.db.models.functions import Now

from catalog.actions.events import record
from catalog.keys import ID_BYTES, SECRET_BYTES, KeyText
from catalog.models import Key, Revision
from catalog.reading import NAME_LIMIT, CatalogError, Fault, quote


def mint_key(
    name: str,
    *,
    user: User,
    scope: str,
    by: str,
    door: str,
    why: str = "",
    expires_in_ns: int | None = None,
    maker: User | None = None,
    through: Key | None = None,
) -> tuple[Key, str]:
    """A new API key and its text, which is not kept: only this answer ever shows it.

    `maker` asks for it, `through` a key of their own; a shell, where one may do everything, names neither.
    Raises CatalogError, also where the key could do more, or for longer, than who or what asks for it.
    """
    faults = [*_faults_of_form(name, scope, expires_in_ns), *_faults_of_reach(user, scope, maker)]
    if faults:
        raise CatalogError(faults)
    text = KeyText.from_bytes(secrets.token_bytes(ID_BYTES), secrets.token_bytes(SECRET_BYTES))
    lives = None if expires_in_ns is None else timedelta(microseconds=expires_in_ns / 1_000)
    with transaction.atomic():
        row = Key.objects.create(
            id=text.id,
            name=name,
            user=user,
            scope=Key.Scope(scope),
            digest=text.digest(settings.LLMGW_KEY_PEPPER),
            expires_at=Now() + lives if lives else None,
            revision=Revision.advance(),
        )
        row.refresh_from_db()
        if through and through.expires_at and not (row.expires_at and row.expires_at <= through.expires_at):
            raise CatalogError([_outlives(through)])
        record(
            "mint",
            "key",
            text.id,
            subject_key=text.id,
            by=by,
            door=door,
            why=why,
            detail={
                "name": name,
                "user": user.get_username(),
                "scope": row.scope,
                "expires_at": row.expires_at.isoformat() if row.expires_at else None,
            },
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


def permissions_of(user: User) -> QuerySet[Permission]:
    """What was given to this user and to their groups, whether or not they are active."""
    return Permission.objects.filter(Q(user=user) | Q(group__user=user)).distinct()


def may_all_of(user: User, other: User) -> bool:
    """Whether this user may do whatever the other may, or might if they were active."""
    if user.is_superuser:
        return True
    beyond = permissions_of(other).exclude(pk__in=permissions_of(user).values("pk"))
    return not other.is_superuser and not beyond.exists()


def _faults_of_form(name: str, scope: str, expires_in_ns: int | None) -> list[Fault]:
    faults = []
    if not name.strip() or len(name) > NAME_LIMIT or not name.isprintable():
        says = f"a key needs a name of at most {NAME_LIMIT} visible characters, telling what it is for"
        faults.append(Fault("", "", "name", "required", says))
    if scope not in Key.Scope.values:
        says = f"scope {quote(scope)} is not known; choose {' or '.join(Key.Scope.values)}"
        faults.append(Fault("", "", "scope", "unknown_choice", says))
    if expires_in_ns is not None and expires_in_ns < 1_000:
        says = "expires_in must be above 0, such as 720h; leave it out for a key that lasts"
        faults.append(Fault("", "", "expires_in", "range", says))
    return faults


def _faults_of_reach(user: User, scope: str, maker: User | None) -> list[Fault]:
    """What is wrong with a key of this user, asked for by that one."""
    if scope == Key.Scope.METRICS and maker is not None and not maker.has_perm("nodes.all_usage"):
        says = "a key that reads /metrics tells what all keys are used for, and you may see your own alone;"
        says += " ask an operator for it"
        return [Fault("", "", "scope", "permission", says)]
    if maker is None or user == maker:
        return []
    if not maker.has_perm("catalog.any_key"):
        says = "you may make keys for yourself alone; leave the user out, or name yourself"
    elif scope == Key.Scope.MANAGE and not may_all_of(maker, user):
        says = f"a key that manages may do what {quote(user.get_username())} may, which is more than you may;"
        says += " let them make it, or make one whose scope is inference"
    else:
        return []
    return [Fault("", "", "user", "permission", says)]


def _outlives(through: Key) -> Fault:
    says = f"a key made with a key ends no later than that one, at {through.expires_at:%Y-%m-%d %H:%M} UTC;"
    says += " give an expires_in that is short enough"
    return Fault("", "", "expires_in", "range", says)
