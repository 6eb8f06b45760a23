"""An agent is killed at random instants while replicas start, run and stop: every engine stays accounted for.

Ten times here, a hundred in `make soak`; which instants they are follows from the seed, which is printed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from nodes.agent.processes import marked_processes
from tests.agent_process import AgentProcess, assignment
from tests.traffic import Traffic
from tests.waiting import wait_until

KILLS = int(os.environ.get("SOAK_KILLS", "10"))
SEED = int(os.environ.get("SOAK_SEED", "1"))
LONGEST_LIFE_S = 1.2
TRUE_WITHIN_S = 15

OVER = {"stopped", "failed"}
ENGINES = (
    (),
    ("--load-time", "300ms"),
    ("--load-time", "1s", "--workers", "2"),
    ("--fail-load", "RuntimeError: on command"),
    ("--workers", "1", "--workers-outlive", "1m"),
)


class Commander:
    """What a control plane does meanwhile: it starts, stops and repeats, and remembers what was accepted."""

    def __init__(self, agent: AgentProcess, random: Random) -> None:
        self.agent, self.random = agent, random
        self.wanted: dict[str, dict[str, Any]] = {}
        self.accepted: set[str] = set()
        self.deleted: set[str] = set()  # it was told to be
        self.released: set[str] = set()  # and that was heard
        self.statuses: Counter[int] = Counter()

    def go_on(self) -> None:
        """Until the agent is gone."""
        with contextlib.suppress(OSError):
            for replica in sorted(self.wanted.keys() - self.accepted - self.deleted):
                self._put(replica)  # again, as its answer was lost
            for replica in sorted(self.deleted - self.released):
                self._delete(replica)
            while True:
                self._something()

    def _put(self, replica: str) -> None:
        status = self.agent.put(self.wanted[replica]).status
        self.statuses[status] += 1
        if status == 200:
            self.accepted.add(replica)
        else:
            del self.wanted[replica]

    def _delete(self, replica: str) -> None:
        drain = self.random.choice(["0s", "200ms", "1m"])
        self.statuses[self.agent.delete(replica, drain=drain).status] += 1
        self.released.add(replica)

    def _something(self) -> None:
        running = [replica for replica in self.wanted if replica not in self.deleted]
        what = self.random.choice(["start", "start", "stop", "kill"])
        if what == "start" or not running:
            told = assignment(
                *self.random.choice(ENGINES), gpus=[f"sim-{self.random.randrange(4)}"], startup_timeout_s=30
            )
            self.wanted[told["replica"]] = told  # whether or not the answer arrives
            self._put(told["replica"])
        elif what == "stop":
            replica = self.random.choice(running)
            self.deleted.add(replica)
            self._delete(replica)
        else:
            rank = self.agent.rank(self.random.choice(running))
            if rank is not None and "pid" in rank and rank["state"] not in OVER:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank["pid"], signal.SIGKILL)


def faults(agent: AgentProcess, commander: Commander) -> list[str]:
    """What is not accounted for just now."""
    processes = marked_processes(agent.node)
    ranks = {rank["replica"]: rank for rank in agent.state().get("ranks", ())}
    alive = {replica: rank for replica, rank in ranks.items() if rank["state"] not in OVER}
    leaders = [seen for seen in processes if seen.is_leader]
    found = [
        f"two engines of {mark} run" for mark, count in Counter(str(seen.mark) for seen in leaders).items()
        if count > 1
    ]  # fmt: skip
    found += [f"{seen.pid} runs for nobody" for seen in processes if seen.mark.replica not in alive]
    found += [
        f"{seen.pid} is not the {alive[seen.mark.replica].get('pid')} of {seen.mark.replica}"
        for seen in leaders
        if seen.mark.replica in alive and alive[seen.mark.replica].get("pid") != seen.pid
    ]
    pids = {seen.pid for seen in leaders}
    found += [
        f"{replica} is {rank['state']} without a process"
        for replica, rank in alive.items()
        if rank["state"] != "fetching" and rank.get("pid") not in pids
    ]
    held = Counter(gpu for rank in alive.values() for gpu in rank.get("gpus", ()))
    found += [f"two engines run on {gpu}" for gpu, count in held.items() if count > 1]
    found += [
        f"{each} was accepted and is unknown"
        for each in commander.accepted - commander.deleted - ranks.keys()
    ]
    found += [
        f"{each} was deleted and runs"
        for each in commander.released
        if alive.get(each, {}).get("state") == "ready"
    ]
    return found


@pytest.mark.e2e
@pytest.mark.timeout(max(120, KILLS * 30))
def test_no_engine_is_lost_doubled_or_left_behind(tmp_path: Path) -> None:
    print(f"seed {SEED}, {KILLS} kills")
    random = Random(SEED)
    with AgentProcess(tmp_path, "--sim-gpus", "4:sim", "--stop-grace", "500ms") as agent:
        commander = Commander(agent, random)
        with Traffic(agent.run("--ttft", "1ms", gpus=[])["port"]):
            for number in range(KILLS):
                kill_once(agent, commander, number)
        assert commander.statuses[200] > KILLS, "there was something to account for"
        for replica in agent.state().get("ranks", ()):
            agent.delete(replica["replica"])
        wait_until(lambda: not marked_processes(agent.node), "all engines to be gone", tell=agent.story)
        assert not list(agent.state_folder.rglob(".*")), "no draft of a file is left"


def kill_once(agent: AgentProcess, commander: Commander, number: int) -> None:
    commands = threading.Thread(target=commander.go_on)
    commands.start()
    commands.join(commander.random.random() * LONGEST_LIFE_S)  # it goes on until the agent does not answer
    before = {seen.pid: seen.mark.replica for seen in marked_processes(agent.node) if seen.is_leader}
    agent.kill()
    commands.join(30)
    agent.start()
    wait_until(
        lambda: not faults(agent, commander),
        f"everything to be accounted for after kill {number} of seed {SEED}",
        tell=lambda: "\n".join([*faults(agent, commander), agent.story()]),
        timeout_s=TRUE_WITHIN_S,
    )
    known = {rank["replica"]: rank for rank in agent.state().get("ranks", ())}
    for pid, replica in before.items():
        rank = known.get(replica, {"state": "stopped"})
        assert rank["state"] in OVER | {"draining"} or rank["pid"] == pid, "it was restarted"
