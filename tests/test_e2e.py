"""The main job, end to end: the real processes, a real llama-server, a real GGUF, the real openai client.

One web process and one worker serve the whole file; each test has a node of its own, and leaves no engine. On
SQLite and files, people in a browser go the same way (tests/browser) and `make up` does (test_up).
"""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psycopg
import pytest

from tests.agent_process import gguf, llama_server
from tests.trial import Trial
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.lasting_database,
    pytest.mark.on_postgresql,
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Trial]:
    """On what this run of the suite is about: SQLite and files, or PostgreSQL and Redis."""
    environment = {}
    if "DATABASE_URL" in os.environ:
        name = f"trial_{uuid.uuid4().hex}"
        server = os.environ["DATABASE_URL"]
        with psycopg.connect(server, autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"')
        environment["DATABASE_URL"] = server.rpartition("/")[0] + f"/{name}"
        environment["REDIS_URL"] = request.getfixturevalue("redis_url")
    trial = Trial(tmp_path_factory.mktemp("trial"), environment)
    try:
        trial.start_web()
        trial.start_worker()
        yield trial
        trial.stop()
        assert trial.strays() == []
    finally:
        trial.end()


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf(tmp_path_factory.mktemp("weights"))


def test_a_model_is_added_served_edited_and_gone(trial: Trial, weights: Path) -> None:
    engine = llama_server()
    if engine is None:
        pytest.skip("no llama-server that runs on this processor")
    trial.start_agent("local", "--engine", f"llamacpp={engine}")

    # An operator adds a model.
    trial.manage(
        *("model_add", "gemma", "--source", str(weights), "--engine", "llamacpp", "--context-length", "1024"),
        *("--min", "1", "--max", "1", "--profile", "args=--threads", "--profile", "args=2"),
    )
    replica = wait_until(lambda: the_ready_one(trial), "a ready replica", tell=trial.story, timeout_s=90)
    assert replica["stale_profile"] is False
    pid = replica["pid"]

    # A client streams a chat.
    client = openai.OpenAI(base_url=f"{trial.url}/v1", api_key=trial.api_key, max_retries=0)
    wait_until(
        lambda: [model.id for model in client.models.list()] == ["gemma"], "the gateway to know the model"
    )
    assert streamed(client)

    # The profile is edited: what runs is left alone, and every door says that it differs.
    model = trial.api("GET", "models/gemma/")
    model["profiles"][0]["args"] = ["--threads", "1"]
    trial.api("PUT", "models/gemma/", {**writable(model), "why": "one thread is enough"})
    edited = wait_until(
        lambda: next((each for each in trial.replicas("gemma") if each["stale_profile"]), None),
        "a stale replica",
    )
    assert edited["id"] == replica["id"]
    assert edited["stale_fields"] == ["args"]
    assert edited["restart_needed"] is True
    trial.log_in()
    assert "stale profile" in trial.page("/admin/nodes/replica/")
    page = trial.page(f"/admin/nodes/replica/{replica['id']}/change/")
    assert "stale profile" in page
    assert "args" in page
    assert "stale profile" in trial.manage("replicas")
    assert streamed(client)
    assert the_ready_one(trial)["pid"] == pid

    # The agent is killed and started again: the same process goes on.
    trial.kill("agent-local")
    assert streamed(client)
    trial.start_agent("local", "--engine", f"llamacpp={engine}")
    wait_until(lambda: node(trial)["state"] == "fresh", "the agent to be back", timeout_s=30)
    again = wait_until(lambda: the_ready_one(trial), "the adopted replica", tell=trial.story, timeout_s=30)
    assert (again["id"], again["pid"]) == (replica["id"], pid)
    assert streamed(client)
    assert len(trial.replicas("gemma")) == 1

    # The model is removed: its replica drains, and no engine is left.
    trial.manage("model_remove", "gemma", "--why", "the trial is over")
    wait_until(lambda: not alive(pid), "the engine to end", tell=trial.story, timeout_s=60)
    with pytest.raises(openai.NotFoundError):
        streamed(client)
    assert trial.engines() == []


def test_an_agent_started_for_a_trial_takes_its_engines_along(trial: Trial) -> None:
    trial.start_agent("cage", "--sim-gpus", "2:sim", "--engines-stop-with-agent")
    trial.manage(
        *("model_add", "parrot", "--source", "sim/parrot", "--engine", "sim", "--gpu-class", "sim"),
        *("--min", "2", "--max", "2"),
    )
    wait_until(
        lambda: [each["state"] for each in trial.replicas("parrot")] == ["ready", "ready"],
        "two ready replicas",
        tell=trial.story,
        timeout_s=60,
    )
    assert len(trial.engines()) == 2
    trial.kill("agent-cage", signal.SIGTERM)
    assert trial.engines() == []
    trial.manage("model_remove", "parrot")


def test_a_model_that_sleeps_is_woken_by_a_request(trial: Trial) -> None:
    trial.start_agent("bed", "--sim-gpus", "1:sim", "--engines-stop-with-agent")
    trial.manage(
        *("model_add", "sleeper", "--source", "sim/sleeper", "--engine", "sim", "--gpu-class", "sim"),
        *("--min", "0", "--max", "1"),
    )
    client = openai.OpenAI(base_url=f"{trial.url}/v1", api_key=trial.api_key, max_retries=0, timeout=90)
    wait_until(
        lambda: [model.id for model in client.models.list()] == ["sleeper"], "the gateway to know the model"
    )
    assert trial.replicas("sleeper") == []
    assert streamed(client, "sleeper")
    assert [each["state"] for each in trial.replicas("sleeper")] == ["ready"]


def streamed(client: openai.OpenAI, model: str = "gemma") -> str:
    """The text of a short streamed chat, which must end as a whole one does."""
    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Count to three."}],
            max_tokens=12,
            temperature=0,
            stream=True,
        )
    )
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert choices[-1].finish_reason in ("length", "stop")
    assert {chunk.model for chunk in chunks} == {model}
    return "".join(choice.delta.content or "" for choice in choices)


def the_ready_one(trial: Trial) -> Any:
    return next((each for each in trial.replicas("gemma") if each["state"] == "ready"), None)


def node(trial: Trial) -> dict[str, Any]:
    return dict(trial.api("GET", "nodes/local/"))


def writable(model: dict[str, Any]) -> dict[str, Any]:
    return {name: model[name] for name in ("name", "source", "profiles", "scaling", "context_length")}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
