"""Weights that go from node to node: real agents, real tickets, and one that dies, lies or is not let in."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from nodes.protocol import CLOCK_HEADER
from nodes.tickets import sign, weights_key
from tests.agent_process import KEY, TOKEN, AgentProcess, gguf, llama_server
from tests.gguf_parts import split
from tests.test_agent_weights import agent_at, model_path, wanted
from tests.waiting import wait_until
from tests.weights_hub import COMMIT, FileHub, running

NOW_S = 1_900_000_000
OF_M = weights_key("org/m", COMMIT)
PARTS = {f"m-0000{part}-of-00003.gguf": bytes([part]) * 8_000_000 for part in (1, 2, 3)}
PATIENCE = ("--peer-patience", "3s")


def ticket(agent: AgentProcess, *, key: str = OF_M, until_s: int = NOW_S + 600) -> str:
    """For what this agent has."""
    return sign([agent.token], key=key, reader=str(uuid.uuid4()), until_s=until_s)


def told_the_time(*agents: AgentProcess, now_s: int = NOW_S) -> None:
    for agent in agents:
        agent.ask("GET", "/v1/state", headers={CLOCK_HEADER: str(now_s)})


def from_peers(*peers: AgentProcess, is_fetching: bool = False) -> dict[str, Any]:
    """A replica whose node is told that these have its weights."""
    told = [{"url": peer.url, "ticket": ticket(peer), "is_fetching": is_fetching} for peer in peers]
    return {**wanted(), "peers": told}


def wait_for_bytes(agent: AgentProcess, replica: str, count: int) -> None:
    wait_until(lambda: agent.rank(replica).get("done_bytes", 0) >= count, "so many bytes", timeout_s=30)


@contextlib.contextmanager
def agents_at(hub: FileHub, tmp_path: Path, count: int) -> Iterator[list[AgentProcess]]:
    with contextlib.ExitStack() as stack:
        agents = [
            stack.enter_context(agent_at(hub.url, tmp_path / name, *PATIENCE)) for name in "abc"[:count]
        ]
        told_the_time(*agents)
        yield agents


def test_a_second_node_has_all_of_it_from_the_first_and_needs_no_hub(tmp_path: Path) -> None:
    with running(PARTS) as hub, agents_at(hub, tmp_path, 2) as (first, second):
        replica = wanted()
        first.put(replica)
        held = model_path(first, replica["replica"])
        hub.is_silent = True
        replica = from_peers(first)
        second.put(replica)
        path = model_path(second, replica["replica"])
        assert {name: (path.parent / name).read_bytes() for name in PARTS} == PARTS
        assert sum(hub.sent.values()) - hub.sent.get("", 0) == 24_000_000
        assert (second.state()["holdings"][0]["state"], second.state()["holdings"][0]["is_used"]) == (
            "held",
            True,
        )

        # What a node has is opened by a ticket for it, in time, and nothing else is.
        address = f"/v1/weights/{OF_M}/m-00002-of-00003.gguf"
        bearer = {"Authorization": f"Bearer {ticket(first)}"}
        assert first.ask("GET", address, headers=bearer).body == PARTS["m-00002-of-00003.gguf"]
        piece = first.ask("GET", address, headers={**bearer, "Range": "bytes=10-19"})
        assert (piece.status, piece.body) == (206, b"\2" * 10)
        for no in (ticket(first, key="0" * 32), ticket(first, until_s=NOW_S), "", "x"):
            assert first.ask("GET", address, headers={"Authorization": f"Bearer {no}"}).status == 401
        for path_of_others in ("/v1/state", f"/v1/weights/{'0' * 32}"):
            assert first.ask("GET", path_of_others, headers=bearer).status == 401
        for name in ("../../../identity.json", "%2e%2e%2f%2e%2e%2fagent.json", str(held)):
            assert first.ask("GET", f"/v1/weights/{OF_M}/{name}", headers=bearer).status in (401, 404)
        (held.parent / "m-00003-of-00003.gguf").resolve().unlink()
        (held.parent / "m-00003-of-00003.gguf").resolve().symlink_to(first.identity)
        linked = first.ask("GET", f"/v1/weights/{OF_M}/m-00003-of-00003.gguf", headers=bearer)
        assert (linked.status, TOKEN.encode() in linked.body) == (404, False)
        told_the_time(first, now_s=NOW_S + 700)
        assert first.ask("GET", address, headers=bearer).status == 401


def test_three_nodes_that_start_at_once_cost_one_download(tmp_path: Path) -> None:
    with running(PARTS) as hub, agents_at(hub, tmp_path, 3) as (first, second, third):
        hub.bytes_per_s = 12_000_000
        replicas = [
            wanted(),
            from_peers(first, is_fetching=True),
            from_peers(first, second, is_fetching=True),
        ]
        for agent, replica in zip((third, second, first), reversed(replicas), strict=True):
            agent.put(replica)
        for agent, replica in zip((first, second, third), replicas, strict=True):
            path = model_path(agent, replica["replica"])
            assert {name: (path.parent / name).read_bytes() for name in PARTS} == PARTS
        assert sorted(hub.gets()) == sorted(PARTS)


def test_when_the_first_dies_half_way_the_next_goes_on_from_the_hub(tmp_path: Path) -> None:
    with running(PARTS) as hub, agents_at(hub, tmp_path, 3) as (first, second, third):
        hub.held = "m-00002-of-00003.gguf"
        hub.gate.clear()
        replicas = [
            wanted(),
            from_peers(first, is_fetching=True),
            from_peers(first, second, is_fetching=True),
        ]
        for agent, replica in zip((first, second, third), replicas, strict=True):
            agent.put(replica)

        for agent, replica in zip((second, third), replicas[1:], strict=True):
            wait_for_bytes(agent, replica["replica"], 8_000_000)
        first.kill()
        hub.gate.set()
        for agent, replica in zip((second, third), replicas[1:], strict=True):
            path = model_path(agent, replica["replica"])
            assert {name: (path.parent / name).read_bytes() for name in PARTS} == PARTS
        assert hub.gets().count("m-00001-of-00003.gguf") == 1
        assert hub.gets().count("m-00003-of-00003.gguf") == 1


def test_what_a_peer_gives_is_checked_and_the_hub_asked_instead(tmp_path: Path) -> None:
    with running({"m.gguf": b"x" * 3_000_000}) as hub, agents_at(hub, tmp_path, 2) as (first, second):
        replica = wanted()
        first.put(replica)
        blob = model_path(first, replica["replica"]).resolve()
        before = blob.stat()
        blob.write_bytes(b"y" * 3_000_000)
        os.utime(blob, ns=(before.st_atime_ns, before.st_mtime_ns))  # as a disk does that rots
        replica = from_peers(first)
        second.put(replica)
        assert model_path(second, replica["replica"]).read_bytes() == b"x" * 3_000_000
        assert len(hub.gets()) == 2


@pytest.mark.skipif(llama_server() is None, reason="no llama-server that runs on this processor")
def test_a_real_model_in_parts_that_came_from_a_hub_and_then_from_a_peer_answers_a_chat(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    whole = gguf(pytestconfig.cache.mkdir("gguf")).read_bytes()  # type: ignore[union-attr]
    parts = dict(split(whole, 64_000_000))
    assert len(parts) > 2
    first_part, *_, last_part = parts
    with running(parts) as hub, agents_at(hub, tmp_path, 2) as (first, second):
        hub.cuts = {last_part: [32_000_000, 16_000_000]}
        replica = wanted()
        first.put(replica)
        wait_until(lambda: first.rank(replica["replica"])["state"] == "starting", "the weights", timeout_s=60)
        hub.is_silent = True
        second.options = (*second.options[2:], "--engine", f"llamacpp={llama_server()}")
        second.restart()
        told_the_time(second)
        replica = from_peers(first)
        replica["launch"]["context_length"] = 256
        replica["launch"]["profile"]["args"] = ["--threads", "2"]
        second.put(replica)
        rank = second.wait_for(replica["replica"], "ready", timeout_s=90)
        assert any(word.endswith(first_part) for word in rank["command"])
        with openai.OpenAI(
            base_url=f"http://127.0.0.1:{rank['port']}/v1", api_key=KEY, max_retries=0, timeout=60
        ) as client:
            made = client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "Hello"}], max_tokens=4, temperature=0
            )
        assert made.usage is not None
        assert made.usage.completion_tokens > 0
