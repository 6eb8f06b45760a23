"""Between the signal that ends a web process and its server's own shutdown."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.waiting import wait_until

pytestmark = pytest.mark.one_database

ROOT = Path(__file__).parent.parent

# A process with one worker, each as uvicorn has them: a handler of the server's own, and a loop. What the
# server is told is printed, after what the draining says then.
PROGRAM = """
import asyncio, multiprocessing, os, signal, sys
from llmgw.draining import Draining

async def serve():
    over, draining = asyncio.Event(), Draining()
    loop = asyncio.get_running_loop()
    def servers_own(number, frame):
        print("server", number, flush=True)
        loop.call_soon_threadsafe(over.set)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, servers_own)
    draining.listen(float(sys.argv[1]))
    print("listens", os.getpid(), flush=True)
    while not draining.has_begun:
        await asyncio.sleep(0.01)
    print("draining", flush=True)
    await over.wait()

def work(linger):
    sys.argv[1:] = [linger]
    asyncio.run(serve())

if __name__ == "__main__":
    if "worker" in sys.argv:
        child = multiprocessing.get_context("spawn").Process(target=work, args=(sys.argv[1],))
        child.start()
        child.join()
    else:
        work(sys.argv[1])
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


@contextlib.contextmanager
def started(program: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, str(program), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield process
        process.kill()


def test_a_server_is_told_after_a_while_however_often_it_is_signalled(program: Path) -> None:
    with started(program, "0.3") as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("listens")
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "draining\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == f"server {int(signal.SIGTERM)}\n"
        assert process.wait(10) == 0


def test_a_second_ctrl_c_is_heard_at_once(program: Path) -> None:
    with started(program, "600") as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("listens")
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "draining\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == f"server {int(signal.SIGINT)}\n"
        assert process.wait(10) == 0


def test_a_worker_does_not_outlive_its_parent(program: Path) -> None:
    with started(program, "0.01", "worker") as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline().split()[1])
        assert worker != process.pid
        process.kill()
        wait_until(lambda: not psutil.pid_exists(worker), "the worker to be gone")
        assert f"server {int(signal.SIGTERM)}" in process.stdout.read()
