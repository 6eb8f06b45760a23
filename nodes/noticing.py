"""Sees troubles begin and end, and tells webhooks and the log: once when one begins, once when it is over.

What is to be told is written down with the trouble itself, in one transaction, and posted afterwards: so a
crash loses none, and a webhook that hangs keeps nothing else waiting. Two that look at once, or post at once,
do not tell twice: each step is a conditional update.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from django.conf import settings
from django.db import transaction
from django.db.models import F, Q
from django.db.models.functions import Now

from catalog.models import database_now
from catalog.reading import shown
from nodes.models import Cluster, Delivery, Trouble, Webhook
from nodes.notices import (
    BEGINS,
    ID_HEADER,
    KINDS,
    LONGEST,
    OVER,
    SIGNATURE_HEADER,
    secret_of,
    signature,
    wait_after,
)
from nodes.posting import Answer, Letter, post
from nodes.troubles import Found, find

SETTLED = timedelta(seconds=30)
"""A trouble that is seen again within this has not been over."""

WAITING = Delivery.State.WAITING
BITE = 500
ROUNDS = 20  # of posts to one webhook before others have their turn
WAITING_LIMIT = 1_000  # deliveries of one webhook
GIVE_UP = timedelta(days=1)
KEEP = timedelta(days=7)
LOG_LIMIT = 500

logger = logging.getLogger("llmgw.notices")


# --- looked for -----------------------------------------------------------------------------------


def look(kinds: Collection[str] = tuple(KINDS)) -> None:
    """Look for troubles of these kinds, and write down what is to be told; nothing where all is as it was."""
    found = {kind: find(kind) for kind in kinds}
    now = database_now()
    known = {(row.kind, row.subject): row for row in Trouble.objects.filter(kind__in=kinds)}
    steps: list[Callable[[], None]] = [partial(_date, row, now) for row in known.values() if row.since > now]
    for kind, troubles in found.items():
        for subject, trouble in troubles.items():
            row = known.pop((kind, subject), None)
            if row is None or _is_news(row, trouble, now):
                steps.append(partial(_see, kind, trouble, row, now))
    steps += [partial(_miss, row, now) for row in known.values() if _is_over(row, now)]
    if steps:
        with transaction.atomic():
            for step in steps:
                step()


def _date(row: Trouble, now: datetime) -> None:
    """One that was first seen before the clock was set back."""
    row.since = now
    Trouble.objects.filter(pk=row.pk).update(since=now)


def _is_news(row: Trouble, trouble: Found, now: datetime) -> bool:
    is_due = row.told_at is None and now - row.since >= KINDS[row.kind].borne
    return is_due or (row.sentence, row.gone_at) != (trouble.sentence, None)


def _see(kind: str, trouble: Found, row: Trouble | None, now: datetime) -> None:
    if row is None:
        fresh = {"sentence": trouble.sentence, "since": now}
        row, _ = Trouble.objects.get_or_create(kind=kind, subject=trouble.subject, defaults=fresh)
    Trouble.objects.filter(pk=row.pk).update(sentence=trouble.sentence, gone_at=None)
    row.sentence = trouble.sentence
    if now - row.since >= KINDS[kind].borne:
        begins = Trouble.objects.filter(pk=row.pk, told_at=None).update(told_at=now)
        if begins:
            _tell(row, BEGINS, now)


def _is_over(row: Trouble, now: datetime) -> bool:
    """Whether there is something to write of a trouble that was not found."""
    return row.told_at is None or row.gone_at is None or not timedelta() <= now - row.gone_at < SETTLED


def _miss(row: Trouble, now: datetime) -> None:
    same = Trouble.objects.filter(pk=row.pk, told_at=row.told_at, gone_at=row.gone_at)
    if row.told_at is not None and row.gone_at is None:
        same.update(gone_at=now)
    elif same.delete()[0] and row.told_at is not None:
        _tell(row, OVER, now)


# --- told -----------------------------------------------------------------------------------------


def _tell(row: Trouble, state: str, now: datetime) -> None:
    body = {
        "kind": row.kind,
        "state": state,
        "subject": row.subject,
        "sentence": row.sentence,
        "since": row.since.isoformat(),
        "at": now.isoformat(),
    }
    hear(Webhook.objects.filter(is_paused=False), body)
    level = logging.WARNING if state == BEGINS else logging.INFO
    said = shown(row.sentence, LOG_LIMIT)
    transaction.on_commit(
        lambda: logger.log(level, "%s %s: %s: %s", row.kind, state, shown(row.subject), said)
    )


def hear(webhooks: Iterable[Webhook], body: Mapping[str, Any], **told: Any) -> list[Delivery]:
    """Have this delivered to those of them that want it: what is to be delivered. `told`: of each, where it
    is not to wait for whoever delivers."""
    cluster = str(Cluster.this().uuid)
    return Delivery.objects.bulk_create(
        Delivery(webhook=each, body={**body, "cluster": cluster}, **told)
        for each in webhooks
        if not each.kinds or body["kind"] in each.kinds or body["kind"] not in KINDS
    )


def deliver() -> int:
    """Post what is due, each webhook's apart from the others'; how many were taken.

    Nobody else posts to a webhook meanwhile. One that did not take what it was sent is left alone until the
    next try of that is due.
    """
    taken = 0
    for _ in range(ROUNDS):
        claimed = _claim()
        if not claimed:
            break
        try:
            answers = post([_letter(delivery) for delivery in claimed])
            for delivery, answer in zip(claimed, answers, strict=True):
                taken += _hear_answer(delivery, answer)
        finally:
            claims = [delivery.webhook_id for delivery in claimed]
            Webhook.objects.filter(pk__in=claims).update(claimed_until=None)
    return taken


def deliver_now(deliveries: Sequence[Delivery]) -> None:
    """Post these, all at the same time, once and whatever else waits; they tell what has become of them, also
    where their webhook was removed meanwhile."""
    answers = post([_letter(delivery) for delivery in deliveries])
    now = database_now()
    for delivery, answer in zip(deliveries, answers, strict=True):
        is_taken = not answer.problem
        told = {
            "state": Delivery.State.DELIVERED if is_taken else Delivery.State.GIVEN_UP,
            "tries": 1,
            "ended_at": now,
            "status": answer.status,
            "problem": answer.problem,
        }
        for name, value in told.items():
            setattr(delivery, name, value)
        counted = "delivered" if is_taken else "failed"
        with transaction.atomic():
            Webhook.objects.filter(pk=delivery.webhook_id).update(**{counted: F(counted) + 1})
            Delivery.objects.filter(pk=delivery.pk).update(**told)


def _claim() -> list[Delivery]:
    """What is due of each webhook to which nobody posts at this moment, for the caller alone: the oldest of
    those that were tried least, so that one which is never taken keeps no other."""
    term = timedelta(seconds=3 * settings.LLMGW_WEBHOOK_TIMEOUT_S)
    due = Delivery.objects.filter(Q(next_at__lte=Now()) | _too_far("next_at", LONGEST), state=WAITING)
    is_free = Q(claimed_until=None) | Q(claimed_until__lte=Now()) | _too_far("claimed_until", term)
    claimed = []
    for webhook in Webhook.objects.filter(is_free, is_paused=False, pk__in=due.values("webhook")):
        if not Webhook.objects.filter(is_free, pk=webhook.pk).update(claimed_until=Now() + term):
            continue
        delivery = due.filter(webhook=webhook).order_by("tries", "id").first()
        if delivery is None:  # another has posted it a moment ago
            Webhook.objects.filter(pk=webhook.pk).update(claimed_until=None)
            continue
        delivery.webhook = webhook
        claimed.append(delivery)
    return claimed


def _too_far(name: str, longest: timedelta) -> Q:
    """Further ahead than it is ever put: that was before the clock was set back."""
    return Q(**{f"{name}__gt": Now() + longest})


def _letter(delivery: Delivery) -> Letter:
    webhook = delivery.webhook
    body = json.dumps({"id": delivery.pk, **delivery.body}, ensure_ascii=False).encode("utf-8", "replace")
    sent_at_s = int(database_now().timestamp())
    secret = secret_of(str(webhook.pk), settings.LLMGW_WEBHOOK_KEY)
    headers = {
        SIGNATURE_HEADER: signature(secret, sent_at_s, body),
        ID_HEADER: str(delivery.pk),
        "User-Agent": "llmgw",
    }
    return Letter(webhook.url, body, headers)


def _hear_answer(delivery: Delivery, answer: Answer) -> bool:
    rows = Delivery.objects.filter(pk=delivery.pk, state=WAITING)
    counts = Webhook.objects.filter(pk=delivery.webhook_id)
    tries = delivery.tries + 1
    told: dict[str, Any] = {"tries": tries, "status": answer.status, "problem": answer.problem}
    with transaction.atomic():
        if not answer.problem:
            counts.update(delivered=F("delivered") + 1, streak=0)
            rows.update(state=Delivery.State.DELIVERED, ended_at=Now(), **told)
            return True
        counts.update(failed=F("failed") + 1, streak=F("streak") + 1)
        streak = counts.values_list("streak", flat=True).first()
        if streak is None:  # it was removed meanwhile, and this delivery with it
            return False
        wait = wait_after(streak)
        rows.update(**told)
        # What else is due for it would fare the same, and waits as long.
        waiting = Delivery.objects.filter(webhook=delivery.webhook_id, state=WAITING)
        due = waiting.filter(Q(next_at__lt=Now() + wait) | _too_far("next_at", LONGEST))
        due.update(next_at=Now() + wait)
    return False


# --- forgotten ------------------------------------------------------------------------------------


def forget(*, waiting_limit: int = WAITING_LIMIT) -> None:
    """Give up what nobody takes, and remove a bite of what ended long ago."""
    old = Delivery.objects.exclude(state=WAITING).filter(ended_at__lt=Now() - KEEP)
    Delivery.objects.filter(pk__in=list(old.values_list("pk", flat=True)[:BITE])).delete()
    waiting = Delivery.objects.filter(state=WAITING)
    for webhook in Webhook.objects.filter(pk__in=waiting.values("webhook")):
        mine = waiting.filter(webhook=webhook)
        too_many = mine.order_by("-id").values_list("pk", flat=True)[waiting_limit : waiting_limit + BITE]
        hopeless = mine.filter(Q(made_at__lt=Now() - GIVE_UP) | Q(pk__in=list(too_many)))
        with transaction.atomic():
            Webhook.objects.select_for_update().filter(pk=webhook.pk).first()  # who posts to it is done
            given_up = hopeless.update(state=Delivery.State.GIVEN_UP, ended_at=Now())
            if given_up:
                Webhook.objects.filter(pk=webhook.pk).update(given_up=F("given_up") + given_up)
