"""Every process that an agent starts is accounted for: how it ended, after how long, and what it said."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from nodes.agent.failures import cause_of_end
from nodes.agent.inventory import oom_counter, oom_kills
from nodes.agent.logs import BITE_BYTES, Follower, bound_log
from tests.agent_process import KEY, TOKEN, AgentProcess, assignment
from tests.waiting import wait_until


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    with AgentProcess(tmp_path) as agent:
        yield agent


def log(agent: AgentProcess, replica: str, query: str = "") -> str:
    answer = agent.ask("GET", f"/v1/replicas/{replica}/log{query}")
    assert answer.status == 200, answer.body
    return answer.body.decode()


# --- attempts -------------------------------------------------------------------------------------------


def test_the_last_five_attempts_are_told_with_their_ends(agent: AgentProcess) -> None:
    """A generation is the control plane's; an attempt is a process."""
    wanted = assignment("--fail-load", "first words")
    for generation in range(1, 7):
        wanted["generation"] = generation
        wanted["launch"]["profile"]["args"][1] = f"words of {generation}"
        assert agent.put(wanted).status == 200, agent.story()
        wait_until(
            lambda: (
                (rank := agent.rank(wanted["replica"]))["state"] == "failed"
                and rank["generation"] == wanted["generation"]
            ),
            "the end of it",
            tell=agent.story,
        )
    attempts = agent.rank(wanted["replica"])["attempts"]
    assert [(each["number"], each["generation"]) for each in attempts] == [(n, n) for n in range(2, 7)]
    assert {each["exit_code"] for each in attempts} == {1}
    assert all(0 < each["duration_s"] < 60 for each in attempts)
    assert "words of 6" in attempts[-1]["reason"]
    assert log(agent, wanted["replica"], "?attempt=3&tail=1") == "words of 3\n"
    assert log(agent, wanted["replica"], "?tail=1") == "words of 6\n"
    gone = agent.ask("GET", f"/v1/replicas/{wanted['replica']}/log?attempt=1")
    assert gone.refusal == (
        404, "unknown_replica", "No attempt 1 of this replica has written a log on this node.",
    )  # fmt: skip


def test_each_kind_of_end_is_told_for_what_it_was(agent: AgentProcess) -> None:
    killed, unseen = agent.run(), agent.run(gpus=["sim-1"])
    os.kill(killed["pid"], signal.SIGKILL)
    failed = agent.wait_for(killed["replica"], "failed")
    (end,) = failed["attempts"]
    assert (end["exit_code"], end["signal"], end["cause"]) == (-9, 9, "killed")
    assert end["reason"] == failed["reason"]

    agent.kill()
    os.kill(unseen["pid"], signal.SIGKILL)
    agent.start()
    (end,) = agent.rank(unseen["replica"])["attempts"]
    assert {"exit_code", "signal", "duration_s"}.isdisjoint(end), "nobody saw it"

    stopped = agent.run(gpus=["sim-1"])
    agent.delete(stopped["replica"])
    (end,) = agent.wait_for(stopped["replica"], "stopped")["attempts"]
    assert (end["exit_code"], end["reason"]) == (0, "It was told to stop.")
    assert "cause" not in end


def test_a_port_that_was_taken_meanwhile_is_replaced_by_another(agent: AgentProcess, tmp_path: Path) -> None:
    """The engine finds its port taken, as somebody was faster; the next port is tried at once."""
    engine = tmp_path / "llama-server"
    engine.write_text(
        "#!/bin/sh\n[ $1 = --version ] && exit\n"
        f"echo x >>{tmp_path}/starts; [ $(wc -l <{tmp_path}/starts) = 3 ] && exec sleep 1000\n"
        "while [ $1 != --port ]; do shift; done\n"
        'echo "couldn\'t bind HTTP server socket, hostname: 127.0.0.1, port: $2"; exit 1\n'
    )
    engine.chmod(0o700)
    agent.options = ("--engine", f"llamacpp={engine}")
    agent.restart()
    wanted = assignment(engine="llamacpp", source=str(engine))
    agent.put(wanted)
    rank = wait_until(
        lambda: (found := agent.rank(wanted["replica"])).get("attempt") == 3 and found,
        "a third start",
        tell=agent.story,
    )
    assert rank["state"] == "starting"
    assert [(each["number"], each["cause"]) for each in rank["attempts"]] == [
        (1, "bind_failed"),
        (2, "bind_failed"),
    ]
    told = [log(agent, wanted["replica"], f"?attempt={number}") for number in (1, 2)]
    assert told[0] != told[1], "another port each time"


# --- memory ---------------------------------------------------------------------------------------------

SHORT = "The node ran out of memory, and its kernel ended the engine"


@pytest.mark.parametrize(
    ("log_tail", "exit_code", "cause"),
    [
        pytest.param("", -9, "host_oom", id="the engine was killed"),
        pytest.param("worker 3 is gone", 1, "host_oom", id="a worker was killed, and the engine went on it"),
        pytest.param("CUDA out of memory", 1, "gpu_oom", id="its log knows better"),
    ],
)
def test_an_end_for_want_of_memory_is_told_as_such(log_tail: str, exit_code: int, cause: str) -> None:
    found = cause_of_end("vllm", log_tail, exit_code, is_short_of_memory=True)
    assert found.cause == cause
    assert found.sentence.startswith(SHORT) is (cause == "host_oom")
    assert cause_of_end("vllm", log_tail, exit_code, is_short_of_memory=False).cause != "host_oom"


@pytest.fixture
def small_memory() -> Iterator[Path]:
    """A memory cgroup of 200 MiB."""
    group = Path(f"/sys/fs/cgroup/memory/llmgw-test-{os.getpid()}")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(200 << 20))
    except OSError:
        pytest.skip("no memory cgroup may be made here")
    try:
        yield group
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text(), "the group to be empty")
        group.rmdir()


def test_the_kernel_ends_an_engine_that_takes_all_memory_and_not_its_agent(
    small_memory: Path, tmp_path: Path
) -> None:
    if oom_kills(oom_counter(os.getpid())) is None:
        pytest.skip("this kernel does not count whom it ends")
    with AgentProcess(tmp_path) as agent:
        # Its engine will be in the same group, which is too small for both in a moment.
        (small_memory / "cgroup.procs").write_text(str(agent.pid))
        rank = agent.run("--memory-growth", "32", "--memory-growth-limit", "1024")
        score = Path(f"/proc/{rank['pid']}/oom_score_adj").read_text()
        assert int(score) > int(Path(f"/proc/{agent.pid}/oom_score_adj").read_text())
        failed = agent.wait_for(rank["replica"], "failed")
    assert (failed["cause"], failed["kind"]) == ("host_oom", "capacity")
    assert failed["reason"].startswith(SHORT)


# --- logs -----------------------------------------------------------------------------------------------


def test_a_log_is_followed_until_its_engine_is_over(agent: AgentProcess) -> None:
    rank = agent.run()
    path = agent.state_folder / "logs" / f"{rank['replica']}-1.log"
    connection = http.client.HTTPConnection("127.0.0.1", agent.port, timeout=20)
    connection.request(
        "GET",
        f"/v1/replicas/{rank['replica']}/log?tail=1&follow=1",
        headers={"Authorization": f"Bearer {TOKEN}"},
    )
    answer = connection.getresponse()
    assert answer.readline().startswith(b"sim: listening on ")
    with path.open("ab", buffering=0) as engine:
        engine.write(b"half a line, ")
        engine.write(f"and the key {KEY}\n".encode())
        assert answer.readline() == b"half a line, and the key <key>\n"
        engine.write(b"last words")
    agent.delete(rank["replica"])
    assert answer.read() == b"last words"
    connection.close()


def test_who_follows_and_goes_makes_room_for_others(agent: AgentProcess) -> None:
    where = f"/v1/replicas/{agent.run()['replica']}/log?follow=1"
    request = f"GET {where} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()

    def status(reader: socket.socket) -> bytes:
        reader.sendall(request)
        return reader.recv(12)

    with contextlib.ExitStack() as stack:
        for _ in range(16):
            reader = stack.enter_context(socket.create_connection(("127.0.0.1", agent.port), timeout=20))
            assert status(reader) == b"HTTP/1.1 200"
        assert agent.ask("GET", where).refusal[:2] == (429, "followers")

    def is_let_in() -> bool:
        with socket.create_connection(("127.0.0.1", agent.port), timeout=20) as reader:
            return status(reader) == b"HTTP/1.1 200"

    wait_until(is_let_in, "room for another")


@pytest.mark.parametrize(
    "query", ["?follow=2", "?follow=yes", "?attempt=0", "?attempt=x", "?attempt=99999999999", "?attempt=../1"]
)
def test_a_question_about_a_log_is_refused(agent: AgentProcess, query: str) -> None:
    answer = agent.ask("GET", f"/v1/replicas/6f1c2f0e-7a53-4a58-9d0a-0f2f8d0a4b11/log{query}")
    assert answer.refusal[:2] == (400, "malformed")


def follow(path: Path, *, lines: int = 10) -> tuple[Follower, str]:
    follower = Follower(path, key=KEY)
    return follower, follower.begin(lines, 10_000)


def test_a_follower_is_given_each_line_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\nthr")
    follower, told = follow(path, lines=1)
    assert told == "two\n"
    with path.open("ab", buffering=0) as engine:
        assert follower.more(is_over=False) == ""
        engine.write(b"ee\nfour")
        assert follower.more(is_over=False) == "three\n"
        engine.write(KEY[:10].encode())
        assert follower.more(is_over=False) == ""
        engine.write(KEY[10:].encode())
        assert follower.more(is_over=True) == "four<key>"
    assert follower.more(is_over=True) == ""


def test_a_line_without_end_does_not_stop_a_follower(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * 5)
    follower, told = follow(path)
    assert (told, follower.more(is_over=False)) == ("", "")
    path.write_bytes(b"x" * (BITE_BYTES + 5))
    assert follower.more(is_over=False) == "x" * BITE_BYTES
    assert follower.more(is_over=False) == ""
    assert follower.more(is_over=True) == "x" * 5


def test_a_log_that_is_cut_goes_on_for_who_follows_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * 100 + b"\n")
    follower, _ = follow(path)
    with path.open("ab", buffering=0) as engine:
        engine.write(b"x" * (9 << 20) + b"\n")
        while follower.more(is_over=False):
            pass
        bound_log(path)
        assert follower.more(is_over=False) == ""
        engine.write(b"after the cut\n")
        assert follower.more(is_over=False) == "after the cut\n"
    assert Follower(tmp_path / "none", key="").begin(5, 100) == ""


def test_an_engines_environment_has_nothing_of_the_agents_own_options(tmp_path: Path) -> None:
    with AgentProcess(tmp_path, environment={"LLMGW_AGENT_LABEL": "zone=a"}) as agent:
        rank = agent.run()
        assert agent.state()["labels"] == {"zone": "a"}
        environ = Path(f"/proc/{rank['pid']}/environ").read_bytes()
    assert b"LLMGW_AGENT" not in environ
