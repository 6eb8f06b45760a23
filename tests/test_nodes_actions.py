"""What operators do to nodes and replicas."""

from __future__ import annotations

import pytest

from catalog.models import Event, Revision
from nodes.actions import NodeRefused, cordon, register_node, stop_replica, uncordon
from nodes.conversation import cluster_keys
from nodes.models import Cluster, Node, Rank, Replica

pytestmark = pytest.mark.django_db

ADDRESS = "http://10.0.0.7:8378"


def test_a_registered_node_gets_an_identity_its_token_in_no_column() -> None:
    node, identity = register_node("gpu-07", ADDRESS, by="ann", door="command")
    assert identity == {
        "cluster": str(Cluster.this().uuid),
        "node": str(node.uuid),
        "name": "gpu-07",
        "token": cluster_keys()[0].node_token(str(node.uuid), 1),
    }
    stored = {str(value) for value in Node.objects.values().get().values()}
    assert not any(identity["token"] in value for value in stored)
    event = Event.objects.get()
    assert (event.by, event.door, event.verb, event.kind, event.subject) == (
        "ann",
        "command",
        "register",
        "node",
        "gpu-07",
    )
    assert identity["token"] not in str(event.detail)


def test_registering_again_is_harmless() -> None:
    first = register_node("gpu-07", ADDRESS, by="ann", door="command")
    again = register_node("gpu-07", ADDRESS + "/", by="ben", door="up")
    assert again == first
    assert Event.objects.count() == 1


def test_a_node_that_moved_keeps_its_identity_and_its_replicas_are_routed_anew() -> None:
    node, identity = register_node("gpu-07", ADDRESS, by="ann", door="command")
    replica = Replica.objects.create(launch={})
    Rank.objects.create(replica=replica, node=node)
    moved, again = register_node("gpu-07", "https://10.0.0.8:8378", by="ben", door="command")
    assert (moved.pk, again) == (node.pk, identity)
    assert Node.objects.get().address == "https://10.0.0.8:8378"
    replica.refresh_from_db()
    assert replica.revision == Revision.current() > 0
    assert Event.objects.latest("id").detail == {"address": "https://10.0.0.8:8378", "was": ADDRESS}


@pytest.mark.parametrize(
    "address",
    [
        pytest.param("", id="nothing"),
        pytest.param("10.0.0.7:8378", id="no scheme"),
        pytest.param("ftp://10.0.0.7:8378", id="another scheme"),
        pytest.param("http://10.0.0.7", id="no port"),
        pytest.param("http://10.0.0.7:99999", id="no such port"),
        pytest.param("http://:8378", id="no host"),
        pytest.param("http://10.0.0.7:8378/v1", id="a path"),
        pytest.param("http://10.0.0.7:8378?x=1", id="a query"),
        pytest.param("http://ann:secret@10.0.0.7:8378", id="somebody's password"),
        pytest.param("http://10.0.0.7:8378 ", id="a space"),
        pytest.param("http://10.0.0.7:8378\r\nX: y", id="a line break"),
        pytest.param("http://[::1", id="half a bracket"),
        pytest.param(f"http://{'a' * 600}:1", id="six hundred letters"),
    ],
)
def test_an_address_that_is_none_is_refused_with_an_example(address: str) -> None:
    with pytest.raises(NodeRefused, match=r"such as http://10\.0\.0\.7:8378"):
        register_node("gpu-07", address, by="ann", door="command")
    assert not Node.objects.exists()
    assert not Event.objects.exists()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("", id="empty"),
        pytest.param(" a", id="an outer space"),
        pytest.param("a\nb", id="two lines"),
        pytest.param("a\x00b", id="a NUL"),
        pytest.param("a\ud800", id="half of a surrogate pair"),
        pytest.param("a" * 201, id="too long"),
    ],
)
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(NodeRefused, match="give it a name of at most 200 visible characters"):
        register_node(name, ADDRESS, by="ann", door="command")
    assert not Node.objects.exists()


def test_cordon_and_uncordon_say_who_and_why_and_whether_they_did() -> None:
    node, _ = register_node("gpu-07", ADDRESS, by="ann", door="command")
    assert cordon(node, by="ann", why="new disks", door="admin")
    assert not cordon(node, by="ben", why="me too", door="admin")
    node.refresh_from_db()
    assert (node.is_cordoned, node.cordoned_by, node.cordoned_why) == (True, "ann", "new disks")
    assert uncordon(node, by="ben", door="api")
    assert not uncordon(node, by="ben", door="api")
    node.refresh_from_db()
    assert (node.is_cordoned, node.cordoned_by, node.cordoned_why) == (False, "", "")
    told = list(Event.objects.order_by("id").values_list("verb", "by", "why", "door"))
    assert told[1:] == [("cordon", "ann", "new disks", "admin"), ("uncordon", "ben", "", "api")]


@pytest.mark.parametrize("state", ["pending", "fetching", "starting", "ready", "draining", "failed", "lost"])
def test_a_replica_in_any_state_but_stopped_can_be_stopped_once(state: str) -> None:
    replica = Replica.objects.create(launch={"model": "m", "profile": {"name": "p"}}, state=state)
    assert stop_replica(replica, by="ann", why="it babbles", door="admin")
    assert not stop_replica(replica, by="ben", why="me too", door="admin")
    replica.refresh_from_db()
    assert (replica.wanted, replica.wanted_why, replica.state) == ("stop", "it babbles", state)
    assert replica.revision == Revision.current() > 0
    event = Event.objects.get()
    assert (event.verb, event.subject, event.detail) == (
        "stop",
        str(replica.pk),
        {"model": "m", "profile": "p"},
    )


def test_a_stopped_replica_cannot_be_stopped() -> None:
    replica = Replica.objects.create(launch={}, state="stopped")
    assert not stop_replica(replica, by="ann", why="", door="admin")
    assert not Event.objects.exists()
