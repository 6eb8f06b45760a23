"""One replica over two nodes: two real agents, sims as its ranks, and the reconciler that seats them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nodes.actions import register_node
from nodes.models import Claim, Rank, Replica
from tests.agent_process import KEY, PORT_RANGE, AgentProcess, Stream, ask, assignment
from tests.passes import add_model, one_pass, verbs
from tests.waiting import wait_until

SPAN = {"nodes": 2, "tp": 2, "gpus_per_node": 1}
FABRIC = ("--fabric", "ib-1", "--sim-gpus", "1:sim")


def two_agents(folder: Path) -> tuple[AgentProcess, AgentProcess]:
    """Of two nodes in one fabric, with a card each; not yet started."""
    first, last = map(int, PORT_RANGE.split("-"))
    middle = (first + last) // 2
    for name in "ab":
        (folder / name).mkdir()
    return (
        AgentProcess(folder / "a", *FABRIC, "--port-range", f"{first}-{middle}"),
        AgentProcess(folder / "b", *FABRIC, "--port-range", f"{middle + 1}-{last}"),
    )


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[AgentProcess, AgentProcess]]:
    first, second = two_agents(tmp_path)
    with first, second:
        yield first, second


def start(pair: tuple[AgentProcess, AgentProcess], *args: str, **changes: Any) -> tuple[dict[str, Any], Any]:
    """A replica on both, as the control plane starts it; and what rank 0's agent says of it."""
    wanted = assignment(*args, gpus=["sim-0"], profile=SPAN, **changes)
    said = pair[0].put(wanted)
    assert said.status == 200, said.body
    second = pair[1].put({**wanted, "rank": 1, "meeting": said.json["meeting"]})
    assert second.status == 200, second.body
    return wanted, said.json


def chat(port: int) -> int:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    return ask(url, "POST", body=body, headers={"Authorization": f"Bearer {KEY}"}).status


def test_rank_0_waits_for_the_others_and_serves_for_all(pair: tuple[AgentProcess, AgentProcess]) -> None:
    wanted = assignment(gpus=["sim-0"], profile=SPAN)
    said = pair[0].put(wanted).json
    assert pair[0].put(wanted).json["meeting"] == said["meeting"], "the same for a command that is repeated"
    wait_until(
        lambda: b"waits for the others" in pair[0].ask("GET", f"/v1/replicas/{wanted['replica']}/log").body,
        "rank 0 to wait",
        tell=pair[0].story,
    )
    assert pair[0].rank(wanted["replica"])["state"] == "starting"
    assert pair[1].put({**wanted, "rank": 1, "meeting": said["meeting"]}).status == 200
    first = pair[0].wait_for(wanted["replica"], "ready")
    second = pair[1].wait_for(wanted["replica"], "ready")
    assert (second["rank"], second["reason"]) == (
        1,
        "Its part runs; rank 0 tells when all of the replica serves.",
    )
    assert chat(first["port"]) == 200
    assert "running" not in second
    address, port = said["meeting"].split(":")
    told = second["command"].index("--master-addr")
    assert second["command"][told : told + 4] == ["--master-addr", address, "--master-port", port]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_part_that_is_killed_takes_the_whole_along(
    pair: tuple[AgentProcess, AgentProcess], lost: int
) -> None:
    wanted, said = start(pair)
    ranks = [agent.wait_for(wanted["replica"], "ready") for agent in pair]
    os.kill(ranks[lost]["pid"], signal.SIGKILL)
    ended = [agent.wait_for(wanted["replica"], "failed") for agent in pair]
    assert (ended[lost]["cause"], ended[1 - lost]["cause"]) == ("killed", "nccl")
    assert [agent.engines() for agent in pair] == [[], []]
    _, again = start(pair)
    assert again["meeting"] != said["meeting"], "where a late rank of the last attempt finds nobody"


def test_agents_that_die_take_up_their_parts_again(pair: tuple[AgentProcess, AgentProcess]) -> None:
    wanted, said = start(pair, "--tpot", "20ms")
    ranks = [agent.wait_for(wanted["replica"], "ready") for agent in pair]
    stream = Stream(ranks[0]["port"], max_tokens=150)
    for agent in pair:
        agent.restart()
    assert stream.finish(), stream.error
    again = [agent.rank(wanted["replica"]) for agent in pair]
    assert [(rank["state"], rank["pid"]) for rank in again] == [("ready", rank["pid"]) for rank in ranks]
    assert again[0]["meeting"] == said["meeting"]


def test_a_part_whose_others_never_come_ends_with_its_start(pair: tuple[AgentProcess, AgentProcess]) -> None:
    wanted = assignment(gpus=["sim-0"], profile=SPAN, startup_timeout_s=2)
    pair[0].put(wanted)
    failed = pair[0].wait_for(wanted["replica"], "failed")
    assert failed["cause"] == "start_timeout"
    assert pair[0].engines() == []


# --- seated by the reconciler ---------------------------------------------------------------------------


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[AgentProcess, AgentProcess]]:
    """Each of them is a node of this database's cluster."""
    agents = two_agents(tmp_path)
    for agent in agents:
        node, identity = register_node(agent.folder.name, agent.url, by="ann", door="command")
        agent.identity.write_text(json.dumps(identity))
        agent.node, agent.token = str(node.uuid), identity["token"]
    with agents[0], agents[1]:
        yield agents


def passes_until(state: str) -> Replica:
    def found() -> Replica | None:
        one_pass()
        return Replica.objects.filter(state=state).first()

    replica = wait_until(found, f"a replica to be {state}", timeout_s=30)
    assert replica is not None
    return replica


@pytest.mark.django_db(transaction=True)
def test_passes_seat_a_gang_and_try_again_when_nothing_of_it_is_left(
    nodes: tuple[AgentProcess, AgentProcess],
) -> None:
    add_model(**SPAN)
    first = passes_until("ready")
    ranks = list(Rank.objects.filter(replica=first).order_by("rank"))
    assert [rank.node.name for rank in ranks] == ["a", "b"]
    assert ranks[0].meeting.startswith("127.0.0.1:")
    pid = nodes[1].rank(str(first.pk))["pid"]

    os.kill(pid, signal.SIGKILL)
    failed = passes_until("failed")
    assert failed.pk == first.pk
    assert failed.cause in ("killed", "nccl")
    second = passes_until("ready")
    assert second.pk != first.pk
    again = Rank.objects.get(replica=second, rank=0)
    assert again.meeting != ranks[0].meeting
    assert Claim.objects.count() == 2
    assert [len(agent.engines()) for agent in nodes] == [1, 1]
    assert verbs().count("start") == 2
