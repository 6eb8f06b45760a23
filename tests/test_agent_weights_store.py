"""The store of a node: what makes room for what, what is never given back, and what is fetched ahead."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nodes.agent.weights.store import Holding, Kept, Store, StoreError
from nodes.protocol import ListedFile
from nodes.tickets import weights_key
from tests.agent_process import CLUSTER, AgentProcess, assignment
from tests.test_agent_weights import agent_at, cut_files, model_path
from tests.waiting import wait_until
from tests.weights_hub import COMMIT, running


def held(store: Store, repo: str, **files: bytes) -> Holding:
    """As a fetch leaves it."""
    listing = {name: ListedFile(len(data), hashlib.sha256(data).hexdigest()) for name, data in files.items()}
    holding = Holding(repo, COMMIT, listing, wanted=tuple(sorted(files)))
    kept = {}
    for name, data in files.items():
        blob = store.blobs(repo) / holding.blob_of(name)
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(data)
        store.link(holding, name, blob.name)
        kept[name] = Kept(len(data), blob.name, blob.name, blob.stat().st_mtime_ns)
    holding = Holding(repo, COMMIT, listing, kept, holding.wanted)
    store.save(holding)
    return holding


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


# --- never lost by accident -----------------------------------------------------------------------


def test_removing_takes_what_is_its_own_and_leaves_the_rest(store: Store) -> None:
    mine, other = held(store, "org/m", a=b"mine", b=b"shared"), held(store, "org/other", a=b"x")
    later = Holding("org/m", "1" * 40, {"b": mine.listing["b"]}, {"b": mine.files["b"]}, ("b",))
    store.save(later)
    assert store.remove(mine.key) == len(b"mine")
    assert [each.key for each in store.holdings()] == sorted([later.key, other.key])
    assert store.verified(later).is_whole
    assert store.verified(other).is_whole
    assert store.remove(later.key) == len(b"shared")
    assert not (store.path / "models--org--m").exists()


@pytest.mark.parametrize("linked", ["models--org--m", "models--org--m/blobs", "models--org--m/snapshots"])
def test_a_link_in_the_store_leads_no_removal_out_of_it(store: Store, tmp_path: Path, linked: str) -> None:
    holding = held(store, "org/m", a=b"precious")
    outside = tmp_path / "outside"
    (store.path / linked).rename(outside)
    (store.path / linked).symlink_to(outside)
    before = sorted(outside.rglob("*"))
    with pytest.raises(StoreError, match="look there by hand"):
        store.remove(holding.key)
    assert sorted(outside.rglob("*")) == before
    assert store.open_file(holding.key, "a") is None or linked.endswith("snapshots")


def test_a_folder_linked_among_the_snapshots_keeps_what_is_in_it(store: Store, tmp_path: Path) -> None:
    holding = held(store, "org/m", a=b"x")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("stays")
    (store.snapshot(holding, "a").parent / "deeper").symlink_to(outside)
    store.remove(holding.key)
    assert (outside / "precious").read_text() == "stays"


@pytest.mark.parametrize("key", ["", "../agent", "0" * 32, "A" * 32, "*"])
def test_no_key_leads_anywhere_but_to_a_record(store: Store, key: str) -> None:
    held(store, "org/m", a=b"x")
    assert store.holding(key) is None
    assert store.open_file(key, "a") is None
    with pytest.raises(StoreError):
        store.remove(key)


def test_what_another_node_uses_is_marked_on_the_disk_that_they_share(store: Store) -> None:
    key = held(store, "org/m", a=b"x").key
    store.mark("node-1", [key])
    assert not store.is_marked(key, besides="node-1")
    assert store.is_marked(key, besides="node-2")
    store.mark("node-1", [])
    assert not store.is_marked(key, besides="node-2")


def test_a_record_that_is_torn_is_no_record(store: Store) -> None:
    holding = held(store, "org/m", a=b"x")
    record = store.path / ".llmgw" / f"{holding.key}.json"
    record.write_text(record.read_text().replace('"x"', '"y"')[:-9])
    assert Store(store.path).holding(holding.key) is None


# --- what makes room ------------------------------------------------------------------------------

SIZE = 10_000_000


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    """Its store may take three and a half models."""
    with (
        running({"m.gguf": b"x" * SIZE}) as hub,
        agent_at(hub.url, tmp_path, "--store-limit", "35MB") as agent,
    ):
        yield agent


def run(agent: AgentProcess, repo: str, *, ends: bool, needed: list[str] | None = None) -> dict[str, Any]:
    launch = {"revision": COMMIT}
    replica = assignment(engine="llamacpp", source=f"org/{repo}", gpus=[], launch=launch, needed=needed)
    agent.put(replica)
    model_path(agent, replica["replica"])
    if ends:
        agent.delete(replica["replica"])
        agent.wait_for(replica["replica"], "stopped")
    return replica


def repos(agent: AgentProcess) -> set[str]:
    return {each["repo"] for each in agent.state()["holdings"]}


def test_what_neither_a_replica_nor_a_model_needs_makes_room_and_nothing_else(agent: AgentProcess) -> None:
    run(agent, "a", ends=False)
    run(agent, "b", ends=True)
    run(agent, "c", ends=True, needed=[f"org/c@{COMMIT}", "org/d"])
    assert repos(agent) == {"org/a", "org/b", "org/c"}
    assert agent.state()["room_bytes"] >= 14_000_000, "what b takes is to be had"
    run(agent, "d", ends=True)
    assert repos(agent) == {"org/a", "org/c", "org/d"}

    replica = assignment(engine="llamacpp", source="org/e", gpus=[], launch={"revision": COMMIT})
    agent.put(replica)
    failed = agent.wait_for(replica["replica"], "failed")
    assert (failed["cause"], failed["kind"]) == ("disk_full", "disk")
    assert "org/e@" in failed["reason"]
    assert "needs 10.0 MB" in failed["reason"]
    assert "has 5.0 MB free; 5.5 MB are missing" in failed["reason"]
    assert failed["total_bytes"] == SIZE
    assert repos(agent) >= {"org/a", "org/c", "org/d"}

    refused = agent.ask(
        "DELETE", f"/v1/weights/{weights_key('org/a', COMMIT)}", headers={"LLMGW-Cluster": CLUSTER}
    )
    assert refused.refusal[:2] == (409, "weights")
    assert "is used on this node" in refused.json["error"]["sentence"]
    key = weights_key("org/c", COMMIT)
    assert agent.ask("DELETE", f"/v1/weights/{key}", headers={"LLMGW-Cluster": "another"}).status == 409
    assert agent.ask("DELETE", f"/v1/weights/{key}", headers={"LLMGW-Cluster": CLUSTER}).json == {
        "given_back_bytes": SIZE
    }
    assert "org/c" not in repos(agent)


def test_what_is_fetched_ahead_goes_on_with_the_next_agent_and_is_there_for_a_replica(tmp_path: Path) -> None:
    with running({"m.gguf": b"x" * SIZE}) as hub, agent_at(hub.url, tmp_path) as agent:
        hub.held = "m.gguf"
        hub.gate.clear()
        launch = {**assignment(engine="llamacpp", source="org/m")["launch"], "revision": COMMIT}
        assert agent.ask("POST", "/v1/weights", body={"cluster": CLUSTER, "launch": launch}).status == 202
        wait_until(lambda: sum(path.stat().st_size for path in cut_files(agent)) >= SIZE // 2, "half of it")
        agent.restart()
        hub.gate.set()
        wait_until(
            lambda: [each["state"] for each in agent.state().get("holdings", ())] == ["held"],
            "all",
            timeout_s=20,
        )
        sent = hub.sent["m.gguf"]
        assert sent < SIZE * 1.5
        replica = assignment(engine="llamacpp", source="org/m", gpus=[], launch={"revision": COMMIT})
        agent.put(replica)
        assert model_path(agent, replica["replica"]).stat().st_size == SIZE
        assert hub.sent["m.gguf"] == sent


def test_what_can_never_be_fetched_ahead_is_refused_at_once(tmp_path: Path) -> None:
    with running({"m.gguf": b"x" * 10}) as hub, agent_at(hub.url, tmp_path) as agent:
        launch = assignment(engine="llamacpp", source="/models/m")["launch"]
        answer = agent.ask("POST", "/v1/weights", body={"cluster": CLUSTER, "launch": launch})
        assert answer.refusal[0] == 422
        assert "is read from a path" in answer.json["error"]["sentence"]
        answer = agent.ask("POST", "/v1/weights", body={"cluster": "another", "launch": launch})
        assert answer.refusal[:2] == (409, "cluster")
        launch = assignment(engine="llamacpp", source="org/zz")["launch"]
        assert agent.ask("POST", "/v1/weights", body={"cluster": CLUSTER, "launch": launch}).status == 202
        told = wait_until(lambda: agent.state().get("holdings"), "a word of its end", timeout_s=20)
        assert "org/zz was not found at" in told[0]["reason"]
