"""Passes driven through a real worker and a real beat, over each broker, on the database under test."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import psutil
import pytest
from celery import Celery
from django.db import connection
from kombu import Connection, Queue

from llmgw.celery import FileTransport, SteadyScheduler
from nodes import jobs
from nodes.models import Job, Lease
from tests.cast import a_model
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
    assert psutil.Process(worker.pid).children() == [], "what is beside it could be killed, or left, alone"
    worker.terminate()
    assert worker.wait(10) == 0


@pytest.mark.parametrize("worker", ["files"], indirect=True)
@pytest.mark.django_db(transaction=True)
def test_a_worker_takes_jobs_from_a_queue_of_their_own(
    worker: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    job = jobs.ask(Job.Kind.ENGINE_CHECK, a_model(), by="alice", door="command")
    elsewhere = Celery(broker="filesystem://localhost/")
    elsewhere.conf.update(
        broker_transport="llmgw.celery:FileTransport",
        broker_transport_options={"folder": str(tmp_path / "broker")},
    )
    with elsewhere.connection() as broker:
        elsewhere.send_task("nodes.tasks.run_job", [str(job.pk)], queue="jobs", connection=broker)
    wait_until(
        lambda: Job.objects.filter(pk=job.pk, state="failed").first(), "the job to be over", timeout_s=40
    )
    job.refresh_from_db()
    assert job.problem.startswith('Model "tiny" has no replica that is ready')
    worker.terminate()
    assert worker.wait(10) == 0


# --- the broker of files ------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "broker"


@pytest.fixture
def broker(folder: Path) -> Iterator[Connection]:
    with Connection(transport=FileTransport, transport_options={"folder": str(folder)}) as broker:
        Queue("ticks", channel=broker.default_channel).declare()
        yield broker


def publish(broker: Connection, body: object) -> None:
    broker.Producer().publish(body, routing_key="ticks", serializer="json")


def received(broker: Connection) -> list[object]:
    """What a consumer takes out of the queue until it is empty."""
    queue = broker.default_channel
    found = []
    while (message := queue.basic_get("ticks", no_ack=True)) is not None:
        found.append(message.decode())
    return found


def test_a_message_in_a_file_is_never_half_there(broker: Connection, folder: Path) -> None:
    halves: list[str] = []
    seen: set[Path] = set()
    is_over = threading.Event()

    def read_along() -> None:
        while not is_over.is_set():
            for path in set(folder.glob("*.msg")) - seen:
                try:
                    json.loads(path.read_text())
                except ValueError:
                    halves.append(path.name)
                seen.add(path)

    reader = threading.Thread(target=read_along)
    reader.start()
    try:
        for _ in range(20):
            publish(broker, "x" * 1_000_000)
    finally:
        is_over.set()
        reader.join()
    assert seen
    assert halves == []
    assert len(list(folder.glob("*.msg"))) == 20


def test_messages_arrive_once_and_in_their_order(broker: Connection, folder: Path) -> None:
    for number in range(20):
        publish(broker, number)
        time.sleep(0.002)  # the names have milliseconds
    assert received(broker) == list(range(20))
    assert list(folder.iterdir()) == []


def test_a_folder_that_somebody_removed_is_made_again(broker: Connection, folder: Path) -> None:
    shutil.rmtree(folder)
    assert received(broker) == []
    shutil.rmtree(folder)
    publish(broker, "there")
    assert received(broker) == ["there"]


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="an empty file"),
        pytest.param(b'{"body": "', id="half a message"),
        pytest.param(b"\xff\xfe", id="bytes that are no text"),
        pytest.param(b"[]", id="a list"),
        pytest.param(b'{"body": "e30="}', id="a body without properties"),
        pytest.param(b'{"body": 1, "properties": {"body_encoding": "base64"}}', id="a number for a body"),
        pytest.param(b"[" * 100_000, id="brackets without end"),
    ],
)
def test_a_file_that_is_no_message_is_thrown_away(broker: Connection, folder: Path, content: bytes) -> None:
    folder.joinpath("000_stranger.ticks.msg").write_bytes(content)
    publish(broker, "sound")
    assert received(broker) == ["sound"]
    assert list(folder.iterdir()) == []


def test_other_files_and_folders_are_left_alone(broker: Connection, folder: Path) -> None:
    folder.joinpath("000_folder.ticks.msg").mkdir()
    folder.joinpath("notes.txt").write_text("mine")
    publish(broker, "sound")
    assert received(broker) == ["sound"]
    assert sorted(path.name for path in folder.iterdir()) == ["000_folder.ticks.msg", "notes.txt"]


def test_a_message_for_which_there_is_no_room_leaves_nothing_behind(broker: Connection, folder: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            publish(broker, "x" * 10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(folder.iterdir()) == []
    publish(broker, "small")
    assert received(broker) == ["small"]


# --- the beat -----------------------------------------------------------------------------


def test_a_clock_that_is_set_back_does_not_silence_the_beat() -> None:
    app = Celery(broker="memory://", set_as_current=False)
    app.conf.beat_schedule = {"tick": {"task": "tick", "schedule": 0.02}}
    scheduler = SteadyScheduler(app=app)
    for count in (1, 2):
        (entry,) = scheduler.schedule.values()
        entry.last_run_at += timedelta(hours=2)  # said before the clock was set back
        wait_until(lambda: scheduler.tick() == 0, f"tick {count}")
        assert app.connection().default_channel.queue_declare("celery").message_count == count
    assert 0 < scheduler.tick() <= 0.02
