"""Whole passes against a real database, and agents that are real on the wire."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection
from django.db.models import F
from django.db.models.functions import Now
from django.db.models.signals import pre_save
from django.test.utils import CaptureQueriesContext

from catalog.models import Event, Model, Name, Profile, Revision
from catalog.spec import ModelSpec
from nodes import lease
from nodes.actions import cordon, stop_replica
from nodes.models import Claim, Demand, Gateway, Lease, Node, Orphan, Rank, Replica, Unplaced
from nodes.protocol import DRAINING, FAILED, READY, STARTING, ClusterKey, Launch, RankReport
from nodes.reconcile import PassReport, run_pass
from tests.fake_agent import FakeAgent, gpus, joining

pytestmark = pytest.mark.django_db(transaction=True)

HOLDER = "here:1:1"


@pytest.fixture
def agent_of() -> Iterator[Callable[..., FakeAgent]]:
    with ExitStack() as stack:
        yield joining(stack)


def add_model(name: str = "m", *, low: int = 1, high: int = 1, **profile: Any) -> Model:
    """Rows as the catalog's verbs write them."""
    spec = ModelSpec.load(
        {
            "name": name,
            "source": "org/m",
            "profiles": [{"name": "p", "engine": "sim", "gpu_class": "sim", "tp": 1} | profile],
            "scaling": {"min": low, "max": high},
        }
    )
    row = Model.objects.create(name=name, source="org/m", scaling_min=low, scaling_max=high)
    Name.objects.create(name=name, model=row, is_canonical=True)
    for each in spec.profiles:
        values = each.as_dict()
        values["startup_timeout_ns"] = values.pop("startup_timeout")
        Profile.objects.create(model=row, fingerprint=each.fingerprint(), **values)
    return row


def edit_profile(model: Model, **columns: Any) -> None:
    profile = model.profiles.get()
    for name, value in columns.items():
        setattr(profile, name, value)
    profile.save()
    spec = Model.objects.get(pk=model.pk).spec.profiles[0]
    Profile.objects.filter(pk=profile.pk).update(fingerprint=spec.fingerprint())


def one_pass() -> PassReport:
    report = run_pass(HOLDER)
    assert report is not None
    return report


def verbs() -> list[str]:
    return list(Event.objects.filter(door="loop").order_by("id").values_list("verb", flat=True))


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
    assert set(tables) == {"nodes_lease", "nodes_node"}


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
        counts.append(len(queries))
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
    assert (replica.wanted, replica.state) == ("drain", "stopped")
    assert replica.wanted_why == "nobody has asked for it for 1ms"
    one_pass()
    assert Replica.objects.count() == 1


def stray(agent: FakeAgent, **columns: Any) -> RankReport:
    """An engine that the agent runs and this database does not know."""
    launch = Launch(
        "m", "org/m", {"name": "p", "engine": "sim", "gpu_class": "sim"}, fingerprint="0123456789abcdef"
    )
    report = RankReport(
        str(uuid.uuid4()), 3, 0, READY, port=18500, pid=77, gpus=("GPU-sim-1",), launch=launch
    )
    report = replace(report, **columns)
    agent.ranks[report.replica] = report
    return report


def test_an_engine_of_a_known_model_is_adopted(agent_of: Callable[..., FakeAgent]) -> None:
    agent = agent_of()
    model = add_model()
    report = stray(agent)

    one_pass()

    replica = Replica.objects.get()
    assert str(replica.pk) == report.replica
    assert (replica.state, replica.is_adopted, replica.generation) == (READY, True, 3)
    assert (replica.fingerprint, replica.profile) == ("0123456789abcdef", model.profiles.get())
    assert Claim.objects.get().gpu == "GPU-sim-1"
    assert Rank.objects.get().port == 18500
    assert not agent.commands()
    assert not Orphan.objects.exists()
    assert verbs() == ["adopt", "ready"]


def test_an_engine_of_an_older_agent_is_adopted_without_a_fingerprint(
    agent_of: Callable[..., FakeAgent],
) -> None:
    agent = agent_of()
    add_model()
    stray(agent, launch=Launch("m", "org/m", {"name": "p"}))
    one_pass()
    assert Replica.objects.get().fingerprint == ""


@pytest.mark.parametrize(
    ("launch", "why"),
    [
        pytest.param(None, "its agent does not say what it was started from", id="without a launch"),
        pytest.param(
            Launch("x", "org/m", {"name": "p"}), 'model "x" is not in the catalog', id="of no model"
        ),
        pytest.param(Launch("m", "org/m", {"name": "x"}), 'model "m" has no profile "x"', id="of no profile"),
    ],
)
def test_an_engine_nobody_knows_is_shown_left_running_and_counted(
    agent_of: Callable[..., FakeAgent], launch: Launch | None, why: str
) -> None:
    agent = agent_of()
    add_model(tp=2, gpus_per_node=2)
    report = stray(agent, launch=launch)

    for _ in range(2):
        one_pass()
        orphan = Orphan.objects.get()
        assert (str(orphan.replica), orphan.why) == (report.replica, f"{why}; it is left running")
        assert orphan.gpus == ["GPU-sim-1"]
        assert Unplaced.objects.get().why == "0 of 1 node: 1 lacks 2 free sim"
    assert not agent.commands()

    del agent.ranks[report.replica]
    one_pass()
    assert not Orphan.objects.exists()
    assert not Unplaced.objects.exists()


def test_an_orphan_is_adopted_once_its_model_is_there(agent_of: Callable[..., FakeAgent]) -> None:
    agent = agent_of()
    stray(agent)
    one_pass()
    assert Orphan.objects.exists()
    add_model()
    one_pass()
    assert not Orphan.objects.exists()
    assert Replica.objects.get().is_adopted


def test_an_engine_whose_replica_has_ended_by_our_record_is_stopped(
    agent_of: Callable[..., FakeAgent],
) -> None:
    agent = agent_of()
    model = add_model()
    report = stray(agent)
    Replica.objects.create(pk=report.replica, model=model, launch={}, state="stopped")
    one_pass()
    assert ("DELETE", f"/v1/replicas/{report.replica}") in agent.commands()
    assert not Orphan.objects.exists()


def test_an_agent_that_forgot_its_replica_is_told_again(agent_of: Callable[..., FakeAgent]) -> None:
    agent = agent_of()
    add_model()
    one_pass()
    agent.ranks.clear()
    one_pass()
    assert [method for method, _ in agent.commands()] == ["PUT", "PUT"]
    assert Replica.objects.get().state == READY


@pytest.mark.parametrize(
    ("body", "says"),
    [
        pytest.param(b"<html>hello</html>", "sends no JSON", id="a page"),
        pytest.param(b'{"cluster": 7, "node": "x"}', "StateReport.cluster must be a text", id="a wrong type"),
        pytest.param(b"[" * 100_000, "sends no JSON", id="a thousand brackets"),
        pytest.param(b'{"cluster": "c", "node": "n"}', "serves another cluster", id="another cluster's"),
        pytest.param(b"1" * (9 << 20), "longer than", id="nine megabytes"),
        pytest.param(b'{"cluster": NaN}', "sends no JSON", id="a number that is none"),
    ],
)
def test_an_agent_that_talks_nonsense_does_not_stop_the_others(
    agent_of: Callable[..., FakeAgent], body: bytes, says: str
) -> None:
    agent_of("node-a", state_body=body)
    agent_of("node-b")
    add_model()
    one_pass()
    assert says in Node.objects.get(name="node-a").problem
    assert Replica.objects.get().ranks.get().node.name == "node-b"
    assert Replica.objects.get().state == READY


def ranks_of(*reports: RankReport) -> dict[str, Any]:
    return {"ranks": {report.replica: report for report in reports}}


def a_rank(**columns: Any) -> RankReport:
    return replace(RankReport(str(uuid.uuid4()), 1, 0, READY, port=18500, pid=77), **columns)


@pytest.mark.parametrize(
    ("lies", "says"),
    [
        pytest.param(
            ranks_of(*(a_rank() for _ in range(10_000))), "it has 10000 ranks", id="ten thousand replicas"
        ),
        pytest.param({"gpus": gpus(10_000)}, "it has 10000 gpus", id="ten thousand GPUs"),
        pytest.param(
            ranks_of(a_rank(generation=2**40)), "whole numbers from 0", id="a generation no column holds"
        ),
        pytest.param(ranks_of(a_rank(generation=-1)), "whole numbers from 0", id="a generation below zero"),
        pytest.param(ranks_of(a_rank(rank=2**40)), "whole numbers from 0", id="a rank no column holds"),
        pytest.param(ranks_of(a_rank(rank=-1)), "whole numbers from 0", id="a rank below zero"),
        pytest.param({"gpus": gpus(1) * 2}, "a GPU is in it twice", id="one GPU twice"),
        pytest.param({"gpus": gpus(1, "g" * 100)}, "1 to 100 characters", id="a GPU with an endless id"),
        pytest.param(
            ranks_of(a_rank(gpus=("g", "g"))), "a GPU is in it twice", id="a rank holds one GPU twice"
        ),
        pytest.param(
            ranks_of(a_rank(launch=Launch("m", "org/m", {"args": json.loads("[" * 400 + "]" * 400)}))),
            "sends no JSON",
            id="lists within lists",
        ),
    ],
)
def test_an_agent_that_reports_what_no_machine_has_does_not_stop_the_others(
    agent_of: Callable[..., FakeAgent], lies: dict[str, Any], says: str
) -> None:
    agent_of("node-a", **lies)
    agent_of("node-b")
    add_model()
    one_pass()
    assert says in Node.objects.get(name="node-a").problem
    assert Replica.objects.get().ranks.get().node.name == "node-b"
    assert not Orphan.objects.exists()
    assert not one_pass().has_changed


@pytest.mark.parametrize(
    "etag", [b'"\xff\xfe"', b'"\xc3\xa9"', b"x" * 4000], ids=["no text", "not ASCII", "long"]
)
def test_an_etag_may_be_anything(agent_of: Callable[..., FakeAgent], etag: bytes) -> None:
    agent = agent_of(state_etag=etag)
    add_model()
    one_pass()
    one_pass()
    assert Replica.objects.get().state == READY
    assert Node.objects.get().problem == ""
    assert not one_pass().has_changed
    assert len(agent.commands()) == 1


def test_an_answer_to_a_command_may_be_nonsense(agent_of: Callable[..., FakeAgent]) -> None:
    """It was carried out all the same, and the next report tells."""
    agent = agent_of(lies_in_answers=True)
    agent_of("node-b")
    add_model(low=3, high=3)
    one_pass()
    assert set(Replica.objects.values_list("state", "generation")) == {("pending", 1), (READY, 1)}
    one_pass()
    assert {replica.state for replica in Replica.objects.all()} == {READY}
    assert len(agent.commands()) == 2


def test_a_database_that_is_away_costs_that_pass_only(
    agent_of: Callable[..., FakeAgent], caplog: pytest.LogCaptureFixture
) -> None:
    agent_of()
    add_model()

    def fail(execute: Any, sql: str, *rest: Any) -> Any:
        if sql.startswith("INSERT"):
            raise OperationalError("the server closed the connection")
        return execute(sql, *rest)

    with connection.execute_wrapper(fail):
        assert run_pass(HOLDER) is None
    assert "This pass broke off" in caplog.text
    assert "the server closed the connection" in caplog.text
    assert not Replica.objects.exists()
    one_pass()
    assert Replica.objects.get().state == READY


def test_an_agent_that_lost_the_record_of_a_running_engine_is_told_again(
    agent_of: Callable[..., FakeAgent],
) -> None:
    agent = agent_of()
    add_model()
    one_pass()
    replica = Replica.objects.get()
    assert agent.ranks[str(replica.pk)].launch is not None

    agent.become(replica.pk, STARTING, launch=None)
    one_pass()
    assert [method for method, _ in agent.commands()] == ["PUT", "PUT"]
    assert Claim.objects.exists()

    agent.become(replica.pk, READY, launch=agent.assignments[str(replica.pk)].launch)
    one_pass()
    replica.refresh_from_db()
    assert replica.state == READY
    assert len(agent.commands()) == 2


def test_processes_that_cannot_be_taken_up_are_stopped_and_replaced(
    agent_of: Callable[..., FakeAgent],
) -> None:
    agent = agent_of()
    add_model()
    one_pass()
    first = Replica.objects.get()
    agent.become(first.pk, STARTING, launch=None)
    agent.refuses = (409, "stray", "Processes of it run here without a record; delete it first.")
    one_pass()
    first.refresh_from_db()
    assert (first.wanted, first.state) == ("stop", STARTING)
    assert "without a record" in first.wanted_why
    assert Claim.objects.exists(), "they still hold the GPU"

    agent.refuses = None
    one_pass()
    one_pass()
    assert [row.state for row in Replica.objects.order_by("created_at")] == ["stopped", READY]


def test_what_a_report_says_beyond_every_column_is_unknown(agent_of: Callable[..., FakeAgent]) -> None:
    agent = agent_of()
    add_model()
    one_pass()
    replica = Replica.objects.get()
    agent.become(
        replica.pk,
        "on fire",
        port=2**40,
        pid=-4,
        running=2**60,
        age_s=1e300,
        reason="a\0b\ud800c",
        kind="k" * 99,
    )
    one_pass()
    rank = Rank.objects.get()
    assert (rank.port, rank.pid, rank.running) == (None, None, None)
    replica.refresh_from_db()
    assert replica.state == STARTING
    assert "\0" not in replica.reason


def test_a_slow_agent_costs_its_own_deadline_only(agent_of: Callable[..., FakeAgent], settings: Any) -> None:
    settings.LLMGW_AGENT_TIMEOUT_S = 0.3
    agent_of("node-a", state_delay_s=3)
    agent_of("node-b")
    add_model()
    one_pass()
    assert "did not answer within 0.3 s" in Node.objects.get(name="node-a").problem
    assert Replica.objects.get().state == READY


def test_an_agent_of_another_node_is_not_believed(agent_of: Callable[..., FakeAgent]) -> None:
    agent = agent_of()
    agent.node = str(uuid.uuid4())
    add_model()
    one_pass()
    assert "is not the one of node-a" in Node.objects.get().problem
    assert not Replica.objects.exists()


def test_a_wrong_token_is_said(agent_of: Callable[..., FakeAgent]) -> None:
    agent_of().token = "another"
    one_pass()
    assert "does not accept this cluster's token" in Node.objects.get().problem


def test_the_token_of_an_older_cluster_key_still_works(
    agent_of: Callable[..., FakeAgent], settings: Any
) -> None:
    agent_of()
    settings.LLMGW_CLUSTER_KEYS = (ClusterKey("new", b"n" * 32), *settings.LLMGW_CLUSTER_KEYS)
    add_model()
    one_pass()
    assert Replica.objects.get().state == READY


@pytest.mark.parametrize(
    ("refusal", "state", "kind"),
    [
        pytest.param(422, FAILED, "node", id="a GPU it does not have: it is tried elsewhere"),
        pytest.param("gpu_taken", FAILED, "node", id="a GPU that is taken there: it is tried elsewhere"),
        pytest.param("fence", "pending", "", id="older than what it has obeyed: it is told again"),
        pytest.param(410, FAILED, "transient", id="stopped there before: another replica follows"),
        pytest.param(400, FAILED, "configuration", id="a launch it cannot read: waits for an edit"),
        pytest.param(503, "pending", "", id="busy: it is told again"),
    ],
)
def test_a_refused_replica_says_the_agents_sentence(
    agent_of: Callable[..., FakeAgent], refusal: int | str, state: str, kind: str
) -> None:
    status, code = (409, refusal) if isinstance(refusal, str) else (refusal, "no")
    agent_of(refuses=(status, code, "It has no GPU of that name."))
    add_model()
    one_pass()
    replica = Replica.objects.get()
    assert (replica.state, replica.failure_kind) == (state, kind)
    assert replica.reason == "It has no GPU of that name."


def test_a_silent_node_is_suspect_then_lost_and_its_replica_replaced(
    agent_of: Callable[..., FakeAgent], settings: Any
) -> None:
    settings.LLMGW_SUSPECT_AFTER_S = settings.LLMGW_LOST_AFTER_S = 60
    agent = agent_of("node-a")
    add_model()
    one_pass()
    first = Replica.objects.get()
    other = agent_of("node-b")
    agent.is_deaf = True

    one_pass()
    first.refresh_from_db()
    assert first.state == READY, "silence is unknown, not an end"

    settings.LLMGW_SUSPECT_AFTER_S = settings.LLMGW_LOST_AFTER_S = 0.000001
    Lease.objects.update(expires_at=Now() + timedelta(seconds=1))
    one_pass()
    first.refresh_from_db()
    assert (first.state, first.wanted) == ("lost", "run")
    assert "no contact with node-a" in first.reason
    assert Claim.objects.filter(rank__replica=first).exists(), "its engine may still run"
    second = Replica.objects.exclude(pk=first.pk).get()
    assert (second.state, len(other.commands())) == (READY, 1)

    settings.LLMGW_SUSPECT_AFTER_S = settings.LLMGW_LOST_AFTER_S = 60
    agent.is_deaf = False
    one_pass()
    second.refresh_from_db()
    first.refresh_from_db()
    assert sorted([first.wanted, second.wanted]) == ["drain", "run"], "one is over the maximum now"


def test_nobody_is_lost_because_the_control_plane_was_away(
    agent_of: Callable[..., FakeAgent], settings: Any
) -> None:
    agent = agent_of()
    add_model()
    one_pass()
    agent.is_deaf = True
    Node.objects.update(seen_at=Now() - timedelta(days=1))
    Lease.objects.update(expires_at=Now() - timedelta(days=1))
    one_pass()
    assert Replica.objects.get().state == READY


@pytest.mark.parametrize(
    "jump",
    [
        pytest.param(timedelta(hours=2), id="set back by two hours"),
        pytest.param(-timedelta(days=3), id="set forward by three days"),
    ],
)
def test_a_clock_that_is_set_changes_nothing_that_runs(
    agent_of: Callable[..., FakeAgent], jump: timedelta
) -> None:
    """To the database, a clock that is set is every moment on record moved the other way."""
    agent_of("node-a")
    silent = agent_of("node-b", gpus=gpus(3, "other"))
    add_model()
    asked = add_model("asked", low=0)
    elsewhere = add_model("elsewhere", gpu_class="other")
    gateway = Gateway.objects.create()
    Demand.objects.create(gateway=gateway, model=asked, waiting=1, asked_at=Now())
    one_pass()
    Demand.objects.update(waiting=0)
    one_pass()
    assert {replica.state for replica in Replica.objects.all()} == {READY}
    before, commands = list(Replica.objects.order_by("pk").values("pk", "state", "wanted")), silent.commands()

    silent.is_deaf = True
    lease.take("of a worker that was killed")
    Lease.objects.update(expires_at=F("expires_at") + jump)
    Node.objects.update(seen_at=F("seen_at") + jump)
    Demand.objects.update(asked_at=F("asked_at") + jump)
    Replica.objects.update(state_since=F("state_since") + jump)
    for _ in range(2):
        one_pass()
        Gateway.objects.update(heartbeat_at=Now())
    assert list(Replica.objects.order_by("pk").values("pk", "state", "wanted")) == before

    # What happens from now on is judged by the clock as it is now.
    asked.delete()
    elsewhere.delete()
    one_pass()
    assert set(Replica.objects.exclude(model=None).values_list("wanted", flat=True)) == {"run"}
    assert set(Replica.objects.filter(model=None).values_list("wanted", flat=True)) == {"drain"}
    assert silent.commands() == commands


def test_only_one_of_two_passes_at_once_holds_the_lease(db: None) -> None:
    held = lease.take("there:2:2")
    assert held is not None
    assert run_pass(HOLDER) is None
    again = lease.take("there:2:2")
    assert again is not None
    assert again.token == held.token, "the same holder goes on"
    lease.release(again)
    for number, holder in enumerate((HOLDER, HOLDER, "there:2:2"), 1):
        other = lease.take(holder)
        assert other is not None
        assert other.token == held.token + number
        lease.release(other)


def test_of_many_that_want_the_lease_at_once_one_has_it(db: None) -> None:
    takers = 6
    at_once = threading.Barrier(takers)

    def contend(number: int) -> list[int]:
        tokens = []
        for _ in range(5):
            at_once.wait(10)
            if held := lease.take(f"there:2:{number}"):
                tokens.append(held.token)
            at_once.wait(10)
            if held:
                lease.release(held)
        connection.close()
        return tokens

    with ThreadPoolExecutor(takers) as pool:
        tokens = [token for taken in pool.map(contend, range(takers)) for token in taken]
    assert sorted(tokens) == [1, 2, 3, 4, 5]


def test_a_holder_that_slept_past_its_lease_writes_nothing(agent_of: Callable[..., FakeAgent]) -> None:
    """While this pass waits for its agent's answer, another holder takes over."""
    agent = agent_of()
    add_model()
    lease.take(HOLDER)

    def take_over() -> None:
        Lease.objects.update(expires_at=Now() - timedelta(seconds=1))
        assert lease.take("there:2:2") is not None
        connection.close()

    agent.before_state = take_over
    assert run_pass(HOLDER) is None

    assert not Replica.objects.exists()
    assert not agent.commands()
    assert Node.objects.get().seen_at is None
    assert Lease.objects.get().holder == "there:2:2"
    assert Lease.objects.filter(expires_at__gt=Now()).exists(), "it does not let go of what is not its own"


def test_a_holder_that_slept_while_it_told_agents_records_no_answer(
    agent_of: Callable[..., FakeAgent],
) -> None:
    agent = agent_of()
    add_model()

    def take_over() -> None:
        Lease.objects.update(expires_at=Now() - timedelta(seconds=1))
        assert lease.take("there:2:2") is not None
        connection.close()

    agent.before_command = take_over
    assert run_pass(HOLDER) is None
    assert Replica.objects.get().state == "pending"

    agent.before_command = None
    Lease.objects.update(expires_at=Now())
    one_pass()
    assert Replica.objects.get().state == READY


def test_a_model_removed_while_a_pass_decides_about_it_costs_that_pass_only(
    agent_of: Callable[..., FakeAgent],
) -> None:
    if connection.vendor == "sqlite":
        pytest.skip("SQLite has one writer at a time, so nobody can come between")
    agent = agent_of()
    model = add_model()
    add_model("n")

    def remove() -> None:
        Model.objects.get(pk=model.pk).delete()
        connection.close()

    def let_somebody_remove(**_: Any) -> None:
        with ThreadPoolExecutor(1) as somebody:
            somebody.submit(remove).result(10)
        pre_save.disconnect(sender=Replica, dispatch_uid="somebody")

    pre_save.connect(let_somebody_remove, sender=Replica, weak=False, dispatch_uid="somebody")
    assert run_pass(HOLDER) is None
    assert not Replica.objects.exists()
    assert not agent.commands()

    one_pass()
    assert Replica.objects.get().model_name == "n"


def test_old_ends_are_forgotten_and_reasons_kept(db: None) -> None:
    model = add_model(low=0)
    week = Now() - timedelta(days=8)
    old = {"launch": {}, "state_since": week, "model": model}
    Replica.objects.create(state="stopped", **old)
    Replica.objects.create(state=FAILED, failure_kind="transient", **old)
    reason = Replica.objects.create(state=FAILED, failure_kind="configuration", **old)
    recent = Replica.objects.create(state="stopped", launch={})
    Gateway.objects.create(heartbeat_at=week)
    gateway = Gateway.objects.create()
    one_pass()
    assert set(Replica.objects.values_list("pk", flat=True)) == {reason.pk, recent.pk}
    assert Gateway.objects.get() == gateway


def test_a_model_that_breaks_the_law_is_said_and_left_alone(agent_of: Callable[..., FakeAgent]) -> None:
    agent_of()
    model = add_model()
    one_pass()
    Profile.objects.update(engine="vlllm")
    add_model("n")
    one_pass()
    assert Replica.objects.filter(model=model, wanted="run", state=READY).exists()
    assert Replica.objects.filter(model__name="n", state=READY).exists()
    assert "until then what runs of it is left alone" in Unplaced.objects.get().why


def test_a_drained_replica_is_waited_for(agent_of: Callable[..., FakeAgent]) -> None:
    agent = agent_of()
    model = add_model()
    one_pass()
    replica = Replica.objects.get()
    agent.become(replica.pk, DRAINING)
    model.delete()
    one_pass()
    replica.refresh_from_db()
    assert (replica.state, replica.wanted) == (DRAINING, "drain")
    assert [method for method, _ in agent.commands()] == ["PUT"], "it drains already"
    assert Claim.objects.exists()
