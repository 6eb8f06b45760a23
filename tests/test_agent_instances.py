"""Agents that were cloned, or that go on from an old copy of their state, as they are on their node."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodes.agent.state import LIVES_KEPT, StateFolder
from nodes.protocol import INSTANCE_HEADER
from tests.agent_process import CLUSTER, ROOT, AgentProcess, assignment


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    with AgentProcess(tmp_path) as agent:
        yield agent


def test_an_agent_tells_who_it_is_and_after_whom_it_came(agent: AgentProcess) -> None:
    first = agent.state()
    assert "follows" not in first
    agent.restart()
    second = agent.state()
    assert second["follows"] == [first["instance"]] != [second["instance"]]
    agent.restart()
    assert agent.state()["follows"] == [second["instance"], first["instance"]]


def test_one_that_goes_on_from_an_old_copy_does_not_know_of_what_came_after(
    agent: AgentProcess, tmp_path: Path
) -> None:
    first = agent.state()["instance"]
    shutil.copytree(agent.state_folder, tmp_path / "copy")
    agent.restart()
    rank = agent.run(fence=9)
    second = agent.state()["instance"]
    agent.kill()
    shutil.rmtree(agent.state_folder)
    shutil.copytree(tmp_path / "copy", agent.state_folder)
    agent.start()
    told = agent.state()
    assert told["follows"] == [first]
    assert second not in (told["instance"], first)
    [stray] = told["ranks"]
    assert (stray["pid"], stray["replica"]) == (rank["pid"], rank["replica"]), "its engine is left alone"
    assert agent.engines() == [rank["pid"]]


def test_a_copy_of_an_agent_on_the_same_machine_touches_none_of_its_engines(
    agent: AgentProcess, tmp_path: Path
) -> None:
    rank = agent.run()
    (tmp_path / "copy").mkdir()
    copy = AgentProcess(tmp_path / "copy")
    copy.identity.write_text(agent.identity.read_text())
    shutil.copytree(agent.state_folder, copy.state_folder)
    second = subprocess.run(copy.command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert second.returncode == 1
    assert second.stderr.splitlines()[-1] == (
        "Another agent of this node runs on this machine, with another state folder; stop it, or let "
        "this one join as a node of its own."
    )
    assert agent.rank(rank["replica"])["pid"] == rank["pid"]
    assert agent.engines() == [rank["pid"]]


def test_a_command_for_another_agent_of_the_node_is_not_carried_out(agent: AgentProcess) -> None:
    wanted = assignment()
    where, other = f"/v1/replicas/{wanted['replica']}", {INSTANCE_HEADER: "another"}
    own = {INSTANCE_HEADER: agent.state()["instance"]}
    of_command = {"LLMGW-Cluster": CLUSTER, "LLMGW-Fence": "1", "LLMGW-Generation": "1"}
    put = agent.ask("PUT", where, body=wanted, headers=other)
    delete = agent.ask("DELETE", where, headers=of_command | other)
    assert put.refusal[:2] == delete.refusal[:2] == (409, "instance")
    assert agent.rank(wanted["replica"]) is None
    assert agent.ask("PUT", where, body=wanted, headers=own).status == 200
    assert agent.ask("DELETE", where, headers=of_command | own).status == 200


def test_the_lives_that_are_kept_are_bounded(tmp_path: Path) -> None:
    lives = []
    for _ in range(LIVES_KEPT + 3):
        folder = StateFolder.open(tmp_path)
        lives.append(folder.instance)
        folder.close()
    assert list(folder.follows) == lives[-2 : -LIVES_KEPT - 2 : -1]
