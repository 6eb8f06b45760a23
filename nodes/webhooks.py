"""What operators may do about webhooks, and what doors show of them: added, with a secret that is shown once,
changed, paused, tried and removed. An address's path may be a secret as well: only those who may change a
webhook see it.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import Count, Q, QuerySet
from django.db.models.functions import Now

from catalog.actions import record
from catalog.models import database_now
from catalog.reading import CatalogError, Fault, quote
from nodes import notices, noticing
from nodes.models import Delivery, Webhook

MAY_ADD, MAY_CHANGE, MAY_DELETE = "nodes.add_webhook", "nodes.change_webhook", "nodes.delete_webhook"
DELIVERIES_SHOWN = 20
WEBHOOKS_LIMIT = 50


def add_webhook(
    name: str, url: str, *, kinds: Sequence[str] = (), by: str, door: str, why: str = ""
) -> tuple[Webhook, str]:
    """The webhook and its secret, which is not shown again. Raises CatalogError."""
    wanted = _checked(name, url, kinds)
    with transaction.atomic():
        if Webhook.objects.count() >= WEBHOOKS_LIMIT:
            raise _no("", "too_many", f"there are {WEBHOOKS_LIMIT} webhooks already; remove one first")
        try:
            with transaction.atomic():
                webhook = Webhook.objects.create(**wanted, by=by)
        except IntegrityError:
            raise _taken(name) from None
        _record("add", webhook, by=by, door=door, why=why)
    webhook.refresh_from_db()
    return webhook, notices.secret_of(str(webhook.pk), settings.LLMGW_WEBHOOK_KEY)


def edit_webhook(
    webhook: Webhook,
    *,
    name: str | None = None,
    url: str | None = None,
    kinds: Sequence[str] | None = None,
    is_paused: bool | None = None,
    by: str,
    door: str,
    why: str = "",
) -> bool:
    """What is None stays. False: nothing has changed. Raises CatalogError."""
    wanted = _checked(
        webhook.name if name is None else name,
        webhook.url if url is None else url,
        webhook.kinds if kinds is None else kinds,
    )
    wanted["is_paused"] = webhook.is_paused if is_paused is None else is_paused
    changed = {key: value for key, value in wanted.items() if getattr(webhook, key) != value}
    if not changed:
        return False
    with transaction.atomic():
        if not _held([webhook]):
            raise _gone(webhook)
        try:
            with transaction.atomic():
                Webhook.objects.filter(pk=webhook.pk).update(**changed)
        except IntegrityError:
            raise _taken(wanted["name"]) from None
        if "is_paused" in changed or "url" in changed:  # it is given another chance
            Webhook.objects.filter(pk=webhook.pk).update(streak=0)
            webhook.deliveries.filter(state=Delivery.State.WAITING).update(next_at=Now())
        webhook.refresh_from_db()
        paused = "pause" if webhook.is_paused else "resume"
        verb = paused if changed.keys() == {"is_paused"} else "edit"
        _record(verb, webhook, by=by, door=door, why=why)
    return True


def pause_webhook(webhook: Webhook, *, by: str, door: str, why: str = "") -> bool:
    return edit_webhook(webhook, is_paused=True, by=by, door=door, why=why)


def resume_webhook(webhook: Webhook, *, by: str, door: str, why: str = "") -> bool:
    return edit_webhook(webhook, is_paused=False, by=by, door=door, why=why)


def remove_webhook(webhook: Webhook, *, by: str, door: str, why: str = "") -> bool:
    """What waits for it is told to nobody. False: it had been removed already."""
    with transaction.atomic():
        is_there = bool(_held([webhook]))
        if is_there:
            Webhook.objects.filter(pk=webhook.pk).delete()
            _record("remove", webhook, by=by, door=door, why=why)
    return is_there


def try_webhook(webhook: Webhook, *, by: str, door: str, why: str = "") -> Delivery:
    """As `try_webhooks`, of one. Raises CatalogError where it was removed meanwhile."""
    tried = try_webhooks([webhook], by=by, door=door, why=why)
    if webhook.pk not in tried:
        raise _gone(webhook)
    return tried[webhook.pk]


def try_webhooks(
    webhooks: Sequence[Webhook], *, by: str, door: str, why: str = ""
) -> Mapping[uuid.UUID, Delivery]:
    """A notice of no trouble, posted once and at once, also to those that are paused: what has become of it,
    by webhook. All are posted to at the same time, and have one time-out between them."""
    now = database_now()
    body = {
        "kind": notices.TEST_KIND,
        "state": notices.TEST,
        "sentence": f"{by} tries whether this webhook hears of llmgw; nothing is wrong.",
        "since": now.isoformat(),
        "at": now.isoformat(),
    }
    # Over from the beginning, so that nobody else posts it, and a crash leaves it so.
    over = {"state": Delivery.State.GIVEN_UP, "made_at": now, "ended_at": now}
    deliveries: list[Delivery] = []
    with transaction.atomic():
        for webhook in _held(webhooks):
            deliveries += noticing.hear([webhook], {**body, "subject": webhook.name}, **over)
            _record("test", webhook, by=by, door=door, why=why)
    noticing.deliver_now(deliveries)
    return {each.webhook_id: each for each in deliveries}


def _held(webhooks: Sequence[Webhook]) -> list[Webhook]:
    """Those of them that are there, and stay there for the length of the transaction. Whoever writes of both
    writes of a webhook first, and of its deliveries then."""
    rows = Webhook.objects.select_for_update().order_by("name")
    return list(rows.filter(pk__in=[each.pk for each in webhooks]))


def _checked(name: str, url: str, kinds: Sequence[str]) -> dict[str, Any]:
    faults = []
    if not name or len(name) > notices.NAME_LIMIT or name != name.strip() or not name.isprintable():
        says = f"a webhook needs a name of at most {notices.NAME_LIMIT} visible characters, such as pager"
        faults.append(Fault("", "", "name", "required", says))
    if fault := notices.fault_of_url(url):
        faults.append(Fault("", "", "url", "invalid", fault))
    elif fault := notices.fault_of_host(url, settings.LLMGW_WEBHOOK_NETWORKS):
        faults.append(Fault("", "", "url", "private", f"url cannot be used: {fault}"))
    unknown = [kind for kind in kinds if kind not in notices.KINDS]
    if unknown:
        says = f"kind {quote(str(unknown[0]))} is not known; these are: {', '.join(notices.KINDS)}"
        faults.append(Fault("", "", "kinds", "unknown_choice", says))
    if faults:
        raise CatalogError(faults)
    return {"name": name, "url": url, "kinds": [kind for kind in notices.KINDS if kind in kinds]}


def _no(field: str, code: str, sentence: str) -> CatalogError:
    return CatalogError([Fault("", "", field, code, sentence)])


def _gone(webhook: Webhook) -> CatalogError:
    says = f"the webhook {quote(webhook.name)} was removed meanwhile; manage.py webhook_list tells which are"
    return _no("", "conflict", f"{says} there")


def _taken(name: str) -> CatalogError:
    return _no("name", "in_use", f"there is a webhook {quote(name)} already; give another name")


def _record(verb: str, webhook: Webhook, *, by: str, door: str, why: str) -> None:
    """Its address by its host alone: events are for more eyes than the webhook's own page."""
    detail = {"url": notices.host_words(webhook.url), "kinds": webhook.kinds, "paused": webhook.is_paused}
    told: dict[str, Any] = {"by": by, "door": door, "why": why, "detail": detail}
    record(verb, "webhook", webhook.name, subject_key=webhook.pk, **told)


# --- shown ----------------------------------------------------------------------------------------


def webhooks() -> QuerySet[Webhook]:
    """All of them, with how much waits for each. One query."""
    waiting = Count("deliveries", filter=Q(deliveries__state=Delivery.State.WAITING))
    return Webhook.objects.annotate(waiting=waiting)


def kinds_words(webhook: Webhook) -> str:
    return ", ".join(webhook.kinds) or "all"


def url_words(webhook: Webhook, *, sees_url: bool) -> str:
    return webhook.url if sees_url else notices.host_words(webhook.url)


def state_of(webhook: Webhook) -> str:
    """paused, failing or live."""
    if webhook.is_paused:
        return "paused"
    return "failing" if webhook.streak else "live"


def webhook_as_dict(webhook: Webhook, *, sees_url: bool) -> dict[str, Any]:
    """A row of `webhooks()` as REST and `--json` tell it."""
    return {
        "id": str(webhook.pk),
        "name": webhook.name,
        "url": url_words(webhook, sees_url=sees_url),
        "kinds": webhook.kinds,
        "paused": webhook.is_paused,
        "state": state_of(webhook),
        "by": webhook.by,
        "created_at": webhook.created_at.isoformat(),
        "waiting": webhook.waiting,  # type: ignore[attr-defined]  # annotated
        "delivered": webhook.delivered,
        "failed": webhook.failed,
        "given_up": webhook.given_up,
    }


def deliveries_of(webhook: Webhook) -> list[Delivery]:
    """The last ones, newest first."""
    return list(webhook.deliveries.all()[:DELIVERIES_SHOWN])


def delivery_as_dict(delivery: Delivery) -> dict[str, Any]:
    body: Mapping[str, Any] = delivery.body
    return {
        "id": delivery.pk,
        **{key: body.get(key, "") for key in ("kind", "state", "subject", "sentence")},
        "made_at": delivery.made_at.isoformat(),
        "delivery": delivery.state,
        "tries": delivery.tries,
        "next_at": delivery.next_at.isoformat() if delivery.state == Delivery.State.WAITING else None,
        "ended_at": delivery.ended_at and delivery.ended_at.isoformat(),
        "status": delivery.status,
        "problem": delivery.problem,
    }


def find_webhook(text: str) -> Webhook | None:
    """By its name, or by its id."""
    found = webhooks().filter(name=text).first()
    if found is None:
        try:
            found = webhooks().filter(pk=uuid.UUID(text)).first()
        except ValueError:
            return None
    return found
