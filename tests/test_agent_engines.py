"""vllm and sglang under a real agent, which meets their command lines; and the guard of vllm's routes."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nodes.agent.guard import Guard
from nodes.agent.inventory import FoundEngine, find_engines
from nodes.engines import vllm
from tests.agent_process import KEY, ROOT, AgentProcess, ask, assignment
from tests.engine_stand_in import stand_in

ENGINES = ("vllm", "sglang")


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    given = [f"--engine={engine}={stand_in(tmp_path, engine)}" for engine in ENGINES]
    with AgentProcess(tmp_path, *given) as agent:
        yield agent


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "config.json").touch()
    return folder


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_serves_the_model_under_its_own_key(
    agent: AgentProcess, weights: Path, engine: str
) -> None:
    wanted = assignment(engine=engine, source=str(weights), launch={"context_length": 512})
    assert agent.put(wanted).status == 200, agent.story()
    rank = agent.wait_for(wanted["replica"], "ready")
    models = ask(
        f"http://127.0.0.1:{rank['port']}/v1/models", headers={"Authorization": f"Bearer {KEY}"}
    ).json
    assert models["data"][0]["max_model_len"] == rank["context_length"] == 512
    assert str(weights) in rank["command"]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_key_of_a_replica_is_told_to_nobody(agent: AgentProcess, weights: Path, engine: str) -> None:
    wanted = assignment(engine=engine, source=str(weights))
    agent.put(wanted)
    rank = agent.wait_for(wanted["replica"], "ready")
    told = json.dumps(agent.state()) + (agent.folder / "agent.log").read_text()
    log = agent.ask("GET", f"/v1/replicas/{rank['replica']}/log").body.decode()
    assert KEY not in told + log
    assert ("api_key='<key>'" in log) is (engine == "sglang")
    assert ("<key>" in rank["command"]) is (engine == "sglang")
    [record] = agent.state_folder.glob("replicas/*.json")
    assert KEY not in json.dumps(json.loads(record.read_text())["command"])


def test_an_engine_that_ends_says_why(agent: AgentProcess, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    wanted = assignment(engine="vllm", source=str(tmp_path / "empty"))
    agent.put(wanted)
    failed = agent.wait_for(wanted["replica"], "failed")
    assert (failed["cause"], failed["kind"]) == ("no_config", "configuration")


def test_an_agent_offers_the_engines_it_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for engine in ENGINES:
        stand_in(tmp_path, engine)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list(find_engines({})) == ["vllm", "sglang", "sim"]


def test_a_version_is_that_of_the_package_in_the_programs_own_python(tmp_path: Path) -> None:
    package = tmp_path / "vllm-0.32.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncd {tmp_path} && exec {sys.executable} "$@"\n')
    python.chmod(0o700)
    program = tmp_path / "vllm"
    program.write_text(f"#!{python}\nraise SystemExit('it is not run')\n")
    program.chmod(0o700)
    assert find_engines({"vllm": [str(program)]})["vllm"].version == "0.32.0"


CONTAINERS = {
    "podman": (
        "podman run --rm {env} --name {name} --device gpu=all -v {model}:{model}:ro IMAGE vllm",
        "podman run --rm --env A --env B --name llmgw-x --device gpu=all -v /w/m:/w/m:ro IMAGE vllm",
    ),
    "docker": (
        'docker run --rm {env} --gpus "device={gpus}" -v {checkout}:{checkout}:ro IMAGE',
        f'docker run --rm --env A --env B --gpus "device=GPU-a,GPU-b" -v {ROOT}:{ROOT}:ro IMAGE',
    ),
    "a wrapper": ("/opt/run vllm", "/opt/run vllm"),
}


@pytest.mark.parametrize(("template", "command"), CONTAINERS.values(), ids=CONTAINERS)
def test_a_template_is_filled_for_each_launch(template: str, command: str) -> None:
    """Of the environment the names alone: their values are nobody's to read from a command line."""
    engine = FoundEngine(vllm.ADAPTER, tuple(template.split(" ")))
    words = engine.fill(env=["A", "B"], gpus=["GPU-a", "GPU-b"], model="/w/m", name="llmgw-x")
    assert " ".join(words) == command


# --- the guard ------------------------------------------------------------------------------------------


def answer_of(path: str, *authorization: str, kind: str = "http") -> list[Any]:
    """What the guard sends, or that it let the request through."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        sent.append("through")

    async def send(message: Any) -> None:
        sent.append(message.get("status") or message["type"])

    async def receive() -> Any:
        raise AssertionError("nothing is read of a request before its key is known to be right")

    headers = [(b"authorization", value.encode()) for value in authorization]
    scope = {"type": kind, "path": path, "headers": headers}
    asyncio.run(Guard(app)(scope, receive, send))
    return sent


@pytest.mark.parametrize(
    ("path", "authorization", "is_let_through"),
    [
        pytest.param("/health", (), True, id="health without a key"),
        pytest.param("/invocations", (), False, id="a route that vllm leaves open"),
        pytest.param("/invocations", (f"Bearer {KEY}",), True, id="the same with the key"),
        pytest.param("/v1/models", ("Bearer another",), False, id="another key"),
        pytest.param("/v1/models", (f"Bearer {KEY}", f"Bearer {KEY}"), False, id="two keys at once"),
        pytest.param("/metrics", ("",), False, id="an empty key"),
        pytest.param("/health/../invocations", (), False, id="a path that only begins like health"),
    ],
)
def test_only_who_has_the_key_passes_the_guard(
    monkeypatch: pytest.MonkeyPatch, path: str, authorization: tuple[str, ...], is_let_through: bool
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    refused = [401, "http.response.body"]
    assert answer_of(path, *authorization) == (["through"] if is_let_through else refused)


def test_without_a_key_in_the_environment_nobody_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert answer_of("/v1/models", "Bearer ") == [401, "http.response.body"]


def test_the_guard_closes_sockets_and_lets_vllm_begin_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    assert answer_of("/v1/realtime", kind="websocket") == ["websocket.close"]
    assert answer_of("", kind="lifespan") == ["through"]
