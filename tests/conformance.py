"""Real engines behind a gateway that is a process, and the clients that people bring.

An engine is started with the command that llmgw itself would run, under a name that its model has since lost.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import anthropic
import openai
from django.conf import settings

from nodes.engines import ENGINES, Seat, render
from nodes.protocol import Launch
from tests.agent_process import ROOT, ask
from tests.gateway_process import GatewayProcess, figure, running
from tests.services import free_port
from tests.stage import Engine, change, make_key, make_model, make_replica, well_behaved
from tests.waiting import wait_until


@dataclass(frozen=True)
class Served:
    """A model, and the engine that it runs on. Clients call it by its alias."""

    name: str
    engine: str
    port: int
    key: str

    @property
    def alias(self) -> str:
        return f"{self.name}-alias"

    def running(self) -> float:
        """How many requests the engine works on, by its own word."""
        told = ask(f"http://127.0.0.1:{self.port}/metrics", headers={"Authorization": f"Bearer {self.key}"})
        return figure(told.body.decode(), ENGINES[self.engine].running)

    def is_up(self) -> bool:
        with contextlib.suppress(OSError):
            return ask(f"http://127.0.0.1:{self.port}{ENGINES[self.engine].health_path}").status == 200
        return False


@dataclass(frozen=True)
class Room:
    """A gateway, and who asks it."""

    gateway: GatewayProcess
    folder: Path
    key: str
    openai: openai.OpenAI
    anthropic: anthropic.Anthropic

    @contextlib.contextmanager
    def serving(
        self,
        engine: str,
        executable: Sequence[str],
        source: Path,
        *args: str,
        context_length: int,
        environment: Mapping[str, str] = {},
        timeout_s: float = 60,
        **columns: bool,
    ) -> Iterator[Served]:
        """`columns` are the model's, such as can_tools."""
        served = Served(engine, engine, free_port(), "")
        model = make_model(served.name, served.alias, **columns)
        model.profiles.update(engine=engine)
        replica = make_replica(model, Engine(well_behaved, port=served.port), state="starting")
        key = settings.LLMGW_CLUSTER_KEYS[0].replica_key(str(replica.pk), replica.generation)
        served = replace(served, key=key)
        launch = Launch(
            "its-former-name",
            str(source),
            {"name": "default", "engine": engine, "args": list(args)},
            context_length=context_length,
            capabilities={name.removeprefix("can_"): value for name, value in columns.items()},
        )
        command = render(launch, Seat(executable, "127.0.0.1", served.port, key, str(source)))
        log = self.folder / f"{engine}.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                command.argv,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), **command.env, **environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:

            def is_settled() -> bool:
                return process.poll() is not None or served.is_up()

            def story() -> str:
                return log.read_text(errors="replace")[-3000:]

            wait_until(is_settled, f"{engine} to be up", tell=story, timeout_s=timeout_s)
            assert process.poll() is None, story()
            change(replica, launch=asdict(launch), state="ready")
            wait_until(lambda: self.status_of(served.name) == "ready", "the gateway to know of it")
            yield served
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def status_of(self, model: str) -> Any:
        with contextlib.suppress(openai.NotFoundError):
            return self.openai.models.retrieve(model).model_extra["status"]
        return None


@contextlib.contextmanager
def open_room(folder: Path, **environment: str) -> Iterator[Room]:
    _, key = make_key()
    options: Any = {"api_key": key, "max_retries": 0, "timeout": 60}
    with (
        running(folder / "gateway.log", **environment) as gateway,
        openai.OpenAI(base_url=f"{gateway.url}/v1", **options) as chats,
        anthropic.Anthropic(base_url=gateway.url, **options) as talks,
    ):
        yield Room(gateway, folder, key, chats, talks)
