"""A disk that is full: state is old or new and never torn, it is said, and it clears by itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodes.agent.failures import cause_of_end
from tests.agent_process import AgentProcess, assignment
from tests.disks import filled, small_disk
from tests.test_agent_weights import SIZE, agent_at, model_path, wanted
from tests.traffic import Traffic
from tests.waiting import wait_until
from tests.weights_hub import running


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    """Its state and its logs are on a disk of two megabytes."""
    with small_disk(tmp_path / "state", 2 << 20), AgentProcess(tmp_path) as agent:
        yield agent


def records(agent: AgentProcess) -> dict[str, str]:
    return {path.name: path.read_text() for path in agent.state_folder.rglob("*.json")}


def test_state_is_old_or_new_and_engines_serve_on(agent: AgentProcess) -> None:
    rank = agent.run("--ttft", "1ms", fence=3)
    before = records(agent)
    wanted = assignment(gpus=["sim-1"], fence=4)
    with Traffic(rank["port"]):
        with filled(agent.state_folder):
            for answer in (agent.put(wanted), agent.delete(rank["replica"], fence=5)):
                status, code, sentence = answer.refusal
                assert (status, code) == (507, "disk_full")
                assert "No space left on device" in sentence
                assert "make room there" in sentence
            assert records(agent) == before
            agent.restart()
            assert agent.rank(rank["replica"])["pid"] == rank["pid"]
            assert "instance" not in agent.state(), "none that comes later would know of it"
        assert agent.put(wanted).status == 200
        agent.wait_for(wanted["replica"], "ready")
        assert agent.rank(rank["replica"])["state"] == "ready"
    assert all(json.loads(text) for text in records(agent).values())
    assert not list(agent.state_folder.rglob(".*")), "no draft of a file is left"
    assert sorted(agent.engines()) == sorted(
        agent.rank(replica)["pid"] for replica in (rank["replica"], wanted["replica"])
    )


def test_an_engine_whose_log_fills_the_disk_is_told_as_such_and_its_end_is_kept_later(
    agent: AgentProcess, tmp_path: Path
) -> None:
    engine = tmp_path / "llama-server"
    engine.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit\nyes "a line of a log" | head -c 1900000\n'
        'while printf "%4000s\\n" padding; do :; done 2>/dev/null\nexit 3\n'
    )
    engine.chmod(0o700)
    agent.options = ("--engine", f"llamacpp={engine}")
    agent.restart()
    wanted = assignment(engine="llamacpp", source=str(engine))
    agent.put(wanted)
    failed = agent.wait_for(wanted["replica"], "failed")
    assert (failed["cause"], failed["kind"], failed["exit_code"]) == ("disk_full", "disk", 3)
    assert failed["reason"].endswith("is full, and the engine's log is on it; make room there.")
    record = agent.state_folder / "replicas" / f"{wanted['replica']}.json"
    assert json.loads(record.read_text())["state"] == "starting", "there was no room for more"
    for log in agent.state_folder.glob("logs/*.log"):
        log.unlink()
    wait_until(
        lambda: agent.state() and json.loads(record.read_text())["state"] == "failed", "its end to be kept"
    )


@pytest.mark.parametrize(
    ("log_tail", "exit_code", "cause"),
    [
        pytest.param("", 1, "disk_full", id="without a word"),
        pytest.param("CUDA out of memory", 1, "gpu_oom", id="its log knows better"),
        pytest.param("", -9, "killed", id="somebody ended it"),
    ],
)
def test_an_end_is_that_of_its_log_where_nothing_else_is_known(
    log_tail: str, exit_code: int, cause: str
) -> None:
    assert cause_of_end("vllm", log_tail, exit_code, full_disk="It is full.").cause == cause


def test_a_store_that_fills_up_meanwhile_is_told_and_a_later_try_succeeds(tmp_path: Path) -> None:
    store = tmp_path / "state" / "weights"
    store.parent.mkdir(mode=0o700)
    with (
        small_disk(store, SIZE + (8 << 20)),
        running({"m.gguf": b"x" * SIZE}) as hub,
        agent_at(hub.url, tmp_path) as agent,
    ):
        hub.held = "m.gguf"
        hub.gate.clear()
        replica = wanted()
        agent.put(replica)
        wait_until(lambda: agent.rank(replica["replica"]).get("done_bytes", 0) >= SIZE // 4, "a part of it")
        with filled(store):
            hub.gate.set()
            failed = agent.wait_for(replica["replica"], "failed", timeout_s=60)
            assert (failed["cause"], failed["kind"]) == ("disk_full", "disk"), failed["reason"]
            assert f"The store {store} is full; make room" in failed["reason"]
        agent.put({**replica, "generation": 2})
        assert model_path(agent, replica["replica"]).stat().st_size == SIZE
        assert not list(store.rglob("*.incomplete"))
