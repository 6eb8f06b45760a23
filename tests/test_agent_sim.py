"""The sim engine: its refusals are vllm's own, recorded; its tokens, counts and slots are what it says."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.agent.sim import read_options
from nodes.agent.sim_asks import Ask, compose, count_tokens, embed
from tests.agent_process import ROOT, Answer, Stream, ask
from tests.services import free_port
from tests.waiting import wait_until

RECORDED = Path(__file__).parent / "data" / "engines" / "vllm"
KEY = "test"


@contextlib.contextmanager
def running_sim(*options: str) -> Iterator[int]:
    """The port of a sim engine that serves my-model with 512 tokens of context."""
    port = free_port()
    command = [sys.executable, "-m", "nodes.agent.sim", "--model", "my-model", "--port", str(port)]
    engine = subprocess.Popen(
        [*command, "--context-length", "512", *options],
        cwd=ROOT,
        env={"VLLM_API_KEY": KEY, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: is_up(port), "the sim engine to listen", timeout_s=20)
        yield port
    finally:
        engine.terminate()
        assert engine.wait(5) == 0


def is_up(port: int) -> bool:
    with contextlib.suppress(OSError):
        return ask(f"http://127.0.0.1:{port}/health").status == 200
    return False


@pytest.fixture(scope="module")
def sim() -> Iterator[int]:
    with running_sim("--ttft", "1ms", "--tpot", "0s") as port:
        yield port


@pytest.fixture
def client(sim: int) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{sim}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def post(port: int, path: str, body: Any, key: str = KEY) -> Answer:
    url = f"http://127.0.0.1:{port}{path}"
    return ask(url, "POST", body=body, headers={"Authorization": f"Bearer {key}"})


def metric(port: int, name: str) -> float:
    text = ask(f"http://127.0.0.1:{port}/metrics").body.decode()
    found = re.search(rf"^{re.escape(name)}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE)
    assert found, f"{name} is not in /metrics"
    return float(found[1])


@pytest.mark.parametrize("recording", sorted(RECORDED.glob("*.txt")), ids=lambda path: path.stem)
def test_it_refuses_as_vllm_did(sim: int, recording: Path) -> None:
    text = recording.read_text()
    sent = re.search(r"^### body: (.*)$", text, re.MULTILINE)
    body = (
        sent[1].encode()
        if sent
        else json.dumps(
            {"model": "my-model", "messages": [{"role": "user", "content": "word " * 1000}]}
        ).encode()
    )
    key = re.search(r"Authorization: Bearer (\w+)", text)
    status = re.search(r"^HTTP/1.1 (\d+)", text, re.MULTILINE)
    assert status
    answer = post(sim, "/v1/chat/completions", body, key=key[1] if key else KEY)
    assert answer.status == int(status[1])
    assert answer.json == json.loads(text.strip().rpartition("\n")[2])


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "is_taken"),
    [
        pytest.param(500, 12, True, id="what just fits"),
        pytest.param(501, 12, False, id="one token too many"),
        pytest.param(511, None, True, id="room for one token"),
        pytest.param(512, None, False, id="room for none"),
    ],
)
def test_prompt_and_answer_share_the_context(
    sim: int, prompt_tokens: int, max_tokens: int | None, is_taken: bool
) -> None:
    body = {"model": "my-model", "prompt": "abcd" * prompt_tokens, "max_tokens": max_tokens}
    answer = post(sim, "/v1/completions", body)
    assert answer.status == (200 if is_taken else 400), answer.body
    if is_taken:
        assert answer.json["usage"]["total_tokens"] <= 512
    else:
        assert "maximum context length is 512 tokens" in answer.json["error"]["message"]


def test_a_chat_has_the_tokens_it_was_asked_for(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model="my-model", messages=[{"role": "user", "content": "hi"}], max_tokens=7
    )
    assert made.choices[0].finish_reason == "length"
    assert count_tokens(made.choices[0].message.content or "") == 7
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (1 + 4, 7)


def test_an_answer_without_a_limit_ends_by_itself(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(model="my-model", messages=[{"role": "user", "content": "hi"}])
    assert made.choices[0].finish_reason == "stop"
    assert made.usage is not None
    assert made.usage.completion_tokens == 64


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    asked: Any = {
        "model": "my-model",
        "messages": [{"role": "user", "content": "hi"}],
        "n": 2,
        "max_tokens": 9,
    }
    whole = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant", "assistant"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    for choice in whole.choices:
        mine = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == choice.index]
        assert "".join(each.delta.content or "" for each in mine) == choice.message.content
        assert mine[-1].finish_reason == "length"


def test_usage_is_not_streamed_unless_it_is_asked_for(client: openai.OpenAI) -> None:
    chunks = client.completions.create(model="my-model", prompt="hi", max_tokens=2, stream=True)
    assert all(chunk.usage is None for chunk in chunks)


def test_a_stop_text_ends_an_answer_before_it(client: openai.OpenAI) -> None:
    said = client.completions.create(model="my-model", prompt="hi", max_tokens=20).choices[0].text
    stop = said[10:15]
    made = client.completions.create(model="my-model", prompt="hi", max_tokens=20, stop=[stop])
    assert made.choices[0].text == said[: said.index(stop)]
    assert made.choices[0].finish_reason == "stop"


def test_embeddings_are_unit_vectors_of_their_text(client: openai.OpenAI, sim: int) -> None:
    made = client.embeddings.create(model="my-model", input=["one", "two", "one"])
    first, second, third = (each.embedding for each in made.data)
    assert first == third != second
    assert sum(value * value for value in first) == pytest.approx(1, abs=1e-3)
    plain = post(sim, "/v1/embeddings", {"model": "my-model", "input": "one"}).json["data"][0]["embedding"]
    assert plain == pytest.approx(first)
    packed = post(sim, "/v1/embeddings", {"model": "my-model", "input": "one", "encoding_format": "base64"})
    raw = base64.b64decode(packed.json["data"][0]["embedding"])
    assert struct.unpack(f"<{len(raw) // 4}f", raw) == pytest.approx(first)


def test_health_and_metrics_are_open_as_vllms_are(sim: int) -> None:
    assert ask(f"http://127.0.0.1:{sim}/health").status == 200
    assert ask(f"http://127.0.0.1:{sim}/v1/models").status == 401
    before = (
        metric(sim, "vllm:generation_tokens_total"),
        metric(sim, "vllm:time_to_first_token_seconds_count"),
    )
    post(sim, "/v1/completions", {"model": "my-model", "prompt": "hi", "max_tokens": 5, "n": 3})
    after = metric(sim, "vllm:generation_tokens_total"), metric(sim, "vllm:time_to_first_token_seconds_count")
    assert (after[0] - before[0], after[1] - before[1]) == (15, 1)


def test_tokens_come_at_the_set_pace() -> None:
    with running_sim("--ttft", "300ms", "--tpot", "20ms") as port:
        body = json.dumps({"model": "my-model", "prompt": "hi", "max_tokens": 20, "stream": True}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", data=body, headers={"Authorization": f"Bearer {KEY}"}
        )
        started = time.monotonic()
        with urllib.request.urlopen(request) as answer:
            answer.readline()
            first = time.monotonic() - started
            answer.read()
        whole = time.monotonic() - started
    assert 0.3 <= first < 0.6
    assert 0.3 + 19 * 0.02 <= whole < 1.4


def test_more_requests_than_slots_wait_and_one_that_leaves_gives_its_slot_on() -> None:
    with running_sim("--max-num-seqs", "1", "--tpot", "50ms") as port:
        first = Stream(port, max_tokens=400, model="my-model", key=KEY)
        assert metric(port, "vllm:num_requests_running") == 1
        late = {"model": "my-model", "prompt": "hi", "max_tokens": 1}
        for body in ({**late, "stream": True}, late):  # both kinds leave while they wait
            with pytest.raises(TimeoutError), contextlib.closing(_hurried(port, body)):
                pass
            wait_until(lambda: metric(port, "vllm:num_requests_waiting") == 0, "the queue to be empty")
        first.leave()
        wait_until(lambda: metric(port, "vllm:num_requests_running") == 0, "the slot to be free")
        assert post(port, "/v1/completions", late).status == 200


def _hurried(port: int, body: Any) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {KEY}"},
    )
    return urllib.request.urlopen(request, timeout=0.3)


def test_a_failing_load_ends_with_its_message() -> None:
    engine = subprocess.run(
        [sys.executable, "-m", "nodes.agent.sim", "--model", "m", "--port", "1", "--fail-load", "no luck"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert engine.returncode == 1
    assert engine.stderr.endswith("no luck\n")


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(["--ttft", "soon"], id="a duration that is none"),
        pytest.param(["--tpot", "-1s"], id="a negative duration"),
        pytest.param(["--max-num-seqs", "0"], id="no slot at all"),
        pytest.param(["--context", "7"], id="an abbreviation"),
    ],
)
def test_options_that_cannot_be_read_are_refused(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        read_options(["--model", "m", "--port", "1", *wrong], key="")
    assert "sim: error: " in capsys.readouterr().err


@given(
    prompt=st.text(max_size=20),
    max_tokens=st.integers(1, 60),
    stops=st.lists(st.sampled_from(["the", "o", " s", "fox joy", "zzz"]), max_size=3),
    choice=st.integers(0, 5),
)
def test_an_answer_never_holds_its_stop_text(
    prompt: str, max_tokens: int, stops: list[str], choice: int
) -> None:
    asked = Ask(prompt, 1, max_tokens, False, tuple(stops), 1, False, False)
    answer = compose(asked, choice)
    text = "".join(answer.pieces)
    assert answer == compose(asked, choice)
    assert not any(stop in text for stop in stops)
    assert len(answer.pieces) <= answer.tokens <= max_tokens
    assert (answer.finish_reason == "stop") == (answer.stop_reason is not None)


@given(st.text())
def test_any_text_has_an_embedding(text: str) -> None:
    assert sum(value * value for value in embed(text)) == pytest.approx(1)
