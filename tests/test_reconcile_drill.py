"""A drill: real agents, engines, a worker and requests; one thing after another goes wrong, and after each
the admin, `manage.py why` and REST say the same, which is true.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from pytest_django import DjangoDbBlocker

from catalog.models import Model
from nodes.agent.inventory import host_memory_mib
from nodes.models import Lease, Node, Replica, Roll
from nodes.placement import GB, MIB, RESERVED_MIB
from tests.drill import LOST_AFTER_S, Drill, add_sim, drilling, is_command, traffic
from tests.pages import MODELS, change, page, text_of
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.lasting_database,
    pytest.mark.on_postgresql,
    pytest.mark.timeout(180),
]

HEALED_WITHIN_S = 15
IS_SOAK = "SOAK_STEPS" in os.environ  # there is time for what is nearly the same
AS_WANTED = 'model "parrot" runs as wanted: 2 of 2 ready, each as the catalog has it'


@pytest.fixture(scope="module")
def all_drills(
    django_db_setup: None, django_db_blocker: DjangoDbBlocker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Drill]:
    with drilling(django_db_blocker, tmp_path_factory.mktemp("drill")) as drill:
        yield drill


@pytest.fixture
def drill(all_drills: Drill) -> Iterator[Drill]:
    """Two parrots run, on two of the three nodes, and do again in the end."""
    yield all_drills
    all_drills.wait_until_ready(2)
    all_drills.audit()


def free_node(drill: Drill) -> str:
    (name,) = {"a", "b", "c"} - set(drill.where())
    return name


def pid_of(drill: Drill, node: str) -> int:
    """Of the engine there, by its agent's word."""
    (rank,) = [each for each in drill.members[node].ranks() if each["state"] == "ready"]
    return int(rank["pid"])


# --- what operators do ----------------------------------------------------------------------------


def test_a_cordoned_node_is_counted_among_those_that_say_no(drill: Drill) -> None:
    drill.manage("node_cordon", free_node(drill), "--why", "new disks")
    drill.manage("model_edit", "parrot", "--min", "3", "--max", "3")
    why_not = "0 of 3 nodes: 2 lack 2 free sim, 1 cordoned"
    told = drill.wait_until_all_say("parrot", f"1 of 3 replicas cannot be started: {why_not}")
    assert told[0] == 'model "parrot" does not run as wanted: 2 of 3 ready'

    # Whoever looks elsewhere finds the same sentence.
    model = Model.objects.get()
    assert drill.browser.get("/api/models/parrot").json()["status"]["unplaced"]["why"] == why_not
    assert f"parrot is 1 short: {why_not}" in drill.manage("models")
    for path in (MODELS, change(model), "/admin/"):
        assert why_not in text_of(page(drill.browser, path)), path

    drill.manage("model_edit", "parrot", "--min", "2", "--max", "2")
    drill.manage("node_uncordon", free_node(drill))
    assert drill.wait_until_all_say("parrot", AS_WANTED)[1:] == []


def test_a_node_is_drained_and_no_request_fails(drill: Drill) -> None:
    spare, full = free_node(drill), drill.where()[0]
    drill.manage("node_cordon", spare, "--why", "not yet")
    with traffic(drill) as flowing:
        drill.manage("node_drain", full, "--why", "a new card")
        drill.wait_until_ready(1)
        told = drill.wait_until_all_say("parrot", "1 of 2 replicas cannot be started: ")
        assert told[1].endswith("0 of 3 nodes: 1 cordoned, 1 draining, 1 lacks 2 free sim")
        assert drill.members[full].engines() == []
        drill.manage("node_uncordon", spare)
        drill.wait_until_ready(2)
        drill.wait_until_routed(2)
    assert flowing.refused == []
    assert spare in drill.where()
    drill.wait_until_all_say("parrot", AS_WANTED)
    assert "drained" in text_of(
        page(drill.browser, f"/admin/nodes/node/{Node.objects.get(name=full).pk}/change/")
    )
    drill.manage("node_uncordon", full)


def test_a_roll_replaces_what_is_stale_and_no_request_fails(drill: Drill) -> None:
    before = {each.pk for each in drill.replicas()}
    drill.manage("model_edit", "parrot", "--profile", "default", "args=--ttft", "args=5ms")
    told = drill.wait_until_all_say("parrot", "is stale: ")
    assert sum('is stale: Profile "default" has changed' in each for each in told) == 2
    assert told[0] == 'model "parrot" does not run as wanted: 2 of 2 ready'
    assert {each.pk for each in drill.replicas()} == before, "an edit touches nothing that runs"
    with traffic(drill) as flowing:
        drill.manage("roll", "parrot", "--why", "faster")
        wait_until(lambda: not Roll.objects.exists(), "the roll to be over", tell=drill.story, timeout_s=60)
        drill.wait_until_ready(2)
        drill.wait_until_routed(2)
    assert flowing.refused == []
    assert not before & {each.pk for each in drill.replicas()}
    assert drill.wait_until_all_say("parrot", AS_WANTED)[1:] == []


# --- what breaks ----------------------------------------------------------------------------------


def test_a_killed_engine_is_replaced_and_why_is_not_forgotten(drill: Drill) -> None:
    node = drill.where()[0]
    with traffic(drill) as flowing:
        os.kill(pid_of(drill, node), signal.SIGKILL)
        failed = wait_until(lambda: Replica.objects.filter(state="failed").first(), "its end to be known")
        drill.wait_until_ready(2)
        drill.wait_until_routed(2)
    assert {status for status, _ in flowing.refused} <= {502, 503}, flowing.refused
    assert len(flowing.refused) <= 1, "one was in flight"
    assert "SIGKILL" in failed.reason
    told = drill.wait_until_all_say("parrot", AS_WANTED)
    assert told[1].startswith('profile "default" failed once within the hour, last at ')
    assert told[1].endswith(f" on {node}: {failed.reason.rstrip('.')}")
    Replica.objects.filter(pk=failed.pk).delete()


@pytest.mark.parametrize("fault", ["it is killed", *(["its answers are lost", "it is cut off"] * IS_SOAK)])
def test_an_agent_out_of_contact_is_replaced_while_its_engine_serves_on(drill: Drill, fault: str) -> None:
    node = drill.where()[0]
    member, pid = drill.members[node], pid_of(drill, node)
    with traffic(drill) as flowing:
        if fault == "it is killed":
            member.kill()
        elif fault == "it is cut off":
            member.wire.refuse()
        else:
            member.wire.hold(member.wire.back)
        drill.wait_until_all_say("parrot", f"is lost: no contact with {node}", timeout_s=LOST_AFTER_S + 30)
        assert pid in member.engines(), "silence is no reason to end what runs"
        wait_until(lambda: len(drill.where()) == 2, "its replacement", tell=drill.story, timeout_s=30)
        if fault == "it is killed":
            member.start()
        member.wire.accept()
        member.wire.release()
        drill.wait_until_ready(2, timeout_s=HEALED_WITHIN_S)
        drill.wait_until_routed(2)
    assert flowing.refused == []
    drill.wait_until_all_say("parrot", AS_WANTED)


def test_a_load_that_fails_says_what_the_engine_said(drill: Drill) -> None:
    add_sim(drill, "broken", "args=--fail-load-as", "args=vllm/badarg")
    failed = wait_until(
        lambda: Replica.objects.filter(model__name="broken", state="failed").first(),
        "it to fail",
        tell=drill.story,
        timeout_s=30,
    )
    assert (failed.failure_kind, failed.ranks.get().exit_code) == ("configuration", 2)
    assert "--no-such-flag" in failed.reason or "unrecognized arguments" in failed.reason
    told = drill.wait_until_all_say("broken", "1 of 1 replica cannot be started: ")
    assert told[1].endswith(
        f'profile "default" failed: {failed.reason.rstrip(".")}; it is tried again after an edit, '
        f"or once the failed replica {str(failed.pk)[:8]} is stopped"
    )
    assert Replica.objects.filter(model__name="broken").count() == 1
    drill.manage("model_remove", "broken", "--why", "the drill is over")


def test_memory_that_is_promised_to_others_is_not_given_twice(drill: Drill) -> None:
    total_mib = host_memory_mib()[0] or 0
    need = int((total_mib - RESERVED_MIB) * MIB / GB * 0.55)
    node = free_node(drill)
    add_sim(drill, "hog", f"min_memory_gb={need}")
    wait_until(lambda: drill.where("hog") == [node], "the first to run", tell=drill.story, timeout_s=30)
    add_sim(drill, "second", f"min_memory_gb={need}")
    told = drill.wait_until_all_say("second", "1 of 1 replica cannot be started: ")
    assert told[1].endswith(f"0 of 3 nodes: 2 lack 1 free sim, 1 short of memory (need {need} GB)")
    for name in ("second", "hog"):
        drill.manage("model_remove", name, "--why", "the drill is over")
    wait_until(lambda: not drill.replicas("hog"), "the hog to be gone")


@pytest.mark.parametrize(
    "way", ["before it has told the agent", *(["before it has heard the answer"] * IS_SOAK)]
)
def test_a_worker_that_is_killed_in_the_middle_of_a_pass_starts_nothing_twice(drill: Drill, way: str) -> None:
    wire = drill.members[free_node(drill)].wire
    held = wire.there if way == "before it has told the agent" else wire.back
    wire.hold(held, is_command)
    drill.manage("model_edit", "parrot", "--min", "3", "--max", "3")
    wait_until(lambda: held.held, "a command to be on its way", tell=drill.story, timeout_s=20)
    drill.kill_worker()
    assert drill.replicas()[-1].state == "pending", "assigned before its agent is told"
    told = drill.wait_until_all_say("parrot", "no pass has been made for", timeout_s=40)
    assert told[0] == 'model "parrot" does not run as wanted: 2 of 3 ready'
    assert any("is pending: waiting for the agent of" in each for each in told)

    wire.release()
    drill.start_worker()
    drill.wait_until_ready(3)
    drill.audit()
    drill.manage("model_edit", "parrot", "--min", "2", "--max", "2")
    drill.wait_until_ready(2)
    drill.wait_until_all_say("parrot", AS_WANTED)


def test_a_worker_that_slept_past_its_lease_is_obeyed_by_nobody(drill: Drill) -> None:
    """Two workers and two beats at once. One is stopped with a command on its way, which arrives late."""
    node = free_node(drill)
    member, slept = drill.members[node], drill.workers[0]
    member.wire.hold(member.wire.there, is_command)
    drill.manage("model_edit", "parrot", "--min", "3", "--max", "3")
    wait_until(lambda: member.wire.there.held, "a command to be on its way", tell=drill.story, timeout_s=20)
    os.kill(slept.process.pid, signal.SIGSTOP)
    before = Lease.objects.get().token

    told_late = set(member.wire.there.held)
    member.wire.hold(member.wire.there, told_late.__contains__)
    drill.start_worker()
    drill.wait_until_ready(3)
    assert Lease.objects.get().token > before
    heard = len(member.wire.answers)
    member.wire.release()
    wait_until(
        lambda: any(b" 409 " in answer for answer in member.wire.answers[heard:]),
        "the late command to be refused",
        tell=drill.story,
    )
    os.kill(slept.process.pid, signal.SIGCONT)
    wait_until(lambda: "longer than its lease" in slept.log.read_text(), "it to notice", tell=drill.story)
    drill.audit()

    drill.kill_worker()
    drill.manage("model_edit", "parrot", "--min", "2", "--max", "2")
    drill.wait_until_ready(2)
