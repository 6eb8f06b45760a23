"""`manage.py gateway` as an operator starts it, beside the database of the tests, and clients of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from django.db import connection

from tests.services import free_port
from tests.waiting import wait_until

ROOT = Path(__file__).parent.parent


def database_url() -> str:
    """Of the database that the tests are on."""
    told = connection.settings_dict
    if connection.vendor == "sqlite":
        return f"sqlite:///{told['NAME']}"
    host = str(told["HOST"]).replace("/", "%2F")
    return f"postgresql://{told['USER']}@{host}/{told['NAME']}"


class GatewayProcess:
    """A port, and what listens there. `environment` comes on top of that of the tests."""

    def __init__(self, log: Path, *options: str, command: str = "gateway", **environment: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "manage.py", command, "--port", str(self.port), *options],
                cwd=ROOT,
                env={
                    **os.environ,
                    "DATABASE_URL": database_url(),
                    "PYTHONWARNINGS": "default",
                    "LLMGW_LINGER_S": "0.5",
                    "LLMGW_USAGE_FLUSH_S": "0.3",
                    "LLMGW_ACCESS_LOG": "off",
                    **environment,
                },
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def story(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    def wait_until_ready(self) -> None:
        def is_ready() -> bool:
            assert self.process.poll() is None, self.story()
            with contextlib.suppress(OSError):
                return self.get("/readyz")[0] == 200
            return False

        wait_until(is_ready, "the gateway to be ready", tell=self.story, timeout_s=60)

    def get(self, path: str, key: str = "") -> tuple[int, str]:
        request = urllib.request.Request(self.url + path)
        if key:
            request.add_header("Authorization", f"Bearer {key}")
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as refusal:
            with refusal:
                return refusal.code, refusal.read().decode()

    def workers(self) -> set[int]:
        """The processes that serve, but for their parent where there are several."""
        own = psutil.Process(self.process.pid)
        return {child.pid for child in own.children() if _serves(child)} or {own.pid}

    def tell(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        """However it stands, nothing of it is left."""
        left = [psutil.Process(self.process.pid)] if self.process.poll() is None else []
        with contextlib.suppress(psutil.Error):
            left += [child for process in left for child in process.children(recursive=True)]
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        _, alive = psutil.wait_procs(left, 5)
        for process in alive:
            process.kill()


@contextlib.contextmanager
def running(
    log: Path, *options: str, command: str = "gateway", **environment: str
) -> Iterator[GatewayProcess]:
    process = GatewayProcess(log, *options, command=command, **environment)
    try:
        process.wait_until_ready()
        yield process
    finally:
        process.end()


def _serves(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):  # a zombie as well
        return "spawn_main" in " ".join(process.cmdline())
    return False


# --- clients ------------------------------------------------------------------------------


@dataclass
class Load:
    """What became of many chats. `failed` says of each that was not answered whole why not."""

    answered: int = 0
    failed: list[str] = field(default_factory=list)


async def chat(
    session: aiohttp.ClientSession, url: str, key: str, load: Load, fields: Mapping[str, Any] = {}
) -> None:
    """One streamed chat; whole is what ends in `[DONE]` without an error."""
    body = {"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "Hello?"}], **fields}
    headers = {"Authorization": f"Bearer {key}"}
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
            text = await answer.text()
            if answer.status != 200 or not text.rstrip().endswith("data: [DONE]") or '"error"' in text:
                load.failed.append(f"{answer.status} {text[-300:]}")
            else:
                load.answered += 1
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        load.failed.append(f"{type(error).__name__}: {error}")


async def keep_chatting(
    url: str, key: str, load: Load, is_over: Callable[[], bool], clients: int = 8
) -> None:
    """Each client one chat after another, on connections that are kept."""
    timeout = aiohttp.ClientTimeout(total=30)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def client() -> None:
            while not is_over():
                await chat(session, url, key, load)
                await asyncio.sleep(0.02)  # so that the machine can do something else, too

        await asyncio.gather(*(client() for _ in range(clients)))


def figure(text: str, name: str) -> float:
    """The sum of a metric's samples."""
    lines = [line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
    return sum(float(line.rpartition(" ")[2]) for line in lines)
