"""Weights from a path or from a hub: a real client against a real server, cut and resumed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from nodes.agent.weights.fetches import Fetch, Fetches
from nodes.agent.weights.sources import Order
from nodes.agent.weights.store import READ_BYTES
from tests.agent_process import AgentProcess, assignment
from tests.engine_stand_in import stand_in
from tests.waiting import wait_until
from tests.weights_hub import COMMIT, FileHub, running

SIZE = 30_000_000


@contextlib.contextmanager
def agent_at(hub_url: str, tmp_path: Path, *options: str) -> Iterator[AgentProcess]:
    """Its llama-server only tells its arguments and waits: what is fetched here is no model."""
    tmp_path.mkdir(exist_ok=True)
    engine = tmp_path / "llama-server"
    engine.write_text('#!/bin/sh\necho "$@"\n[ "$1" = --version ] || exec sleep 1000\n')
    engine.chmod(0o700)
    environment = {"HF_ENDPOINT": hub_url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_ETAG_TIMEOUT": "20"}
    options = ("--engine", f"llamacpp={engine}", *options)
    with AgentProcess(tmp_path, *options, environment=environment) as agent:
        yield agent


def wanted(source: str = "org/m", revision: str = COMMIT) -> dict[str, Any]:
    return assignment(engine="llamacpp", source=source, gpus=[], launch={"revision": revision})


def model_path(agent: AgentProcess, replica: str) -> Path:
    command = agent.wait_for(replica, "starting")["command"]
    return Path(command[command.index("--model") + 1])


def test_only_the_chosen_file_is_fetched_at_the_pinned_commit(tmp_path: Path) -> None:
    files = {"m-q4.gguf": b"4" * 9000, "m-q8.gguf": b"8" * 9000, "README.md": b"r" * 9000}
    with running(files) as hub, agent_at(hub.url, tmp_path) as agent:
        replica = wanted("org/m:*q4*")
        agent.put(replica)
        path = model_path(agent, replica["replica"])
        assert path.read_bytes() == files["m-q4.gguf"]
        assert path.is_relative_to(agent.state_folder / "weights")
        assert agent.state()["weights"] == ["org/m:*q4*"]
        assert {each.name for each in hub.asked} == {"m-q4.gguf"}


def test_a_model_in_parts_is_fetched_whole(tmp_path: Path) -> None:
    files = {f"m-0000{part}-of-00002.gguf": bytes([part]) * 9000 for part in (2, 1)}
    with running(files) as hub, agent_at(hub.url, tmp_path) as agent:
        replica = wanted()
        agent.put(replica)
        path = model_path(agent, replica["replica"])
        assert path.name == "m-00001-of-00002.gguf"
        assert (path.parent / "m-00002-of-00002.gguf").read_bytes() == b"\2" * 9000


def begun(agent: AgentProcess, replica: str) -> Any:
    def has_begun() -> Any:
        rank = agent.rank(replica)
        return rank if rank.get("done_bytes", 0) >= SIZE // 4 else None

    return wait_until(has_begun, "part of the file", tell=agent.story, timeout_s=20)


def cut_files(agent: AgentProcess) -> list[Path]:
    return list(agent.state_folder.rglob("*.incomplete"))


@pytest.mark.parametrize("trusts", [False, True], ids=["not trusted", "trusted by the operator"])
def test_code_of_the_models_author_is_fetched_only_where_it_is(tmp_path: Path, *, trusts: bool) -> None:
    files = {"m.safetensors": b"w" * 50_000, "config.json": b"{}", "modeling.py": b"evil = 1", "a.pt": b"p"}
    program = stand_in(tmp_path, "vllm")
    environment = {"HF_HOME": str(tmp_path / "hf")}
    with (
        running(files) as hub,
        AgentProcess(
            tmp_path, f"--engine=vllm={program}", environment={**environment, "HF_ENDPOINT": hub.url}
        ) as agent,
    ):
        args = ["--trust-remote-code"] if trusts else []
        wanted = assignment(*args, engine="vllm", source="org/m", launch={"revision": COMMIT})
        agent.put(wanted)
        rank = agent.wait_for(wanted["replica"], "ready")
        fetched = {path.name for path in Path(rank["command"][2]).iterdir()}
    assert fetched == {"m.safetensors", "config.json"} | ({"modeling.py"} if trusts else set())


@contextlib.contextmanager
def half_way(hub: FileHub, agent: AgentProcess, replica: dict[str, Any]) -> Iterator[Any]:
    """While half of the last file is there and no more comes."""
    hub.held = max(hub.files)
    hub.gate.clear()
    agent.put(replica)
    yield begun(agent, replica["replica"])
    hub.gate.set()


def test_a_fetch_tells_its_bytes_and_goes_on_where_a_dead_agent_stopped(tmp_path: Path) -> None:
    files = {"m-00001-of-00002.gguf": b"x" * 9_000_000, "m-00002-of-00002.gguf": b"y" * SIZE}
    with running(files) as hub, agent_at(hub.url, tmp_path) as agent:
        replica = wanted()
        with half_way(hub, agent, replica) as rank:
            assert (rank["state"], rank["total_bytes"]) == ("fetching", SIZE + 9_000_000)
            assert "MB of org/m are on the node" in rank["reason"]
            wait_until(lambda: agent.rank(replica["replica"])["done_bytes"] >= SIZE * 3 // 4, "half of it")
            assert agent.rank(replica["replica"])["bytes_per_s"] > 0
            agent.kill()
        hub.asked.clear()
        sent = sum(hub.sent.values())
        agent.start()
        path = model_path(agent, replica["replica"])
        for name, data in files.items():
            assert (path.parent / name).read_bytes() == data
        assert hub.gets() == [hub.held]
        assert [each.range for each in hub.asked if each.method == "GET"] == [f"bytes={SIZE // 2}-"] or (
            sum(hub.sent.values()) - sent < SIZE * 3 // 4
        )
        assert not cut_files(agent)


def test_a_fetch_that_is_told_to_stop_stops_and_leaves_nothing(tmp_path: Path) -> None:
    with running({"m.gguf": b"x" * SIZE}) as hub, agent_at(hub.url, tmp_path) as agent:
        replica = wanted()
        with half_way(hub, agent, replica):
            assert cut_files(agent)
            agent.delete(replica["replica"], drain="1m")
            agent.wait_for(replica["replica"], "stopped", timeout_s=5)
        assert not cut_files(agent)
        assert "holdings" not in agent.state()


def test_two_replicas_of_one_model_fetch_it_once_and_both_tell_how_far_it_is(tmp_path: Path) -> None:
    with running({"m.gguf": b"x" * SIZE}) as hub, agent_at(hub.url, tmp_path) as agent:
        replicas = [wanted(), wanted()]
        with half_way(hub, agent, replicas[0]):
            agent.put(replicas[1])
            begun(agent, replicas[1]["replica"])
            agent.delete(replicas[0]["replica"])
            agent.wait_for(replicas[0]["replica"], "stopped", timeout_s=5)
        assert model_path(agent, replicas[1]["replica"]).stat().st_size == SIZE
        assert hub.gets() == ["m.gguf"]


def test_a_connection_that_is_cut_costs_a_piece_and_no_more(tmp_path: Path) -> None:
    with running({"m.gguf": bytes(range(250)) * 40_000}) as hub, agent_at(hub.url, tmp_path) as agent:
        hub.cuts["m.gguf"] = [3_000_000, 4_000_000]
        replica = wanted()
        agent.put(replica)
        assert model_path(agent, replica["replica"]).read_bytes() == hub.files["m.gguf"]
        assert len(hub.gets()) == 3
        assert hub.sent["m.gguf"] < 10_000_000 + 2 * READ_BYTES


@pytest.mark.parametrize("size", [500, 50_000], ids=["kept with the code", "stored apart"])
def test_what_is_not_what_was_announced_never_reaches_an_engine(tmp_path: Path, size: int) -> None:
    with running({"m.gguf": b"x" * size}) as hub, agent_at(hub.url, tmp_path) as agent:
        hub.lies["m.gguf"] = b"y" * size
        replica = wanted()
        agent.put(replica)
        failed = agent.wait_for(replica["replica"], "failed")
        assert (failed["cause"], failed["kind"]) == ("bad_checksum", "transient")
        assert "m.gguf of org/m@" in failed["reason"]
        assert len(hub.gets()) == 2
        hub.lies.clear()
        agent.put({**replica, "generation": 2})
        assert model_path(agent, replica["replica"]).read_bytes() == b"x" * size


def test_what_was_removed_or_changed_by_hand_is_fetched_again_and_nothing_else(tmp_path: Path) -> None:
    files = {f"m-0000{part}-of-00003.gguf": bytes([part]) * 9000 for part in (1, 2, 3)}
    with running(files) as hub, agent_at(hub.url, tmp_path) as agent:
        first = wanted()
        agent.put(first)
        folder = model_path(agent, first["replica"]).parent
        agent.delete(first["replica"])
        agent.wait_for(first["replica"], "stopped")
        (folder / "m-00001-of-00003.gguf").resolve().unlink()
        (folder / "m-00002-of-00003.gguf").resolve().write_bytes(b"?" * 9000)
        hub.asked.clear()
        again = wanted()
        agent.put(again)
        path = model_path(agent, again["replica"])
        assert {name: (path.parent / name).read_bytes() for name in files} == files
        assert hub.gets() == ["m-00001-of-00003.gguf", "m-00002-of-00003.gguf"]


def test_what_is_here_starts_without_a_hub(tmp_path: Path) -> None:
    with running({"m.gguf": b"x" * 9000}) as hub, agent_at(hub.url, tmp_path) as agent:
        first = wanted()
        agent.put(first)
        model_path(agent, first["replica"])
        hub.is_silent = True
        second = wanted()
        agent.put(second)
        assert model_path(agent, second["replica"]).read_bytes() == b"x" * 9000


def test_the_hubs_token_goes_to_the_hub_and_not_to_where_its_files_lie(tmp_path: Path) -> None:
    files = {"m.gguf": b"x" * 9000}
    with running(files) as hub, running(files) as elsewhere:
        hub.elsewhere = elsewhere.url.replace("127.0.0.1", "localhost")
        with agent_at(hub.url, tmp_path) as agent:
            agent.environment["HF_TOKEN"] = "hf_secret"
            agent.restart()
            replica = wanted()
            agent.put(replica)
            model_path(agent, replica["replica"])
            assert {each.authorization for each in hub.asked} == {"Bearer hf_secret"}
            assert [each.authorization for each in elsewhere.asked] == [None]
            assert "hf_secret" not in agent.story()


def test_so_many_fetches_run_at_the_same_time_and_others_say_that_they_wait(tmp_path: Path) -> None:
    files = {"a.gguf": b"a" * SIZE, "b.gguf": b"b" * 9000}
    with running(files) as hub, agent_at(hub.url, tmp_path, "--fetches", "1") as agent:
        hub.held = "a.gguf"
        hub.gate.clear()
        first, second = wanted("org/m:a.gguf"), wanted("org/m:b.gguf")
        agent.put(first)
        begun(agent, first["replica"])
        agent.put(second)
        waits = wait_until(lambda: agent.rank(second["replica"]).get("reason"), "a word of the second")
        assert waits == "It waits until fewer than 1 others are fetched on this node."
        hub.gate.set()
        model_path(agent, first["replica"])
        model_path(agent, second["replica"])


def test_fetches_keep_to_the_rate_that_the_node_allows(tmp_path: Path) -> None:
    with (
        running({"m.gguf": b"x" * 10_000_000}) as hub,
        agent_at(hub.url, tmp_path, "--fetch-rate", "5MB") as agent,
    ):
        replica = wanted()
        begun_s = monotonic()
        agent.put(replica)
        wait_until(lambda: agent.rank(replica["replica"])["state"] == "starting", "the end of the fetch")
        assert monotonic() - begun_s > 1.5, "ten megabytes, five a second"


async def test_a_late_word_on_its_progress_does_not_undo_a_finished_fetch() -> None:
    async def lines() -> AsyncIterator[bytes]:
        for said in ({"done": 1, "total": 2}, {"path": "/there"}, {"done": 2, "total": 2}):
            yield json.dumps(said).encode() + b"\n"

    fetch = Fetch(Order("org/m", COMMIT, "", "llamacpp", trusts_code=False))
    assert await Fetches._hear(None, lines(), fetch) == {"path": "/there"}
    assert [done for _, done in fetch.samples] == [1, 2]


@pytest.mark.parametrize(
    ("source", "revision", "cause", "kind", "words"),
    [
        pytest.param(
            "org/other", COMMIT, "repo_not_found", "configuration", "was not found at", id="a repository"
        ),
        pytest.param(
            "org/m", "0" * 40, "repo_not_found", "configuration", "no such revision", id="a revision"
        ),
        pytest.param(
            "org/m:*.bin", COMMIT, "no_weights", "configuration", "has no file of that name", id="a file"
        ),
        pytest.param("org/m", COMMIT, "gated_repo", "configuration", "accept its licence", id="a licence"),
        pytest.param(
            "not a source", COMMIT, "bad_source", "configuration", "neither a Hugging Face", id="a source"
        ),
    ],
)
def test_what_is_missing_is_named(
    tmp_path: Path, source: str, revision: str, cause: str, kind: str, words: str
) -> None:
    with running({"m.gguf": b"x" * 9000}) as hub, agent_at(hub.url, tmp_path) as agent:
        hub.is_gated = True
        replica = wanted(source, revision)
        agent.put(replica)
        failed = agent.wait_for(replica["replica"], "failed")
        assert (failed["cause"], failed["kind"]) == (cause, kind), failed["reason"]
        assert words in failed["reason"]


def test_a_hub_that_is_down_is_tried_again_later(tmp_path: Path) -> None:
    with agent_at("http://127.0.0.1:9", tmp_path) as agent:
        replica = wanted()
        agent.put(replica)
        failed = agent.wait_for(replica["replica"], "failed", timeout_s=60)
        assert (failed["cause"], failed["kind"]) == ("hub_unreachable", "transient"), failed["reason"]
        assert "http://127.0.0.1:9" in failed["reason"]


def test_more_than_the_disk_holds_is_not_begun(tmp_path: Path) -> None:
    class Huge(bytes):
        def __len__(self) -> int:
            return 10**18

    with running({"m.gguf": Huge()}) as hub, agent_at(hub.url, tmp_path) as agent:
        replica = wanted()
        agent.put(replica)
        failed = agent.wait_for(replica["replica"], "failed")
        assert (failed["cause"], failed["kind"]) == ("disk_full", "disk")
        assert "needs 1000000000.0 GB" in failed["reason"]
        assert "are missing" in failed["reason"]
        assert failed["total_bytes"] == 10**18
