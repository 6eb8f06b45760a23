"""Real programs under a real supervisor, which ends in every way that a process can end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.waiting import wait_until

ROOT = Path(__file__).parent.parent

# Writes its process id when it is ready to be stopped. A polite program ends on SIGTERM, a stubborn one does
# not, a slow one takes longer than honcho would wait, and a brief one ends by itself once there is a polite
# one beside it.
PROGRAM = """
import pathlib, signal, sys, time
kind, path = sys.argv[1:]
if kind == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if kind == "slow":
    signal.signal(signal.SIGTERM, lambda *_: (time.sleep(6), pathlib.Path(path).unlink(), sys.exit()))
part = pathlib.Path(path + ".part")
part.write_text(str(__import__("os").getpid()))
part.rename(path)
print(kind, "runs", flush=True)
while kind != "brief" or not pathlib.Path(path).with_name("polite").exists():
    time.sleep(0.05)
"""

SUPERVISE = """
import os, sys
from llmgw.supervisor import Supervisor
program, folder, stop_s, *kinds = sys.argv[1:]
supervisor = Supervisor(stop_s=int(stop_s), on_started=lambda: print("started", flush=True))
for kind in kinds:
    command = [sys.executable, "-c", program, kind, f"{folder}/{kind}"]
    supervisor.add(kind, command, env=os.environ, cwd=folder)
supervisor.loop()
print("asked" if supervisor.was_asked_to_stop else "not asked", flush=True)
"""


class Supervised:
    def __init__(self, folder: Path, *kinds: str, stop_s: int = 1) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISE, PROGRAM, str(folder), str(stop_s), *kinds],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.paths = [folder / kind for kind in kinds]
        self.everything: list[psutil.Process] = []

    def wait_until_all_run(self) -> None:
        wait_until(lambda: all(path.exists() for path in self.paths), "all programs to run")
        self.everything = psutil.Process(self.process.pid).children(recursive=True)
        assert {int(path.read_text()) for path in self.paths} <= {process.pid for process in self.everything}

    def is_anything_left(self) -> bool:
        return any(process.is_running() and process.status() != "zombie" for process in self.everything)

    def wait_until_nothing_is_left(self) -> None:
        wait_until(lambda: not self.is_anything_left(), "every process to be gone", timeout_s=15)

    def last_line(self) -> str:
        output, _ = self.process.communicate(timeout=15)
        return output.splitlines()[-1]


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Supervised]:
    one = Supervised(tmp_path, "polite", "stubborn")
    one.wait_until_all_run()
    yield one
    one.process.kill()
    one.process.communicate(timeout=15)


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name
)
def test_a_signal_stops_even_the_stubborn(supervised: Supervised, number: signal.Signals) -> None:
    supervised.process.send_signal(number)
    assert supervised.last_line() == "asked"
    assert not supervised.is_anything_left()


def test_what_takes_its_time_has_all_of_it(tmp_path: Path) -> None:
    one = Supervised(tmp_path, "polite", "slow", stop_s=30)
    one.wait_until_all_run()
    one.process.send_signal(signal.SIGTERM)
    assert one.last_line() == "asked"
    assert not (tmp_path / "slow").exists(), "it was killed before it had ended"


def test_a_ctrl_c_reaches_the_whole_terminal_and_is_answered_once(supervised: Supervised) -> None:
    os.killpg(supervised.process.pid, signal.SIGINT)
    assert supervised.last_line() == "asked"
    assert not supervised.is_anything_left()


def test_a_killed_supervisor_leaves_nothing_behind(supervised: Supervised) -> None:
    supervised.process.kill()
    supervised.wait_until_nothing_is_left()


def test_killed_keepers_leave_no_polite_program_behind(supervised: Supervised) -> None:
    polite = psutil.Process(int(supervised.paths[0].read_text()))
    keepers = psutil.Process(supervised.process.pid).children()
    assert polite.parent() in keepers
    for process in (psutil.Process(supervised.process.pid), *keepers):
        process.kill()
    wait_until(lambda: not polite.is_running(), "the program to end")
    psutil.Process(int(supervised.paths[1].read_text())).kill()


def test_one_that_stops_takes_the_others_along(tmp_path: Path) -> None:
    one = Supervised(tmp_path, "brief", "polite")
    assert one.last_line() == "not asked"
    assert not psutil.pid_exists(int((tmp_path / "polite").read_text()))


def test_a_signal_before_all_have_started_is_not_forgotten(tmp_path: Path) -> None:
    one = Supervised(tmp_path, "polite")
    assert one.process.stdout is not None
    assert one.process.stdout.readline() == "started\n"
    one.process.terminate()
    assert one.last_line() == "asked"
