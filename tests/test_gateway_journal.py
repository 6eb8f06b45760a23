"""The access log: a line a request, whole, without secrets, and never in anybody's way."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from llmgw.gateway.journal import Journal, line_of
from llmgw.gateway.passage import Passage
from tests.disks import filled, small_disk
from tests.test_gateway_accounts import passed
from tests.waiting import wait_until

pytestmark = pytest.mark.one_database

NOON_S = datetime(2026, 11, 30, 12, 0, tzinfo=UTC).timestamp()


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def written(path: Path, *passages: Passage) -> list[dict[str, Any]]:
    journal = Journal(str(path), lambda: NOON_S)
    journal.start()
    for passage in passages:
        journal.note(passage)
    journal.stop()
    return lines_of(path)


def test_a_line_tells_what_became_of_a_request() -> None:
    told = json.loads(line_of(passed(replica="r1", route="prefix", attempts=1), NOON_S, 103.5))
    assert told == {
        "at": "2026-11-30T11:59:58.000Z",
        "request": "req",
        "key": "k",
        "endpoint": "/v1/chat/completions",
        "asked_as": "",
        "model": "tiny",
        "replica": "r1",
        "route": "prefix",
        "status": 200,
        "code": "",
        "stream": True,
        "simulated": False,
        "attempts": 1,
        "prompt_tokens": 100,
        "cached_tokens": 60,
        "completion_tokens": 11,
        "hold_ms": 0.0,
        "queue_ms": 100.0,
        "ttft_ms": 500.0,
        "tpot_ms": 100.0,
        "duration_ms": 1500.0,
    }


def test_what_a_client_wrote_makes_neither_a_second_line_nor_a_long_one() -> None:
    line = line_of(passed(asked_as='a"\n\u2028\x1b[2J' + "x" * 5000), None, 103.5)
    assert line.count(b"\n") == 1
    assert len(line) < 1200
    assert b"\x1b" not in line
    assert json.loads(line)["at"] is None


def test_the_file_is_private_and_added_to(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    assert len(written(path, passed(), passed())) == 2
    assert len(written(path, passed())) == 3
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_was_moved_away_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    journal = Journal(str(path), lambda: NOON_S)
    journal.start()
    journal.note(passed(key="before"))
    wait_until(lambda: path.exists() and lines_of(path), "the first line")
    path.rename(tmp_path / "access.log.1")
    journal.note(passed(key="after"))
    journal.stop()
    assert [line["key"] for line in lines_of(path)] == ["after"]
    assert [line["key"] for line in lines_of(tmp_path / "access.log.1")] == ["before"]


def test_lines_of_two_processes_stay_whole(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    journals = [Journal(str(path), lambda: NOON_S) for _ in range(3)]
    for journal in journals:
        journal.start()
    for number in range(300):
        for journal in journals:
            journal.note(passed(asked_as="x" * (number % 200)))
    for journal in journals:
        journal.stop()
    assert len(lines_of(path)) == 900


@pytest.fixture
def deaf() -> Any:
    """A pipe that takes a little and is read by nobody, until somebody does."""
    reader, writer = os.pipe()
    yield reader, f"/proc/self/fd/{writer}"
    os.close(writer)
    os.close(reader)


def test_nobody_waits_for_who_does_not_read_and_what_is_dropped_is_told(deaf: Any) -> None:
    reader, path = deaf
    journal = Journal(path, lambda: NOON_S, lines_waiting=50)
    journal.start()
    for _ in range(2000):
        journal.note(passed())
    assert journal.dropped > 1000
    heard = bytearray()

    def listen() -> None:
        while data := os.read(reader, 65536):
            heard.extend(data)
            if b"enough" in data:
                return

    listener = threading.Thread(target=listen)
    listener.start()
    wait_until(lambda: not journal._waiting, "the lines that waited to be written")
    journal.note(passed(asked_as="enough"))
    journal.stop()
    listener.join(10)
    lines = [json.loads(line) for line in heard.splitlines()]
    told = sum(line["dropped"] for line in lines if "dropped" in line)
    assert told == journal.dropped
    assert len([line for line in lines if "dropped" not in line]) + told == 2001


def test_a_place_that_cannot_be_written_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "later"
    journal = Journal(str(folder / "access.log"), lambda: NOON_S)
    journal.start()
    for _ in range(3):
        journal.note(passed())
    wait_until(lambda: journal.dropped == 3, "the lines to be dropped")
    folder.mkdir()
    journal.note(passed(key="late"))
    journal.stop()
    assert caplog.text.count("The access log cannot be written") == 1
    dropped, line = lines_of(folder / "access.log")
    assert (dropped, line["key"]) == ({"dropped": 3}, "late")


def test_a_full_disk_costs_lines_and_tears_none_but_its_last(tmp_path: Path) -> None:
    path = tmp_path / "disk" / "access.log"
    with small_disk(path.parent, 1024 * 1024):
        journal = Journal(str(path), lambda: NOON_S)
        journal.start()
        journal.note(passed())
        wait_until(path.exists, "the first line")
        with filled(path.parent):
            for number in range(100):
                journal.note(passed(asked_as="x" * number))
            wait_until(
                lambda: path.read_bytes().count(b"\n") + journal.dropped == 101, "all to be written or not"
            )
        journal.note(passed(key="late"))
        journal.stop()
        [*before, torn, dropped, late] = path.read_bytes().splitlines()
    with pytest.raises(json.JSONDecodeError):
        json.loads(torn)
    assert all(json.loads(line)["status"] == 200 for line in before)
    assert json.loads(dropped) == {"dropped": journal.dropped}
    assert json.loads(late)["key"] == "late"
    assert len(before) + journal.dropped == 101


def test_stdout_is_a_place_too() -> None:
    program = (
        "from llmgw.gateway.journal import Journal; from llmgw.gateway.passage import Passage\n"
        "journal = Journal('-', lambda: 0.0); journal.start()\n"
        "journal.note(Passage('r', 0.0)); journal.stop()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["request"] == "r"
