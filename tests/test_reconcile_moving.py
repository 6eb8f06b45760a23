"""Whole passes that move replicas on a person's word, hold back what is too much, or are told to wait."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import IntegrityError
from django.db.models import F
from django.db.models.functions import Now

from catalog.models import Event, Model, Revision
from nodes.actions import (
    allow_held,
    cancel_roll,
    drain_node,
    pause,
    resume,
    roll_model,
    stop_replica,
    uncordon,
)
from nodes.models import (
    Claim,
    Cluster,
    Demand,
    Gateway,
    Held,
    Lease,
    Load,
    Node,
    Rank,
    Replica,
    Roll,
    Unplaced,
)
from nodes.protocol import FAILED, READY, STARTING, STOPPED
from tests.fake_agent import FakeAgent, gpus
from tests.passes import add_model, edit_profile, one_pass, verbs

pytestmark = pytest.mark.django_db(transaction=True)
ANN = {"by": "ann", "door": "command"}


def ready() -> set[str]:
    return {str(pk) for pk in Replica.objects.filter(state=READY, wanted="run").values_list("pk", flat=True)}


# --- draining a node --------------------------------------------------------------------------------


def test_a_drained_node_is_empty_in_the_end_and_the_model_is_served_throughout(
    agent_of: Callable[..., FakeAgent],
) -> None:
    agent_of("node-a")
    add_model()
    one_pass()
    first = Replica.objects.get()
    agent_of("node-b", first_state=STARTING)
    one_pass()
    node = Node.objects.get(name="node-a")
    assert drain_node(node, why="new disks", **ANN)
    assert not drain_node(node, why="again", **ANN)

    one_pass()
    second = Replica.objects.exclude(pk=first.pk).get()
    assert (second.replaces, second.state) == (first.pk, STARTING)
    assert second.wanted_why == f"node-a is draining: in place of replica {str(first.pk)[:8]}"
    assert ready() == {str(first.pk)}


def test_a_replica_leaves_once_its_stand_in_is_ready(agent_of: Callable[..., FakeAgent]) -> None:
    agent_of("node-a")
    add_model()
    one_pass()
    first = Replica.objects.get()
    other = agent_of("node-b", first_state=STARTING)
    drain_node(Node.objects.get(name="node-a"), why="new disks", **ANN)
    one_pass()
    one_pass()
    second = Replica.objects.exclude(pk=first.pk).get()
    other.become(second.pk, READY)

    one_pass()
    first.refresh_from_db()
    assert (first.wanted, first.state) == ("drain", "stopped")
    assert first.wanted_why == f"replica {str(second.pk)[:8]} has taken its place"
    assert ready() == {str(second.pk)}
    assert not Claim.objects.filter(node__name="node-a").exists()
    assert not one_pass().has_changed


def test_what_has_nowhere_to_go_leaves_a_draining_node_and_comes_back(
    agent_of: Callable[..., FakeAgent],
) -> None:
    agent_of()
    add_model()
    one_pass()
    node = Node.objects.get()
    drain_node(node, why="new disks", **ANN)
    one_pass()
    one_pass()
    assert Replica.objects.get().state == "stopped"
    assert Unplaced.objects.get().why == "0 of 1 node: 1 draining"

    assert uncordon(node, **ANN)
    one_pass()
    node.refresh_from_db()
    assert (node.is_draining, node.is_cordoned) == (False, False)
    assert len(ready()) == 1
    assert verbs()[-2:] == ["start", "ready"]


def test_the_database_refuses_a_draining_node_that_is_open(db: None) -> None:
    with pytest.raises(IntegrityError, match="a_draining_node_is_cordoned"):
        Node.objects.create(name="a", address="http://a:1", is_draining=True)


# --- rolling a model --------------------------------------------------------------------------------


@pytest.mark.parametrize("cards", [2, 3], ids=["one leaves first", "one beside them"])
def test_a_roll_replaces_what_is_stale_one_by_one(agent_of: Callable[..., FakeAgent], cards: int) -> None:
    agent_of(gpus=gpus(cards))
    model = add_model(low=2, high=2)
    one_pass()
    before = ready()
    edit_profile(model, args=["--tpot", "20ms"])
    one_pass()
    assert ready() == before

    roll = roll_model(model, why="take the new arguments", **ANN)
    assert roll.keep == 2
    least = 2
    for _ in range(12):
        one_pass()
        least = min(least, len(ready()))
    assert not Roll.objects.exists()
    assert least == (1 if cards == 2 else 2)
    assert len(ready()) == 2
    assert not ready() & before
    assert "rolled" in verbs()


def test_a_roll_stops_at_the_first_replacement_that_fails_and_says_so(
    agent_of: Callable[..., FakeAgent],
) -> None:
    agent = agent_of(gpus=gpus(4))
    model = add_model(low=2, high=2)
    one_pass()
    before = ready()
    edit_profile(model, args=["--bad"])
    roll_model(model, why="", **ANN)
    agent.first_state = STARTING
    one_pass()
    new = Replica.objects.exclude(pk__in=before).get()
    agent.become(new.pk, FAILED, reason="Unknown option --bad.", kind="configuration")

    for _ in range(3):
        one_pass()
    assert ready() == before
    assert Replica.objects.count() == 3
    says = (
        f'The roll of "m" stopped: its replacement {str(new.pk)[:8]} failed: Unknown option --bad. '
        "Put it right, then roll again."
    )
    assert Roll.objects.get().halted == says
    assert Event.objects.get(verb="roll halted").why == says
    assert not one_pass().has_changed

    assert cancel_roll(model, **ANN)
    assert not cancel_roll(model, **ANN)
    assert not Roll.objects.exists()


# --- too much at once -------------------------------------------------------------------------------


def test_what_would_end_too_much_waits_for_a_yes(agent_of: Callable[..., FakeAgent]) -> None:
    agent = agent_of(gpus=gpus(5))
    model = add_model(low=5, high=5)
    one_pass()
    Model.objects.filter(pk=model.pk).update(scaling_min=0, scaling_max=0)
    for _ in range(2):
        one_pass()
    assert len(ready()) == 5
    assert Held.objects.count() == 5
    assert {(held.wanted, held.why) for held in Held.objects.all()} == {("drain", "the model is off (max 0)")}
    says = Cluster.this().alarm
    assert says.startswith("5 of 5 ready replicas would stop at once (the model is off (max 0));")
    assert Event.objects.get(verb="alarm").why == says
    assert {method for method, _ in agent.commands()} == {"PUT"}

    assert allow_held(why="yes, all of it", **ANN) == 5
    assert allow_held(why="again", **ANN) == 0
    one_pass()
    assert {row.state for row in Replica.objects.all()} == {"stopped"}
    assert not Held.objects.exists()
    assert Cluster.this().alarm == ""
    assert Event.objects.filter(verb="alarm over").exists()


def test_what_was_held_is_forgotten_once_the_catalog_is_put_right(agent_of: Callable[..., FakeAgent]) -> None:
    agent_of(gpus=gpus(5))
    model = add_model(low=5, high=5)
    one_pass()
    Model.objects.filter(pk=model.pk).update(scaling_min=0, scaling_max=0)
    one_pass()
    Model.objects.filter(pk=model.pk).update(scaling_min=5, scaling_max=5)
    one_pass()
    assert not Held.objects.exists()
    assert Cluster.this().alarm == ""
    assert len(ready()) == 5


# --- waiting ----------------------------------------------------------------------------------------


def test_a_paused_reconciler_looks_and_does_nothing(agent_of: Callable[..., FakeAgent]) -> None:
    agent = agent_of()
    model = add_model()
    one_pass()
    replica = Replica.objects.get()
    assert pause(why="moving the database", **ANN)
    assert not pause(why="again", **ANN)

    stop_replica(replica, why="", **ANN)
    Model.objects.filter(pk=model.pk).update(scaling_min=2, scaling_max=2)
    agent.become(replica.pk, FAILED, reason="It was killed by signal 9.", kind="transient")
    report = one_pass()
    replica.refresh_from_db()
    assert replica.state == FAILED, "it still looks"
    assert report.plan.start, "and says what it would do"
    assert Replica.objects.count() == 1
    assert {method for method, _ in agent.commands()} == {"PUT"}

    assert resume(**ANN)
    assert not resume(**ANN)
    one_pass()
    assert len(ready()) == 2


# --- making room, and by load -----------------------------------------------------------------------


def test_an_idle_replica_makes_room_for_a_model_that_is_asked_for(agent_of: Callable[..., FakeAgent]) -> None:
    agent_of(gpus=gpus(1))
    idle, asked = add_model("idle", low=0), add_model("asked", low=0)
    gateway = Gateway.objects.create()
    Demand.objects.create(gateway=gateway, model=idle, asked_at=Now(), waiting=1)
    one_pass()
    first = Replica.objects.get()
    Demand.objects.update(waiting=0, asked_at=Now() - timedelta(minutes=5))
    Replica.objects.update(state_since=Now() - timedelta(minutes=6))
    Demand.objects.create(gateway=gateway, model=asked, asked_at=Now(), waiting=1)

    one_pass()
    first.refresh_from_db()
    assert first.wanted == "drain"
    assert first.wanted_why.endswith('model "asked" needs its room')
    assert Unplaced.objects.get().why == "0 of 1 node: 1 lacks 1 free sim; 1 idle replica is evicted"
    assert "evict" in verbs()

    Gateway.objects.update(seen_revision=Revision.current())
    one_pass()
    one_pass()
    assert Replica.objects.exclude(pk=first.pk).get().model == asked
    assert not Unplaced.objects.exists()


def test_requests_that_wait_for_a_while_have_one_more_started(agent_of: Callable[..., FakeAgent]) -> None:
    agent = agent_of()
    add_model(low=1, high=2)
    one_pass()
    first = Replica.objects.get()
    agent.become(first.pk, READY, running=4, waiting=3)
    one_pass()
    load = Load.objects.get()
    assert (load.level, load.replicas) == ("pressed", 1)
    assert Replica.objects.count() == 1

    Load.objects.update(since=F("since") - timedelta(seconds=20))
    one_pass()
    assert len(ready()) == 2

    second = Replica.objects.exclude(pk=first.pk).get()
    agent.become(first.pk, READY, running=1, waiting=0)
    one_pass()
    assert not Load.objects.exists(), "the other does not tell"
    agent.become(second.pk, READY, running=0, waiting=0)
    one_pass()
    assert (Load.objects.get().level, Load.objects.get().replicas) == ("slack", 2)
    assert not one_pass().has_changed


# --- gangs ------------------------------------------------------------------------------------------


def test_all_ranks_of_a_gang_are_assigned_at_once_and_rank_0_is_told_first(
    agent_of: Callable[..., FakeAgent],
) -> None:
    agents = [agent_of(name, fabric="ib-1", runs_gangs=True) for name in ("node-a", "node-b")]
    add_model(nodes=2, tp=2, gpus_per_node=1)
    one_pass()
    replica = Replica.objects.get()
    assert replica.state == "pending"
    assert [(rank.rank, rank.node.name) for rank in Rank.objects.order_by("rank")] == [
        (0, "node-a"),
        (1, "node-b"),
    ]
    assert Claim.objects.count() == 2
    assert [len(agent.assignments) for agent in agents] == [1, 0]

    one_pass()
    replica.refresh_from_db()
    assert replica.state == READY
    told = [agent.assignments[str(replica.pk)] for agent in agents]
    assert [(each.rank, each.meeting) for each in told] == [(0, ""), (1, "127.0.0.1:19001")]
    commands = [len(agent.commands()) for agent in agents]
    one_pass()
    assert [len(agent.commands()) for agent in agents] == commands


def test_a_gang_that_loses_a_part_ends_whole_before_another_is_tried(
    agent_of: Callable[..., FakeAgent],
) -> None:
    agent_a, agent_b = (
        agent_of(name, fabric="ib-1", runs_gangs=True, gpus=gpus(1)) for name in ("node-a", "node-b")
    )
    add_model(nodes=2, tp=2, gpus_per_node=1)
    one_pass()
    one_pass()
    first = Replica.objects.get()
    agent_a.stops_slowly = True
    agent_b.become(first.pk, FAILED, reason="Its GPU fell off.", cause="gpu_lost", kind="transient")
    one_pass()
    first.refresh_from_db()
    assert (first.state, first.reason, first.cause) == ("draining", "Its GPU fell off.", "gpu_lost")
    assert agent_a.commands()[-1] == ("DELETE", f"/v1/replicas/{first.pk}")
    assert agent_b.commands()[-1][0] == "PUT"
    one_pass()
    assert Replica.objects.count() == 1
    assert Claim.objects.count() == 2, "what is left of it holds its GPUs"

    # That rank 0 ends of it as well is not the cause.
    agent_a.become(first.pk, FAILED, reason="It lost a rank.", cause="nccl", kind="node")
    one_pass()
    first.refresh_from_db()
    assert (first.state, first.reason, first.cause, first.failure_kind) == (
        "failed",
        "Its GPU fell off.",
        "gpu_lost",
        "transient",
    )
    assert not Claim.objects.filter(rank__replica=first).exists()


def test_a_gang_is_drained_at_rank_0_and_the_others_stop_after_it(agent_of: Callable[..., FakeAgent]) -> None:
    agent_a, agent_b = (agent_of(name, fabric="ib-1", runs_gangs=True) for name in ("node-a", "node-b"))
    model = add_model(nodes=2, tp=2, gpus_per_node=1)
    one_pass()
    one_pass()
    replica = Replica.objects.get()
    agent_a.stops_slowly = True
    model.scaling_min = model.scaling_max = 0
    model.save()
    one_pass()
    replica.refresh_from_db()
    assert (replica.wanted, replica.state) == ("drain", "draining")
    assert agent_a.commands()[-1][0] == "DELETE"
    one_pass()
    assert agent_b.commands()[-1][0] == "PUT", "rank 0 still has requests"
    agent_a.become(replica.pk, STOPPED)
    one_pass()
    assert agent_b.commands()[-1][0] == "DELETE"
    one_pass()
    replica.refresh_from_db()
    assert replica.state == "stopped"


def test_agents_that_run_whole_replicas_are_told_of_no_gang(agent_of: Callable[..., FakeAgent]) -> None:
    agents = [agent_of(name, fabric="ib-1") for name in ("node-a", "node-b")]
    add_model(nodes=2, tp=2, gpus_per_node=1)
    one_pass()
    assert not any(agent.commands() for agent in agents)
    assert Unplaced.objects.get().why == (
        "0 of 2 nodes: 2 without an agent that runs a part of a replica (set nodes to 1)"
    )


def test_what_is_left_of_a_gang_makes_room_for_its_replacement(
    agent_of: Callable[..., FakeAgent], settings: Any
) -> None:
    settings.LLMGW_SUSPECT_AFTER_S = settings.LLMGW_LOST_AFTER_S = 60
    has = {"fabric": "ib-1", "runs_gangs": True, "gpus": gpus(1)}
    agent_a, agent_b = agent_of("node-a", **has), agent_of("node-b", **has)
    add_model(nodes=2, tp=2, gpus_per_node=1)
    one_pass()
    one_pass()
    first = Replica.objects.get()
    agent_of("node-c", **has)
    one_pass()
    agent_b.is_deaf = True
    settings.LLMGW_SUSPECT_AFTER_S = settings.LLMGW_LOST_AFTER_S = 0.000001
    Lease.objects.update(expires_at=Now() + timedelta(seconds=1))
    one_pass()
    first.refresh_from_db()
    assert (first.state, first.wanted) == ("lost", "stop")
    assert first.wanted_why == "its part on node-b is lost, and with it the whole"

    assert agent_a.commands()[-1] == ("DELETE", f"/v1/replicas/{first.pk}")
    Lease.objects.update(expires_at=Now() + timedelta(seconds=1))
    one_pass()
    second = Replica.objects.exclude(pk=first.pk).get()
    assert {rank.node.name for rank in second.ranks.all()} == {"node-a", "node-c"}
    assert [claim.node.name for claim in Claim.objects.filter(rank__replica=first)] == ["node-b"]
