"""Control plane and agents of neighbouring versions understand each other; of others that is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nodes.models import Node, Replica
from nodes.protocol import to_json
from nodes.reconcile import run_pass
from tests.agent_process import AgentProcess, assignment
from tests.fake_agent import FakeAgent
from tests.passes import add_model

LATER = {"from_later": {"deep": [1, {"x": None}]}}


def without_what_may_be_missing(raw: dict[str, Any]) -> dict[str, Any]:
    """As the oldest agent tells it."""
    cards = [{"id": gpu["id"], "index": gpu["index"], "gpu_class": gpu["gpu_class"]} for gpu in raw["gpus"]]
    engines = [{"name": each["name"]} for each in raw["engines"]]
    return {"cluster": raw["cluster"], "node": raw["node"], "gpus": cards, "engines": engines}


TOO_NEW = (
    "The agent of node-a speaks protocol 9, and this control plane 1, which is too far apart; bring this "
    "control plane up to date."
)
TOO_OLD = (
    "The agent of node-a speaks protocol -1, and this control plane 1, which is too far apart; bring its "
    "agent up to date."
)
UNREADABLE = (
    "The agent of node-a sends a report that cannot be read (StateReport.gpus must be a list); bring it to "
    "the version of the control plane."
)
REPORTS: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "one that leaves out what may be missing": (without_what_may_be_missing, ""),
    "one that is newer by one": (
        lambda raw: raw | LATER | {"protocol": 2, "gpus": [gpu | LATER for gpu in raw["gpus"]]},
        "",
    ),
    "one that is much newer": (lambda raw: raw | {"protocol": 9}, TOO_NEW),
    "one that is much older": (lambda raw: raw | {"protocol": -1}, TOO_OLD),
    "one with another type for what is known": (lambda raw: raw | {"gpus": "all"}, UNREADABLE),
}


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(("told", "problem"), REPORTS.values(), ids=REPORTS)
def test_what_a_control_plane_makes_of_a_report(
    agent_of: Callable[..., FakeAgent], told: Callable[[dict[str, Any]], dict[str, Any]], problem: str
) -> None:
    agent = agent_of()
    add_model()
    agent.state_body = json.dumps(told(to_json(agent.report()))).encode()
    run_pass("here:1:1")
    node = Node.objects.get()
    assert node.problem == problem
    assert (node.seen_at is None) is bool(problem)
    assert Replica.objects.exists() is not bool(problem), "what is understood is used"


@pytest.mark.one_database
def test_what_an_agent_makes_of_an_assignment_of_another_version(tmp_path: Path) -> None:
    with AgentProcess(tmp_path) as agent:
        newer = assignment(protocol=2, launch=LATER, profile=LATER, **LATER)
        older = {name: value for name, value in assignment(gpus=["sim-1"]).items() if name != "protocol"}
        for each in (newer, older):
            assert agent.put(each).status == 200
            assert agent.wait_for(each["replica"], "ready")["state"] == "ready"
        status, code, sentence = agent.put(assignment(protocol=3)).refusal
        assert (status, code) == (400, "malformed")
        assert sentence.endswith("this agent speaks protocol 1; bring it up to date.")
