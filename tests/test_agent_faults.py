"""What befalls a node's agent from outside, and what must hold afterwards (`audit`).

Deaths of agents: test_agent_kills and test_agent_adoption. Full disks: test_agent_disk. Copies of agents:
test_agent_instances. Want of memory: test_agent_attempts.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import pytest

from nodes.agent.__main__ import KEEPALIVE, UNHEARD_MS, bind
from nodes.agent.files import SUM
from nodes.agent.ports import find_port
from nodes.agent.processes import Mark, Process, marked_processes, marks
from tests.agent_process import KEY, PORT_RANGE, TOKEN, AgentProcess, Stream, assignment
from tests.services import free_port
from tests.traffic import Traffic
from tests.waiting import wait_until


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    with AgentProcess(tmp_path) as agent:
        yield agent
        audit(agent)


def audit(agent: AgentProcess) -> None:
    """One engine of each rank that runs and no process besides, no GPU held twice, no draft of a file, no
    secret in what anybody may read; and nothing of it when all are told to stop."""
    ranks = agent.state().get("ranks", [])
    alive = [rank for rank in ranks if rank["state"] not in ("stopped", "failed")]
    leaders = [seen for seen in marked_processes(agent.node) if seen.is_leader]
    assert sorted(seen.pid for seen in leaders) == sorted(rank["pid"] for rank in alive), agent.story()
    held = [gpu for rank in alive for gpu in rank.get("gpus", ())]
    assert len(held) == len(set(held))
    assert not list(agent.state_folder.rglob(".*"))
    told = json.dumps(agent.state()) + agent.story()
    told += "".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in agent.engines())
    assert KEY not in told
    assert TOKEN not in told
    for rank in ranks:
        agent.delete(rank["replica"], fence=10**6)
    wait_until(lambda: not agent.engines(), "all engines to be gone", tell=agent.story)
    wait_until(lambda: not held_by(agent), "every handle to be closed", tell=lambda: str(held_by(agent)))


def held_by(agent: AgentProcess) -> list[str]:
    """What it has open of engines and of files that are gone."""
    opened = []
    for each in Path(f"/proc/{agent.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            opened.append(os.readlink(each))
    return [each for each in opened if "pidfd" in each or "deleted" in each]


# --- clocks ---------------------------------------------------------------------------------------------


class WallClock:
    """The agent's, which the test moves; what counts durations goes on as it does."""

    def __init__(self, folder: Path) -> None:
        spec = importlib.util.find_spec("libfaketime")
        assert spec is not None
        assert spec.origin is not None
        library = Path(spec.origin).parent / "vendor/libfaketime/src/libfaketime.so.1"
        self._file = folder / "clock"
        self.jump("+0")
        self.environment = {
            "LD_PRELOAD": str(library),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_NO_CACHE": "1",
            "DONT_FAKE_MONOTONIC": "1",
        }

    def jump(self, offset: str) -> None:
        self._file.write_text(offset + "\n")


def wall_clock_of(agent: AgentProcess) -> timedelta:
    """How far it is from the test's, by the date in its answers."""
    return parsedate_to_datetime(agent.ask("GET", "/v1/state").headers["Date"]) - datetime.now(UTC)


@pytest.mark.parametrize(
    ("offset", "away"),
    [
        pytest.param("+3d", timedelta(days=3), marks=pytest.mark.soak),
        ("-2h", timedelta(hours=-2)),
    ],
)
def test_a_clock_that_jumps_changes_nothing(tmp_path: Path, offset: str, away: timedelta) -> None:
    clock = WallClock(tmp_path)
    with AgentProcess(tmp_path, environment=clock.environment) as agent:
        running = agent.run("--tpot", "20ms")
        serving = agent.run("--ttft", "1ms", "--tpot", "1ms", gpus=[])
        loading = assignment("--load-time", "4s", gpus=["sim-1"], startup_timeout_s=60)
        agent.put(loading)
        gone = assignment()
        agent.delete(gone["replica"])
        stream = Stream(running["port"], max_tokens=200)
        with Traffic(serving["port"]):
            agent.delete(running["replica"], drain="1m")
            clock.jump(offset)
            wait_until(lambda: abs(wall_clock_of(agent) - away) < timedelta(minutes=1), "the clock to jump")
            draining = agent.rank(running["replica"])
            assert (draining["state"], draining["pid"]) == ("draining", running["pid"])
            assert 0 <= draining["age_s"] < 60
            assert agent.put(gone).refusal[:2] == (410, "deleted")
            assert agent.wait_for(loading["replica"], "ready")["age_s"] < 60
            agent.restart()
            assert agent.rank(loading["replica"])["age_s"] < 120
            assert stream.finish(), stream.error
            agent.wait_for(running["replica"], "stopped")
        audit(agent)


# --- state ----------------------------------------------------------------------------------------------


def rewrite(path: Path, **changes: Any) -> None:
    record = {**json.loads(path.read_text()), **changes}
    del record[SUM]  # as of an agent that wrote none
    path.write_text(json.dumps(record))


FROM_ANOTHER_VERSION = {
    "fields that nobody knows yet": {
        "hibernation": {"until": 7},
        "attempts": [{"number": 1, "mood": "good"}],
    },
    "a state that nobody knows yet": {"state": "hibernating"},
    "none of what came later": {"attempt": 0, "attempts": [], "gpu_used_mib": {}, "meeting": ""},
}


@pytest.mark.parametrize("changes", FROM_ANOTHER_VERSION.values(), ids=FROM_ANOTHER_VERSION)
def test_a_record_of_another_version_keeps_its_engine(agent: AgentProcess, changes: dict[str, Any]) -> None:
    rank = agent.run()
    agent.kill()
    rewrite(agent.state_folder / "replicas" / f"{rank['replica']}.json", **changes)
    agent.start()
    again = agent.wait_for(rank["replica"], "ready")
    assert again["pid"] == rank["pid"]
    assert agent.engines() == [rank["pid"]]


@pytest.mark.parametrize("name", ["replicas/{replica}.json", "agent.json"])
def test_a_byte_that_has_turned_is_noticed_and_its_engine_left_alone(agent: AgentProcess, name: str) -> None:
    """Where it would have been read all the same: another digit in a number."""
    rank = agent.run(fence=7)
    agent.kill()
    path = agent.state_folder / name.format(replica=rank["replica"])
    held = path.read_text()
    port = f'"{"port" if "replica" in name else "next_port"}": '
    place = held.index(port) + len(port)
    path.write_text(f"{held[:place]}{9 - int(held[place])}{held[place + 1 :]}")
    agent.start()
    assert path.with_suffix(".unreadable").read_text() != held
    assert agent.rank(rank["replica"])["pid"] == rank["pid"]
    assert agent.engines() == [rank["pid"]]


@pytest.mark.parametrize("content", ["", "{", '{"fence": "high"}', "[]", "\0" * 100], ids=repr)
def test_a_ledger_that_cannot_be_read_is_set_aside_and_engines_go_on(
    agent: AgentProcess, content: str
) -> None:
    rank = agent.run(fence=7)
    agent.kill()
    (agent.state_folder / "agent.json").write_text(content)
    agent.start()
    assert (agent.state_folder / "agent.unreadable").exists()
    assert agent.rank(rank["replica"])["pid"] == rank["pid"]
    assert agent.delete(rank["replica"], fence=8).status == 200, "the control plane is believed anew"
    agent.wait_for(rank["replica"], "stopped")


# --- connections ----------------------------------------------------------------------------------------


def test_a_connection_whose_other_end_is_silent_for_good_is_noticed() -> None:
    port = free_port()
    with bind("127.0.0.1", port) as door, socket.create_connection(("127.0.0.1", port)):
        accepted, _ = door.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == UNHEARD_MS
            told = {name: accepted.getsockopt(socket.IPPROTO_TCP, name) for name in KEEPALIVE}
    assert told == KEEPALIVE
    idle_s, every_s, times = (
        KEEPALIVE[name] for name in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    )
    assert idle_s + every_s * times <= 35


# --- engines --------------------------------------------------------------------------------------------


@pytest.fixture
def frozen() -> Iterator[Callable[[int], None]]:
    """Keeps a process from heeding any signal, KILL too, as one does that waits for a driver or a disk."""
    group = Path(f"/sys/fs/cgroup/freezer/llmgw-test-{os.getpid()}")
    try:
        group.mkdir()
    except OSError:
        pytest.skip("no freezer cgroup may be made here")

    def freeze(pid: int) -> None:
        (group / "cgroup.procs").write_text(str(pid))
        (group / "freezer.state").write_text("FROZEN")
        wait_until(lambda: read_word(group) == "FROZEN", "the process to freeze")

    try:
        yield freeze
    finally:
        (group / "freezer.state").write_text("THAWED")
        wait_until(lambda: not (group / "cgroup.procs").read_text(), "the group to be empty")
        group.rmdir()


def read_word(group: Path) -> str:
    return (group / "freezer.state").read_text().strip()


def thaw() -> None:
    Path(f"/sys/fs/cgroup/freezer/llmgw-test-{os.getpid()}/freezer.state").write_text("THAWED")


def test_an_engine_that_survives_being_killed_keeps_its_cards(
    agent: AgentProcess, frozen: Callable[[int], None]
) -> None:
    agent.options = ("--stop-grace", "100ms")
    agent.restart()
    rank = agent.run()
    frozen(rank["pid"])
    agent.delete(rank["replica"])
    wait_until(lambda: is_killed(rank["pid"]), "KILL to wait for it", tell=agent.story)
    for _ in range(2):
        told = agent.rank(rank["replica"])
        assert (told["state"], told["pid"], told["gpus"]) == ("draining", rank["pid"], rank["gpus"])
        assert "stopped" in told["reason"]
        assert agent.put(assignment()).refusal[:2] == (409, "gpu_taken")
        agent.restart()
    thaw()
    agent.wait_for(rank["replica"], "stopped")
    agent.run()


def is_killed(pid: int) -> bool:
    """Whether it would end, if it could."""
    found = re.search(r"^SigPnd:\t(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(found and int(found[1], 16) >> (signal.SIGKILL - 1) & 1)


async def test_a_process_that_survives_being_killed_is_told_by_its_number(
    tmp_path: Path, frozen: Callable[[int], None]
) -> None:
    mark = Mark("00000000-0000-4000-8000-000000000001", 1, 0)
    process = Process.spawn(
        ["sh", "-c", "trap '' TERM; exec sleep 1000"],
        env=marks(mark, node="n", port=1) | {"PATH": os.environ["PATH"]},
        mark=mark,
        log=tmp_path / "log",
        folder=tmp_path,
    )
    told: list[str] = []
    frozen(process.pid)
    ending = asyncio.create_task(process.end(grace_s=0.1, tell=told.append, killed_within_s=0.2))
    sentence = f"process {process.pid} was killed and does not end; if it stays, restart the node"
    async with asyncio.timeout(10):
        while sentence not in told:  # noqa: ASYNC110 - it tells a list
            await asyncio.sleep(0.05)
        assert not ending.done()
        thaw()
        await ending
    process.close()
    assert process.exit_code == -9


def test_an_engine_that_is_stuck_ends_within_its_grace_and_two_looks(tmp_path: Path) -> None:
    """By default within the 20 seconds that a stuck engine may hold up its users."""
    with AgentProcess(tmp_path) as agent:
        rank = agent.run("--stall-after", "8")
        stream = Stream(rank["port"], max_tokens=1000)
        wait_until(lambda: len(stream.lines) >= 8, "the stall")
        began = time.monotonic()
        assert agent.wait_for(rank["replica"], "failed", timeout_s=30)["cause"] == "stuck"
        assert time.monotonic() - began < 20
        stream.finish()


def test_a_stranger_on_an_engines_port_is_never_taken_for_it(agent: AgentProcess) -> None:
    """It answers everything with 200; the engine that was to have the port loads on, and cannot have it."""
    first, last = map(int, PORT_RANGE.split("-"))
    wanted = assignment("--load-time", "2s")
    agent.put(wanted)
    port = agent.wait_for(wanted["replica"], "starting")["port"]
    assert find_port("127.0.0.1", first, last, start=port, taken=set()) == port
    with socket.create_server(("127.0.0.1", port)):
        again = wait_until(
            lambda: (rank := agent.rank(wanted["replica"])).get("attempts") and rank,
            "another start",
            tell=agent.story,
        )
        assert again["attempts"][0]["cause"] in ("port_in_use", "bind_failed"), again["attempts"]
        assert agent.wait_for(wanted["replica"], "ready")["port"] != port
