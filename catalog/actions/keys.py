"""API keys: minted once, shown once, changed in what they open, revoked for good."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.contrib.auth.models import Permission, User
from django.db import transaction
from django.db.models import Q, QuerySet
from django.db.models.functions import Now

from catalog.actions.events import ChangedSince, record
from catalog.differences import differences
from catalog.keys import ID_BYTES, SECRET_BYTES, KeyText
from catalog.models import Key, Name, Revision
from catalog.patching import merged
from catalog.reach import Reach, fault_of_nothing, fault_of_unknown_model, fault_of_widening
from catalog.reading import NAME_LIMIT, CatalogError, Fault, quote

PLAYGROUND_LIVES = timedelta(hours=1)


def mint_key(
    name: str,
    *,
    user: User,
    scope: str,
    by: str,
    door: str,
    why: str = "",
    expires_in_ns: int | None = None,
    reach: object = None,
    maker: User | None = None,
    through: Key | None = None,
) -> tuple[Key, str]:
    """A new API key and its text, which is not kept: only this answer ever shows it.

    `reach` is what it opens, as JSON: every model without a limit, if left out. `maker` asks for it,
    `through` a key of their own; a shell, where one may do everything, names neither. Raises CatalogError,
    also where the key could do more, or for longer, than who or what asks for it.
    """
    faults = [*_faults_of_form(name, scope, expires_in_ns), *_faults_of_owner(user, scope, maker)]
    try:
        asked = Reach.load({} if reach is None else reach)
    except CatalogError as no:
        faults += no.faults
    if faults:
        raise CatalogError(faults)
    text = KeyText.from_bytes(secrets.token_bytes(ID_BYTES), secrets.token_bytes(SECRET_BYTES))
    lives = None if expires_in_ns is None else timedelta(microseconds=expires_in_ns / 1_000)
    with transaction.atomic():
        revision = Revision.advance()
        models = _models_named(asked.models)
        wanted = _named(asked, models)
        if wanted.models == ():
            raise CatalogError([fault_of_nothing()])
        _refuse_beyond(wanted, through)
        row = Key.objects.create(
            id=text.id,
            name=name,
            user=user,
            scope=Key.Scope(scope),
            digest=text.digest(settings.LLMGW_KEY_PEPPER),
            expires_at=Now() + lives if lives else None,
            revision=revision,
            **_columns(wanted),
        )
        row.opened.set(models.values())
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
            revision=revision,
            detail={
                "name": name,
                "user": user.get_username(),
                "scope": row.scope,
                "expires_at": row.expires_at.isoformat() if row.expires_at else None,
                **wanted.as_dict(),
            },
        )
    return row, text.reveal()


def edit_key(
    key_id: str,
    patch: object,
    *,
    expected: int | None = None,
    by: str,
    door: str,
    why: str = "",
    maker: User | None = None,
    through: Key | None = None,
) -> list[dict[str, Any]]:
    """Change what a key opens and how much of it, by a JSON merge patch; and answer field by field what that
    changed. Nothing: it is as it was, and there is no event.

    `maker` and `through` are as in `mint_key`. Raises CatalogError, also where there is no such key, it was
    revoked, or it would do more than who or what asks; and ChangedSince where it is not at the revision that
    was `expected`.
    """
    with transaction.atomic():
        Revision.hold()
        row = Key.objects.filter(pk=key_id).first()
        if row is None:
            raise CatalogError([_unknown(key_id)])
        if expected is not None and expected != row.revision:
            raise ChangedSince("key", row.pk, row.pk, expected)
        if row.revoked_at:
            raise CatalogError([_revoked(row)])
        was = row.reach
        asked = Reach.load(merged(was.as_dict(), patch))
        models = _models_named(asked.models)
        wanted = _named(asked, models)
        if wanted == was:
            return []
        if wanted.models == () and wanted.models != was.models:
            raise CatalogError([fault_of_nothing()])
        if maker and not maker.has_perm("catalog.add_key") and not wanted.is_within(was):
            raise CatalogError([fault_of_widening()])
        _refuse_beyond(wanted, through)
        revision = Revision.advance()
        Key.objects.filter(pk=row.pk).update(**_columns(wanted), revision=revision)
        row.opened.set(models.values())
        changed = [asdict(each) for each in differences(was.as_dict(), wanted.as_dict())]
        detail = {"changed": changed}
        told: dict[str, Any] = {"by": by, "door": door, "why": why, "revision": revision, "detail": detail}
        record("edit", "key", row.pk, subject_key=row.pk, **told)
    return changed


def renew_playground_key(user: User, *, by: str, door: str) -> tuple[Key, str]:
    """The key with which a user's own page tries models, and its text, which is not kept.

    They have one. Its last text opens nothing from now on; its id stays, and so do its usage and the limits
    that it was given. Once it was revoked, there is another.
    """
    text = KeyText.from_bytes(secrets.token_bytes(ID_BYTES), secrets.token_bytes(SECRET_BYTES))
    with transaction.atomic():
        revision = Revision.advance()
        row = Key.objects.filter(user=user, is_playground=True, revoked_at=None).first()
        verb = "renew" if row else "mint"
        row = row or Key(
            id=text.id,
            name=f"playground of {user.get_username()}",
            user=user,
            scope=Key.Scope.INFERENCE,
            is_playground=True,
        )
        text = replace(text, id=row.pk)
        row.digest, row.revision = text.digest(settings.LLMGW_KEY_PEPPER), revision
        row.expires_at = Now() + PLAYGROUND_LIVES
        row.save()
        row.refresh_from_db()
        ends = row.expires_at.isoformat() if row.expires_at else None
        detail = {"name": row.name, "user": user.get_username(), "expires_at": ends}
        told: dict[str, Any] = {"by": by, "door": door, "revision": revision, "detail": detail}
        record(verb, "key", row.pk, subject_key=row.pk, **told)
    return row, text.reveal()


def revoke_key(key_id: str, *, by: str, door: str, why: str = "") -> bool:
    """End a key for good. False where it had ended already, or there is none."""
    with transaction.atomic():
        revision = Revision.advance()
        ended = Key.objects.filter(pk=key_id, revoked_at=None).update(revoked_at=Now(), revision=revision)
        if ended:
            told: dict[str, Any] = {"by": by, "door": door, "why": why}
            record("revoke", "key", key_id, subject_key=key_id, revision=revision, **told)
    return ended == 1


def _models_named(names: Sequence[str] | None) -> dict[str, int]:
    """The models of these names and aliases, by canonical name. Within the change's transaction, which holds
    the revision: what is found is there at the commit."""
    rows = Name.objects.filter(name__in=names or ()).values_list("name", "model__name", "model_id")
    found = {name: (canonical, pk) for name, canonical, pk in rows}
    if unknown := [fault_of_unknown_model(name) for name in names or () if name not in found]:
        raise CatalogError(unknown)
    return dict(found.values())


def _named(reach: Reach, models: Mapping[str, int]) -> Reach:
    return reach if reach.models is None else replace(reach, models=tuple(sorted(models)))


def _columns(reach: Reach) -> dict[str, Any]:
    opens_all, cache_scope = reach.models is None, reach.cache_scope
    return {"opens_all": opens_all, "cache_scope": cache_scope, **asdict(reach.limits)}


def _refuse_beyond(wanted: Reach, through: Key | None) -> None:
    """What is asked for with a key does no more than that key does at this moment."""
    if through is None:
        return
    row = Key.objects.filter(pk=through.pk).first()
    if faults := wanted.faults_beyond(row.reach) if row else [_unknown(through.pk)]:
        raise CatalogError(faults)


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


def _faults_of_owner(user: User, scope: str, maker: User | None) -> list[Fault]:
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


def _unknown(key_id: str) -> Fault:
    return Fault("", "", "", "unknown", f"there is no key {quote(key_id)}; look at the list of keys")


def _revoked(row: Key) -> Fault:
    says = f"key {quote(row.pk)} was revoked, and opens nothing for good; make another"
    return Fault("", "", "", "conflict", says)


def _outlives(through: Key) -> Fault:
    says = f"a key made with a key ends no later than that one, at {through.expires_at:%Y-%m-%d %H:%M} UTC;"
    says += " give an expires_in that is short enough"
    return Fault("", "", "expires_in", "range", says)
