"""What befalls a node's agent from outside: clocks that jump, state of another version, dead connections."""

from __future__ import annotations

import importlib.util
import json
import socket
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import pytest

from nodes.agent.__main__ import KEEPALIVE, UNHEARD_MS, bind
from nodes.agent.ports import find_port
from tests.agent_process import PORT_RANGE, AgentProcess, Stream, assignment
from tests.services import free_port
from tests.waiting import wait_until


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    with AgentProcess(tmp_path) as agent:
        yield agent


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


@pytest.mark.parametrize(("offset", "away"), [("+3d", timedelta(days=3)), ("-2h", timedelta(hours=-2))])
def test_a_clock_that_jumps_changes_nothing(tmp_path: Path, offset: str, away: timedelta) -> None:
    clock = WallClock(tmp_path)
    with AgentProcess(tmp_path, environment=clock.environment) as agent:
        running = agent.run("--tpot", "20ms")
        loading = assignment("--load-time", "4s", gpus=["sim-1"], startup_timeout_s=60)
        agent.put(loading)
        gone = assignment()
        agent.delete(gone["replica"])
        stream = Stream(running["port"], max_tokens=200)
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


# --- state ----------------------------------------------------------------------------------------------


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


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
