"""Gateways as processes: several that share a port, replaced under load, stopped, killed.

One set of processes serves the whole file; each test leaves it as it was.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import os
import signal
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from aiohttp import web
from django.core.management import call_command
from django.db.models import Sum
from django.db.models.functions import Now
from pytest_django import DjangoDbBlocker

from catalog.models import Key
from nodes.models import Demand, Gateway, Usage
from tests.gateway_process import GatewayProcess, Load, chat, figure, keep_chatting, running
from tests.stage import (
    Engine,
    LoopThread,
    begin_stream,
    chat_event,
    make_key,
    make_model,
    make_replica,
    playing_engine,
    well_behaved,
)
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.lasting_database,
    pytest.mark.on_postgresql,
    pytest.mark.timeout(180),
]


@dataclass
class Stage:
    gateway: GatewayProcess
    engine: Engine
    key: str
    scrapes: str
    access_log: Path


@pytest.fixture(scope="module")
def stage(
    django_db_setup: None, django_db_blocker: DjangoDbBlocker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("gateway")
    log, access_log = folder / "log", folder / "access.log"
    with django_db_blocker.unblock(), LoopThread() as thread, playing_engine(thread, well_behaved) as engine:
        try:
            _, key = make_key()
            _, scrapes = make_key("prometheus", scope=Key.Scope.METRICS)
            make_replica(make_model("tiny"), engine)
            with running(log, "--workers", "2", LLMGW_ACCESS_LOG=str(access_log)) as gateway:
                wait_until(lambda: len(alive()) == 2, "two gateways", tell=gateway.story)
                yield Stage(gateway, engine, key, scrapes, access_log)
        finally:
            call_command("flush", verbosity=0, interactive=False)


def alive() -> set[Any]:
    """Those that were heard from and have not said that they stop."""
    lately = Now() - timedelta(seconds=5)
    return set(Gateway.objects.filter(stopped_at=None, heartbeat_at__gte=lately).values_list("pk", flat=True))


def requests_written(**of: str) -> int:
    return Usage.objects.filter(**{"span": "ever"} | of).aggregate(n=Sum("requests"))["n"] or 0


@contextlib.contextmanager
def under_load(stage: Stage, key: str = "") -> Iterator[Load]:
    load, over = Load(), threading.Event()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        clients = pool.submit(
            asyncio.run, keep_chatting(stage.gateway.url, key or stage.key, load, over.is_set, clients=4)
        )
        try:
            wait_until(lambda: load.answered + len(load.failed) >= 20, "the first requests")
            yield load
            before = load.answered
            wait_until(lambda: load.answered > before + 20 or load.failed, "requests after all of it")
        finally:
            over.set()
            clients.result(30)


class Slow:
    """Streams that go on until they are let go."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.open = 0

    async def __call__(self, request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
        response = await begin_stream(request)
        self.open += 1
        try:
            while not self.may_end.is_set():
                await response.write(chat_event(fields, "word "))
                await asyncio.sleep(0.02)
            await response.write(b"data: [DONE]\n\n")
        finally:
            self.open -= 1
        return response


@contextlib.contextmanager
def streaming(stage: Stage) -> Iterator[tuple[Slow, Load]]:
    """Some streams of each worker are open, each on a connection of its own, until they are let go."""
    slow, load = Slow(), Load()
    stage.engine.script = slow

    async def one() -> None:
        async with aiohttp.ClientSession() as session:
            await chat(session, stage.gateway.url, stage.key, load)

    with concurrent.futures.ThreadPoolExecutor(40) as pool:
        done: list[concurrent.futures.Future[None]] = []
        try:
            # One by one: of many at once, whichever worker is awake may take all.
            while min(len(held_by(stage, pid)) for pid in stage.gateway.workers()) < 3:
                assert len(done) < 40, "one worker takes every connection"
                done.append(pool.submit(asyncio.run, one()))
                wait_until(lambda: slow.open == len(done), "a stream", tell=lambda: str(load.failed))
            yield slow, load
        finally:
            slow.may_end.set()
            for each in done:
                each.result(40)
            stage.engine.script = well_behaved


def held_by(stage: Stage, pid: int) -> list[int]:
    """The ports of the clients that this process talks with."""
    return [
        each.raddr.port
        for each in psutil.Process(pid).net_connections("tcp")
        if each.status == psutil.CONN_ESTABLISHED and each.laddr.port == stage.gateway.port
    ]


def of_each_worker(stage: Stage, path: str, key: str) -> list[str]:
    """Answers to requests on connections of their own, until both workers have very likely answered."""
    return [stage.gateway.get(path, key)[1] for _ in range(12)]


def test_several_share_a_port_and_any_tells_of_all(stage: Stage) -> None:
    before = requests_written()
    with under_load(stage) as load:
        pass
    assert load.failed == []
    wait_until(lambda: requests_written() == before + load.answered, "all of them to be written")
    said = {figure(text, "llmgw_requests_total") for text in of_each_worker(stage, "/metrics", stage.scrapes)}
    assert said == {before + load.answered}
    assert figure(stage.gateway.get("/metrics", stage.scrapes)[1], "llmgw_gateways") == 2


@pytest.mark.parametrize(
    ("path", "key", "status", "says"),
    [
        ("/healthz", "", 200, "ok"),
        ("/readyz", "", 200, "Serving from a table "),
        ("/metrics", "", 401, "needs an API key"),
        ("/metrics", "key", 403, "does not read /metrics: use one whose scope is metrics"),
        ("/v1/models", "scrapes", 403, "reads /metrics alone: use one whose scope is inference"),
        ("/v1/models", "key", 200, "tiny"),
        ("/admin/", "", 404, "This address serves /v1/ alone; the admin and /api/ are elsewhere."),
        ("/api/models", "key", 404, "This address serves /v1/ alone"),
    ],
    ids=lambda value: str(value) if str(value).startswith("/") else "",
)
def test_what_the_gateway_alone_answers(stage: Stage, path: str, key: str, status: int, says: str) -> None:
    got, body = stage.gateway.get(path, getattr(stage, key) if key else "")
    assert (got, says in body) == (status, True), body


def test_a_request_is_counted_and_told_of(stage: Stage) -> None:
    key, text = make_key("bob")
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "a secret question"}]}
    request = urllib.request.Request(
        f"{stage.gateway.url}/v1/chat/completions",
        json.dumps(asked).encode(),
        {"Authorization": f"Bearer {text}", "X-Request-Id": "mine-1", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert answer.status == 200
    row = wait_until(
        lambda: Usage.objects.filter(span="minute", key=key.id, model="tiny").first(), "it to be counted"
    )
    assert (row.requests, row.prompt_tokens, row.completion_tokens) == (1, 3, 4)
    assert set(row.times) == {"queue", "duration"}
    told = [json.loads(line) for line in stage.access_log.read_text().splitlines() if "mine-1" in line]
    [line] = told
    assert (line["key"], line["model"], line["status"], line["completion_tokens"]) == (key.id, "tiny", 200, 4)
    assert line["replica"]
    assert line["route"]
    for secret in (text, "secret question", "Hello from here"):
        assert secret not in stage.access_log.read_text() + stage.gateway.story()


def test_all_are_replaced_under_load_and_no_request_fails(stage: Stage) -> None:
    old, rows = stage.gateway.workers(), alive()
    with under_load(stage) as load:
        stage.gateway.tell(signal.SIGHUP)
        wait_until(
            lambda: len(stage.gateway.workers()) == 2 and not stage.gateway.workers() & old,
            "other processes",
            tell=stage.gateway.story,
            timeout_s=90,
        )
    assert load.failed == []
    assert load.answered >= 50
    wait_until(lambda: len(alive()) == 2 and not alive() & rows, "those that left to have said so")
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in old), "the old ones to be gone")


def test_one_that_is_told_to_stop_finishes_its_streams_and_takes_no_new_ones(stage: Stage) -> None:
    """The parent starts another in its place."""
    [first, _] = sorted(stage.gateway.workers())
    with streaming(stage) as (slow, load):
        begun = slow.open
        os.kill(first, signal.SIGTERM)
        wait_until(lambda: requests_refused_by(first), "the one that stops to accept nothing")
        assert psutil.pid_exists(first)
        assert load.failed == []
        slow.may_end.set()
    assert (load.answered, load.failed) == (begun, [])
    wait_until(lambda: not psutil.pid_exists(first) or is_zombie(first), "it to end")
    wait_until(lambda: first not in stage.gateway.workers() and len(alive()) == 2, "another", timeout_s=30)


def requests_refused_by(pid: int) -> bool:
    """Whether the process has no listening socket any more."""
    return not any(each.status == psutil.CONN_LISTEN for each in psutil.Process(pid).net_connections("tcp"))


def is_zombie(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def test_one_that_is_killed_takes_its_own_streams_along_and_frees_their_slots(stage: Stage) -> None:
    [first, second], rows = sorted(stage.gateway.workers()), alive()
    with streaming(stage) as (slow, load):
        begun, lost = slow.open, len(held_by(stage, first))
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: len(load.failed) == lost, "its streams to be cut")
        wait_until(lambda: slow.open == begun - lost, "their slots to be freed", timeout_s=5)
        slow.may_end.set()
    assert (load.answered, len(load.failed)) == (begun - lost, lost)
    assert not any("[DONE]" in told for told in load.failed)
    assert psutil.pid_exists(second)
    wait_until(lambda: len(stage.gateway.workers()) == 2, "another process", timeout_s=30)
    wait_until(lambda: len(alive() & rows) == 1 and len(alive() - rows) == 1, "it to serve", timeout_s=30)
    with under_load(stage) as load:
        pass
    assert load.failed == []


def test_one_that_is_killed_while_it_is_asked_for_a_sign_of_life_is_replaced_at_once(stage: Stage) -> None:
    [first, second], rows = sorted(stage.gateway.workers()), alive()
    parent = Path(f"/proc/{stage.gateway.process.pid}/wchan")
    os.kill(first, signal.SIGSTOP)
    wait_until(lambda: "poll" in parent.read_text(), "the parent to wait for its answer")
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: stage.gateway.workers() - {first, second}, "another process")
    wait_until(lambda: len(alive() & rows) == 1 and len(alive() - rows) == 1, "it to serve", timeout_s=30)


def test_when_all_are_told_to_stop_everything_is_written(stage: Stage) -> None:
    """Runs last: nothing serves afterwards."""
    wait_until(lambda: len(alive()) == 2, "two gateways")
    rows, (key, text) = alive(), make_key("the last")
    with under_load(stage, text) as load:
        pass
    stage.gateway.tell(signal.SIGTERM)
    stage.gateway.process.wait(30)
    assert load.failed == []
    assert requests_written(span="hour", key=key.id) == load.answered
    assert not Gateway.objects.filter(pk__in=rows, stopped_at=None).exists()
    assert not Demand.objects.filter(gateway__in=rows, in_flight__gt=0).exists()
    assert "Traceback" not in stage.gateway.story()
