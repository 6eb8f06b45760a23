"""Whole passes against a real database, and agents that are real on the wire: what is wanted comes about."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models import F
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext

from catalog.models import Model, Profile, Revision
from nodes.actions import cordon, stop_replica
from nodes.models import Claim, Demand, Gateway, Lease, Node, Replica, Unplaced
from nodes.protocol import FAILED, READY, STARTING
from tests.fake_agent import FakeAgent, gpus
from tests.passes import add_model, edit_profile, one_pass, verbs

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_wanted_replica_is_assigned_told_and_ready(agent_of: Callable[..., FakeAgent]) -> None:
    agent = agent_of()
    model = add_model()

    one_pass()

    replica = Replica.objects.get()
    assert (replica.state, replica.wanted, replica.model) == (READY, "run", model)
    assert replica.fingerprint == model.profiles.get().fingerprint
    assert replica.launch["profile"]["gpu_class"] == "sim"
    rank = replica.ranks.get()
    assert (rank.port, rank.pid) == (18001, 4001)
    assert [claim.gpu for claim in rank.claims.all()] == ["GPU-sim-0"]
    told = agent.assignments[str(replica.pk)]
    assert (told.cluster, told.generation, told.fence) == (agent.cluster, 1, Lease.objects.get().token)
    assert told.gpus == ("GPU-sim-0",)
    assert told.launch.fingerprint == replica.fingerprint
    assert replica.revision == Revision.current() > 0
    assert verbs() == ["start", "ready"]
    assert not Unplaced.objects.exists()


def test_a_second_pass_writes_nothing_and_tells_nobody_anything(agent_of: Callable[..., FakeAgent]) -> None:
    agent = agent_of()
    add_model()
    add_model("too-big", tp=8)
    one_pass()
    one_pass()
    commands, revision = agent.commands(), Revision.current()

    with CaptureQueriesContext(
        connection,
    ) as queries:
        report = one_pass()

    assert agent.commands() == commands
    assert agent.statuses[-1] == 304
    assert Revision.current() == revision
    assert not report.has_changed
    writes = [query["sql"] for query in queries if query["sql"].startswith(("INSERT", "UPDATE", "DELETE"))]
    tables = [sql.split('"')[1] for sql in writes]
    assert tables.count("nodes_node") == 1
    assert set(tables) - {"nodes_sample"} == {"nodes_lease", "nodes_node"}  # that one as a minute begins


def test_a_node_that_is_cordoned_while_its_agent_is_asked_gets_nothing(
    agent_of: Callable[..., FakeAgent],
) -> None:
    agent = agent_of()
    add_model()

    def cordon_it() -> None:
        cordon(Node.objects.get(), by="ann", why="new disks", door="admin")
        connection.close()

    agent.before_state = cordon_it
    one_pass()

    assert agent.commands() == []
    assert Unplaced.objects.get().why == "0 of 1 node: 1 cordoned"


def test_the_number_of_queries_does_not_depend_on_the_number_of_replicas(
    agent_of: Callable[..., FakeAgent],
) -> None:
    agent_of(gpus=gpus(12))
    model = add_model()
    counts = []
    for wanted in (1, 12):
        Model.objects.filter(pk=model.pk).update(scaling_min=wanted, scaling_max=wanted)
        one_pass()
        one_pass()
        with CaptureQueriesContext(connection) as queries:
            one_pass()
        counts.append(sum("nodes_sample" not in query["sql"] for query in queries))
    assert counts[0] == counts[1]


def test_a_message_that_never_arrived_is_sent_again(agent_of: Callable[..., FakeAgent]) -> None:
    agent = agent_of(hangs_up=2)  # the client tries once more by itself
    add_model()

    one_pass()
    replica = Replica.objects.get()
    assert replica.state == "pending"
    assert "cannot be reached" in replica.reason

    one_pass()
    replica.refresh_from_db()
    assert replica.state == READY
    assert replica.reason == ""
    assert {method for method, _ in agent.commands()} == {"PUT"}
    assert Replica.objects.count() == 1


def test_an_edited_profile_leaves_the_running_replica_alone(agent_of: Callable[..., FakeAgent]) -> None:
    agent = agent_of()
    model = add_model()
    one_pass()
    before = Replica.objects.values().get()
    commands = agent.commands()

    edit_profile(model, args=["--tpot", "20ms"])
    one_pass()

    assert Replica.objects.values().get() == before
    assert agent.commands() == commands


def test_a_removed_profile_leaves_the_running_replica_alone(agent_of: Callable[..., FakeAgent]) -> None:
    agent_of()
    model = add_model()
    one_pass()
    Profile.objects.create(
        model=model,
        name="q",
        engine="sim",
        gpu_class="sim",
        gpus_per_node=1,
        startup_timeout_ns=1,
        position=1,
    )
    model.profiles.filter(name="p").delete()

    one_pass()

    replica = Replica.objects.get()
    assert (replica.state, replica.wanted, replica.profile) == (READY, "run", None)


def test_a_removed_model_is_drained_and_its_gpus_are_free_again(agent_of: Callable[..., FakeAgent]) -> None:
    agent = agent_of()
    model = add_model()
    one_pass()
    revision = Revision.current()

    model.delete()
    one_pass()

    replica = Replica.objects.get()
    assert (replica.wanted, replica.state) == ("drain", "stopped")
    assert replica.wanted_why == 'model "m" was removed from the catalog'
    assert replica.revision > revision
    assert not Claim.objects.exists()
    assert agent.commands()[-1][0] == "DELETE"
    assert verbs()[-2:] == ["drain", "stopped"]


def test_a_model_that_is_turned_off_stops(agent_of: Callable[..., FakeAgent]) -> None:
    agent_of()
    model = add_model()
    one_pass()
    Model.objects.filter(pk=model.pk).update(scaling_min=0, scaling_max=0)
    one_pass()
    assert Replica.objects.get().wanted_why == "the model is off (max 0)"
    assert Replica.objects.get().state == "stopped"


def test_what_cannot_be_placed_says_why_and_stops_saying_so(agent_of: Callable[..., FakeAgent]) -> None:
    agent_of()
    node_b = agent_of("node-b")
    cordon(Node.objects.get(name="node-b"), by="ann", why="new disks", door="admin")
    model = add_model(tp=4, gpus_per_node=4)

    one_pass()
    unplaced = Unplaced.objects.get()
    assert unplaced.model == model
    assert unplaced.missing == 1
    assert unplaced.why == "0 of 2 nodes: 1 cordoned, 1 lacks 4 free sim"

    edit_profile(model, tp=2, gpus_per_node=2)
    one_pass()
    assert not Unplaced.objects.exists()
    assert not node_b.commands()


def test_without_any_node_the_want_says_so(db: None) -> None:
    add_model()
    one_pass()
    assert Unplaced.objects.get().why == "0 of 0 nodes: none has joined yet; add one with manage.py node_add"


def test_a_failed_engine_is_replaced_after_its_back_off(agent_of: Callable[..., FakeAgent]) -> None:
    agent = agent_of()
    add_model()
    one_pass()
    first = Replica.objects.get()
    agent.become(
        first.pk, FAILED, reason="It was killed by signal 9.", kind="transient", cause="killed", exit_code=-9
    )

    one_pass()
    first.refresh_from_db()
    assert (first.state, first.reason, first.failure_kind, first.cause) == (
        FAILED,
        "It was killed by signal 9.",
        "transient",
        "killed",
    )
    assert first.ranks.get().exit_code == -9
    assert not Claim.objects.exists()
    assert 'profile "p" failed: It was killed by signal 9; next try at' in Unplaced.objects.get().why

    Replica.objects.filter(pk=first.pk).update(state_since=F("state_since") - timedelta(seconds=2))
    one_pass()
    assert Replica.objects.exclude(pk=first.pk).get().state == READY
    assert not Unplaced.objects.exists()


def test_a_wrong_configuration_waits_for_an_edit_or_for_a_person(agent_of: Callable[..., FakeAgent]) -> None:
    agent = agent_of()
    model = add_model()
    one_pass()
    first = Replica.objects.get()
    agent.become(first.pk, FAILED, reason="Unknown option --x.", kind="configuration")
    one_pass()
    Replica.objects.update(state_since=Now() - timedelta(hours=5))
    one_pass()
    assert Replica.objects.count() == 1
    assert (
        f"after an edit, or once the failed replica {str(first.pk)[:8]} is stopped"
        in Unplaced.objects.get().why
    )

    edit_profile(model, args=["--y"])
    one_pass()
    second = Replica.objects.exclude(pk=first.pk).get()
    assert second.state == READY

    agent.become(second.pk, FAILED, reason="Unknown option --y.", kind="configuration")
    one_pass()
    assert Replica.objects.count() == 2
    stop_replica(second, by="ann", why="the node was mended", door="admin")
    one_pass()
    assert Replica.objects.count() == 3


def test_a_stopped_replica_is_replaced_once_it_has_stopped(agent_of: Callable[..., FakeAgent]) -> None:
    agent = agent_of(first_state=STARTING)
    add_model()
    one_pass()
    first = Replica.objects.get()
    agent.become(first.pk, READY)
    one_pass()
    assert stop_replica(first, by="ann", why="take the new profile", door="admin")
    assert not stop_replica(first, by="ann", why="again", door="admin")

    one_pass()
    assert Replica.objects.count() == 1
    assert Unplaced.objects.get().why == "1 replica is stopping first, as the maximum is 1"
    one_pass()
    first.refresh_from_db()
    assert (first.state, first.wanted_why) == ("stopped", "take the new profile")
    assert Replica.objects.exclude(pk=first.pk).get().wanted == "run"
    assert Replica.objects.count() == 2


def test_an_on_demand_model_is_loaded_when_asked_for_and_unloaded_when_idle(
    agent_of: Callable[..., FakeAgent], settings: Any
) -> None:
    settings.LLMGW_IDLE_TIMEOUT = 1_000_000  # of nanoseconds
    agent = agent_of()
    model = add_model(low=0)
    one_pass()
    assert not Replica.objects.exists()

    gateway = Gateway.objects.create()
    Demand.objects.create(gateway=gateway, model=model, waiting=2, asked_at=Now())
    one_pass()
    replica = Replica.objects.get()
    assert replica.wanted_why == "asked for, 2 waiting"

    Demand.objects.update(waiting=0, in_flight=1, asked_at=Now() - timedelta(hours=1))
    Replica.objects.update(state_since=Now() - timedelta(hours=1))
    one_pass()
    assert Replica.objects.get().wanted == "run", "something is in flight"

    Demand.objects.update(in_flight=0)
    agent.become(replica.pk, READY, running=1)
    one_pass()
    assert Replica.objects.get().wanted == "run", "its engine has a request"

    agent.become(replica.pk, READY, running=0)
    Gateway.objects.update(heartbeat_at=Now() - timedelta(minutes=5))
    one_pass()
    assert Replica.objects.get().wanted == "run", "no gateway lives that could tell"

    Gateway.objects.update(heartbeat_at=Now())
    one_pass()
    replica.refresh_from_db()
    assert (replica.wanted, replica.state) == ("drain", READY), "the gateway may still send it requests"
    assert replica.wanted_why == "nobody has asked for it for 1ms"
    one_pass()
    assert {method for method, _ in agent.commands()} == {"PUT"}

    Gateway.objects.update(seen_revision=Revision.current())
    one_pass()
    replica.refresh_from_db()
    assert replica.state == "stopped"
    one_pass()
    assert Replica.objects.count() == 1
