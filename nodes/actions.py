"""What operators may do to nodes and replicas. Each verb changes rows and writes its Event; it starts and
stops nothing itself: the next pass of the reconciler does, and says so.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from django.db import IntegrityError, transaction
from django.db.models.functions import Now

from catalog.actions import record
from catalog.models import Revision
from catalog.reading import NAME_LIMIT, quote, storable
from nodes.agents import cluster_keys
from nodes.models import Cluster, Node, Replica


class NodeRefused(ValueError):
    """A node cannot be registered as asked; the text says why, and what to do."""


def register_node(name: str, address: str, *, by: str, door: str) -> tuple[Node, dict[str, Any]]:
    """The node's row and the identity its agent needs, token included.

    A node keeps its uuid however often it is registered; only its address follows. Raises NodeRefused.
    """
    _check_name(name)
    address = _checked_address(address)
    with transaction.atomic():
        Revision.hold()
        try:
            with transaction.atomic():
                node, is_new = Node.objects.get_or_create(name=name, defaults={"address": address})
        except IntegrityError:  # somebody registered it a moment ago
            node, is_new = Node.objects.get(name=name), False
        was = node.address
        if is_new:
            record("register", "node", name, by=by, door=door, detail={"address": address})
        elif was != address:
            Node.objects.filter(pk=node.pk).update(address=address)
            node.address = address
            # Gateways reach its replicas at the new address.
            Replica.objects.filter(ranks__node=node).update(revision=Revision.advance())
            record("register", "node", name, by=by, door=door, detail={"address": address, "was": was})
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


def uncordon(node: Node, *, by: str, why: str = "", door: str) -> bool:
    """Replicas may be placed on the node again. False: they already might."""
    with transaction.atomic():
        changed = Node.objects.filter(pk=node.pk, is_cordoned=True).update(
            is_cordoned=False, cordoned_by="", cordoned_why=""
        )
        if changed:
            record("uncordon", "node", node.name, by=by, door=door, why=why)
    return bool(changed)


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


def _check_name(name: str) -> None:
    if not name or len(name) > NAME_LIMIT or name != name.strip() or not name.isprintable():
        raise NodeRefused(
            f"A node cannot be called {quote(name)}: give it a name of at most "
            f"{NAME_LIMIT} visible characters, such as gpu-07."
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
            "such as http://10.0.0.7:8378."
        )
    return address.rstrip("/")
