"""What agents run that the database does not know: adopted, shown or stopped."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from catalog.models import Event
from nodes.actions import NodeRefused, stop_orphan, stop_replica
from nodes.models import Claim, Orphan, Rank, Replica, Unplaced
from nodes.protocol import READY, Launch, RankReport
from tests.fake_agent import FakeAgent
from tests.passes import add_model, one_pass, verbs

pytestmark = pytest.mark.django_db(transaction=True)


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


def test_an_orphan_ends_once_a_person_says_so(agent_of: Callable[..., FakeAgent]) -> None:
    agent = agent_of(stops_slowly=True)
    add_model(tp=2, gpus_per_node=2)
    report = stray(agent, launch=None)
    one_pass()
    told: dict[str, Any] = {"by": "ann", "why": "nobody's", "door": "admin"}
    orphan = Orphan.objects.get()
    assert stop_orphan(orphan, **told)
    assert not stop_orphan(orphan, **told), "that was said"
    one_pass()
    assert agent.commands() == [("DELETE", f"/v1/replicas/{report.replica}")]
    one_pass()
    assert not Orphan.objects.exists(), "while it drains it is nobody's question any more"
    assert Unplaced.objects.exists(), "and has its GPU"
    agent.become(report.replica, "stopped")
    one_pass()
    assert not Unplaced.objects.exists()
    event = Event.objects.get(verb="stop")
    assert (event.kind, event.subject, event.why) == ("replica", report.replica, "nobody's")


def test_an_orphan_of_a_replica_that_runs_elsewhere_ends_with_it(agent_of: Callable[..., FakeAgent]) -> None:
    agent_of()
    add_model()
    one_pass()
    replica = Replica.objects.get()
    other = agent_of("node-b")
    stray(other, replica=str(replica.pk), generation=1)
    one_pass()
    told: dict[str, Any] = {"by": "ann", "why": "", "door": "admin"}
    with pytest.raises(NodeRefused, match=r"is to run elsewhere, and what node-b runs of it cannot be ended"):
        stop_orphan(Orphan.objects.get(), **told)
    assert stop_replica(replica, **told)
    for _ in range(3):
        one_pass()
    assert ("DELETE", f"/v1/replicas/{replica.pk}") in other.commands()


def test_an_agent_that_forgot_its_replica_is_told_again(agent_of: Callable[..., FakeAgent]) -> None:
    agent = agent_of()
    add_model()
    one_pass()
    agent.ranks.clear()
    one_pass()
    assert [method for method, _ in agent.commands()] == ["PUT", "PUT"]
    assert Replica.objects.get().state == READY
