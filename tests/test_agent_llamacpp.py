"""A real llama-server with a real model under a real agent."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.agent_process import KEY, AgentProcess, Stream, assignment, gguf, llama_server, xllama_server

pytestmark = pytest.mark.skipif(llama_server() is None, reason="no llama-server that runs on this processor")


@pytest.fixture(scope="session")
def model(pytestconfig: pytest.Config) -> Path:
    return gguf(pytestconfig.cache.mkdir("gguf"))  # type: ignore[union-attr]


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    with AgentProcess(tmp_path, "--engine", f"llamacpp={llama_server()}") as agent:
        yield agent


def llama(source: Path, *args: str, **changes: Any) -> dict[str, Any]:
    launch = {"context_length": 256, **changes.pop("launch", {})}
    return assignment(
        *("--threads", "2", *args), engine="llamacpp", source=str(source), gpus=[], launch=launch, **changes
    )


def client(port: int, key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0, timeout=60)


@pytest.mark.parametrize("program", [llama_server, xllama_server], ids=["packaged", "inside xllamacpp"])
def test_it_answers_with_the_catalogs_context_under_its_own_key(
    program: Callable[[], str | None], agent: AgentProcess, model: Path
) -> None:
    agent.options = ("--engine", f"llamacpp={program()}")
    agent.restart()
    wanted = llama(model)
    agent.put(wanted)
    rank = agent.wait_for(wanted["replica"], "ready", timeout_s=60)
    assert (rank["running"], rank["waiting"]) == (0, 0)
    assert rank["context_length"] == 256
    assert str(model) in agent.state()["weights"]
    version = {
        engine["name"]: engine["version"] for engine in agent.state()["engines"] if "version" in engine
    }
    assert version["llamacpp"]
    with client(rank["port"]) as chat:
        made = chat.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "Hello"}], max_tokens=4, temperature=0
        )
        assert made.usage is not None
        assert made.usage.completion_tokens == 4
        with pytest.raises(
            openai.BadRequestError, match=r"exceeds the available context size \(256 tokens\)"
        ):
            chat.completions.create(model="m", prompt="word " * 400, max_tokens=1)
    with (
        client(rank["port"], key="another-key-0123456789") as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.completions.create(model="m", prompt="Hello", max_tokens=1)


def test_a_stream_outlives_its_agent_and_a_drain_waits_for_it(agent: AgentProcess, model: Path) -> None:
    wanted = llama(model)
    agent.put(wanted)
    rank = agent.wait_for(wanted["replica"], "ready", timeout_s=60)
    stream = Stream(rank["port"], max_tokens=150)
    agent.restart()
    assert agent.rank(rank["replica"])["pid"] == rank["pid"]
    agent.delete(rank["replica"], drain="1m")
    assert stream.finish(timeout_s=60), stream.error
    agent.wait_for(rank["replica"], "stopped")
    assert agent.engines() == []


def test_a_folder_with_one_model_in_it_is_enough(agent: AgentProcess, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "only.gguf").symlink_to(model)
    wanted = llama(folder, launch={"capabilities": {"embeddings": True}})
    wanted["launch"]["profile"]["args"] += ["--pooling", "mean"]
    agent.put(wanted)
    rank = agent.wait_for(wanted["replica"], "ready", timeout_s=60)
    with client(rank["port"]) as engine:
        assert len(engine.embeddings.create(model="m", input="Hello").data[0].embedding) > 100
    os.kill(rank["pid"], signal.SIGKILL)
    assert agent.wait_for(rank["replica"], "failed")["exit_code"] == -9


def known_failure(agent: AgentProcess, wanted: dict[str, Any]) -> Any:
    """llama-server leaves its log to a thread that it does not wait for: once in fifty a quick end comes
    before the first word of why. It is started anew then, as the control plane would do it."""
    for generation in (1, 2, 3, 4):
        failed = agent.wait_for(wanted["replica"], "failed", timeout_s=60, generation=generation)
        if failed["cause"] != "unknown" or "failed" in agent.log(wanted["replica"]):
            break
        assert agent.put(wanted | {"generation": generation + 1}).status == 200
    return failed


def test_what_cannot_start_says_why(agent: AgentProcess, model: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(model.read_bytes()[:100_000])
    (tmp_path / "two").mkdir()
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / "two" / name).touch()
    cases = {
        "corrupt_weights": (llama(cut), "The weights are no whole GGUF file"),
        "bad_argument": (llama(model, "--no-such-flag"), "does not know the argument --no-such-flag"),
        "model_path_missing": (llama(tmp_path / "nowhere.gguf"), "nowhere.gguf of model"),
        "no_weights": (llama(tmp_path / "two"), "holds 2 GGUF models"),
    }
    for wanted, _ in cases.values():
        agent.put(wanted)
    for cause, (wanted, words) in cases.items():
        failed = known_failure(agent, wanted)
        kind = "node" if cause == "model_path_missing" else "configuration"  # another node may have it
        assert (failed["cause"], failed["kind"]) == (cause, kind), agent.story()
        assert words in failed["reason"]
