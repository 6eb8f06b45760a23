"""An engine check's conversation with engines that keep their word and with engines that do not: the sim
engine's own server, asked over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from nodes.agent.sim.lies import LIES
from nodes.checks import CHECKS, Claims, Finding, Verdict, verdict_of
from nodes.engines import ENGINES, Seat, adapter
from nodes.interview import EngineGone, Interview, Subject
from nodes.protocol import Launch
from tests.agent_process import ask, gguf, llama_server
from tests.services import free_port
from tests.sim_thread import ABLE, serving
from tests.waiting import wait_until

pytestmark = pytest.mark.one_database

IS_SOAK = "SOAK_STEPS" in os.environ
ALL = Claims("my-model", tools=True, vision=True, context_length=4096)


async def asked(url: str, claims: Claims = ALL, patience_s: float = 1, **more: Any) -> Mapping[str, Finding]:
    subject = Subject(url, "test", ENGINES["sim"], claims, **more)
    interview = Interview(subject, patience_s=patience_s)
    await interview.hold()
    return {finding.check: finding for finding in interview.findings}


def works(found: Mapping[str, Finding]) -> set[str]:
    return {check for check, finding in found.items() if finding.works}


async def test_a_healthy_engine_passes() -> None:
    with serving(*ABLE) as sim:
        found = await asked(sim.url, own_length=4096)
    assert works(found) == set(CHECKS), [finding for finding in found.values() if not finding.works]


FAULTS = {
    "name": ("name", 'it lists "not-my-model", and not "my-model"'),
    "stop": ("stop", 'it went on past the stop text "'),
    "max-tokens": ("max_tokens", "it said 24 tokens where 8 were allowed"),
    "usage": ("stream", "its stream ends without the usage that was asked for"),
    "calls": ("tools_auto tools_required tools_named", "whole: it called no tool, and said "),
    "arguments": ("tools_auto tools_required tools_named", 'whole: its arguments are no JSON: "{'),
    "schema": ("json_schema", 'its answer is no JSON: "Of course! Here it is: {"'),
    "context": ("context", "it took a prompt of "),
    "cancel": ("cancel", "it still works on an answer 1 s after its client left"),
    "vision": ("vision", 'shown blue, it said "red"'),
    "embeddings": ("embeddings", "the same text has another vector each time"),
}


def test_every_lie_is_in_the_table() -> None:
    assert FAULTS.keys() == LIES.keys()


@pytest.mark.parametrize("lie", FAULTS)
async def test_a_lie_is_found_and_nothing_else_is_blamed(lie: str) -> None:
    with serving(*ABLE, "--lie", lie) as sim:
        found = await asked(sim.url)
    checks, says = FAULTS[lie]
    wrong = {check for check, finding in found.items() if finding.works is False}
    assert wrong == set(checks.split())
    assert all(found[check].says.startswith(says) for check in wrong), [found[check] for check in wrong]


async def test_what_is_not_claimed_is_asked_for_once_and_is_no_fault() -> None:
    with serving("--context-length", "4096", "--no-enable-prefix-caching") as sim:
        found = await asked(sim.url, Claims("my-model", context_length=4096, is_caching=False))
    assert {check: finding.works for check, finding in found.items() if not finding.works} == {
        "tools_required": False,
        "vision": False,
        "prefix": False,
    }
    assert "is not a multimodal model" in found["vision"].says
    assert verdict_of(found["vision"], False) is Verdict.ABSENT
    assert verdict_of(found["embeddings"], False) is Verdict.BONUS


async def test_of_a_model_that_embeds_nothing_else_is_asked() -> None:
    with serving() as sim:
        found = await asked(sim.url, Claims("my-model", embeddings=True))
    assert works(found) == found.keys() == {"health", "name", "embeddings"}


async def test_in_a_small_context_no_answer_is_asked_for_that_has_no_room() -> None:
    with serving(*ABLE, "--context-length", "512") as sim:
        found = await asked(sim.url, replace(ALL, context_length=512))
    assert works(found) == set(CHECKS), [finding for finding in found.values() if not finding.works]


async def test_a_context_that_is_shorter_than_promised_is_told_without_asking() -> None:
    with serving(*ABLE) as sim:
        found = await asked(sim.url, Claims("my-model", context_length=8192), own_length=4096)
    assert found["context"].says == "the catalog promises 8192 tokens, and it has 4096"


async def test_a_wrong_key_is_a_refusal_of_everything() -> None:
    with serving(*ABLE, key="another") as sim:
        found = await asked(sim.url)
    assert works(found) == {"health"}
    assert found["chat"].says == "it answered with status 401: Unauthorized"


async def gone(url: str) -> tuple[str, set[str]]:
    interview = Interview(Subject(url, "test", ENGINES["sim"], ALL), patience_s=0.3)
    with pytest.raises(EngineGone) as gone:
        await interview.hold()
    return f"{gone.value} ({interview.step})", {finding.check for finding in interview.findings}


async def test_an_engine_that_stalls_is_not_waited_for_again_and_again() -> None:
    with serving(*ABLE, "--stall-after", "40") as sim:
        says, found = await gone(sim.url)
    assert says == "answers no more: 2 requests had no answer in time (max_tokens)"
    assert found == {"health", "chat", "name", "stream", "stop"}


async def test_an_engine_that_dies_ends_the_check() -> None:
    with serving(*ABLE, "--crash-after", "40", "--crash-how", "core") as sim:
        says, found = await gone(sim.url)
    assert says == "is not healthy any more: its engine answers with status 503 (stop text)"
    assert found == {"health", "chat", "name", "stream"}


async def test_an_engine_that_is_not_there_is_told_at_once() -> None:
    with serving() as sim:
        pass
    assert await gone(sim.url) == ("is gone: its engine takes no connection any more (health)", set())


async def test_an_engine_that_does_not_speak_tls_is_not_called_gone() -> None:
    with serving() as sim:
        says, _ = await gone(sim.url.replace("http", "https"))
    assert says == "does not speak TLS as its node tells (health)"


async def test_an_engine_that_points_elsewhere_is_not_followed() -> None:
    paths: set[str] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        _, _, length = head.lower().partition(b"content-length: ")
        await reader.readexactly(int(length.split()[0]) if length else 0)
        path = head.split()[1].decode()
        paths.add(path)
        if path == "/health":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        else:
            writer.write(b"HTTP/1.1 307 X\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        host, port = server.sockets[0].getsockname()
        found = await asked(f"http://{host}:{port}")
    assert works(found) == {"health"}
    assert paths == {"/health", "/v1/models", "/v1/chat/completions", "/v1/embeddings", "/metrics"}


# --- a real one -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(pytestconfig: pytest.Config) -> Iterator[str]:
    """Where a llama-server with a small model and 512 tokens of context listens, started as an agent does."""
    port, launch = free_port(), Launch("my-model", "x", {"args": ["--threads", "2"]}, context_length=512)
    model = gguf(pytestconfig.cache.mkdir("gguf"))  # type: ignore[union-attr]
    seat = Seat([str(llama_server())], "127.0.0.1", port, "test", model_path=str(model))
    command = adapter.render(ENGINES["llamacpp"], launch, seat)
    process = subprocess.Popen(
        command.argv, env={**os.environ, **command.env}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: is_healthy(url), "llama-server to have loaded", timeout_s=60)
        yield url
    finally:
        process.kill()
        process.wait()


def is_healthy(url: str) -> bool:
    with contextlib.suppress(OSError):
        return ask(f"{url}/health").status == 200
    return False


@pytest.mark.skipif(not IS_SOAK, reason="a model on a processor takes half a minute; make soak asks it")
@pytest.mark.skipif(llama_server() is None, reason="no llama-server that runs on this processor")
async def test_a_real_llama_server_keeps_its_word_and_has_no_tools(llama: str) -> None:
    claims = Claims("my-model", context_length=512)
    subject = Subject(llama, "test", ENGINES["llamacpp"], claims, own_length=512)
    interview = Interview(subject, patience_s=60)
    await interview.hold()
    wrong = {finding.check: finding.says for finding in interview.findings if not finding.works}
    assert wrong.keys() == {"tools_required", "vision", "embeddings"}, wrong
    assert wrong["tools_required"].startswith("whole: it called no tool, and said ")
    assert wrong["vision"].startswith("it answered with status 500: image input is not supported")
    assert wrong["embeddings"].startswith("it answered with status 501: This server does not support embedd")
