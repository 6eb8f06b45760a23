"""Weights at every door: what is shown, what is fetched ahead of time, and what may be removed."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test import Client

from catalog.models import Event, Model
from nodes.models import Replica, Weights
from nodes.protocol import FETCHING, HELD, WeightsReport
from nodes.tickets import opens, weights_key
from tests.cast import alice
from tests.fake_agent import FakeAgent
from tests.passes import add_model, one_pass
from tests.rest_client import Api

pytestmark = pytest.mark.django_db(transaction=True)

COMMIT = "0123456789abcdef0123456789abcdef01234567"
KEY = weights_key("org/m", COMMIT)
COMING = WeightsReport(
    KEY,
    "org/m",
    COMMIT,
    FETCHING,
    size_bytes=1_200_000_000,
    total_bytes=4_500_000_000,
    bytes_per_s=110_000_000,
)
HERE = WeightsReport("1" * 32, "org/<b>", "f" * 40, HELD, size_bytes=64_000_000, total_bytes=64_000_000)


@pytest.fixture
def agent(agent_of: Callable[..., FakeAgent]) -> FakeAgent:
    agent = agent_of("node-a", engines=("llamacpp",), holdings=(COMING, HERE))
    model = add_model(engine="llamacpp", low=0, high=1)
    Model.objects.filter(pk=model.pk).update(source_revision=COMMIT)
    one_pass()
    return agent


def command(*words: str) -> str:
    out = StringIO()
    call_command(*words, stdout=out)
    return out.getvalue()


def test_the_command_and_rest_tell_the_same(agent: FakeAgent) -> None:
    told = command("weights")
    assert "fetching, 1.2 of 4.5 GB, 110.0 MB/s, 30 s left" in told
    assert "held, 64.0 MB" in told
    rows = json.loads(command("weights", "--node", "node-a", "--json"))
    assert [(row["repo"], row["state"], row["left_s"], row["needed_by"]) for row in rows] == [
        ("org/<b>", "held", None, []),
        ("org/m", "fetching", 30, ["m"]),
    ]
    assert Api(alice())("GET", "weights")[1]["results"] == rows


def test_the_admin_shows_a_bar_and_escapes_what_agents_say(agent: FakeAgent) -> None:
    client = Client()
    client.force_login(alice())
    node = Weights.objects.first().node
    for page in ("/admin/nodes/weights/", f"/admin/nodes/node/{node.pk}/change/"):
        body = client.get(page).content.decode()
        assert "1.2 of 4.5 GB, 110.0 MB/s, 30 s left" in body
        assert "org/&lt;b&gt;" in body
    body = client.get("/admin/nodes/weights/").content.decode()
    assert '<progress max="4500000000" value="1200000000" aria-label="1.2 of 4.5 GB' in body


def test_a_list_of_weights_takes_no_more_queries_for_more_rows(
    agent: FakeAgent, django_assert_max_num_queries: Any
) -> None:
    client = Client()
    client.force_login(alice())
    row = Weights.objects.first()
    for index in range(20):
        Weights.objects.create(node=row.node, key=f"{index:032x}", repo="org/n", revision="c", state=HELD)
    with django_assert_max_num_queries(16):
        client.get("/admin/nodes/weights/")


def test_a_node_is_told_to_fetch_ahead_and_from_whom(
    agent: FakeAgent, agent_of: Callable[..., FakeAgent]
) -> None:
    second = agent_of("node-b", engines=("llamacpp",))
    one_pass()
    assert "node-b fetches the weights of m" in command("weights_fetch", "m", "--node", "node-b")
    (order,) = second.weights_orders
    assert (order.launch.source, order.launch.revision) == ("org/m", COMMIT)
    assert [(peer.url, peer.is_fetching) for peer in order.peers] == [(agent.address, True)]
    assert opens(order.peers[0].ticket, token=agent.token, key=KEY, now_s=float(agent.clock))
    assert order.needed == (f"org/m@{COMMIT}",)
    event = Event.objects.get(verb="fetch weights")
    assert (event.kind, event.subject, event.detail["model"]) == ("node", "node-b", "m")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        pytest.param({"source": "/models/m"}, "is read from a path on the nodes", id="a path"),
        pytest.param({}, "has an engine on node-b that reads weights", id="no engine for it"),
    ],
)
def test_what_a_node_cannot_fetch_is_refused_before_it_is_asked(
    agent: FakeAgent, agent_of: Callable[..., FakeAgent], changes: dict[str, Any], says: str
) -> None:
    second = agent_of("node-b")
    one_pass()
    Model.objects.update(**changes)
    with pytest.raises(CommandError, match=says):
        command("weights_fetch", "m", "--node", "node-b")
    assert second.weights_orders == []


def test_what_is_removed_is_asked_about_first_and_what_is_used_stays(
    agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda: "no")
    with pytest.raises(CommandError, match="Nothing was removed"):
        command("weights_remove", "org/<b>", "--node", "node-a")
    assert [*agent.holdings] == [COMING, HERE]
    assert "Removed org/<b>@ffffffff (held, 64.0 MB)" in command(
        "weights_remove", "org/<b>@ffff", "--node", "node-a", "--yes"
    )
    assert [*agent.holdings] == [COMING]
    agent.holdings = (WeightsReport(KEY, "org/m", COMMIT, HELD, is_used=True),)
    with pytest.raises(CommandError, match="These are used here"):
        command("weights_remove", "org/m", "--node", "node-a", "--yes")
    assert Api(alice())("DELETE", f"weights/{Weights.objects.get(repo='org/m').pk}")[0] == 409
    assert Event.objects.filter(verb="remove weights").count() == 1


def test_an_agent_that_cannot_be_asked_is_nobodys_mistake(agent: FakeAgent) -> None:
    agent.is_deaf = True
    row, api = Weights.objects.get(repo="org/m"), Api(alice())
    assert api("DELETE", f"weights/{row.pk}")[0] == 503
    assert api("POST", "weights", {"model": "m", "node": "node-a"})[0] == 503
    assert Weights.objects.count() == 2


def test_the_admin_removes_what_nothing_uses(agent: FakeAgent) -> None:
    client = Client()
    client.force_login(alice())
    row = Weights.objects.get(repo="org/<b>")
    told = {"action": "remove", "_selected_action": [str(row.pk)], "confirmed": "yes", "why": "room"}
    client.post("/admin/nodes/weights/", told)
    assert agent.holdings == (COMING,)
    assert Event.objects.get(verb="remove weights").why == "room"


def test_a_replica_that_fetches_shows_how_far_it_is(agent: FakeAgent) -> None:
    Model.objects.update(scaling_min=1)
    agent.first_state = FETCHING
    one_pass()
    (replica,) = agent.ranks
    agent.become(replica, FETCHING, done_bytes=30_000_000, total_bytes=64_000_000, bytes_per_s=17_000_000)
    one_pass()
    client = Client()
    client.force_login(alice())
    for page in ("/admin/nodes/replica/", f"/admin/nodes/replica/{replica}/change/"):
        assert "30.0 of 64.0 MB, 17.0 MB/s, 2 s left" in client.get(page).content.decode()
    (rank,) = json.loads(command("replicas", "--json"))[0]["ranks"]
    assert (rank["bytes_per_s"], rank["left_s"]) == (17_000_000, 2)
    assert Replica.objects.get().state == FETCHING
