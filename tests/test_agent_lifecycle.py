"""A replica's life on a node: from a PUT to ready, and to an end that leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.agent_process import KEY, PORT_RANGE, AgentProcess, Answer, Stream, ask, assignment
from tests.waiting import wait_until


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    with AgentProcess(tmp_path) as agent:
        yield agent


def chat(port: int, key: str = KEY) -> Answer:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    return ask(url, "POST", body=body, headers={"Authorization": f"Bearer {key}"})


def test_a_replica_becomes_ready_and_answers_to_its_own_key_alone(agent: AgentProcess) -> None:
    started = time.monotonic()
    rank = agent.run("--ttft", "1ms")
    assert time.monotonic() - started < 8
    first, last = map(int, PORT_RANGE.split("-"))
    assert first <= rank["port"] <= last
    assert rank["gpus"] == ["sim-0"]
    assert rank["launch"]["model"] == "m"
    assert (rank["running"], rank["waiting"]) == (0, 0)
    assert chat(rank["port"]).json["usage"]["completion_tokens"] == 3
    assert chat(rank["port"], key="another-key-0123456789").status == 401


def test_a_secret_is_in_the_engines_environment_and_nowhere_else(tmp_path: Path) -> None:
    with AgentProcess(
        tmp_path, environment={"HF_TOKEN": "hf_planted", "LLMGW_SECRET": "planted-too"}
    ) as agent:
        rank = agent.run(env={"GREETING": "hello"})
        environ = Path(f"/proc/{rank['pid']}/environ").read_bytes().decode().split("\0")
        argv = Path(f"/proc/{rank['pid']}/cmdline").read_bytes().decode().split("\0")
        log = agent.ask("GET", f"/v1/replicas/{rank['replica']}/log").body.decode()
        told = json.dumps(agent.state()) + "".join(argv) + log + (tmp_path / "agent.log").read_text()
    assert f"VLLM_API_KEY={KEY}" in environ
    assert {"GREETING=hello", "CUDA_VISIBLE_DEVICES=sim-0", f"LLMGW_NODE={agent.node}"} <= set(environ)
    assert not any("planted" in entry for entry in environ)
    assert KEY not in told


def test_the_environment_of_a_profile_cannot_load_code_into_an_engine(agent: AgentProcess) -> None:
    wanted = assignment(env={"LD_PRELOAD": "/nowhere/evil.so"})
    agent.put(wanted)
    rank = agent.wait_for(wanted["replica"], "failed")
    assert "LD_PRELOAD" in rank["reason"]
    assert (rank["cause"], rank["kind"]) == ("bad_argument", "configuration")


def test_a_drain_lets_a_running_stream_finish(agent: AgentProcess) -> None:
    rank = agent.run("--tpot", "20ms")
    stream = Stream(rank["port"], max_tokens=80)
    report = agent.delete(rank["replica"], drain="20s").json
    assert report["state"] == "draining"
    assert stream.finish(), stream.error
    assert len(stream.lines) == 80 + 3
    stopped = agent.wait_for(rank["replica"], "stopped")
    assert stopped["reason"] == "It was told to stop."
    assert agent.engines() == []


def test_a_drain_has_a_deadline(agent: AgentProcess) -> None:
    rank = agent.run("--tpot", "20ms")
    stream = Stream(rank["port"], max_tokens=5000)
    started = time.monotonic()
    agent.delete(rank["replica"], drain="300ms")
    agent.wait_for(rank["replica"], "stopped")
    assert time.monotonic() - started < 5
    assert not stream.finish()
    assert agent.engines() == []


def test_a_second_delete_shortens_a_drain(agent: AgentProcess) -> None:
    rank = agent.run("--tpot", "20ms")
    stream = Stream(rank["port"], max_tokens=5000)
    agent.delete(rank["replica"], drain="10m")
    draining = wait_until(
        lambda: (found := agent.rank(rank["replica"]))["reason"].startswith("waits for 1") and found,
        "a reason",
    )
    assert draining["state"] == "draining"
    agent.delete(rank["replica"], drain="0s")
    agent.wait_for(rank["replica"], "stopped")
    assert not stream.finish()


def test_a_replica_that_still_loads_stops_at_once(agent: AgentProcess) -> None:
    wanted = assignment("--load-time", "10m")
    agent.put(wanted)
    rank = agent.wait_for(wanted["replica"], "starting")
    wait_until(lambda: agent.rank(wanted["replica"]).get("reason"), "a reason")
    agent.delete(rank["replica"], drain="10m")
    agent.wait_for(rank["replica"], "stopped", timeout_s=5)
    assert agent.engines() == []


def test_an_engine_that_dies_is_told_with_its_cause(agent: AgentProcess) -> None:
    rank = agent.run()
    os.kill(rank["pid"], signal.SIGKILL)
    started = time.monotonic()
    failed = agent.wait_for(rank["replica"], "failed")
    assert time.monotonic() - started < 2
    assert failed["exit_code"] == -9
    assert (failed["cause"], failed["kind"]) == ("killed", "transient")
    assert "SIGKILL" in failed["reason"]
    assert agent.put(assignment()).status == 200, "its GPU is free again"


def test_an_exit_with_success_is_a_failure_all_the_same(agent: AgentProcess) -> None:
    rank = agent.run()
    os.kill(rank["pid"], signal.SIGTERM)
    failed = agent.wait_for(rank["replica"], "failed")
    assert failed["exit_code"] == 0


def test_a_load_that_fails_is_told_in_the_engines_own_words(agent: AgentProcess) -> None:
    wanted = assignment("--fail-load", "RuntimeError: the weights are made of cheese")
    agent.put(wanted)
    failed = agent.wait_for(wanted["replica"], "failed")
    assert "RuntimeError: the weights are made of cheese" in failed["reason"]
    assert failed["exit_code"] == 1
    log = agent.ask("GET", f"/v1/replicas/{wanted['replica']}/log?tail=1").body.decode()
    assert log == "RuntimeError: the weights are made of cheese\n"


def test_a_start_is_bounded_and_says_what_was_in_the_way(agent: AgentProcess) -> None:
    wanted = assignment("--load-time", "10m", startup_timeout_s=1)
    agent.put(wanted)
    failed = agent.wait_for(wanted["replica"], "failed")
    assert failed["cause"] == "start_timeout"
    assert "within 1s" in failed["reason"]
    assert "it does not listen yet" in failed["reason"]
    assert agent.engines() == []


def test_what_an_engine_leaves_behind_ends_with_it(agent: AgentProcess, tmp_path: Path) -> None:
    """An engine's workers survive their parent's death and hold its GPU: they are found by group and mark."""
    engine = tmp_path / "llama-server"
    engine.write_text(
        "#!/bin/sh\n[ $1 = --version ] && exit\nsleep 1000 &\nsetsid sleep 1000 &\nsleep 1000\n"
    )
    engine.chmod(0o700)
    agent.stop()
    agent.options = ("--engine", f"llamacpp={engine}")
    agent.start()
    wanted = assignment(engine="llamacpp", source=str(engine))
    agent.put(wanted)
    rank = agent.wait_for(wanted["replica"], "starting")
    wait_until(lambda: len(agent.engines()) == 4, "the engine's four processes")
    os.kill(rank["pid"], signal.SIGKILL)
    agent.wait_for(wanted["replica"], "failed")
    assert agent.engines() == []


def test_engines_of_a_trial_stop_with_their_agent(tmp_path: Path) -> None:
    with AgentProcess(tmp_path, "--engines-stop-with-agent") as agent:
        ranks = [agent.run("--tpot", "20ms", gpus=[gpu]) for gpu in ("sim-0", "sim-1")]
        stream = Stream(ranks[0]["port"], max_tokens=5000)
        started = time.monotonic()
        assert agent.stop() == 0
        assert time.monotonic() - started < 8
        assert agent.engines() == []
        assert not stream.finish()
        agent.start()
        assert {rank["state"] for rank in agent.state()["ranks"]} == {"stopped"}


def test_engines_of_a_trial_end_with_an_agent_that_is_killed(tmp_path: Path) -> None:
    with AgentProcess(tmp_path, "--engines-stop-with-agent") as agent:
        replica = agent.run()["replica"]
        agent.kill()
        wait_until(lambda: not agent.engines(), "the engine to end")
        agent.start()
        agent.wait_for(replica, "failed")
