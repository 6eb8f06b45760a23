"""REST: what an operator does to nodes, replicas and sources, beside the catalog."""

from __future__ import annotations

from typing import Any

import pytest

from catalog.models import Event, Model
from nodes.models import Node, Orphan, Replica
from tests.cast import a_model, a_node, a_replica, alice
from tests.rest_client import Api, field, sentence

pytestmark = pytest.mark.django_db


@pytest.fixture
def api() -> Api:
    return Api(alice())


def test_a_node_is_cordoned_and_uncordoned_with_a_reason(api: Api) -> None:
    a_node()
    status, told = api("POST", "nodes/gpu-01/cordon", {"why": "a new card"})
    assert (status, told["cordoned"], told["cordoned_by"], told["cordoned_why"]) == (
        200, True, "alice", "a new card",
    )  # fmt: skip
    assert api("POST", "nodes/gpu-01/cordon", {"why": "again"})[1]["cordoned_why"] == "a new card"
    assert api("POST", "nodes/gpu-01/uncordon")[1]["cordoned"] is False
    events = Event.objects.filter(kind="node").order_by("id").values_list("verb", "why", "door")
    assert list(events) == [("cordon", "a new card", "api"), ("uncordon", "", "api")]


@pytest.mark.parametrize("name", ["rack 1/gpu-01", "gpu/cordon", "cordon", "ä"])
def test_a_node_is_found_by_any_name(api: Api, name: str) -> None:
    a_node("gpu")
    a_node(name)
    assert api("GET", f"nodes/{name}")[1]["name"] == name
    assert api("POST", f"nodes/{name}/cordon/")[1]["cordoned"] is True
    assert [node.name for node in Node.objects.filter(is_cordoned=True)] == [name]


@pytest.mark.parametrize(
    ("body", "where", "says"),
    [
        pytest.param(
            {"why": 3}, "why", "the body: why must be a text, not a number", id="a number for a reason"
        ),
        pytest.param(
            {"because": "x"}, "because", 'the body: unknown key "because"; the keys are why', id="a key"
        ),
        pytest.param("[]", "", "the body: it must be a map of fields, not a list", id="a list"),
    ],
)
def test_a_body_that_cannot_be_read_cordons_nothing(api: Api, body: Any, where: str, says: str) -> None:
    a_node()
    answer = api("POST", "nodes/gpu-01/cordon", body)
    assert field(answer)[:2] == (400, where)
    assert sentence(answer)[1] == says
    assert Node.objects.get().is_cordoned is False


def test_what_is_not_there_and_what_cannot_be_done(api: Api) -> None:
    a_node()
    unknown = (404, 'there is no node "gpu-02"; GET /api/nodes lists them')
    assert sentence(api("GET", "nodes/gpu-02")) == unknown
    assert sentence(api("POST", "nodes/gpu-02/cordon")) == unknown
    possible = "POST is not possible here; these are: GET, HEAD, DELETE."
    assert sentence(api("POST", "nodes/gpu-01/burn")) == (405, possible)
    assert sentence(api("POST", "nodes/gpu-01")) == (405, possible)
    assert api.ask("POST", "nodes/gpu-01")["Allow"] == "GET, HEAD, DELETE"
    assert api.ask("GET", "nodes/gpu-01")["Allow"] == "GET, HEAD, DELETE"


def test_a_replica_is_stopped_with_a_reason(api: Api) -> None:
    replica = a_replica(a_model(), a_node())
    status, told = api("DELETE", f"replicas/{replica.pk}?why=it%20hangs")
    assert (status, told["wanted"], told["wanted_why"]) == (202, "stop", "it hangs")
    assert told["state"] == "ready"  # until it was seen to end
    assert Event.objects.get(kind="replica").why == "it hangs"
    assert api("DELETE", f"replicas/{replica.pk}")[1]["wanted_why"] == "it hangs"
    assert Event.objects.filter(kind="replica").count() == 1
    gone = f"replicas/{'0' * 8}-0000-0000-0000-{'0' * 12}"
    assert sentence(api("DELETE", gone))[0] == 404
    assert Replica.objects.count() == 1


def test_an_orphan_is_stopped_by_the_id_that_the_plan_tells(api: Api) -> None:
    id = "12345678-0000-0000-0000-000000000000"
    Orphan.objects.create(replica=id, node=a_node(), why="its model is gone")
    for _ in range(2):
        status, told = api("DELETE", f"replicas/{id}?why=old")
        assert (status, told["id"], told["state"], told["wanted_why"]) == (202, id, "stopped", "old")
    event = Event.objects.get(kind="replica")
    assert (event.verb, event.subject, event.why, event.detail) == ("stop", id, "old", {"node": "gpu-01"})


def test_a_source_is_asked_about_again(api: Api) -> None:
    a_model()
    Model.objects.update(source_state="refuse", source_sentence="it was away")
    answer = api.ask("POST", "models/tiny/check", {"why": "it is back"})
    assert answer.status_code == 200
    assert answer["ETag"] == f'"{Model.objects.get().revision}"'
    assert answer.json()["status"]["source"]["state"] == "ok"
    assert Event.objects.get(verb="check").why == "it is back"


@pytest.mark.parametrize(
    ("body", "where"),
    [
        pytest.param({"pin": "yes"}, "pin", id="a text for a yes"),
        pytest.param({"pin": True}, "source", id="a commit of what has none"),
        pytest.param({"commit": "main"}, "commit", id="an unknown key"),
    ],
)
def test_a_check_that_cannot_be_is_refused_at_its_field(api: Api, body: Any, where: str) -> None:
    a_model()
    assert field(api("POST", "models/tiny/check", body))[:2] == (400, where)
    assert sentence(api("POST", "models/nobody/check"))[0] == 404
