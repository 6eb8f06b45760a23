"""`make up`, from nothing to an answered chat and back to nothing, with the real programs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import psutil
import pytest
from django.core.management import CommandError, call_command

from tests.services import free_port
from tests.waiting import wait_until

ROOT = Path(__file__).parent.parent
START_S = 90
STOP_S = 30

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


class Up:
    """One `manage.py up`, and every process that came of it."""

    def __init__(self, var: Path, port: int) -> None:
        self.environment = {"PATH": os.environ["PATH"], "HOME": str(var), "LLMGW_VAR": str(var)}
        self.process = subprocess.Popen(
            [sys.executable, "manage.py", "up", "--port", str(port)],
            cwd=ROOT,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.output = ""
        self.everything: list[psutil.Process] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.output += line

    def wait_until_it_says(self, text: str) -> None:
        def has_said() -> bool:
            assert self.process.poll() is None, self.output
            return text in self.output

        wait_until(has_said, repr(text), timeout_s=START_S)
        self.everything = [
            psutil.Process(self.process.pid),
            *psutil.Process(self.process.pid).children(recursive=True),
        ]

    def manage(self, *words: str) -> None:
        subprocess.run([sys.executable, "manage.py", *words], cwd=ROOT, env=self.environment, check=True)

    def stop(self, number: signal.Signals) -> int:
        """As a terminal does it: the whole foreground group is told."""
        os.killpg(self.process.pid, number)
        status = self.process.wait(STOP_S)
        self._reader.join(STOP_S)
        return status

    def left(self) -> list[str]:
        commands = []
        for process in filter(psutil.Process.is_running, self.everything):
            with contextlib.suppress(psutil.NoSuchProcess):  # raised as well for one that nobody has reaped
                commands.append(" ".join(process.cmdline()))
        return commands


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[int], Up]]:
    var = tmp_path / "var"
    started: list[Up] = []

    def start_one(port: int) -> Up:
        started.append(Up(var, port))
        return started[-1]

    yield start_one
    for one in started:
        if one.process.poll() is None:
            one.stop(signal.SIGTERM)
        for process in one.everything:
            if process.is_running():
                process.kill()


def chat(access: dict[str, str]) -> Any:
    connection = HTTPConnection(access["url"].removeprefix("http://"), timeout=30)
    body = {"model": access["model"], "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    headers = {"Authorization": f"Bearer {access['api_key']}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    answer = json.load(connection.getresponse())
    connection.close()
    return answer


def test_from_nothing_to_a_chat_and_back_to_nothing(start: Callable[[int], Up], tmp_path: Path) -> None:
    port, kept = free_port(), tmp_path / "var" / "up.json"
    first = start(port)
    first.wait_until_it_says("Ctrl-C stops it all.")
    assert "answered its first chat" in first.output

    access = json.loads(kept.read_text())
    assert sorted(access) == ["api_key", "model", "password", "url", "user"]
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert all(value in first.output for value in access.values())
    assert chat(access)["choices"][0]["message"]["content"]
    assert any("nodes.agent.sim" in process for process in first.left()), first.left()

    twin = start(port + 1)
    assert twin.process.wait(START_S) == 0
    assert access["url"] in twin.output
    assert access["api_key"] not in twin.output

    assert first.stop(signal.SIGINT) == 0, first.output
    assert "Traceback" not in first.output
    assert first.left() == []

    kept.write_text("half of {")
    again = start(port)
    again.wait_until_it_says("Ctrl-C stops it all.")
    anew = json.loads(kept.read_text())
    assert all(anew[secret] in again.output for secret in ("password", "api_key")), "it is made anew"
    assert anew["api_key"] != access["api_key"]
    assert chat(anew)["choices"], "by the model that was there"
    again.manage("model_remove", "demo")
    again.process.kill()
    wait_until(lambda: not again.left(), "everything to be gone", timeout_s=STOP_S)

    bare = start(port)
    bare.wait_until_it_says("Ctrl-C stops it all.")
    assert 'llmgw runs. There is no model "demo".' in bare.output
    assert "/v1/models" in bare.output
    assert "/v1/chat" not in bare.output
    assert json.loads(kept.read_text()) == anew
    assert str(kept) in bare.output
    assert not any(anew[secret] in bare.output for secret in ("password", "api_key"))
    (key,) = re.findall(r'Bearer (.*)"', bare.output)
    assert subprocess.check_output(["sh", "-c", f'printf %s "{key}"'], text=True) == anew["api_key"]
    assert bare.stop(signal.SIGTERM) == 0, bare.output
    assert bare.left() == []


def test_a_busy_port_is_one_sentence(start: Callable[[int], Up]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        one = start(port)
        assert one.process.wait(START_S) == 1
    assert one.output == (
        f"CommandError: Port {port} cannot be used (Address already in use). "
        f"Choose another: PORT={port + 111} make up\n"
    )


@pytest.mark.parametrize("port", ["http", "0", "80", "70000", "-1"])
def test_a_port_that_is_none_is_one_sentence(port: str) -> None:
    with pytest.raises(CommandError, match=f"PORT is '{port}', which is not a number from 1024 to 65000."):
        call_command("up", f"--port={port}")
