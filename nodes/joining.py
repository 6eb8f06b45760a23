"""How a machine becomes a node: a token that somebody makes, shows once and may take back, and the join
itself, which uses it up.

A join that is repeated by the machine that made it (its answer was lost, it was cut short, the same line was
pasted twice) is the same join and gets the same answer. No join makes two nodes of one machine, nor one of
two.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn
from uuid import UUID

from django.conf import settings
from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import F, Q
from django.db.models.functions import Now

from catalog.actions import record
from catalog.durations import HOUR, MINUTE, format_duration
from catalog.keys import ID_BYTES, SECRET_BYTES, KeyText
from catalog.models import Key, Revision
from catalog.reading import CatalogError, Fault, quote, storable
from catalog.showing import KEY_STATES
from nodes.actions import NodeRefused, check_name, identity_of, register_node
from nodes.conversation import is_token_of
from nodes.models import Cluster, JoinToken, Node

MAY_ADD = "nodes.add_node"
DOOR = "join"
LIVES_NS, LONGEST_NS = HOUR, 7 * 24 * HOUR
KEPT = timedelta(days=30)  # after their end, for those who look
LABELS_LIMIT, LABEL_LIMIT = 100, 200


@dataclass(frozen=True, slots=True)
class Machine:
    """What a machine says of itself. name: empty where it asks for none; host: its own. certificate: SHA-256
    of what its agent shows, empty where authorities vouch for it. claim: a secret of its own, by which it is
    known again. cluster, node and token: what it is already, empty where it is none."""

    name: str
    host: str
    address: str
    certificate: str
    claim: str
    cluster: str = ""
    node: str = ""
    token: str = ""


# --- tokens -------------------------------------------------------------------------------------------


def mint_join_token(
    *,
    name: str = "",
    labels: dict[str, str] | None = None,
    lives_ns: int | None = None,
    by: str,
    door: str,
    why: str = "",
    maker: User | None = None,
    key: Key | None = None,
) -> tuple[JoinToken, str]:
    """A new join token and its text, which is not kept. name: of the node it makes, or of one whose place the
    machine takes. `maker` asks for it, through an API key or without one; a shell names neither. Raises
    CatalogError."""
    labels, lives_ns = labels or {}, LIVES_NS if lives_ns is None else lives_ns
    if name:
        check_name(name)
    if faults := [*_faults_of_labels(labels), *_faults_of_life(lives_ns)]:
        raise CatalogError(faults)
    text = KeyText.from_bytes(secrets.token_bytes(ID_BYTES), secrets.token_bytes(SECRET_BYTES))
    with transaction.atomic():
        JoinToken.objects.filter(expires_at__lt=Now() - KEPT).delete()
        token = JoinToken.objects.create(
            id=text.id,
            digest=_digest(text),
            node_name=name,
            labels=labels,
            by=by,
            maker=maker,
            key=key,
            expires_at=Now() + timedelta(microseconds=lives_ns / 1_000),
        )
        token.refresh_from_db()
        detail = {"node": name, "labels": labels, "expires_at": token.expires_at.isoformat()}
        record("mint", "join token", text.id, subject_key=text.id, by=by, door=door, why=why, detail=detail)
    return token, text.reveal()


def revoke_join_token(token: JoinToken, *, by: str, door: str, why: str = "") -> bool:
    """No machine joins with it from here on. False: it had been used, had expired or was revoked already."""
    with transaction.atomic():
        ended = JoinToken.objects.filter(pk=token.pk, revoked_at=None, used_at=None, expires_at__gt=Now())
        changed = ended.update(revoked_at=Now())
        if changed:
            record("revoke", "join token", token.pk, subject_key=token.pk, by=by, door=door, why=why)
    return bool(changed)


def find_join_token(text: str) -> JoinToken | None:
    """The one that this is the text of, whatever has become of it since."""
    typed = KeyText.parse(text)
    if typed is None:
        return None
    row = JoinToken.objects.filter(pk=typed.id).select_related("maker", "node").first()
    # A comparison in any case: time does not tell whether there is such an id.
    fits = hmac.compare_digest(_digest(typed), row.digest if row else "0" * 64)
    return row if row and fits else None


def judge_join_token(token: JoinToken) -> None:
    """Whether it opens anything still, to the machine that used it, too. Raises NodeRefused."""
    if token.revoked_at:
        _no("revoked", "This join token was revoked")
    if not JoinToken.objects.filter(pk=token.pk, expires_at__gt=Now()).exists():
        _no("expired", f"This join token expired at {token.expires_at:%Y-%m-%d %H:%M} UTC")
    may = token.maker is None or (token.maker.is_active and token.maker.has_perm(MAY_ADD))
    is_key_live = token.key_id is None or Key.objects.filter(KEY_STATES["live"], pk=token.key_id).exists()
    if not may or not is_key_live:
        _no("maker", f"Whoever made this join token ({token.by}) may add no nodes any more")


def _no(code: str, sentence: str) -> NoReturn:
    raise NodeRefused(
        f"{sentence}; make a new one (manage.py node_join_token, or Add node in the admin).", code=code
    )


def _digest(text: KeyText) -> str:
    """Another one than an API key of the same id and secret would have."""
    return text.digest(settings.LLMGW_KEY_PEPPER + b" join")


def _faults_of_labels(labels: dict[str, str]) -> list[Fault]:
    is_sound = len(labels) <= LABELS_LIMIT and all(
        0 < len(each) <= LABEL_LIMIT and each.isprintable() and each == each.strip()
        for pair in labels.items()
        for each in pair
    )
    says = (
        f"labels are up to {LABELS_LIMIT} of NAME=value, either of at most {LABEL_LIMIT} visible characters"
    )
    return [] if is_sound else [Fault("", "", "labels", "invalid", says)]


def _faults_of_life(lives_ns: int) -> list[Fault]:
    says = f"expires_in must be from 1m to {format_duration(LONGEST_NS)}, such as 1h"
    return [] if MINUTE <= lives_ns <= LONGEST_NS else [Fault("", "", "expires_in", "range", says)]


# --- joining ------------------------------------------------------------------------------------------


def join(token: JoinToken, machine: Machine) -> dict[str, Any]:
    """The machine is a node from here on: what its agent keeps, and the labels that the token gives it.

    Nothing is used up where it is refused. Raises NodeRefused.
    """
    if len(machine.claim) < 32:
        raise NodeRefused("A machine that joins sends a claim of its own; run the line as it was printed.")
    claim = hashlib.sha256(machine.claim.encode("utf-8", "replace")).hexdigest()
    with transaction.atomic():
        Revision.hold()  # one join after another
        token = JoinToken.objects.select_related("maker", "node").get(pk=token.pk)
        judge_join_token(token)
        node = _node_of(token, machine, claim)
        name = node.name if node else token.node_name or machine.name or machine.host
        if node is not None and not is_token_of(node, machine.token) and not token.used_at:
            # Another machine has its place from here on, or the same one made anew: the old token ends.
            Node.objects.filter(pk=node.pk).update(token_generation=F("token_generation") + 1, etag="")
        node, _ = register_node(
            name,
            machine.address,
            certificate=machine.certificate,
            by=token.by,
            door=DOOR,
            verb="join",
        )
        used = JoinToken.objects.filter(pk=token.pk, used_at=None).update(
            used_at=Now(), node=node, claim=claim
        )
        if used:
            told = {"node": node.name, "host": storable(machine.host)[:LABEL_LIMIT]}
            record("use", "join token", token.pk, subject_key=token.pk, by=token.by, door=DOOR, detail=told)
        node.refresh_from_db()
    return {**identity_of(node), "labels": token.labels}


def _node_of(token: JoinToken, machine: Machine, claim: str) -> Node | None:
    """Which node the machine is or will take the place of; None for a new one. Raises NodeRefused."""
    if machine.cluster and machine.cluster != str(Cluster.this().uuid):
        raise NodeRefused(
            "This machine is a node of another cluster; take that agent off first (its folder has "
            "`uninstall`), or give this one another --home and --listen.",
            code="conflict",
        )
    if token.used_at is not None:
        if not hmac.compare_digest(token.claim, claim):
            _no(
                "used", "This join token was used already" + (f", by {token.node.name}" if token.node else "")
            )
        if token.node is None:
            _no("used", "This join token was used already, and its node has been removed")
        return token.node
    was = _proven(machine)
    asked = token.node_name or machine.name
    if was is not None and asked not in ("", was.name):
        raise NodeRefused(
            f"This machine is the node {quote(was.name)} already, and {quote(asked)} was asked for; take the "
            f"agent off first (its folder has `uninstall`), or make a join token for {quote(was.name)}.",
            code="conflict",
        )
    if was is not None:
        return was
    if token.node_name and machine.name not in ("", token.node_name):
        raise NodeRefused(
            f"This join token is for {quote(token.node_name)}; leave --name out, or make another one.",
            code="conflict",
        )
    found = Node.objects.filter(name=token.node_name or machine.name or machine.host).first()
    if found is not None:
        _judge_taking(found, token)
    return found


def _proven(machine: Machine) -> Node | None:
    """The node that the machine is by its own identity."""
    found = Node.objects.filter(uuid=machine.node).first() if _is_uuid(machine.node) else None
    return found if found is not None and is_token_of(found, machine.token) else None


def _judge_taking(found: Node, token: JoinToken) -> None:
    """Whether another machine may be this node. Raises NodeRefused."""
    if not token.node_name:
        raise NodeRefused(
            f"There is a node {quote(found.name)} already; give another name with --name, or make a join "
            f"token for it by name if this machine is to take its place.",
            code="conflict",
        )
    lately = Now() - timedelta(seconds=settings.LLMGW_SUSPECT_AFTER_S)
    if Node.objects.filter(Q(pk=found.pk) & Q(seen_at__gt=lately, problem="")).exists():
        raise NodeRefused(
            f"{quote(found.name)} answers at this moment, from {found.address}; stop the agent there before "
            f"another machine takes its place.",
            code="conflict",
        )


def _is_uuid(text: str) -> bool:
    try:
        return bool(UUID(text))
    except ValueError:
        return False
