"""Agents that lie or are mistaken: about when, about which, about whose. They are believed about less, never
about more, and whatever is not believed is said.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from django.core.management import call_command
from django.test import Client

from catalog.models import Revision, database_now
from nodes.actions import register_node
from nodes.models import Claim, Node, Replica
from nodes.outlook import why_of
from nodes.protocol import READY, STARTING, to_json
from tests.cast import alice
from tests.fake_agent import FakeAgent
from tests.pages import page, text_of
from tests.passes import add_model, one_pass

pytestmark = pytest.mark.django_db(transaction=True)


def put(agent: FakeAgent) -> list[str]:
    return [path for method, path in agent.commands() if method == "PUT"]


# --- when -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "age_s",
    [
        pytest.param(-3 * 86_400.0, id="since three days from now"),
        pytest.param(0.0, id="since now"),
        pytest.param(40 * 365 * 86_400.0, id="since before there were computers"),
    ],
)
def test_a_clock_that_is_wrong_moves_no_moment_into_the_future(
    agent_of: Callable[..., FakeAgent], age_s: float
) -> None:
    agent = agent_of(first_state=STARTING)
    add_model()
    one_pass()
    replica = Replica.objects.get()
    agent.become(replica.pk, READY, age_s=age_s)
    one_pass()
    replica.refresh_from_db()
    assert replica.state == READY
    assert 0 <= (database_now() - replica.state_since).total_seconds() <= 11 * 365 * 86_400
    assert not one_pass().has_changed


# --- which ----------------------------------------------------------------------------------------


def test_what_an_agent_reports_of_an_older_generation_is_not_what_was_asked_for(
    agent_of: Callable[..., FakeAgent],
) -> None:
    """Its disk is an older image, say."""
    agent = agent_of()
    add_model()
    one_pass()
    replica = Replica.objects.get()
    Replica.objects.update(generation=3)
    before = len(put(agent))
    agent.is_deaf_to_commands = True
    one_pass()
    replica.refresh_from_db()
    assert replica.state == "pending"
    assert Claim.objects.exists(), "what it runs there may use the card"
    assert any("is pending: " in each for each in why_of("m").amiss)

    agent.is_deaf_to_commands = False
    one_pass()
    replica.refresh_from_db()
    assert (replica.state, replica.generation) == (READY, 3)
    assert agent.ranks[str(replica.pk)].generation == 3
    assert set(put(agent)[before:]) == {f"/v1/replicas/{replica.pk}"}
    assert not one_pass().has_changed


def test_what_an_agent_reports_of_a_newer_generation_is_taken_up(agent_of: Callable[..., FakeAgent]) -> None:
    """This database was restored, say, and has forgotten."""
    agent = agent_of()
    add_model()
    one_pass()
    replica = Replica.objects.get()
    agent.become(replica.pk, READY, generation=7)
    one_pass()
    replica.refresh_from_db()
    assert (replica.state, replica.generation) == (READY, 7)
    assert len(put(agent)) == 1


def test_a_report_that_comes_twice_or_late_starts_nothing_twice(agent_of: Callable[..., FakeAgent]) -> None:
    agent = agent_of()
    add_model()
    early = json.dumps(to_json(agent.report())).encode()
    one_pass()
    replica, revision = Replica.objects.get(), Revision.current()
    assert replica.state == READY

    Node.objects.update(etag="")  # the same report, once more
    assert not one_pass().has_changed
    assert Revision.current() == revision

    agent.state_body = early  # one from before the command
    one_pass()
    assert Replica.objects.get().pk == replica.pk, "it is told again, and nothing else is started"
    assert len(agent.ranks) == 1
    agent.state_body = None
    one_pass()
    assert Replica.objects.get().state == READY
    assert set(put(agent)) == {f"/v1/replicas/{replica.pk}"}
    assert not one_pass().has_changed


# --- whose ----------------------------------------------------------------------------------------


def test_of_two_nodes_at_one_address_the_agents_own_is_believed(agent_of: Callable[..., FakeAgent]) -> None:
    agent = agent_of("node-a")
    register_node("node-b", agent.address, by="ann", door="command")
    add_model(low=2, high=2, tp=2, gpus_per_node=2)
    one_pass()
    assert Replica.objects.get().ranks.get().node.name == "node-a"
    says = Node.objects.get(name="node-b").problem
    assert says == (
        f"The agent at {agent.address} does not accept the token of node-b; if another node has this address "
        f"(manage.py nodes tells), correct one of the two, else have the machine join again (manage.py "
        f"node_join_token)."
    )
    browser = Client()
    browser.force_login(alice())
    assert browser.get("/api/nodes/node-b").json()["problem"] == says
    row = Node.objects.get(name="node-b")
    assert says in html.unescape(text_of(page(browser, f"/admin/nodes/node/{row.pk}/change/")))
    assert says in html.unescape(text_of(page(browser, "/admin/")))


# --- of another age -------------------------------------------------------------------------------


def test_what_an_older_agent_leaves_out_is_unknown_and_excludes_nobody(
    agent_of: Callable[..., FakeAgent], capsys: pytest.CaptureFixture[str]
) -> None:
    agent = agent_of()
    add_model(min_memory_gb=64, min_disk_gb=64)
    one_pass()
    replica = Replica.objects.get()
    assert replica.state == READY, "memory and disk are unknown"
    known = agent.ranks[str(replica.pk)]
    report = to_json(replace(agent.report(), ranks=()))
    least = {"replica": known.replica, "generation": 1, "rank": 0, "state": READY, "port": known.port}
    assert known.launch is not None
    agent.state_body = json.dumps(
        {
            "cluster": report["cluster"],
            "node": report["node"],
            "gpus": [
                {"id": gpu["id"], "index": gpu.get("index", 0), "gpu_class": "sim"} for gpu in report["gpus"]
            ],
            "engines": [{"name": "sim"}],
            "ranks": [{**least, "launch": to_json(known.launch)}],
        }
    ).encode()
    one_pass()
    replica.refresh_from_db()
    rank = replica.ranks.get()
    assert (replica.state, rank.running, rank.waiting, rank.pid) == (READY, None, None, None)
    assert len(put(agent)) == 1
    assert why_of("m").is_as_wanted
    browser = Client()
    browser.force_login(alice())
    shown = browser.get(f"/api/replicas/{replica.pk}").json()["ranks"][0]
    assert (shown["running"], shown["waiting"], shown["pid"]) == (None, None, None)
    node = browser.get("/api/nodes/node-a").json()
    assert (node["memory_total_mib"], node["disk_free_bytes"]) == (None, None)
    call_command("nodes")
    assert "fresh" in capsys.readouterr().out


def test_a_state_that_only_a_newer_agent_knows_is_none_to_send_requests_to(
    agent_of: Callable[..., FakeAgent],
) -> None:
    agent = agent_of()
    add_model()
    one_pass()
    replica = Replica.objects.get()
    agent.become(replica.pk, "warming", reason="It compiles graphs.")
    one_pass()
    replica.refresh_from_db()
    assert (replica.state, replica.reason, replica.wanted) == (STARTING, "It compiles graphs.", "run")
    assert (
        f"replica {str(replica.pk)[:8]} (p) on node-a is starting: It compiles graphs." in why_of("m").amiss
    )
    assert len(put(agent)) == 1
