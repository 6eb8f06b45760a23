"""An agent dies and another takes its place: engines go on, and nothing is told that is not so."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nodes.agent.files import SUM
from tests.agent_process import ROOT, AgentProcess, Stream, assignment
from tests.waiting import wait_until


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    with AgentProcess(tmp_path) as agent:
        yield agent


def record_of(agent: AgentProcess, replica: str) -> Path:
    return agent.state_folder / "replicas" / f"{replica}.json"


def edit_record(agent: AgentProcess, replica: str, **changes: Any) -> None:
    path = record_of(agent, replica)
    record = {**json.loads(path.read_text()), **changes, SUM: None}
    path.write_text(json.dumps({name: value for name, value in record.items() if value is not None}))


def test_a_killed_agent_is_replaced_in_the_midst_of_a_stream(agent: AgentProcess) -> None:
    rank = agent.run("--tpot", "20ms", launch={"context_length": 1024})
    stream = Stream(rank["port"], max_tokens=150)
    agent.kill()
    told = time.monotonic()
    agent.start()
    adopted = agent.rank(rank["replica"])
    assert (adopted["state"], adopted["pid"], adopted["port"]) == ("ready", rank["pid"], rank["port"])
    assert adopted["context_length"] == rank["context_length"] == 1024
    assert adopted["age_s"] > time.monotonic() - told
    wait_until(lambda: agent.rank(rank["replica"]).get("running") == 1, "the running request to be counted")
    assert stream.finish(), stream.error
    assert len(stream.lines) == 150 + 3


def test_a_full_disk_does_not_keep_an_agent_from_taking_up_its_engines(agent: AgentProcess) -> None:
    """Its record is larger than any file may become, which leaves its log room."""
    rank = agent.run(env={"FILLER": "x" * 60_000})
    dead = agent.run(env={"FILLER": "x" * 60_000}, gpus=["sim-1"])
    agent.kill()
    os.kill(dead["pid"], signal.SIGKILL)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        agent.start()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    adopted = agent.rank(rank["replica"])
    assert (adopted["state"], adopted["pid"]) == ("ready", rank["pid"])
    assert agent.rank(dead["replica"])["state"] == "failed"
    assert "is not saved yet" in agent.story()
    resource.prlimit(agent.pid, resource.RLIMIT_FSIZE, limits)
    agent.restart()
    assert [agent.rank(each["replica"])["state"] for each in (rank, dead)] == ["ready", "failed"]


def test_an_agent_that_is_stopped_leaves_its_engines_running(agent: AgentProcess) -> None:
    rank = agent.run()
    assert agent.stop() == 0
    assert agent.engines() == [rank["pid"]]
    agent.start()
    assert agent.rank(rank["replica"])["state"] == "ready"
    agent.delete(rank["replica"])
    agent.wait_for(rank["replica"], "stopped")
    assert agent.engines() == []


def test_a_drain_goes_on_after_a_restart(agent: AgentProcess) -> None:
    rank = agent.run("--tpot", "20ms")
    stream = Stream(rank["port"], max_tokens=150)
    agent.delete(rank["replica"], drain="1m")
    agent.restart()
    assert agent.rank(rank["replica"])["state"] == "draining"
    assert stream.finish(), stream.error
    agent.wait_for(rank["replica"], "stopped")
    assert agent.engines() == []


def test_a_start_that_was_watched_goes_on_after_a_restart(agent: AgentProcess) -> None:
    wanted = assignment("--load-time", "2s")
    agent.put(wanted)
    pid = agent.wait_for(wanted["replica"], "starting")["pid"]
    agent.restart()
    assert agent.rank(wanted["replica"])["state"] == "starting", "not ready without a probe"
    assert agent.wait_for(wanted["replica"], "ready")["pid"] == pid


def test_an_engine_that_died_meanwhile_has_failed(agent: AgentProcess) -> None:
    rank = agent.run()
    agent.kill()
    os.kill(rank["pid"], signal.SIGKILL)
    agent.start()
    failed = agent.rank(rank["replica"])
    assert failed["state"] == "failed"
    assert failed["reason"].startswith("The engine exited with a code that nobody saw")


def test_an_adopted_engine_is_watched(agent: AgentProcess) -> None:
    rank = agent.run()
    agent.restart()
    os.kill(rank["pid"], signal.SIGKILL)
    assert agent.wait_for(rank["replica"], "failed")["cause"] == "unknown"


def test_a_start_cut_in_half_is_found_by_its_mark(agent: AgentProcess) -> None:
    """The agent died between starting the process and writing its pid down."""
    rank = agent.run()
    agent.kill()
    edit_record(agent, rank["replica"], state="starting", pid=None, started=None)
    agent.start()
    assert agent.wait_for(rank["replica"], "ready")["pid"] == rank["pid"]
    assert agent.engines() == [rank["pid"]]


def test_a_start_cut_before_its_process_is_made_again(agent: AgentProcess) -> None:
    rank = agent.run()
    agent.kill()
    os.kill(rank["pid"], signal.SIGKILL)
    wait_until(lambda: not agent.engines(), "the engine to be gone")
    edit_record(agent, rank["replica"], state="starting", pid=None, started=None)
    agent.start()
    again = agent.wait_for(rank["replica"], "ready")
    assert again["pid"] != rank["pid"]
    assert agent.engines() == [again["pid"]]


@pytest.mark.parametrize("is_draining", [False, True], ids=["that ran", "that drained"])
def test_workers_whose_engine_died_meanwhile_are_stopped(
    agent: AgentProcess, tmp_path: Path, is_draining: bool
) -> None:
    engine = tmp_path / "llama-server"
    engine.write_text("#!/bin/sh\n[ $1 = --version ] && exit\nsetsid sleep 1000 &\nsleep 1000\n")
    engine.chmod(0o700)
    agent.options = ("--engine", f"llamacpp={engine}")
    agent.restart()
    wanted = assignment(engine="llamacpp", source=str(engine))
    agent.put(wanted)
    rank = agent.wait_for(wanted["replica"], "starting")
    wait_until(lambda: len(agent.engines()) == 3, "the engine's three processes")
    agent.kill()
    os.kill(rank["pid"], signal.SIGKILL)
    if is_draining:
        edit_record(agent, rank["replica"], state="draining", drain_until_s=1e12)
    agent.start()
    agent.wait_for(rank["replica"], "stopped" if is_draining else "failed")
    assert agent.engines() == []


def test_after_a_reboot_a_recycled_pid_is_nobodys_engine(agent: AgentProcess) -> None:
    rank = agent.run()
    agent.kill()
    os.kill(rank["pid"], signal.SIGKILL)
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as stranger:
        edit_record(agent, rank["replica"], boot="another-boot", pid=stranger.pid)
        agent.start()
        failed = agent.rank(rank["replica"])
        assert (failed["state"], failed["cause"]) == ("failed", "rebooted")
        agent.delete(rank["replica"])
        assert stranger.poll() is None
        stranger.kill()


def test_a_strangers_process_under_a_recorded_pid_is_never_signalled(agent: AgentProcess) -> None:
    rank = agent.run()
    agent.kill()
    os.kill(rank["pid"], signal.SIGKILL)
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as stranger:
        edit_record(agent, rank["replica"], pid=stranger.pid)
        agent.start()
        assert agent.rank(rank["replica"])["state"] == "failed"
        assert stranger.poll() is None
        stranger.kill()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"assignment": 7}', "\udcff"], ids=repr)
def test_a_record_that_cannot_be_read_is_set_aside_and_its_engine_left_alone(
    agent: AgentProcess, content: str
) -> None:
    rank = agent.run()
    agent.kill()
    record_of(agent, rank["replica"]).write_text(content, errors="surrogateescape")
    agent.start()
    assert record_of(agent, rank["replica"]).with_suffix(".unreadable").exists()
    stray = agent.rank(rank["replica"])
    assert (stray["state"], stray["pid"], stray["gpus"]) == ("starting", rank["pid"], ["sim-0"])
    assert "launch" not in stray
    assert "record is lost" in stray["reason"]
    assert agent.put(assignment()).refusal[:2] == (409, "gpu_taken")
    assert agent.engines() == [rank["pid"]]


def test_an_engine_without_a_record_is_taken_up_when_the_control_plane_names_it(agent: AgentProcess) -> None:
    wanted = assignment("--tpot", "20ms")
    agent.put(wanted)
    rank = agent.wait_for(wanted["replica"], "ready")
    stream = Stream(rank["port"], max_tokens=150)
    agent.kill()
    record_of(agent, rank["replica"]).unlink()
    agent.start()
    assert agent.put(wanted).status == 200
    again = agent.wait_for(wanted["replica"], "ready")
    assert (again["pid"], again["port"]) == (rank["pid"], rank["port"])
    assert stream.finish(), stream.error


def test_an_engine_without_a_record_stops_when_it_is_told_to(agent: AgentProcess) -> None:
    rank = agent.run()
    agent.kill()
    record_of(agent, rank["replica"]).unlink()
    agent.start()
    assert agent.delete(rank["replica"], drain="1m").status == 200
    agent.wait_for(rank["replica"], "stopped")
    assert agent.engines() == []


def test_engines_of_another_node_on_this_machine_are_not_seen(agent: AgentProcess, tmp_path: Path) -> None:
    rank = agent.run()
    other = tmp_path / "other"
    other.mkdir()
    with AgentProcess(other) as neighbour:
        assert "ranks" not in neighbour.state()
    assert agent.engines() == [rank["pid"]]


def test_a_second_agent_in_the_same_folder_says_so(agent: AgentProcess) -> None:
    second = subprocess.run(agent.command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert second.returncode == 1
    assert second.stderr.startswith("Another agent runs with the state folder")
    assert second.stderr.count("\n") == 1
