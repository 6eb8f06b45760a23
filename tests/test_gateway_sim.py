"""The gateway in front of the sim engine's real process: what engines really do on the wire."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from django.conf import settings as django_settings

from nodes.models import Replica
from tests.services import free_port
from tests.stage import MESSAGES, Engine, Play, change, make_model, make_replica, playing, saying, text_of
from tests.waiting import wait_until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.one_database]

ROOT = Path(__file__).parent.parent


class Sim:
    """`python -m nodes.agent.sim` for one replica, with that replica's key."""

    def __init__(self, port: int, replica: Replica) -> None:
        self.port = port
        self.key = django_settings.LLMGW_CLUSTER_KEYS[0].replica_key(str(replica.pk), replica.generation)
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "nodes.agent.sim", "--model", "sim", "--port", str(port)),
                *("--ttft", "10ms", "--tpot", "50ms", "--context-length", "200"),
            ],
            cwd=ROOT,
            env={"PATH": os.environ["PATH"], "VLLM_API_KEY": self.key},
        )

    def running(self) -> float:
        """How many requests it works on, by its own word."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=5) as response:
            lines = response.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running"))

    def is_up(self) -> bool:
        try:
            return self.running() == 0
        except OSError:
            return False


@pytest.fixture
def play(settings: Any) -> Iterator[Play]:
    settings.LLMGW_HOLD_S = 1
    with playing() as play:
        yield play


@pytest.fixture
def sim(play: Play) -> Iterator[Sim]:
    engine = Engine(saying(500, {}), port=free_port())
    replica = make_replica(make_model("sim", can_embeddings=True), engine, state="starting")
    sim = Sim(engine.port, replica)
    try:
        wait_until(sim.is_up, "the sim engine to answer", timeout_s=20)
        change(replica, state="ready")
        play.wait_until_known("sim")
        yield sim
    finally:
        sim.process.kill()
        sim.process.wait()


def test_a_chat_streams_with_its_usage(play: Play, sim: Sim) -> None:
    chunks = play.chunks(model="sim", max_tokens=12, stream_options={"include_usage": True})
    *words, last = chunks
    assert text_of(words).strip()
    assert last.usage.completion_tokens == 12
    assert play.chat(model="sim", max_tokens=12).usage == last.usage


def test_completions_and_embeddings_are_served(play: Play, sim: Sim) -> None:
    with play.web.client(play.key) as client:
        completion = client.completions.create(model="sim", prompt="Once", max_tokens=5)
        assert completion.choices[0].text.strip()
        assert client.embeddings.create(model="sim", input=["a", "b"]).data[1].embedding


def test_a_prompt_that_is_too_long_is_refused_in_the_engines_words(play: Play, sim: Sim) -> None:
    messages = [{"role": "user", "content": "word " * 1000}]
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        play.chat(model="sim", messages=messages)


@pytest.mark.parametrize("is_stream", [pytest.param(True, id="streamed"), pytest.param(False, id="plain")])
def test_an_engine_stops_working_for_a_client_that_left(play: Play, sim: Sim, is_stream: bool) -> None:
    body = {"model": "sim", "messages": MESSAGES, "max_tokens": 190, "stream": is_stream}
    with play.web.connection() as connection:
        connection.sendall(play.request(json.dumps(body).encode()))
        wait_until(lambda: sim.running() == 1, "the engine to begin")
    wait_until(lambda: sim.running() == 0, "the engine to stop, long before it is done", timeout_s=2)


def test_a_killed_engine_cuts_its_streams_visibly(play: Play, sim: Sim) -> None:
    with play.web.client(play.key) as client:
        stream = client.chat.completions.create(model="sim", messages=MESSAGES, max_tokens=190, stream=True)
        next(stream)
        sim.process.kill()
        with pytest.raises(openai.APIError, match="ends unfinished"):
            list(stream)
    refusal = play.refused(model="sim")
    assert (refusal.status, refusal.body["code"]) == (503, "unavailable")
    assert "its replica refused the connection" in refusal.body["message"]
