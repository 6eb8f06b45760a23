"""What the agent's probe believes of whoever answers on an engine's port."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from nodes.agent.probes import Load, Probe, total_of
from nodes.engines import ENGINES
from nodes.protocol import Launch
from tests.services import free_port

KEY = "the-right-key-0123456789"


@asynccontextmanager
async def probe_of(port: int, engine: str = "sim", **changes: Any) -> AsyncIterator[Probe]:
    launch = Launch("m", "s", {"engine": engine}, **changes)
    async with aiohttp.ClientSession() as session:
        yield Probe(session, ENGINES[engine], launch, base_url=f"http://127.0.0.1:{port}", key=KEY)


async def obstacle(port: int, **changes: Any) -> str:
    async with probe_of(port, **changes) as probe:
        load, found = await asyncio.gather(probe.load(), probe.obstacle())
        assert load in (Load(), Load(2, 1, (None, 40, None)))
        return found


@asynccontextmanager
async def answering(answers: dict[str, tuple[int, Any]]) -> AsyncIterator[int]:
    """The port of an engine that answers like this, and 401 to a stranger unless it is open."""

    async def answer(request: web.Request) -> web.Response:
        is_ours = request.headers["Authorization"] == f"Bearer {KEY}"
        if not is_ours and request.method == "POST" and "open" not in answers:
            return web.Response(status=401)
        status, body = answers.get(request.path, (404, "no such route"))
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(status=status, text=text)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield port
    finally:
        await runner.cleanup()


async def obstacle_of(answers: dict[str, tuple[int, Any]], **changes: Any) -> str:
    async with answering(answers) as port:
        return await obstacle(port, **changes)


GOOD: dict[str, tuple[int, Any]] = {
    "/health": (200, ""),
    "/v1/models": (200, {"data": [{"id": "m"}]}),
    "/v1/completions": (200, {}),
    "/metrics": (
        200,
        (
            'vllm:num_requests_running{a="{}"} 2.0\nvllm:num_requests_waiting 1.0\n'
            "vllm:generation_tokens_total 40.0\n"
        ),
    ),
}

OBSTACLES: dict[str, tuple[dict[str, tuple[int, Any]], str]] = {
    "none": ({}, ""),
    "a load that goes on": ({"/health": (503, "Loading\nmodel")}, "/health answers 503: Loading model"),
    "another's key": ({"/v1/models": (401, "no")}, "/v1/models answers 401 to this replica's key: no"),
    "another's model": (
        {"/v1/models": (200, {"data": [{"id": "x"}]})},
        "does not list m: another engine answers",
    ),
    "no list of models": ({"/v1/models": (200, "[[[")}, "does not list m"),
    "a list that is none": ({"/v1/models": (200, {"data": 7})}, "does not list m"),
    "open to everybody": ({"open": (200, "")}, "/v1/completions answers 200 to a wrong key instead of 401"),
    "no first token": ({"/v1/completions": (500, "kaput")}, "answers 500 to a first request: kaput"),
    "an answer without end": ({"/health": (200, "x" * (5 << 20))}, "/health answers without end"),
}


@pytest.mark.parametrize(("changes", "words"), OBSTACLES.values(), ids=OBSTACLES)
async def test_an_obstacle_is_named(changes: dict[str, tuple[int, Any]], words: str) -> None:
    found = await obstacle_of({**GOOD, **changes})
    assert words in found if words else not found


async def test_an_engine_for_embeddings_is_asked_for_one() -> None:
    embedding = {**GOOD, "/v1/completions": (500, ""), "/v1/embeddings": (200, {})}
    assert await obstacle_of(embedding, capabilities={"embeddings": True}) == ""


async def test_nobody_who_listens_is_an_obstacle() -> None:
    assert await obstacle(free_port()) == "it does not listen yet"


async def test_one_who_never_answers_is_an_obstacle() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert await obstacle(silent.getsockname()[1]) == "/health did not answer within 2 s"


CONTEXTS: dict[str, tuple[str, tuple[int, Any], int | None]] = {
    "as vllm tells it": ("vllm", (200, {"data": [{"id": "m", "max_model_len": 512}]}), 512),
    "as sglang tells it": ("sglang", (200, {"data": [{"id": "m", "max_model_len": 512}]}), 512),
    "as llama-server tells it": ("llamacpp", (200, {"default_generation_settings": {"n_ctx": 2048}}), 2048),
    "not told": ("vllm", (200, {"data": [{"id": "m"}]}), None),
    "of no model": ("vllm", (200, {"data": []}), None),
    "a text": ("vllm", (200, {"data": [{"max_model_len": "512"}]}), None),
    "true": ("vllm", (200, {"data": [{"max_model_len": True}]}), None),
    "none": ("vllm", (200, {"data": [{"max_model_len": 0}]}), None),
    "more than there is": ("vllm", (200, {"data": [{"max_model_len": 10**12}]}), None),
    "another form": ("llamacpp", (200, [7]), None),
    "no JSON": ("llamacpp", (200, "[[["), None),
    "kept from us": ("llamacpp", (403, {"default_generation_settings": {"n_ctx": 2048}}), None),
}


@pytest.mark.parametrize(("engine", "answer", "tokens"), CONTEXTS.values(), ids=CONTEXTS)
async def test_the_context_of_a_request_is_what_the_running_engine_says(
    engine: str, answer: tuple[int, Any], tokens: int | None
) -> None:
    path = "/props" if engine == "llamacpp" else "/v1/models"
    async with answering({path: answer}) as port, probe_of(port, engine) as probe:
        assert await probe.context_length() == tokens


async def test_an_engine_that_does_not_listen_tells_no_context() -> None:
    async with probe_of(free_port()) as probe:
        assert await probe.context_length() is None


@pytest.mark.parametrize(
    ("metrics", "total"),
    [
        ("", None),
        ("running 3", 3),
        ('running{engine="0"} 3.0\nrunning{engine="1"} 1e0\n', 4),
        ("# TYPE running gauge\nrunning_total 7\nnot_running 8\n", None),
        ("running many\n", None),
        ("running 1e999\n", None),
        ("running 1.2.3\n", None),
    ],
    ids=repr,
)
def test_a_metric_is_summed_over_its_labels(metrics: str, total: int | None) -> None:
    assert total_of(metrics, "running") == total


@given(st.text())
def test_metrics_of_any_kind_are_a_number_or_unknown(text: str) -> None:
    assert total_of(text, "running") is None
    assert isinstance(total_of(f"{text}\nrunning 3\n", "running"), int | None)
