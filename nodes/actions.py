"""What operators may do to nodes and replicas. Each verb changes rows and writes its Event; it starts and
stops nothing itself: the next pass of the reconciler does, and says so.
"""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models.functions import Now

from catalog.actions import record
from catalog.models import Model, Revision
from catalog.reading import NAME_LIMIT, CatalogError, Fault, quote, storable
from nodes import lease
from nodes.conversation import cluster_keys
from nodes.models import Cluster, Held, Node, Orphan, Rank, Replica, Roll
from nodes.showing import models_with_replicas, tally

RESERVED = ("join",)  # /api/nodes/ has these for itself
RESERVED_END = "/metrics"
STEPS = frozenset({".", ".."})  # that clients take in a path before they ask for it


class NodeRefused(CatalogError):
    """Something cannot be done to a node as asked; the text says why, and what to do."""

    def __init__(self, sentence: str, *, field: str = "", code: str = "invalid") -> None:
        super().__init__([Fault("", "", field, code, sentence)])


def register_node(
    name: str, address: str, *, certificate: str = "", by: str, door: str, verb: str = "register"
) -> tuple[Node, dict[str, Any]]:
    """The node's row and the identity its agent needs, token included. certificate: of its agent, empty where
    the system's authorities vouch for it.

    A node keeps its uuid however often it is registered; address and certificate follow. Raises NodeRefused.
    """
    check_name(name)
    address, certificate = _checked_address(address), _checked_certificate(certificate)
    asked = {"address": address, "certificate": certificate}
    told = {name: value for name, value in asked.items() if value}
    with transaction.atomic():
        Revision.hold()
        try:
            with transaction.atomic():
                node, is_new = Node.objects.get_or_create(name=name, defaults=asked)
        except IntegrityError:  # somebody registered it a moment ago
            node, is_new = Node.objects.get(name=name), False
        was = node.address
        if is_new:
            record(verb, "node", name, subject_key=node.pk, by=by, door=door, detail=told)
        elif (was, node.certificate) != (address, certificate):
            Node.objects.filter(pk=node.pk).update(**asked, etag="")
            node.refresh_from_db()
            # Gateways reach its replicas at the new address.
            Replica.objects.filter(ranks__node=node).update(revision=Revision.advance())
            record(verb, "node", name, subject_key=node.pk, by=by, door=door, detail=told | {"was": was})
    return node, identity_of(node)


def identity_of(node: Node) -> dict[str, Any]:
    """What the agent keeps in its identity file, mode 0600. The token is derived, and stored nowhere here."""
    uuid = str(node.uuid)
    return {
        "cluster": str(Cluster.this().uuid),
        "node": uuid,
        "name": node.name,
        "token": cluster_keys()[0].node_token(uuid, node.token_generation),
    }


def cordon(node: Node, *, by: str, why: str, door: str) -> bool:
    """Nothing new is placed on the node; what runs there stays. False: it was cordoned already."""
    with transaction.atomic():
        changed = Node.objects.filter(pk=node.pk, is_cordoned=False).update(
            is_cordoned=True, cordoned_by=by, cordoned_why=storable(why)
        )
        if changed:
            record("cordon", "node", node.name, by=by, door=door, why=why)
    return bool(changed)


def drain_node(node: Node, *, by: str, why: str, door: str) -> bool:
    """Cordon the node and move what runs there: each replica leaves once another has taken its place, or at
    once where nothing else has room for it. False: it was draining already."""
    with transaction.atomic():
        changed = Node.objects.filter(pk=node.pk, is_draining=False).update(
            is_draining=True, is_cordoned=True, cordoned_by=by, cordoned_why=storable(why)
        )
        if changed:
            record("drain", "node", node.name, subject_key=node.pk, by=by, door=door, why=why)
    return bool(changed)


def uncordon(node: Node, *, by: str, why: str = "", door: str) -> bool:
    """Replicas may be placed on the node again, and stay there. False: they already might."""
    with transaction.atomic():
        changed = Node.objects.filter(pk=node.pk, is_cordoned=True).update(
            is_cordoned=False, is_draining=False, cordoned_by="", cordoned_why=""
        )
        if changed:
            record("uncordon", "node", node.name, by=by, door=door, why=why)
    return bool(changed)


def remove_node(node: Node, *, by: str, why: str, door: str) -> bool:
    """Forget the node; its agent's token opens nothing from here on. False: it was gone already.

    What runs there leaves first: so the node is drained, and empty or lost. That an operator removes a lost
    one is the evidence that its engines are gone, which nobody else can give. Raises NodeRefused.
    """
    with transaction.atomic():
        Revision.hold()
        found = Node.objects.select_for_update().filter(pk=node.pk).first()
        if found is None:
            return False
        here = list(Replica.objects.filter(ranks__node=found).exclude(state__in=Replica.OVER).distinct())
        _check_empty(found, here)
        Rank.objects.filter(node=found).delete()  # and what they claim
        left = Replica.objects.filter(pk__in=[replica.pk for replica in here])
        left.filter(ranks=None).update(state=Replica.State.STOPPED, reason=f"{found.name} was removed")
        left.update(
            wanted=Replica.Wanted.STOP,
            wanted_why=f"its node {found.name} was removed",
            wanted_since=Now(),
            revision=Revision.advance(),
        )
        detail = {"address": found.address, "replicas": [str(replica.pk) for replica in here]}
        key = found.pk
        found.delete()
        record("remove", "node", node.name, subject_key=key, by=by, door=door, why=why, detail=detail)
    return True


def _check_empty(node: Node, here: list[Replica]) -> None:
    lately = Now() - timedelta(seconds=settings.LLMGW_LOST_AFTER_S)
    if node.orphans.exists() and Node.objects.filter(pk=node.pk, seen_at__gt=lately).exists():
        raise NodeRefused(
            f"The node {node.name} runs engines that nothing here accounts for; stop these orphans first "
            f"(manage.py replica_stop, or in the admin, which lists them).",
            code="in_use",
        )
    if not here:
        return
    count = "1 replica" if len(here) == 1 else f"{len(here)} replicas"
    if not node.is_draining:
        raise NodeRefused(
            f"The node {node.name} has {count}; drain it first (manage.py node_drain), then remove it.",
            code="in_use",
        )
    if any(replica.state != Replica.State.LOST for replica in here):
        raise NodeRefused(
            f"The node {node.name} is being drained and has {count} still; wait until it is empty, or lost, "
            f"as manage.py nodes tells.",
            code="in_use",
        )


def stop_replica(replica: Replica, *, by: str, why: str, door: str) -> bool:
    """Stop this replica; another is started if one is still wanted. False: it had been stopped already.

    Stopping one that has failed says that the failure has been dealt with: its profile is tried again.
    """
    with transaction.atomic():
        Revision.hold()
        changed = (
            Replica.objects.filter(pk=replica.pk)
            .exclude(wanted=Replica.Wanted.STOP)
            .exclude(state=Replica.State.STOPPED)
            .update(
                wanted=Replica.Wanted.STOP,
                wanted_why=storable(why) or f"stopped by {by}",
                wanted_since=Now(),
            )
        )
        if changed:
            Replica.objects.filter(pk=replica.pk).update(revision=Revision.advance())
            detail = {"model": replica.model_name, "profile": replica.profile_name}
            record("stop", "replica", str(replica.pk), by=by, door=door, why=why, detail=detail)
    return bool(changed)


def stop_orphan(orphan: Orphan, *, by: str, why: str, door: str) -> bool:
    """Have an engine ended that nothing here accounts for. False: it was told so already.

    The replica is put on record as one that is over, as whatever runs of those is ended wherever it is found.
    Raises NodeRefused where it is one of ours that runs elsewhere.
    """
    with transaction.atomic():
        Revision.hold()
        known = Replica.objects.filter(pk=orphan.replica).first()
        if known is not None and known.state not in Replica.OVER:
            raise NodeRefused(
                f"{known} is to run elsewhere, and what {orphan.node} runs of it cannot be ended alone; stop "
                f"the replica (manage.py replica_stop), and both end.",
                code="in_use",
            )
        if known is None:
            reason = f"{orphan.node} ran it, and nothing here accounted for it"
            Replica.objects.create(
                pk=orphan.replica,
                launch=orphan.launch,
                wanted=Replica.Wanted.STOP,
                wanted_why=storable(why) or f"stopped by {by}",
                state=Replica.State.STOPPED,
                reason=reason,
                revision=Revision.advance(),
            )
            told: dict[str, Any] = {"by": by, "door": door, "why": why, "detail": {"node": orphan.node.name}}
            record("stop", "replica", str(orphan.replica), **told)
    return known is None


def roll_model(model: Model, *, by: str, why: str, door: str) -> Roll | None:
    """Replace the model's stale replicas one after another, as the catalog has them at this moment. What was
    rolling before, or had halted, begins anew from here. None: nothing of it is stale."""
    with transaction.atomic():
        Revision.hold()
        Roll.objects.filter(model=model).delete()
        if not any(tally(row).stale for row in models_with_replicas().filter(pk=model.pk)):
            return None
        keep = model.replicas.filter(wanted=Replica.Wanted.RUN).exclude(state__in=Replica.OVER).count()
        roll = Roll.objects.create(model=model, by=by, why=storable(why), keep=keep)
        record("roll", "model", model.name, subject_key=model.pk, by=by, door=door, why=why)
    return roll


def cancel_roll(model: Model, *, by: str, why: str = "", door: str) -> bool:
    """Replace no more; what has been replaced stays. False: nothing was rolling."""
    with transaction.atomic():
        changed = Roll.objects.filter(model=model).delete()[0]
        if changed:
            record("cancel roll", "model", model.name, subject_key=model.pk, by=by, door=door, why=why)
    return bool(changed)


def pause(*, by: str, why: str, door: str) -> bool:
    """Passes go on looking, and change and tell nothing. False: they were paused already."""
    with transaction.atomic():
        this = Cluster.this()
        changed = Cluster.objects.filter(pk=this.pk, is_paused=False).update(
            is_paused=True, paused_by=by, paused_why=storable(why)
        )
        if changed:
            record("pause", "cluster", str(this), by=by, door=door, why=why)
    return bool(changed)


def resume(*, by: str, why: str = "", door: str) -> bool:
    """Passes act again. False: they were not paused."""
    with transaction.atomic():
        this = Cluster.this()
        changed = Cluster.objects.filter(pk=this.pk, is_paused=True).update(
            is_paused=False, paused_by="", paused_why=""
        )
        if changed:
            record("resume", "cluster", str(this), by=by, door=door, why=why)
    return bool(changed)


def outrank(*, by: str, why: str, door: str) -> int:
    """Have agents obey this database again, after it was restored from a backup and they had seen later
    commands. What another control plane may still send them is refused from the next command on. The token
    above which passes go on."""
    with transaction.atomic():
        token = lease.outrank()
        record("outrank", "cluster", str(Cluster.this()), by=by, door=door, why=why, detail={"token": token})
    return token


def allow_held(*, by: str, why: str, door: str) -> int:
    """Say yes to the ends that the last pass held back, as they are shown; how many there were."""
    with transaction.atomic():
        Revision.hold()
        held = list(Held.objects.select_related("replica"))
        for each in held:
            Replica.objects.filter(pk=each.replica_id, wanted=Replica.Wanted.RUN).update(
                wanted=each.wanted, wanted_why=each.why, wanted_since=Now()
            )
        if held:
            ids = [each.replica_id for each in held]
            Replica.objects.filter(pk__in=ids).update(revision=Revision.advance())
            Held.objects.filter(pk__in=[each.pk for each in held]).delete()
            detail = {"replicas": [str(each.replica) for each in held]}
            record("allow", "cluster", str(Cluster.this()), by=by, door=door, why=why, detail=detail)
    return len(held)


def check_name(name: str) -> None:
    """Raises NodeRefused."""
    if not name or len(name) > NAME_LIMIT or name != name.strip() or not name.isprintable():
        raise NodeRefused(
            f"A node cannot be called {quote(name)}: give it a name of at most "
            f"{NAME_LIMIT} visible characters, such as gpu-07.",
            field="name",
        )
    if name in RESERVED or name.endswith(RESERVED_END) or not STEPS.isdisjoint(name.split("/")):
        raise NodeRefused(
            f"A node cannot be called {quote(name)}, as its address would lead elsewhere: give it another "
            "name.",
            field="name",
        )


def _checked_address(address: str) -> str:
    """Scheme, host and port alone: paths on an agent come from the protocol, never from what was typed."""
    try:
        parts = urlsplit(address)
        is_sound = (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port is not None
            and parts.path in ("", "/")
            and not (parts.query or parts.fragment or parts.username or parts.password)
            and address.isascii()
            and address.isprintable()
            and " " not in address
        )
    except ValueError:
        is_sound = False
    if not is_sound or len(address) > 500:
        raise NodeRefused(
            f"{quote(address)} is no address of an agent: give scheme, host and port, "
            "such as http://10.0.0.7:8378.",
            field="address",
        )
    return address.rstrip("/")


def _checked_certificate(text: str) -> str:
    """As `openssl x509 -fingerprint -sha256` writes it, or without its colons."""
    bare = text.replace(":", "").lower()
    if bare and not re.fullmatch("[0-9a-f]{64}", bare):
        raise NodeRefused(
            f"{quote(text)} is no certificate's checksum: give its SHA-256 in hex, 64 digits.",
            field="certificate",
        )
    return bare
