"""What doors ask of agents: paths and logs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest
from django.db.models.functions import Now
from hypothesis import given
from hypothesis import strategies as st

from catalog.source import PathFacts
from catalog.spec import ModelSpec
from nodes.actions import cordon, register_node
from nodes.agents import ask_paths
from nodes.conversation import AgentProblem, clean
from nodes.logs import read_log
from nodes.models import Node
from nodes.protocol import READY, RankReport
from nodes.reconcile import run_pass
from tests.fake_agent import FakeAgent, gpus, joining

PATH = "/models/m.gguf"
REPLICA = "7a1b3c4d-0000-4000-8000-000000000000"


@pytest.fixture
def agent_of() -> Iterator[Callable[..., FakeAgent]]:
    with ExitStack() as stack:
        yield joining(stack)


def model(gpu_class: str = "sim") -> ModelSpec:
    return ModelSpec.load(
        {"name": "m", "source": PATH, "profiles": [{"name": "p", "engine": "sim", "gpu_class": gpu_class}]}
    )


@pytest.mark.django_db(transaction=True)
def test_a_path_is_asked_of_every_node_that_a_profile_could_use(agent_of: Callable[..., FakeAgent]) -> None:
    agent_of("has", paths={PATH: {"exists": True, "kind": "file", "size_bytes": 7, "files": ["m.gguf"]}})
    agent_of("lacks")
    cordoned = agent_of("cordoned")
    other = agent_of("other-class", gpus=gpus(2, "l40s"))
    lost = agent_of("lost")
    run_pass("here:1:1")
    cordon(Node.objects.get(name="cordoned"), by="ann", why="", door="admin")
    Node.objects.filter(name="lost").update(seen_at=Now() - timedelta(hours=1))
    new = agent_of("new")

    facts = {each.node: each for each in ask_paths(PATH, model())}

    assert facts["has"] == PathFacts("has", True, kind="file", size_bytes=7, files=("m.gguf",))
    assert facts["lacks"] == PathFacts("lacks", False)
    assert facts["new"].exists is False, "nobody knows what it has, so it is asked, too"
    assert facts.keys() == {"has", "lacks", "new"}
    assert ("POST", "/v1/paths") in new.requests
    for agent in (cordoned, other, lost):
        assert ("POST", "/v1/paths") not in agent.requests


@pytest.mark.django_db(transaction=True)
def test_a_node_that_does_not_answer_is_unknown_with_a_reason(agent_of: Callable[..., FakeAgent]) -> None:
    agent_of("deaf", is_deaf=True)
    agent_of("wrong").token = "another"
    deaf, wrong = ask_paths(PATH, model())
    assert (deaf.exists, wrong.exists) == (None, None)
    assert "cannot be reached" in deaf.reason
    assert "does not accept the token of wrong" in wrong.reason


@pytest.mark.django_db(transaction=True)
def test_without_a_node_nobody_is_asked() -> None:
    assert ask_paths(PATH, model()) == []


@pytest.mark.django_db(transaction=True)
def test_a_log_is_read_from_the_node(agent_of: Callable[..., FakeAgent]) -> None:
    agent = agent_of()
    agent.ranks[REPLICA] = RankReport(REPLICA, 1, 0, READY)
    assert read_log(Node.objects.get(), REPLICA, tail=7) == "the last 7 lines"


@pytest.mark.django_db(transaction=True)
def test_a_log_that_is_not_there_is_said(agent_of: Callable[..., FakeAgent]) -> None:
    agent_of()
    with pytest.raises(AgentProblem, match="No such replica runs here"):
        read_log(Node.objects.get(), REPLICA)


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(st.characters(exclude_categories=()) | st.just("\0")),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=())), inner),
    )
)
def test_whatever_an_agent_sends_a_database_can_hold_it(value: Any) -> None:
    def check(found: Any) -> None:
        if isinstance(found, str):
            assert "\0" not in found
            found.encode("utf-8")
        elif isinstance(found, list):
            for each in found:
                check(each)
        elif isinstance(found, dict):
            for key, each in found.items():
                check(key)
                check(each)
        elif isinstance(found, (int, float)):
            assert abs(found) < 2**53

    check(clean(value))


@pytest.mark.django_db(transaction=True)
def test_an_agent_that_is_not_there_is_said_in_few_words() -> None:
    with FakeAgent().running() as gone:
        register_node("gone", gone.address, by="ann", door="command")
    (facts,) = ask_paths(PATH, model())
    says = "cannot be reached (Connection refused); check that it runs there."
    assert facts.reason == f"The agent of gone at {gone.address} {says}"
