"""Agents that were cloned, or brought back from a copy: one of a node is heard, and it is said loudly."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
from django.conf import settings
from django.db.models.functions import Now

from catalog.models import Event
from nodes.instances import Instance, instance_of, restored_says, second_says
from nodes.models import Node, Rank, Replica
from nodes.protocol import READY, StateReport
from tests.fake_agent import FakeAgent
from tests.passes import add_model, one_pass, verbs

A, B, C = "instance-a", "instance-b", "instance-c"
OWN, SECOND, RESTORED = Instance


def report(instance: str = "", *follows: str, boot: str = "boot-1") -> StateReport:
    return StateReport("cluster", "node", instance=instance, follows=follows, boot_id=boot)


INSTANCES = {
    "nobody was heard before": (report(A), None, 1, OWN),
    "the same again": (report(A), report(A), 1, OWN),
    "the next after a restart": (report(B, A), report(A), 1, OWN),
    "the next but one": (report(C, B, A), report(A), 1, OWN),
    "after a reboot": (report(B, A, boot="boot-2"), report(A), 1, OWN),
    "its state was lost": (report(B), report(A), 1, OWN),
    "one that does not tell who it is": (report(), report(A), 1, OWN),
    "after one that did not tell": (report(B, C), report(), 1, OWN),
    "the first again, after its clone was heard": (report(A), report(B, A, boot="boot-2"), 1, SECOND),
    "another line of the same family": (report(C, A), report(B, A), 1, SECOND),
    "a copy of the identity on another machine": (report(B, boot="boot-2"), report(A), 1, SECOND),
    "an old copy where the last is long gone": (report(C, A), report(B, A), 90, RESTORED),
    "a new machine where the last is long gone": (report(B, boot="boot-2"), report(A), 90, RESTORED),
    "an old copy, and nobody knows for how long": (report(C, A), report(B, A), None, RESTORED),
}


@pytest.mark.one_database
@pytest.mark.parametrize(("told", "known", "silent_s", "found"), INSTANCES.values(), ids=INSTANCES)
def test_an_agent_is_the_nodes_own_or_another(
    told: StateReport, known: StateReport | None, silent_s: float | None, found: Instance
) -> None:
    silent_for = None if silent_s is None else timedelta(seconds=silent_s)
    assert instance_of(told, known, silent_for, lost_after_s=90) is found


def be(agent: FakeAgent, instance: str, *follows: str, boot: str) -> None:
    """Whoever answers at the address from now on, with nothing on it but what it is told."""
    agent.instance, agent.follows, agent.boot_id = instance, follows, boot
    agent.ranks.clear()


@pytest.mark.django_db(transaction=True)
def test_of_two_agents_of_a_node_one_is_heard_and_the_other_is_told_of(
    agent_of: Callable[..., FakeAgent],
) -> None:
    agent = agent_of(instance=A, boot_id="boot-1")
    add_model(low=2, high=2)
    one_pass()
    one_pass()
    kept = dict(agent.ranks)
    before = list(Rank.objects.order_by("pk").values())

    be(agent, C, boot="boot-2")  # of a machine that was made from a copy, and answers at this address
    told = len(agent.commands())
    for _ in range(3):
        one_pass()
        node = Node.objects.get()
        assert node.problem == second_says("node-a", agent.address)
    assert list(Rank.objects.order_by("pk").values()) == before, "it changes nothing of what is known"
    assert len(agent.commands()) == told, "and is told nothing"

    be(agent, A, boot="boot-1")
    agent.ranks.update(kept)
    one_pass()
    assert Node.objects.get().problem == second_says("node-a", agent.address), "it may still be there"
    assert set(Replica.objects.values_list("state", flat=True)) == {READY}
    assert verbs().count("second agent") == 1, "the first time"
    assert Event.objects.get(verb="second agent").subject == "node-a"

    Node.objects.update(rival_at=Now() - timedelta(seconds=settings.LLMGW_LOST_AFTER_S))
    one_pass()
    assert Node.objects.get().problem == ""
    assert not one_pass().has_changed


@pytest.mark.django_db(transaction=True)
def test_an_agent_from_an_old_copy_is_heard_once_the_last_is_long_gone(
    agent_of: Callable[..., FakeAgent],
) -> None:
    agent = agent_of(instance=B, follows=(A,), boot_id="boot-1")
    add_model()
    one_pass()
    one_pass()
    be(agent, C, A, boot="boot-1")
    Node.objects.update(seen_at=Now() - timedelta(seconds=settings.LLMGW_LOST_AFTER_S + 1))
    one_pass()
    assert Node.objects.get().problem == ""
    assert Event.objects.get(verb="restored agent").why == restored_says("node-a")
    one_pass()
    assert Replica.objects.get().state == READY, "what it has forgotten is told to it again"
    assert agent.ranks, "it runs again"
    one_pass()
    assert not one_pass().has_changed


@pytest.mark.django_db(transaction=True)
def test_a_command_reaches_the_agent_alone_that_was_looked_at(agent_of: Callable[..., FakeAgent]) -> None:
    agent = agent_of(instance=A)
    one_pass()
    add_model()
    report_of_a = agent.report

    def then_another() -> StateReport:
        told = report_of_a()  # is on its way, and another takes its place
        agent.instance, agent.follows = B, (A,)
        return told

    agent.report = then_another  # type: ignore[method-assign]  # the far side of the wire
    one_pass()
    assert 409 in agent.statuses
    assert not agent.ranks
    assert Replica.objects.get().state == "pending", "nothing has failed"
    agent.report = report_of_a  # type: ignore[method-assign]
    one_pass()
    one_pass()
    assert Replica.objects.get().state == READY
