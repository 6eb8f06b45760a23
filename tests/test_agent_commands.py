"""What an agent obeys and what it refuses: status, code and one sentence each, and nothing has changed."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agent_process import CLUSTER, TOKEN, AgentProcess, Answer, ask, assignment

OTHER_CLUSTER = "c1000000-0000-4000-8000-000000000002"


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentProcess]:
    """One for all: nothing that is refused here may change it."""
    with AgentProcess(tmp_path_factory.mktemp("agent")) as agent:
        yield agent


@pytest.fixture(scope="module")
def running(agent: AgentProcess) -> Any:
    """A ready replica of generation 3, commanded under fence 5. Its agent also remembers a deleted one."""
    return agent.run(generation=3, fence=5)


@pytest.fixture(scope="module")
def deleted(agent: AgentProcess, running: Any) -> str:
    replica = str(uuid.uuid4())
    assert agent.delete(replica, fence=5, generation=2).status == 404
    return replica


Refused = tuple[dict[str, Any], int, str, str]
ASSIGNMENTS: dict[str, Callable[[str, str], Refused]] = {
    "another cluster's": lambda running, deleted: (
        assignment(cluster=OTHER_CLUSTER, fence=99), 409, "cluster", "belongs to another cluster",
    ),
    "one under an older lease": lambda running, deleted: (
        assignment(fence=4), 409, "fence", "older (4) than one obeyed here (5)",
    ),
    "an older generation of what runs": lambda running, deleted: (
        assignment(replica=running, generation=2, fence=5), 409, "generation", "older than 3",
    ),
    "a newer generation of what still runs": lambda running, deleted: (
        assignment(replica=running, generation=4, fence=5), 409, "generation", "wait until it is gone",
    ),
    "one that was deleted": lambda running, deleted: (
        assignment(replica=deleted, generation=2, fence=5), 410, "deleted", "does not come back",
    ),
    "a GPU that is taken": lambda running, deleted: (
        assignment(fence=5), 409, "gpu_taken", f"held by replica {running}",
    ),
    "a GPU that is not there": lambda running, deleted: (
        assignment(fence=5, gpus=["sim-7"]), 422, "gpu_unknown", "no GPU sim-7",
    ),
    "an engine that is not there": lambda running, deleted: (
        assignment(fence=5, gpus=["sim-1"], engine="vllm"), 422, "engine_absent", "vllm is not on this node",
    ),
    "a part of a gang": lambda running, deleted: (
        assignment(fence=5, gpus=["sim-1"], profile={"nodes": 2}), 422, "gang", "spans several nodes",
    ),
    "a rank above the first": lambda running, deleted: (
        assignment(fence=5, gpus=["sim-1"], rank=1), 400, "malformed", "rank must be below",
    ),
    "a part that does not know where to meet": lambda running, deleted: (
        assignment(fence=5, gpus=["sim-1"], rank=1, profile={"nodes": 2}),
        400, "malformed", "meeting must be",
    ),
    "a meeting that is no address": lambda running, deleted: (
        assignment(fence=5, gpus=["sim-1"], rank=1, profile={"nodes": 2}, meeting="--help:1"),
        400, "malformed", "meeting must be",
    ),
    "a key that could break out of a header": lambda running, deleted: (
        assignment(key="sixteen-characters\r\nHost: x"), 400, "malformed", "visible ASCII",
    ),
    "a key that is short": lambda running, deleted: (assignment(key="k"), 400, "malformed", "key must be"),
    "generation zero": lambda running, deleted: (assignment(generation=0), 400, "malformed", "generation"),
    "a negative fence": lambda running, deleted: (assignment(fence=-1), 400, "malformed", "fence"),
    "one GPU twice": lambda running, deleted: (
        assignment(gpus=["sim-1", "sim-1"]), 400, "malformed", "name one twice",
    ),
    "a GPU's name that is two": lambda running, deleted: (
        assignment(gpus=["sim-1,sim-0"]), 400, "malformed", "devices' ids",
    ),
    "no model": lambda running, deleted: (assignment(model=""), 400, "malformed", "launch.model"),
    "no engine": lambda running, deleted: (assignment(engine=""), 400, "malformed", "launch.profile.engine"),
    "a protocol from the far future": lambda running, deleted: (
        assignment(protocol=9), 400, "malformed", "bring it up to date",
    ),
    "a number for a text": lambda running, deleted: (
        assignment(key=7), 400, "malformed", "Assignment.key must be a text",
    ),
    "a truth for a number": lambda running, deleted: (
        assignment(generation=True), 400, "malformed", "Assignment.generation must be a whole number",
    ),
    "no launch": lambda running, deleted: (
        assignment() | {"launch": None}, 400, "malformed", "Assignment lacks launch",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ASSIGNMENTS.values(), ids=ASSIGNMENTS)
def test_an_assignment_is_refused(
    agent: AgentProcess, running: Any, deleted: str, case: Callable[[str, str], Refused]
) -> None:
    wanted, status, code, words = case(running["replica"], deleted)
    before = agent.state()["ranks"]
    answer = agent.put(wanted)
    assert answer.refusal[:2] == (status, code), answer.body
    assert words in answer.refusal[2]
    assert answer.refusal[2].endswith(".")
    assert [rank["replica"] for rank in agent.state()["ranks"]] == [rank["replica"] for rank in before]


BODIES = {
    "no JSON": (b"{", 400, "malformed"),
    "a cut body": (json.dumps(assignment()).encode()[:-9], 400, "malformed"),
    "no object": (b"[]", 400, "malformed"),
    "no UTF-8": (b'{"a": "\xff"}', 400, "malformed"),
    "a hundred thousand lists in each other": (b"[" * 100_000, 400, "malformed"),
    "more than a mebibyte": (b" " * (1 << 20) + b"{}", 413, "too_large"),
}


@pytest.mark.parametrize(("body", "status", "code"), BODIES.values(), ids=BODIES)
def test_a_body_is_refused(agent: AgentProcess, body: bytes, status: int, code: str) -> None:
    assert agent.ask("PUT", f"/v1/replicas/{uuid.uuid4()}", body=body).refusal[:2] == (status, code)


def test_a_compressed_body_is_refused(agent: AgentProcess) -> None:
    answer = agent.ask("POST", "/v1/paths", body=b"\x1f\x8b", headers={"Content-Encoding": "gzip"})
    assert answer.refusal[:2] == (415, "encoding")


def test_an_assignment_for_another_address_is_refused(agent: AgentProcess) -> None:
    answer = agent.ask("PUT", f"/v1/replicas/{uuid.uuid4()}", body=assignment())
    assert answer.refusal[:2] == (400, "malformed")


@pytest.mark.parametrize(
    "replica", ["x", "..%2F..%2Fetc", "C1000000-0000-4000-8000-000000000001", "0" * 32], ids=str
)
@pytest.mark.parametrize("method", ["PUT", "DELETE"])
def test_a_replica_is_named_by_its_uuid(agent: AgentProcess, method: str, replica: str) -> None:
    assert agent.ask(method, f"/v1/replicas/{replica}", body=b"{}").refusal[:2] == (400, "malformed")
    assert agent.ask("GET", f"/v1/replicas/{replica}/log").refusal[:2] == (400, "malformed")


def test_the_same_assignment_again_changes_nothing(agent: AgentProcess, running: Any) -> None:
    answer = agent.put(assignment(replica=running["replica"], generation=3, fence=5))
    assert answer.status == 200
    assert {key: answer.json[key] for key in ("pid", "port", "state")} == {
        key: running[key] for key in ("pid", "port", "state")
    }
    assert agent.engines() == [running["pid"]]


@pytest.mark.parametrize(
    ("changes", "status", "code"),
    [
        pytest.param({"cluster": OTHER_CLUSTER}, 409, "cluster", id="another cluster's"),
        pytest.param({"cluster": ""}, 409, "cluster", id="nobody's"),
        pytest.param({"fence": 4}, 409, "fence", id="one under an older lease"),
        pytest.param({"generation": 2}, 409, "generation", id="for an older generation"),
        pytest.param({"drain": "soon"}, 400, "malformed", id="with a drain that is no duration"),
        pytest.param({"drain": "-1s"}, 400, "malformed", id="with a negative drain"),
        pytest.param({"drain": "2h"}, 400, "malformed", id="with a drain beyond bounds"),
    ],
)
def test_a_delete_is_refused(
    agent: AgentProcess, running: Any, changes: dict[str, Any], status: int, code: str
) -> None:
    asked = {"fence": 5, "generation": 3, **changes}
    assert agent.delete(running["replica"], **asked).refusal[:2] == (status, code)
    assert agent.rank(running["replica"])["state"] == "ready"


@pytest.mark.parametrize("header", ["LLMGW-Fence", "LLMGW-Generation"])
@pytest.mark.parametrize("value", ["", "x", "-1", "1.5", "9" * 30, "\u0661"], ids=repr)
def test_a_delete_without_its_authority_is_refused(
    agent: AgentProcess, running: Any, header: str, value: str
) -> None:
    headers = {"LLMGW-Cluster": CLUSTER, "LLMGW-Fence": "5", "LLMGW-Generation": "3"}
    headers[header] = value.encode().decode("latin-1")
    answer = agent.ask("DELETE", f"/v1/replicas/{running['replica']}", headers=headers)
    assert answer.refusal[:2] == (400, "malformed")
    assert header in answer.refusal[2]


SOME_REPLICA = "6f1c2f0e-7a53-4a58-9d0a-0f2f8d0a4b11"
ROUTES = [
    ("GET", "/v1/state"),
    ("PUT", f"/v1/replicas/{SOME_REPLICA}"),
    ("DELETE", f"/v1/replicas/{SOME_REPLICA}"),
    ("GET", f"/v1/replicas/{SOME_REPLICA}/log"),
    ("POST", "/v1/paths"),
    ("GET", "/"),
    ("GET", "/no/such/route"),
]
STRANGERS = {
    "nobody": {},
    "a wrong token": {"Authorization": "Bearer wrong"},
    "a token that is cut": {"Authorization": f"Bearer {TOKEN[:-1]}"},
    "another scheme": {"Authorization": f"Basic {TOKEN}"},
    "a token that is not ASCII": {"Authorization": "Bearer tök"},
}


@pytest.mark.parametrize("headers", STRANGERS.values(), ids=STRANGERS)
@pytest.mark.parametrize(("method", "path"), ROUTES, ids=[" ".join(route) for route in ROUTES])
def test_every_route_wants_the_token(
    agent: AgentProcess, method: str, path: str, headers: dict[str, str]
) -> None:
    assert ask(agent.url + path, method, headers=headers).refusal[:2] == (401, "unauthorised")


def test_two_credentials_are_refused(agent: AgentProcess) -> None:
    line = f"Authorization: Bearer {TOKEN}\r\n"
    with socket.create_connection(("127.0.0.1", agent.port), timeout=5) as raw:
        raw.sendall(f"GET /v1/state HTTP/1.1\r\nHost: x\r\n{line}{line}\r\n".encode())
        assert raw.recv(4096).startswith(b"HTTP/1.1 401 ")


def test_an_unknown_route_is_told_in_a_sentence(agent: AgentProcess) -> None:
    assert agent.ask("GET", "/v2/state").refusal == (404, "no_route", "The agent has no GET /v2/state.")
    assert agent.ask("POST", "/v1/state").status == 405


def test_an_unchanged_state_is_not_told_again(agent: AgentProcess, running: Any) -> None:
    first = agent.ask("GET", "/v1/state")
    again = agent.ask("GET", "/v1/state", headers={"If-None-Match": first.headers["ETag"]})
    assert (again.status, again.body) == (304, b"")
    report = agent.put(assignment(replica=running["replica"], generation=3, fence=5)).json
    assert report["age_s"] > 0
    other = agent.run(gpus=["sim-1"], fence=5)
    changed = agent.ask("GET", "/v1/state", headers={"If-None-Match": first.headers["ETag"]})
    assert changed.status == 200
    assert agent.delete(other["replica"], fence=5).status == 200


def test_the_state_tells_what_the_node_has(tmp_path: Path) -> None:
    options = ("--label", "zone=a", "--label", "rack = 7", "--fabric", "ib0")
    with AgentProcess(tmp_path, *options) as agent:
        state = agent.state()
    assert (state["cluster"], state["node"]) == (CLUSTER, agent.node)
    assert [(gpu["id"], gpu["gpu_class"]) for gpu in state["gpus"]] == [("sim-0", "sim"), ("sim-1", "sim")]
    assert "sim" in [engine["name"] for engine in state["engines"]]
    assert state["labels"] == {"zone": "a", "rack": "7"}
    assert state["fabric"] == "ib0"
    assert state["memory_total_mib"] >= state["memory_free_mib"] > 0
    assert state["disk_free_bytes"] > 0
    assert state["cpu_cores"] == len(os.sched_getaffinity(0))
    if found := re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
        assert state["cpu_model"] == found[1].strip()


def test_what_was_seen_is_known_after_the_agents_death(tmp_path: Path) -> None:
    with AgentProcess(tmp_path) as agent:
        rank = agent.run(fence=7)
        agent.delete(rank["replica"], fence=8)
        agent.wait_for(rank["replica"], "stopped")
        agent.restart()
        assert agent.put(assignment(fence=7)).refusal[1] == "fence"
        wanted = assignment(replica=rank["replica"], fence=8)
        assert agent.put(wanted).refusal[:2] == (410, "deleted")
        assert agent.run(replica=rank["replica"], generation=2, fence=8)["generation"] == 2


def test_a_full_disk_refuses_commands_and_clears_by_itself(tmp_path: Path) -> None:
    with AgentProcess(tmp_path) as agent:
        rank = agent.run()
        unlimited = resource.prlimit(agent.pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        wanted = assignment(gpus=["sim-1"])
        assert agent.put(wanted).refusal[:2] == (507, "disk_full")
        assert agent.delete(rank["replica"]).refusal[:2] == (507, "disk_full")
        assert [each["state"] for each in agent.state()["ranks"]] == ["ready"]
        os.kill(rank["pid"], signal.SIGKILL)
        agent.wait_for(rank["replica"], "failed")
        assert not list(agent.state_folder.rglob(".*"))
        resource.prlimit(agent.pid, resource.RLIMIT_FSIZE, unlimited)
        assert agent.put(wanted).status == 200
        agent.restart()
        assert agent.rank(rank["replica"])["state"] == "failed"
        agent.wait_for(wanted["replica"], "ready")


def test_a_log_outlives_its_replica(agent: AgentProcess, running: Any) -> None:
    rank = agent.run(gpus=["sim-1"], fence=5)
    agent.delete(rank["replica"], fence=5)
    agent.wait_for(rank["replica"], "stopped")
    answer = agent.ask("GET", f"/v1/replicas/{rank['replica']}/log?tail=2")
    assert answer.headers["Content-Type"].startswith("text/plain")
    assert answer.body.decode().splitlines()[-1] == f"sim: listening on http://127.0.0.1:{rank['port']}"


@pytest.mark.parametrize(
    ("query", "status"), [("?tail=0", 400), ("?tail=x", 400), ("?tail=99999", 400), ("", 404)], ids=str
)
def test_a_log_is_refused(agent: AgentProcess, query: str, status: int) -> None:
    assert agent.ask("GET", f"/v1/replicas/{uuid.uuid4()}/log{query}").status == status


def paths(agent: AgentProcess, *paths: Any) -> Answer:
    return agent.ask("POST", "/v1/paths", body={"paths": list(paths)})


def test_paths_are_told_with_their_weights(agent: AgentProcess, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"x" * 10)
    (tmp_path / "other.safetensors").write_bytes(b"x" * 5)
    (tmp_path / "README.md").write_text("not weights")
    (tmp_path / "folder.gguf").mkdir()
    folder, file, missing = paths(
        agent, str(tmp_path), str(tmp_path / "model.gguf"), str(tmp_path / "missing")
    ).json["paths"]
    assert folder == {
        "path": str(tmp_path),
        "exists": True,
        "kind": "directory",
        "size_bytes": 15,
        "files": ["model.gguf", "other.safetensors"],
    }
    assert (file["kind"], file["size_bytes"], file["files"]) == ("file", 10, ["model.gguf"])
    assert missing == {"path": str(tmp_path / "missing"), "exists": False}


@pytest.mark.parametrize(
    "path", ["relative", "", "/etc/../etc", "/nul\0", "/dev/null", "/" + "x" * 5000], ids=ascii
)
def test_a_path_that_is_none_does_not_exist(agent: AgentProcess, path: str) -> None:
    (report,) = paths(agent, path).json["paths"]
    assert report["exists"] is False
    assert report["reason"]


@pytest.mark.parametrize("wrong", [{}, {"paths": "/x"}, {"paths": [1]}, {"paths": ["/x"] * 101}], ids=str)
def test_a_question_about_paths_is_refused(agent: AgentProcess, wrong: Any) -> None:
    answer = agent.ask("POST", "/v1/paths", body=wrong)
    assert answer.refusal[:2] == (400, "malformed")
