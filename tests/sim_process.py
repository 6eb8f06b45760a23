"""A real sim engine as a process of its own: asked over HTTP, and ended with all that belongs to it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import IO, Any

from tests.agent_process import ROOT, Answer, ask
from tests.services import free_port
from tests.waiting import wait_until

KEY = "test"
COMMAND = (sys.executable, "-m", "nodes.agent.sim", "--model", "my-model")


class Sim:
    """A sim engine that serves my-model with 512 tokens of context."""

    def __init__(self, *options: str, log: IO[bytes], key: str = KEY) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        self.process = subprocess.Popen(
            [*COMMAND, "--port", str(self.port), "--context-length", "512", *options],
            cwd=ROOT,
            env={"VLLM_API_KEY": key, "PYTHONPATH": str(ROOT), "SSL_CERT_FILE": ""},
            stdin=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
        )

    @property
    def words(self) -> str:
        """What it has written to its log."""
        self._log.flush()
        return os.pread(self._log.fileno(), 1_000_000, 0).decode()

    @property
    def group(self) -> list[int]:
        """Pids of the processes of its group that run."""
        found = []
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                with open(f"/proc/{name}/stat") as stat:
                    state, _, group = stat.read().rpartition(")")[2].split()[:3]
                if int(group) == self.process.pid and state not in "ZX":
                    found.append(int(name))
        return found

    @property
    def is_up(self) -> bool:
        with contextlib.suppress(OSError):
            return ask(f"{self.url}/health").status == 200
        return False

    def wait_until_up(self) -> None:
        def is_settled() -> bool:
            return self.process.poll() is not None or self.is_up

        wait_until(is_settled, "the sim engine to listen", tell=lambda: self.words, timeout_s=30)
        assert self.process.poll() is None, self.words

    def post(self, path: str, body: Any, key: str = KEY) -> Answer:
        return ask(self.url + path, "POST", body=body, headers={"Authorization": f"Bearer {key}"})

    def complete(self, prompt: str = "hi", max_tokens: int = 1, **more: Any) -> Answer:
        body = {"model": "my-model", "prompt": prompt, "max_tokens": max_tokens, **more}
        return self.post("/v1/completions", body)

    def metric(self, name: str) -> float:
        text = ask(f"{self.url}/metrics").body.decode()
        found = re.search(rf"^{re.escape(name)}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE)
        assert found, f"{name} is not in /metrics"
        return float(found[1])

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def starting_sim(*options: str, key: str = KEY) -> Iterator[Sim]:
    """Whether or not it comes up. Nothing of it is left afterwards."""
    with tempfile.TemporaryFile() as log:
        sim = Sim(*options, log=log, key=key)
        try:
            yield sim
        finally:
            sim.end()


@contextlib.contextmanager
def running_sim(*options: str, key: str = KEY) -> Iterator[Sim]:
    """One that serves, and that ends well when it is told to."""
    with starting_sim(*options, key=key) as sim:
        sim.wait_until_up()
        yield sim
        sim.process.terminate()
        assert sim.process.wait(10) == 0, sim.words
