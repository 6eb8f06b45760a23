"""A real vllm on a processor under a real agent: asked for by LLMGW_TEST_VLLM, the program's path."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from nodes.agent.home import Home
from tests.agent_process import KEY, AgentProcess, Stream, ask, assignment
from tests.vllm_program import PROGRAM, make_vllm_model

pytestmark = [
    pytest.mark.skipif(not PROGRAM, reason="LLMGW_TEST_VLLM names no vllm"),
    pytest.mark.timeout(900),
]


OPTIONS = ("--engine", f"vllm={PROGRAM}", "--stop-grace", "30s")
PLAIN = ("--enforce-eager", "--dtype", "float32")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vllm_model(tmp_path_factory.mktemp("vllm"))


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    with AgentProcess(tmp_path, *OPTIONS) as agent:
        yield agent


def wanted_of(model: Path, *args: str, context_length: int) -> dict[str, Any]:
    return assignment(
        *args,
        engine="vllm",
        source=str(model),
        gpus=[],
        env={"VLLM_CPU_KVCACHE_SPACE": "1"},
        launch={"context_length": context_length},
        startup_timeout_s=600,
    )


def test_it_serves_is_taken_up_again_and_drains(agent: AgentProcess, model: Path) -> None:
    wanted = wanted_of(model, *PLAIN, context_length=512)
    assert agent.put(wanted).status == 200, agent.story()
    rank = agent.wait_for(wanted["replica"], "ready", timeout_s=600)
    assert rank["context_length"] == 512
    assert (rank["running"], rank["waiting"]) == (0, 0)
    told = {each["name"]: each.get("version") for each in agent.state()["engines"]}
    assert told["vllm"]

    url = f"http://127.0.0.1:{rank['port']}"
    for path in ("/v1/models", "/metrics", "/version", "/load"):
        assert ask(url + path).status == 401, "the guard closes what vllm leaves open"
    asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    assert ask(f"{url}/invocations", "POST", body=asked).status == 401
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=120) as client:
        made = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "Hello"}], max_tokens=4
        )
        assert made.usage is not None
        assert made.usage.completion_tokens <= 4
        with pytest.raises(openai.BadRequestError, match="maximum context length is 512"):
            client.completions.create(model="m", prompt="word " * 400, max_tokens=1)

    stream = Stream(rank["port"], max_tokens=400, ignore_eos=True)
    agent.restart()
    assert agent.rank(rank["replica"])["pid"] == rank["pid"]
    agent.delete(rank["replica"], drain="2m")
    assert stream.finish(timeout_s=120), stream.error
    agent.wait_for(rank["replica"], "stopped", timeout_s=120)
    assert agent.engines() == []


def test_a_context_that_does_not_fit_is_told_as_such(agent: AgentProcess, model: Path) -> None:
    wanted = wanted_of(model, context_length=8192)
    agent.put(wanted)
    failed = agent.wait_for(wanted["replica"], "failed", timeout_s=600)
    assert (failed["cause"], failed["kind"]) == ("ctx_too_long", "configuration"), failed["reason"]
    assert agent.engines() == []


def test_it_answers_over_tls_alone(tmp_path: Path, model: Path) -> None:
    home = Home(tmp_path)
    if not home.has_certificate():
        pytest.skip("no openssl")
    wanted = wanted_of(model, *PLAIN, context_length=512)
    with AgentProcess(tmp_path, *OPTIONS, "--engine-tls", tls=(home.certificate, home.key)) as agent:
        assert agent.put(wanted).status == 200, agent.story()
        rank = agent.wait_for(wanted["replica"], "ready", timeout_s=600)
        assert (rank["certificate"], rank["context_length"]) == (home.checksum(), 512)
        said = ask(
            f"https://127.0.0.1:{rank['port']}/v1/chat/completions",
            "POST",
            body={"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
            headers={"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"},
            certificate=home.certificate,
        )
        assert said.json["usage"]["completion_tokens"] == 1
        with pytest.raises((OSError, http.client.HTTPException)):
            ask(f"http://127.0.0.1:{rank['port']}/health")
        agent.delete(rank["replica"], drain="2m")
        agent.wait_for(rank["replica"], "stopped", timeout_s=120)
