"""Faults under load: each request ends once, whole or with an error that its client sees, and is counted
once; no slot is lost, and nothing without content is called a success."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from django.conf import settings as django_settings
from pytest_django import DjangoDbBlocker

from nodes.models import Demand
from tests.services import free_port
from tests.stage import (
    MESSAGES,
    Engine,
    Play,
    Script,
    begin_stream,
    change,
    chat_answer,
    chat_event,
    drop,
    make_replica,
    never,
    playing_for_many,
    saying,
    well_behaved,
)
from tests.waiting import wait_until

pytestmark = [pytest.mark.lasting_database, pytest.mark.one_database]

ROOT = Path(__file__).parent.parent
REQUESTS, AT_ONCE = 50, 10
TOKENS = 4
IS_SOAK = "SOAK_STEPS" in os.environ  # there is time for what is nearly the same


@dataclass
class Storm:
    """A play with a log of the requests that have ended. Half of what it asks is streamed."""

    play: Play
    log: Path
    rounds: int = 0

    def rage(self, count: int = REQUESTS) -> Counter[str]:
        """How so many requests ended: "whole", "cut" (an error ended the stream), or a status and a code.
        After that, everything is as it was."""
        self.rounds += 1
        with ThreadPoolExecutor(AT_ONCE) as pool:
            ends = list(pool.map(self._ask, range(count)))
        self._audit(ends)
        return Counter(ends)

    def _ask(self, number: int) -> str:
        is_stream = bool(number % 2)
        body = json.dumps({"model": "tiny", "messages": MESSAGES, "stream": is_stream, "max_tokens": 4})
        headers = {"Authorization": f"Bearer {self.play.key}", "X-Request-Id": f"{self.rounds}.{number}"}
        request = urllib.request.Request(
            f"{self.play.web.url}/v1/chat/completions", body.encode(), headers, method="POST"
        )
        try:
            with urllib.request.urlopen(request, timeout=15) as response:
                answer = response.read()
        except urllib.error.HTTPError as error:
            with error:
                return f"{error.code} {json.load(error)['error']['code']}"
        if not is_stream:
            assert json.loads(answer)["choices"][0]["message"]["content"], "a success without content"
            return "whole"
        events = answer.split(b"\n\n")
        assert events.pop() == b"", "a frame was torn"
        said = [json.loads(event[6:]) for event in events if event.startswith(b"data: {")]
        if events[-1] == b"data: [DONE]":
            words = "".join(each["choices"][0]["delta"].get("content") or "" for each in said)
            assert words, "a success without content"
            assert not any("error" in each for each in said)
            return "whole"
        assert "error" in said[-1], "a stream that ends without a word"
        assert b"[DONE]" not in answer
        return "cut"

    def _audit(self, ends: list[str]) -> None:
        from llmgw import asgi

        gateway = asgi._gateway
        assert gateway is not None
        wait_until(lambda: not gateway._relay._in_flight, "all slots to be given back")
        wait_until(
            lambda: {(row.waiting, row.in_flight) for row in Demand.objects.all()} == {(0, 0)},
            "the demand to be settled",
        )
        told = wait_until(lambda: self._told(len(ends)), "each request to be told of")
        assert len(told) == len({line["request"] for line in told}) == len(ends), "each of them once"
        answered = [line for line in told if line["status"] == 200 and not line["code"]]
        assert len(answered) == ends.count("whole")
        assert {line["completion_tokens"] for line in answered} <= {TOKENS}, "usage is counted once"

    def _told(self, count: int) -> list[dict[str, Any]]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        told = [json.loads(line) for line in lines]
        own = [line for line in told if line["request"].startswith(f"{self.rounds}.")]
        return own if len(own) >= count else []


@pytest.fixture(scope="module")
def all_storms(
    django_db_setup: None, django_db_blocker: DjangoDbBlocker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Storm]:
    log = tmp_path_factory.mktemp("log") / "access.jsonl"
    settings = {"HOLD_S": 5, "IDLE_S": 1, "FIRST_BYTE_S": 1, "STALL_S": 1, "ACCESS_LOG": str(log)}
    with playing_for_many(
        django_db_blocker, **{f"LLMGW_{name}": value for name, value in settings.items()}
    ) as play:
        yield Storm(play, log)


@pytest.fixture
def storm(all_storms: Storm) -> Storm:
    all_storms.play.begin_anew()
    all_storms.play.engine.script = _answers
    return all_storms


# --- engines ------------------------------------------------------------------------------

USAGE = {"prompt_tokens": 3, "completion_tokens": TOKENS, "total_tokens": 7}


async def _answers(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
    """Well, and with usage."""
    if not fields.get("stream"):
        return await well_behaved(request, fields)
    response = await _begin(request, fields)
    usage = json.dumps({"model": fields["model"], "choices": [], "usage": USAGE}).encode()
    await response.write(b"data: " + usage + b"\n\ndata: [DONE]\n\n")
    return response


async def _begin(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
    response = await begin_stream(request)
    for word in ("One", " two"):
        await response.write(chat_event(fields, word))
    return response


async def _dies_in_the_middle(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
    response = await _begin(request, fields) if fields.get("stream") else web.Response()
    await asyncio.sleep(0.01)
    drop(request)
    return response


async def _hangs_in_the_middle(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
    if fields.get("stream"):
        await _begin(request, fields)
    return await never(request, fields)


async def _reports_and_says_done(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
    error = {"error": {"message": "EngineCore encountered an issue.", "code": 500}}
    if not fields.get("stream"):
        return web.json_response(error, status=500)
    response = await _begin(request, fields)
    await response.write(b"data: " + json.dumps(error).encode() + b"\n\ndata: [DONE]\n\n")
    return response


def _sending(body: bytes, **headers: str) -> Script:
    async def script(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={name.replace("_", "-"): value for name, value in headers.items()}
        )
        await response.prepare(request)
        with contextlib.suppress(ConnectionResetError):
            await response.write(body)
        return response

    return script


JSON, GZIP = {"Content_Type": "application/json"}, {"Content_Encoding": "gzip"}
WHOLE = json.dumps(chat_answer({"model": "tiny"})).encode()
OTHER = json.dumps(chat_answer({"model": "another"})).encode()


@pytest.mark.parametrize(
    ("script", "ends"),
    [
        pytest.param(_dies_in_the_middle, {"whole", "cut"}, id="killed in the middle of its answers"),
        pytest.param(saying(500, {"error": {"message": "no"}}), {"whole", "500 engine_error"}, id="broken"),
        pytest.param(
            _reports_and_says_done,
            {"whole", "cut", "500 engine_error"},
            id="broken, and says that it is done",
        ),
        pytest.param(never, {"whole"}, id="silent before its first byte"),
        pytest.param(_hangs_in_the_middle, {"whole", "cut"}, id="silent between two bytes"),
        pytest.param(_sending(b"\x00garbage\xff", **JSON), {"whole"}, id="babbling"),
        pytest.param(_sending(b"no gzip", **JSON, **GZIP), {"whole"}, id="compressing badly"),
        pytest.param(
            _sending(WHOLE, **JSON, Content_Length="5000"), {"whole"}, id="promising more than it sends"
        ),
        pytest.param(
            _sending(WHOLE, **JSON, Content_Length="50"), {"whole"}, id="sending more than it promises"
        ),
        pytest.param(saying(200, b"<html>It works!</html>"), {"whole"}, id="a web server"),
        pytest.param(saying(502, b"<html>Bad Gateway</html>"), {"whole"}, id="behind a bad proxy"),
        pytest.param(_sending(OTHER, **JSON), {"whole"}, id="another model behind its port"),
        pytest.param(saying(401, {"error": "Unauthorized"}), {"whole"}, id="another engine behind its port"),
    ],
)
def test_a_storm_is_survived_beside_a_replica_that_is(storm: Storm, script: Script, ends: set[str]) -> None:
    """Whole answers come from the one that is well; the other is left out after a few errors."""
    with storm.play.another_engine(script) as bad:
        wait_until(lambda: len(storm.play.web.targets()) == 2, "the bad replica to be routed to")
        counted = storm.rage()
        assert bad.heard, "it was asked"
        assert set(counted) <= ends
        assert counted["whole"] >= REQUESTS // 2
        assert len(bad.heard) < REQUESTS // 2, "it was left out"


def test_a_storm_is_survived_while_a_replica_is_gone(storm: Storm) -> None:
    with storm.play.another_engine(_answers) as gone:
        wait_until(lambda: len(storm.play.web.targets()) == 2, "the other replica to be routed to")
        storm.play.thread.run(gone.close())
        assert storm.rage() == {"whole": REQUESTS}
        storm.play.thread.run(gone.open())


def test_a_storm_waits_for_the_only_replica_to_come_back(storm: Storm) -> None:
    storm.play.thread.run(storm.play.engine.close())
    with ThreadPoolExecutor(1) as pool:
        raging = pool.submit(storm.rage)
        wait_until(lambda: Demand.objects.filter(waiting__gte=AT_ONCE).exists(), "all to wait")
        storm.play.thread.run(storm.play.engine.open())
        assert raging.result(30) == {"whole": REQUESTS}


# --- the sim engine's own faults ----------------------------------------------------------


@contextlib.contextmanager
def _sim(play: Play, *faults: str) -> Iterator[subprocess.Popen[bytes]]:
    """A second replica of "tiny", which is a sim engine with a fault of its own."""
    engine = Engine(_answers, port=free_port())
    replica = make_replica(play.model, engine, state="starting")
    cluster = django_settings.LLMGW_CLUSTER_KEYS[0]
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "nodes.agent.sim", "--model", "tiny", "--port", str(engine.port)),
            *("--ttft", "5ms", "--tpot", "5ms", *faults),
        ],
        cwd=ROOT,
        env={
            "PATH": os.environ["PATH"],
            "VLLM_API_KEY": cluster.replica_key(str(replica.pk), replica.generation),
        },
    )
    try:
        wait_until(lambda: _is_up(engine.port), "the sim engine to answer", timeout_s=20)
        change(replica, state="ready")
        wait_until(lambda: str(replica.pk) in play.web.targets(), "it to be routed to")
        yield process
    finally:
        process.kill()
        process.wait()
        change(replica, state="stopped")
        wait_until(lambda: str(replica.pk) not in play.web.targets(), "it to be forgotten")


def _is_up(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(("--crash-after", "3", "--crash-how", "kill"), id="it is killed"),
        pytest.param(("--crash-after", "3", "--crash-how", "core"), id="its core dies, and it says so"),
        *IS_SOAK
        * (
            pytest.param(("--stall-after", "3"), id="it stalls"),
            pytest.param(("--hang-after", "3"), id="its whole process hangs"),
        ),
    ],
)
def test_a_storm_is_survived_beside_a_real_engine_and(storm: Storm, fault: tuple[str, ...]) -> None:
    with _sim(storm.play, *fault):
        counted = storm.rage()
    assert set(counted) <= {"whole", "cut", "500 engine_error"}
    assert counted["whole"] >= REQUESTS // 2


# --- clients ------------------------------------------------------------------------------


def test_clients_that_read_nothing_cost_no_slot_and_little_memory(storm: Storm) -> None:
    async def without_end(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        while True:
            await response.write(chat_event(fields, "x" * 10_000))

    storm.play.engine.script = without_end
    body = json.dumps({"model": "tiny", "messages": MESSAGES, "stream": True}).encode()
    before_kib = _resident_kib()
    with contextlib.ExitStack() as stack:
        for _ in range(50):
            stack.enter_context(storm.play.web.connection()).sendall(storm.play.request(body))
        wait_until(lambda: len(storm.play.engine.heard) == 50, "all to be served")
        begun_s = time.monotonic()
        wait_until(
            lambda: all(heard.is_gone for heard in storm.play.engine.heard),
            "their streams to end",
            timeout_s=10,
        )
        assert time.monotonic() - begun_s < 5
        assert _resident_kib() - before_kib < 100 * 1024
    storm.play.engine.script = _answers
    assert storm.rage(2) == {"whole": 2}


def _resident_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
