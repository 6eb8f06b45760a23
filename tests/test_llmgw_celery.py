"""Passes driven through a real worker and a real beat, over each broker, on the database under test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import psutil
import pytest
from django.db import connection
from kombu import Connection, Queue

from llmgw.celery import WholeFileTransport
from nodes.models import Lease
from tests.waiting import wait_until

ROOT = Path(__file__).parent.parent


def _database_url() -> str:
    """Of the test database: a worker is a process of its own, and finds only what was committed."""
    name = connection.settings_dict["NAME"]
    if connection.vendor == "sqlite":
        return f"sqlite:///{name}"
    return f"{os.environ['DATABASE_URL'].rpartition('/')[0]}/{name}"


@pytest.fixture(params=["files", "redis"])
def worker(
    request: pytest.FixtureRequest, transactional_db: None, tmp_path: Path
) -> Iterator[subprocess.Popen[bytes]]:
    environment = {
        **os.environ,
        "LLMGW_VAR": str(tmp_path),
        "DATABASE_URL": _database_url(),
        "LLMGW_TICK_S": "0.3",
        "REDIS_URL": request.getfixturevalue("redis_url") if request.param == "redis" else "",
    }
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "celery", "--app", "llmgw", "--quiet", "worker", "--beat"),
            *("--pool", "threads", "--concurrency", "2", "--loglevel", "warning"),
        ],
        cwd=ROOT,
        env=environment,
    )
    yield process
    process.kill()
    process.wait(10)


class Passes:
    """Each pass takes the lease, and so moves the moment at which it expires."""

    def __init__(self) -> None:
        self._moments: set[datetime | None] = set()

    def look(self) -> int:
        self._moments.update(Lease.objects.exclude(expires_at=None).values_list("expires_at", flat=True))
        return len(self._moments)


@pytest.mark.django_db(transaction=True)
def test_beat_ticks_and_a_worker_runs_the_passes(worker: subprocess.Popen[bytes]) -> None:
    passes = Passes()
    wait_until(lambda: passes.look() >= 4, "more than one pass", timeout_s=30)
    worker.terminate()
    assert worker.wait(10) == 0


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("worker", ["files"], indirect=True)
def test_a_killed_worker_takes_its_beat_along(worker: subprocess.Popen[bytes]) -> None:
    wait_until(lambda: Passes().look() >= 1, "a pass", timeout_s=30)
    (beat,) = psutil.Process(worker.pid).children()
    worker.send_signal(signal.SIGKILL)
    worker.wait(10)
    wait_until(lambda: not beat.is_running(), "beat to end")


def test_a_message_in_a_file_is_never_half_there(tmp_path: Path) -> None:
    """What a worker would do with half a message is die."""
    options = {name: str(tmp_path) for name in ("data_folder_in", "data_folder_out", "control_folder")}
    halves: list[str] = []
    seen: set[Path] = set()
    is_over = threading.Event()

    def read_along() -> None:
        while not is_over.is_set():
            for path in set(tmp_path.glob("*.msg")) - seen:
                try:
                    json.loads(path.read_text())
                except ValueError:
                    halves.append(path.name)
                seen.add(path)

    reader = threading.Thread(target=read_along)
    reader.start()
    try:
        with Connection(transport=WholeFileTransport, transport_options=options) as broker:
            queue = Queue("ticks", channel=broker.default_channel)
            queue.declare()
            for _ in range(20):
                broker.Producer().publish("x" * 1_000_000, routing_key="ticks", serializer="json")
    finally:
        is_over.set()
        reader.join()
    assert seen
    assert halves == []
    assert len(list(tmp_path.glob("*.msg"))) == 20
