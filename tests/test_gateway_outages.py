"""What a gateway stands on goes away and comes back, under load: PostgreSQL, Redis, the wall clock.

One gateway on servers of its own serves the whole file; each test leaves it as it was.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime

import aiohttp
import psutil
import psycopg
import pytest

from catalog.keys import KeyText
from tests.gateway_process import ROOT, GatewayProcess, Load, chat, keep_chatting, running
from tests.services import Service, start_postgresql, start_redis
from tests.stage import Engine, LoopThread, playing_engine, well_behaved
from tests.test_agent_faults import WallClock
from tests.test_gateway_processes import Slow
from tests.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.one_database, pytest.mark.timeout(180)]

_PREPARE = """
import json, sys
import django
django.setup()
from django.core.management import call_command
call_command("migrate", verbosity=0)
from tests.stage import make_key, make_model, make_replica
class engine:
    port = int(sys.argv[1])
make_replica(make_model("tiny"), engine)
print(json.dumps([make_key(name, **columns)[1] for name, columns in
    (("ada", {}), ("bob", {"requests_per_minute": 1_000_000}))]))
"""


class PostgreSQL:
    """A server that can be stopped and started, with what it keeps."""

    def __init__(self) -> None:
        self.url, self.service = start_postgresql()
        self._pid = int((self.service.folder / "data" / "postmaster.pid").read_text().split()[0])
        self._process: subprocess.Popen[bytes] | None = None
        own = psutil.Process(self._pid)
        self._command, self._user = own.cmdline(), own.uids().real
        self._group = own.gids().real

    def stop(self) -> None:
        """As an administrator does: it does not wait for those that are connected."""
        os.kill(self._pid, signal.SIGINT)
        if self._process is not None:
            self._process.wait(20)
            self._process = None
        else:
            wait_until(lambda: not (self.service.folder / "data" / "postmaster.pid").exists(), "it to stop")

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._command,
            cwd="/",
            user=self._user,
            group=self._group,
            extra_groups=[],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._pid = self._process.pid
        self.service.wait_for(str(self.service.folder / ".s.PGSQL.5432"))

    def end(self) -> None:
        if self._process is not None:
            self.stop()
        self.service.stop()

    def ask(self, query: str) -> tuple[object, ...]:
        with psycopg.connect(self.url) as connection:
            return connection.execute(query).fetchone() or ()  # type: ignore[call-overload, no-any-return]


@dataclass
class World:
    gateway: GatewayProcess
    engine: Engine
    postgresql: PostgreSQL
    redis: Service
    clock: WallClock
    ada: str
    bob: str

    def readiness(self) -> tuple[int, str]:
        return self.gateway.get("/readyz")

    def date(self) -> datetime:
        """By the gateway's wall clock."""
        with urllib.request.urlopen(f"{self.gateway.url}/healthz", timeout=10) as answer:
            return parsedate_to_datetime(answer.headers["Date"])


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("outages")
    clock = WallClock(folder)
    with contextlib.ExitStack() as stack:
        postgresql = PostgreSQL()
        stack.callback(postgresql.end)
        redis_url, redis = start_redis()
        stack.callback(redis.stop)
        thread = stack.enter_context(LoopThread())
        engine = stack.enter_context(playing_engine(thread, well_behaved))
        environment = {
            "DATABASE_URL": postgresql.url,
            "DJANGO_SETTINGS_MODULE": "llmgw.settings",
            "REDIS_URL": redis_url,
        }
        prepared = subprocess.run(
            [sys.executable, "-c", _PREPARE, str(engine.port)],
            cwd=ROOT,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
        )
        assert prepared.returncode == 0, prepared.stderr
        ada, bob = json.loads(prepared.stdout)
        gateway = stack.enter_context(running(folder / "log", **environment, **clock.environment))
        yield World(gateway, engine, postgresql, redis, clock, ada, bob)


@contextlib.contextmanager
def load_with(world: World, key: str) -> Iterator[Load]:
    load, over = Load(), threading.Event()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        clients = pool.submit(
            asyncio.run, keep_chatting(world.gateway.url, key, load, over.is_set, clients=4)
        )
        try:
            go_on(load)
            yield load
        finally:
            over.set()
            clients.result(30)


def go_on(load: Load) -> None:
    """Until some more have been answered, or one was not."""
    before = load.answered
    wait_until(lambda: load.answered >= before + 15 or load.failed, "requests to be answered")
    assert load.failed == []


def wait_until_the_clock_is(world: World, away: timedelta) -> None:
    wait_until(
        lambda: abs(world.date() - datetime.now(UTC) - away) < timedelta(minutes=1), "the clock to jump"
    )


def test_postgresql_restarts_and_the_wall_clock_jumps(world: World) -> None:
    stranger = KeyText.from_bytes(b"nobody", b"a secret that is not known").reveal()
    with load_with(world, world.ada) as load:
        world.postgresql.stop()
        wait_until(lambda: "the database is away" in world.readiness()[1], "it to be noticed", timeout_s=20)
        assert world.readiness()[0] == 200
        go_on(load)
        status, body = world.gateway.get("/v1/models", stranger)
        assert (status, "database_away" in body) == (503, True)
        for offset, away in (("+3d", timedelta(days=3)), ("-2h", timedelta(hours=-2))):
            world.clock.jump(offset)
            wait_until_the_clock_is(world, away)
            go_on(load)
        world.postgresql.start()
        wait_until(lambda: "away" not in world.readiness()[1], "it to be back")
        wait_until(lambda: world.gateway.get("/v1/models", stranger)[0] == 401, "it to be asked")
        go_on(load)
        world.clock.jump("+0")
    assert load.answered >= 50
    used = "SELECT coalesce(sum(requests), 0), max(begins_at) FROM nodes_usage WHERE span = 'hour'"
    wait_until(lambda: world.postgresql.ask(used)[0] >= load.answered, "all of it to be written")  # type: ignore[operator]
    answered, latest = world.postgresql.ask(f"{used} AND key_name = 'ada'")
    assert answered == load.answered
    assert isinstance(latest, datetime)
    assert abs(latest - datetime.now(UTC)) < timedelta(hours=1, minutes=5)


def test_redis_is_lost(world: World) -> None:
    with load_with(world, world.bob) as load:
        assert "away" not in world.readiness()[1]
        world.redis.stop()
        wait_until(lambda: "Redis is away" in world.readiness()[1], "it to be noticed")
        assert world.readiness()[0] == 200
        go_on(load)


def test_no_connection_to_the_database_is_held_for_a_request(world: World) -> None:
    count = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'"
    before, slow, load = world.postgresql.ask(count), Slow(), Load()
    world.engine.script = slow

    async def streams() -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await asyncio.gather(*(chat(session, world.gateway.url, world.ada, load) for _ in range(40)))

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        done = pool.submit(asyncio.run, streams())
        try:
            wait_until(lambda: slow.open == 40, "the streams to be open", tell=lambda: str(load.failed))
            assert world.postgresql.ask(count) == before
        finally:
            slow.may_end.set()
            done.result(30)
            world.engine.script = well_behaved
    assert (load.answered, load.failed) == (40, [])
