"""Passes that meet silence, set clocks, each other, and changes in their midst."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models import F
from django.db.models.functions import Now
from django.db.models.signals import pre_save

from catalog.models import Model, Profile
from nodes import lease
from nodes.actions import stop_replica
from nodes.models import Claim, Demand, Gateway, Lease, Node, Replica, Unplaced
from nodes.protocol import DRAINING, FAILED, READY
from nodes.reconcile import run_pass
from tests.fake_agent import FakeAgent, gpus
from tests.passes import HOLDER, add_model, one_pass

pytestmark = pytest.mark.django_db(transaction=True)


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


def test_of_a_model_that_breaks_the_law_nothing_starts_and_everything_may_stop(
    agent_of: Callable[..., FakeAgent],
) -> None:
    agent_of(gpus=gpus(4))
    model = add_model(low=2, high=2)
    one_pass()
    first, second = Replica.objects.order_by("created_at", "id")
    Profile.objects.update(engine="vlllm")
    add_model("n")
    one_pass()
    assert Replica.objects.filter(model=model, wanted="run", state=READY).count() == 2
    assert Replica.objects.filter(model__name="n", state=READY).exists()
    assert Unplaced.objects.get().missing == 0

    stop_replica(first, by="ann", why="it hangs", door="admin")
    one_pass()
    one_pass()
    assert Replica.objects.filter(model=model, state=READY).get() == second
    told = Unplaced.objects.get()
    assert told.missing == 1
    assert told.why == (
        'model "m" profile "p": engine "vlllm" is not known; choose vllm, sglang, llamacpp or sim; '
        "edit the model, until then nothing of it is started"
    )

    Model.objects.filter(pk=model.pk).update(scaling_min=0, scaling_max=0)
    one_pass()
    one_pass()
    assert not Replica.objects.filter(model=model, state=READY).exists()


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
