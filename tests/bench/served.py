"""A whole gateway to measure: its own folder and database, a catalog, a key, and replicas at given ports.

Settings are read once in a process, so what is in the database is written by a process of its own, and the
gateway runs as operators run it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.agent_process import ask
from tests.services import free_port
from tests.waiting import wait_until

ROOT = Path(__file__).parent.parent.parent
_KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "VIRTUAL_ENV")


@dataclass(frozen=True, slots=True)
class Served:
    """A gateway that listens. `key` is a client's."""

    url: str
    key: str
    pid: int


def clean_environment(**more: str) -> dict[str, str]:
    return {name: os.environ[name] for name in _KEPT if name in os.environ} | more


def on_core(core: int | None, command: Sequence[str]) -> Sequence[str]:
    """The command, kept on one core with all that it starts; None is any."""
    return command if core is None else ["taskset", "--cpu-list", str(core), *command]


@contextlib.contextmanager
def running(
    command: Sequence[str], *, core: int | None = None, env: Mapping[str, str] | None = None, log: Any = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A program and all that it starts, until the end of the block."""
    process = subprocess.Popen(
        on_core(core, command),
        cwd=ROOT,
        env=dict(env) if env is not None else None,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def is_answering(url: str, key: str = "none") -> bool:
    with contextlib.suppress(OSError):
        return ask(url, headers={"Authorization": f"Bearer {key}"}).status < 500
    return False


@dataclass(frozen=True, slots=True)
class Hosted:
    """A model: its name, its way of routing, and a replica at each of the ports."""

    name: str
    routing: str
    ports: Sequence[int]

    @classmethod
    def read(cls, word: str) -> Hosted:
        name, routing, ports = word.split("=")
        return cls(name, routing, [int(port) for port in ports.split(",")])

    def __str__(self) -> str:
        return f"{self.name}={self.routing}={','.join(map(str, self.ports))}"


@dataclass(frozen=True, slots=True)
class Filled:
    """What is in the database: a client's key, and the key of the replica at each port."""

    environment: dict[str, str]
    key: str
    replica_keys: Mapping[int, str]


@contextlib.contextmanager
def filled(models: Sequence[Hosted]) -> Iterator[Filled]:
    with tempfile.TemporaryDirectory(prefix="llmgw-bench-") as var:
        environment = clean_environment(
            DJANGO_SETTINGS_MODULE="llmgw.settings", LLMGW_VAR=var, LLMGW_PLAIN_HTTP="1", LLMGW_TICK_S="1000"
        )
        command = [sys.executable, "-m", "tests.bench.served", *map(str, models)]
        printed = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=True)
        told = json.loads(printed.stdout)
        keys = {int(port): key for port, key in told["replica_keys"].items()}
        yield Filled(environment, told["key"], keys)


@contextlib.contextmanager
def serving(filled: Filled, *, core: int | None = None) -> Iterator[Served]:
    """One gateway process on it."""
    port = free_port()
    command = [sys.executable, "manage.py", "web", "--port", str(port), "--workers", "1"]
    with (
        tempfile.TemporaryFile() as log,
        running(command, core=core, env=filled.environment, log=log) as process,
    ):
        url = f"http://127.0.0.1:{port}"

        def is_up() -> bool:
            assert process.poll() is None, _words(log)
            return is_answering(f"{url}/v1/models")

        wait_until(is_up, "the gateway to answer", tell=lambda: _words(log), timeout_s=60)
        yield Served(url, filled.key, process.pid)


def _words(log: Any) -> str:
    return os.pread(log.fileno(), 100_000, 0).decode(errors="replace")


def fill(models: Sequence[Hosted]) -> dict[str, Any]:
    """In the process whose environment chose the database."""
    from django.conf import settings

    from tests.bench.databases import begin

    begin()
    from tests.stage import Engine, make_key, make_model, make_replica, well_behaved

    _, key = make_key()
    replica_keys = {}
    cluster_key = settings.LLMGW_CLUSTER_KEYS[0]
    for hosted in models:
        model = make_model(hosted.name, high=len(hosted.ports), routing_profile=hosted.routing)
        for port in hosted.ports:
            replica = make_replica(model, Engine(well_behaved, port=port))
            replica_keys[port] = cluster_key.replica_key(str(replica.pk), replica.generation)
    return {"key": key, "replica_keys": replica_keys}


if __name__ == "__main__":
    print(json.dumps(fill([Hosted.read(word) for word in sys.argv[1:]])))
