"""What moving weights from node to node costs, beside curl and sha256sum of the same file.

`python -m tests.bench.weights`. Two real agents on loopback: the second fetches from the first, checks what
came and writes it down. curl asks the first agent for the same file. Then three agents start one model at
once, and what the hub gave out is counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nodes.agent.weights.store import Holding, Kept, Store, sha256_of
from nodes.protocol import CLOCK_HEADER, ListedFile
from nodes.tickets import sign
from tests.agent_process import CLUSTER, AgentProcess, assignment
from tests.waiting import wait_until
from tests.weights_hub import COMMIT, running

FILE_BYTES = 1_000_000_000
ROUNDS = 3
NAME = "m.gguf"
NOW_S = 1_900_000_000
LIMIT = 2.0  # times curl and sha256sum
MIB = 1 << 20


def measure(folder: Path, size: int, rounds: int) -> dict[str, float]:
    with _agents(folder, "http://127.0.0.1:9", "first", "second") as (first, second):
        holding = _put_there(Store(first.state_folder / "weights"), size)
        store = Store(second.state_folder / "weights")
        peer_s, curl_s, sum_s = [], [], []
        for _ in range(rounds):
            curl_s.append(_took_s(lambda: _curl(first, holding, folder / "copy")))
            sum_s.append(_took_s(lambda: subprocess.run(["sha256sum", folder / "copy"], check=True, **QUIET)))
            (folder / "copy").unlink()
            peer_s.append(_took_s(lambda: _fetch(second, first, holding, store)))
            store.remove(holding.key)
    found = {"peer, s": peer_s, "curl, s": curl_s, "sha256sum, s": sum_s}
    numbers = {name: statistics.median(values) for name, values in found.items()}
    numbers["times curl and sha256sum"] = numbers["peer, s"] / (numbers["curl, s"] + numbers["sha256sum, s"])
    return numbers


def downloads_of_three(folder: Path, size: int) -> float:
    """How often the hub gave the file out."""
    with running({NAME: b"x" * size}) as hub, _agents(folder, hub.url, "a", "b", "c") as agents:
        key = Holding("org/m", COMMIT).key
        for count, agent in enumerate(agents):
            _order(agent, [_peer(each, key, is_fetching=True) for each in agents[:count]])
        for agent in agents:
            _wait_for(Store(agent.state_folder / "weights"), key)
        return hub.sent[NAME] / size


QUIET: dict[str, Any] = {"stdout": subprocess.DEVNULL}


@contextlib.contextmanager
def _agents(folder: Path, hub_url: str, *names: str) -> Iterator[list[AgentProcess]]:
    engine = folder / "llama-server"
    engine.write_text("#!/bin/sh\n")
    engine.chmod(0o700)
    environment = {"HF_ENDPOINT": hub_url, "HF_HOME": str(folder / "hf")}
    with contextlib.ExitStack() as stack:
        agents = []
        for name in names:
            (folder / name).mkdir()
            options = ("--engine", f"llamacpp={engine}")
            agent = AgentProcess(folder / name, *options, environment=environment)
            agents.append(stack.enter_context(agent))
            agent.ask("GET", "/v1/state", headers={CLOCK_HEADER: str(NOW_S)})
        yield agents


def _put_there(store: Store, size: int) -> Holding:
    """As if it had been fetched."""
    path = store.blobs("org/m") / "draft"
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        for written in range(0, size, MIB):
            file.write(os.urandom(min(MIB, size - written)))
    sha256 = sha256_of(path)
    blob = path.rename(path.with_name(sha256))
    kept = Kept(size, sha256, sha256, blob.stat().st_mtime_ns)
    holding = Holding("org/m", COMMIT, {NAME: ListedFile(size, sha256)}, {NAME: kept}, (NAME,))
    store.link(holding, NAME, sha256)
    store.save(holding)
    return holding


def _curl(agent: AgentProcess, holding: Holding, to: Path) -> None:
    bearer = f"Authorization: Bearer {agent.token}"
    url = f"{agent.url}/v1/weights/{holding.key}/{NAME}"
    subprocess.run(["curl", "--silent", "--fail", "--header", bearer, "--output", to, url], check=True)


def _fetch(agent: AgentProcess, first: AgentProcess, holding: Holding, store: Store) -> None:
    _order(agent, [_peer(first, holding.key)])
    _wait_for(store, holding.key)


def _order(agent: AgentProcess, peers: Sequence[dict[str, Any]]) -> None:
    launch = {**assignment(engine="llamacpp", source="org/m")["launch"], "revision": COMMIT}
    body = {"cluster": CLUSTER, "launch": launch, "peers": peers}
    answer = agent.ask("POST", "/v1/weights", body=body)
    assert answer.status == 202, answer.body


def _peer(agent: AgentProcess, key: str, *, is_fetching: bool = False) -> dict[str, Any]:
    ticket = sign([agent.token], key=key, reader=str(uuid.uuid4()), until_s=NOW_S + 600)
    return {"url": agent.url, "ticket": ticket, "is_fetching": is_fetching}


def _wait_for(store: Store, key: str) -> None:
    def is_whole() -> bool:
        holding = store.holding(key)
        return holding is not None and holding.is_whole

    wait_until(is_whole, "the weights", timeout_s=300, every_s=0.01)


def _took_s(work: Any) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def _print_table(found: dict[str, Any]) -> None:
    print(f"a file of {found['file_bytes'] / 1e9:g} GB from one node to another, median of {found['rounds']}")
    for what, value in found["numbers"].items():
        print(f"  {what:<26}{value:>8.2f}")
    print(f"  (at most {LIMIT:g} times curl and sha256sum; three nodes cost one download)")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.weights", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    parser.add_argument("--bytes", type=int, default=FILE_BYTES)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="llmgw-bench-") as folder:
        numbers = measure(Path(folder), options.bytes, options.rounds)
    with tempfile.TemporaryDirectory(prefix="llmgw-bench-") as folder:
        numbers["downloads of three nodes"] = downloads_of_three(Path(folder), options.bytes // 10)
    limits = {"times curl and sha256sum": LIMIT, "downloads of three nodes": 1.0}
    found = {
        "file_bytes": options.bytes,
        "rounds": options.rounds,
        "numbers": numbers,
        "limits": limits,
    }
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        _print_table(found)


if __name__ == "__main__":
    main()
