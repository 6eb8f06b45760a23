"""Weights from a path or from a hub: a real client against a real server, cut and resumed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from nodes.agent.weights import _hear
from tests.agent_process import AgentProcess, assignment
from tests.engine_stand_in import stand_in
from tests.waiting import wait_until

COMMIT = "89abcdef0123456789abcdef0123456789abcdef"
SIZE = 30_000_000  # the hub's client writes in pieces of ten megabytes


@dataclass
class Repositories:
    """A hub of one repository, org/m at COMMIT. While `gate` is clear, `held` is sent by half."""

    files: dict[str, bytes]
    url: str = ""
    is_gated: bool = False
    held: str = "m.gguf"
    gate: threading.Event = field(default_factory=threading.Event)
    asked: list[tuple[str, str]] = field(default_factory=list)


@contextlib.contextmanager
def running(files: dict[str, bytes]) -> Iterator[Repositories]:
    class Answering(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer(is_head=True)

        def do_GET(self) -> None:
            self.answer(is_head=False)

        def answer(self, *, is_head: bool) -> None:
            hub.asked.append((self.command, self.path))
            path = self.path.partition("?")[0]
            resolve = f"/org/m/resolve/{COMMIT}/"
            if path == f"/api/models/org/m/revision/{COMMIT}":
                siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
                info = {"id": "org/m", "modelId": "org/m", "sha": COMMIT, "tags": [], "siblings": siblings}
                self.send(200, json.dumps(info).encode())
            elif path.startswith(resolve) and hub.is_gated:
                self.send(403, b"", {"X-Error-Code": "GatedRepo"})
            elif path.startswith(resolve):
                self.send_file(files[path.removeprefix(resolve)], is_head=is_head)
            elif path.startswith("/api/models/org/m/revision/"):
                self.send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            else:
                self.send(401, b"", {"X-Error-Code": "RepoNotFound"})

        def send_file(self, data: bytes, *, is_head: bool) -> None:
            headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
            self.send(200, b"" if is_head else data, headers, length=len(data))

        def send(
            self, status: int, body: bytes, headers: dict[str, str] | None = None, length: int | None = None
        ) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body) if length is None else length))
            self.end_headers()
            half = len(body) // 2
            with contextlib.suppress(ConnectionError):
                self.wfile.write(body[:half])
                self.wfile.flush()
                if half and self.path.endswith(hub.held):
                    hub.gate.wait(30)
                self.wfile.write(body[half:])

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    hub = Repositories(files, f"http://127.0.0.1:{server.server_port}")
    hub.gate.set()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        hub.gate.set()
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def agent_at(hub_url: str, tmp_path: Path) -> Iterator[AgentProcess]:
    """Its llama-server only tells its arguments and waits: what is fetched here is no model."""
    engine = tmp_path / "llama-server"
    engine.write_text('#!/bin/sh\necho "$@"\n[ "$1" = --version ] || exec sleep 1000\n')
    engine.chmod(0o700)
    environment = {"HF_ENDPOINT": hub_url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_ETAG_TIMEOUT": "20"}
    with AgentProcess(tmp_path, "--engine", f"llamacpp={engine}", environment=environment) as agent:
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
        fetched = {name.rpartition("/")[2] for _, name in hub.asked if "/resolve/" in name}
        assert fetched == {"m-q4.gguf"}


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


def test_a_fetch_tells_its_bytes_and_goes_on_with_what_a_dead_agent_lacked(tmp_path: Path) -> None:
    files = {"m-00001-of-00002.gguf": b"x" * SIZE, "m-00002-of-00002.gguf": b"y" * SIZE}
    with running(files) as hub, agent_at(hub.url, tmp_path) as agent:
        hub.held = "m-00002-of-00002.gguf"
        hub.gate.clear()
        replica = wanted()
        agent.put(replica)
        rank = begun(agent, replica["replica"])
        assert (rank["state"], rank["total_bytes"]) == ("fetching", 2 * SIZE)
        assert "GB of org/m are on the node" in rank["reason"]
        wait_until(lambda: ("GET", f"/org/m/resolve/{COMMIT}/{hub.held}") in hub.asked, "the second part")
        agent.kill()
        wait_until(lambda: not cut_files(agent), "the cut file to be gone")
        hub.asked.clear()
        hub.gate.set()
        agent.start()
        path = model_path(agent, replica["replica"])
        assert (path.parent / hub.held).stat().st_size == SIZE
        fetched = [path for method, path in hub.asked if method == "GET" and "/resolve/" in path]
        assert fetched == [f"/org/m/resolve/{COMMIT}/{hub.held}"]


def test_a_fetch_that_is_told_to_stop_stops_and_leaves_nothing(tmp_path: Path) -> None:
    with running({"m.gguf": b"x" * SIZE}) as hub, agent_at(hub.url, tmp_path) as agent:
        hub.gate.clear()
        replica = wanted()
        agent.put(replica)
        begun(agent, replica["replica"])
        assert cut_files(agent)
        agent.delete(replica["replica"], drain="1m")
        agent.wait_for(replica["replica"], "stopped", timeout_s=5)
        assert not cut_files(agent)


def test_two_replicas_of_one_model_fetch_it_once(tmp_path: Path) -> None:
    with running({"m.gguf": b"x" * SIZE}) as hub, agent_at(hub.url, tmp_path) as agent:
        hub.gate.clear()
        replicas = [wanted(), wanted()]
        for replica in replicas:
            agent.put(replica)
        wait_until(lambda: cut_files(agent), "the fetch to begin")
        hub.gate.set()
        assert len({model_path(agent, replica["replica"]) for replica in replicas}) == 1
        assert len([path for method, path in hub.asked if method == "GET" and "/resolve/" in path]) == 1


async def test_a_late_word_on_its_progress_does_not_undo_a_finished_fetch() -> None:
    async def lines() -> AsyncIterator[bytes]:
        for said in ({"done": 1, "total": 2}, {"path": "/there"}, {"done": 2, "total": 2}):
            yield json.dumps(said).encode() + b"\n"

    heard: list[tuple[int, int]] = []
    assert await _hear(lines(), lambda *counts: heard.append(counts)) == {"path": "/there"}
    assert heard == [(1, 2), (2, 2)]


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
