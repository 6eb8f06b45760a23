"""Who may reconcile now: one row, taken by one conditional update, in the database's own time.

The token grows with each taking. Whoever writes on the strength of a lease confirms it in the same
transaction, so that one who slept past its time writes nothing; agents refuse tokens that have been followed.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.db.models import Case, F, Q, When
from django.db.models.functions import Now

from nodes.models import Lease

NAME = "reconcile"
OUTRANK_COMMAND = "manage.py reconcile_outrank"
FAR = 2**32  # passes: more than any backup can be behind


class LeaseLost(Exception):
    """Somebody else holds the lease by now, or nobody does."""


@dataclass(frozen=True, slots=True)
class Held:
    """A lease that was taken. `unwatched` is how long nobody had held it; None when nobody ever had."""

    holder: str
    token: int
    unwatched: timedelta | None


def take(holder: str) -> Held | None:
    """The lease, or None while another has it. Its holder may take it again, and goes on under its token."""
    row = Lease.objects.annotate(now=Now()).filter(name=NAME).first()
    if row is None:
        Lease.objects.get_or_create(name=NAME)
    term = timedelta(seconds=settings.LLMGW_LEASE_S)
    is_mine = Q(holder=holder, expires_at__gt=Now())
    # One that ends more than a term from now was taken before the clock was set back.
    is_free = Q(holder="") | Q(expires_at__lte=Now()) | Q(expires_at__gt=Now() + term)
    taken = Lease.objects.filter(is_mine | is_free, name=NAME).update(
        token=Case(When(is_mine, then=F("token")), default=F("token") + 1),
        holder=holder,
        expires_at=Now() + term,
    )
    if not taken:
        return None
    token = Lease.objects.values_list("token", flat=True).filter(name=NAME, holder=holder).first()
    if token is None:  # it slept between the two statements for longer than the lease
        return None
    unwatched = row.now - row.expires_at if row is not None and row.expires_at is not None else None
    return Held(holder, token, unwatched)


def unwatched() -> timedelta | None:
    """How long nobody has held it, negative while somebody does; None when nobody ever has."""
    row = Lease.objects.annotate(now=Now()).filter(name=NAME).first()
    return row.now - row.expires_at if row is not None and row.expires_at is not None else None


def confirm(held: Held) -> None:
    """Keep it for another term, and its row locked until the transaction ends. Raises LeaseLost."""
    kept = Lease.objects.filter(name=NAME, holder=held.holder, token=held.token, expires_at__gt=Now()).update(
        expires_at=Now() + timedelta(seconds=settings.LLMGW_LEASE_S)
    )
    if not kept:
        raise LeaseLost(held.holder)


def outrank() -> int:
    """Go on under tokens that no agent has obeyed yet, whatever this database remembers: above this one."""
    Lease.objects.get_or_create(name=NAME)
    Lease.objects.filter(name=NAME).update(token=F("token") + FAR)
    return Lease.objects.values_list("token", flat=True).get(name=NAME)


def release(held: Held, *, took_s: float | None = None) -> None:
    """Let the next one have it at once. Nothing happens when it is somebody else's already. took_s: how long
    the pass took that it was for, None where none was made."""
    counted: dict[str, Any] = {}
    if took_s is not None:
        counted = {"passes": F("passes") + 1, "passes_s": F("passes_s") + took_s, "last_s": took_s}
    held_still = Lease.objects.filter(name=NAME, holder=held.holder, token=held.token)
    held_still.update(holder="", expires_at=Now(), **counted)
