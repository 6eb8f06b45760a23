"""What the reconciler does while wires, agents and databases are away, slow, or older than they should be."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection
from django.db.models.functions import Now
from django.test import Client

from catalog.models import Event
from nodes.actions import register_node
from nodes.models import Claim, Cluster, Lease, Node, Replica
from nodes.outlook import why_of
from nodes.protocol import READY
from nodes.reconcile import run_pass
from tests.cast import alice
from tests.fake_agent import FakeAgent, joining
from tests.fault_proxy import FaultProxy
from tests.pages import page, text_of
from tests.passes import HOLDER, add_model, one_pass

pytestmark = pytest.mark.django_db(transaction=True)


def make_silence_count(settings: Any) -> None:
    """In the next pass, whoever does not answer has been silent, and listened to, for long enough."""
    settings.LLMGW_SUSPECT_AFTER_S = settings.LLMGW_LOST_AFTER_S = 0.000001
    Lease.objects.update(expires_at=Now() + timedelta(seconds=1))


@pytest.fixture
def wire(agent_of: Callable[..., FakeAgent]) -> Any:
    """Between the control plane and node-a. Its agent is at the other end."""
    agent = agent_of("node-a")
    with FaultProxy(int(agent.address.rpartition(":")[2])).running() as wire:
        register_node("node-a", wire.url, by="ann", door="command")
        yield wire


# --- the wire between the control plane and an agent ----------------------------------------------


@pytest.mark.parametrize(
    ("delay_s", "bytes_at_a_time"),
    [
        pytest.param(2, 1 << 16, id="two seconds late"),
        pytest.param(0.1, 100, id="a kilobyte a second"),
        pytest.param(0.02, 1, id="drop by drop"),
    ],
)
def test_a_slow_agent_has_one_deadline_and_others_are_as_fast_as_ever(
    wire: FaultProxy, agent_of: Callable[..., FakeAgent], settings: Any, delay_s: float, bytes_at_a_time: int
) -> None:
    settings.LLMGW_AGENT_TIMEOUT_S = 0.5
    wire.back.delay_s, wire.back.bytes_at_a_time = delay_s, bytes_at_a_time
    agent_of("node-b")
    add_model(low=2, high=2)
    begun = time.monotonic()
    one_pass()
    assert time.monotonic() - begun < 1.8, "of which the deadline is half a second"
    assert {replica.ranks.get().node.name for replica in Replica.objects.all()} == {"node-b"}
    one_pass()  # on a busy machine a fast one may have missed the first deadline
    assert {replica.state for replica in Replica.objects.all()} == {READY}

    # Every door says that, and how old what is known of it is.
    says = f"The agent of node-a at {wire.url} did not answer within 0.5 s"
    browser = Client()
    browser.force_login(alice())
    shown = browser.get("/api/nodes/node-a").json()
    assert shown["problem"].startswith(says)
    assert (shown["state"], shown["age_s"]) == ("never", None)
    assert says in text_of(page(browser, f"/admin/nodes/node/{Node.objects.get(name='node-a').pk}/change/"))
    wire.back.delay_s, wire.back.bytes_at_a_time = 0, 1 << 16
    one_pass()
    assert browser.get("/api/nodes/node-a").json()["state"] == "fresh"


@pytest.mark.parametrize("way", ["both ways", "its answers alone"])
def test_a_partition_makes_a_node_suspect_then_lost_and_ends_nothing(
    wire: FaultProxy, agent_of: Callable[..., FakeAgent], settings: Any, way: str
) -> None:
    settings.LLMGW_AGENT_TIMEOUT_S = 0.3
    add_model()
    one_pass()
    first = Replica.objects.get()
    agent_of("node-b")
    one_pass()
    if way == "both ways":
        wire.refuse()
    else:
        wire.hold(wire.back)
    settings.LLMGW_SUSPECT_AFTER_S = 0.000001
    assert not one_pass().has_changed, "a suspect is routed to, and nothing is done about it"
    make_silence_count(settings)
    one_pass()
    first.refresh_from_db()
    assert (first.state, first.wanted) == ("lost", "run")
    assert Claim.objects.filter(rank__replica=first).exists(), "its engine may still run"
    second = Replica.objects.exclude(pk=first.pk).get()
    assert (second.state, second.ranks.get().node.name) == (READY, "node-b")

    settings.LLMGW_SUSPECT_AFTER_S = settings.LLMGW_LOST_AFTER_S = 60
    wire.accept()
    wire.release()
    one_pass()
    one_pass()
    assert Replica.objects.filter(state=READY, wanted="run").count() == 1
    assert not Replica.objects.filter(state="lost").exists()


def test_when_most_nodes_fall_silent_at_once_one_alarm_is_raised_and_nothing_moves(settings: Any) -> None:
    with ExitStack() as stack:
        agents = [joining(stack)(f"node-{letter}") for letter in "abcde"]
        add_model(low=5, high=5)
        one_pass()
        before = list(Replica.objects.order_by("pk").values("pk", "state", "wanted"))
        for agent in agents[:3]:
            agent.is_deaf = True
        for _ in range(3):
            make_silence_count(settings)
            one_pass()
        assert list(Replica.objects.order_by("pk").values("pk", "state", "wanted")) == before
        says = Cluster.this().alarm
        assert says.startswith("3 of 5 nodes are silent at once, which looks like the network of the control")
        assert Event.objects.get(verb="alarm").why == says
        browser = Client()
        browser.force_login(alice())
        assert browser.get("/api/reconciler").json()["alarm"] == says
        assert says in text_of(page(browser, "/admin/"))

        agents[0].is_deaf = False
        make_silence_count(settings)
        one_pass()
        assert Cluster.this().alarm == ""
        assert Event.objects.filter(verb="alarm over").count() == 1
        lost = {replica.ranks.get().node.name for replica in Replica.objects.filter(state="lost")}
        assert lost == {"node-b", "node-c"}, "two of five are no network's fault"


# --- the database ---------------------------------------------------------------------------------


def test_a_database_that_was_away_is_given_time_before_anyone_is_lost(
    agent_of: Callable[..., FakeAgent], settings: Any, tmp_path: Path
) -> None:
    """Cut off and refused, as clients of one see it that restarts or fails over."""
    if connection.vendor != "postgresql":
        pytest.skip("SQLite is a file, and does not restart")
    agent = agent_of()
    add_model()
    one_pass()
    replica = Replica.objects.get()
    direct, name = connection.settings_dict["HOST"], ".s.PGSQL.5432"
    with FaultProxy(f"{direct}/{name}", path=str(tmp_path / name)).running() as wire:
        connection.close()
        connection.settings_dict["HOST"] = str(tmp_path)
        try:
            one_pass()
            wire.refuse()
            for _ in range(2):
                assert run_pass(HOLDER) is None
                connection.close()  # as a worker does after each task
            wire.accept()

            # It was away for a minute and a half, and the agent is too, now.
            agent.is_deaf = True
            long_ago = Now() - timedelta(seconds=settings.LLMGW_LOST_AFTER_S + 1)
            Lease.objects.update(expires_at=long_ago)
            Node.objects.update(seen_at=long_ago)
            for _ in range(2):
                one_pass()
                replica.refresh_from_db()
                assert replica.state == READY, "nobody was asked meanwhile"
            make_silence_count(settings)
            one_pass()
            replica.refresh_from_db()
            assert replica.state == "lost", "now it was, for long enough"
        finally:
            connection.close()
            connection.settings_dict["HOST"] = direct


def test_a_database_restored_from_a_backup_says_what_to_do_and_is_obeyed_again(
    agent_of: Callable[..., FakeAgent],
) -> None:
    agent = agent_of()
    agent.fence = 90_000
    add_model()
    one_pass()
    one_pass()
    replica = Replica.objects.get()
    token = Lease.objects.get().token
    assert replica.state == "pending"
    assert replica.reason == (
        f"The command is older ({token}) than one obeyed here (90000). If this database was restored from "
        "a backup, manage.py reconcile_outrank has it obeyed again; if it was not, another control plane "
        "drives node-a: stop one of the two."
    )
    assert any(replica.reason.rstrip(".") in each for each in why_of("m").amiss)

    call_command("reconcile_outrank", "--why", "the disk was replaced")
    assert Event.objects.get(verb="outrank").why == "the disk was replaced"
    one_pass()
    replica.refresh_from_db()
    assert (replica.state, replica.reason) == (READY, "")
    assert agent.fence == Lease.objects.get().token > 90_000
    assert not one_pass().has_changed
