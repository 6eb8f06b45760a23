"""llmgw's real processes on this machine, each as an operator would start it, in a folder of their own.

At the end everything is stopped, engines too, and whatever carries the trial's mark in its environment is
found.
"""

from __future__ import annotations

import contextlib
import http.cookiejar
import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.services import free_port
from tests.waiting import wait_until

ROOT = Path(__file__).parent.parent

# In one process, as each takes seconds to start: tables, ada, and a key of hers, which is printed.
_PREPARE = """
import os
from django.core.management import execute_from_command_line
os.environ["DJANGO_SETTINGS_MODULE"] = "llmgw.settings"
for command in (
    "migrate --verbosity 0",
    "createsuperuser --verbosity 0 --noinput --username ada --email ada@example.org",
    "key_create trial --user ada --scope manage --json",
):
    execute_from_command_line(["manage.py", *command.split()])
"""


class Trial:
    """`environment` chooses database and broker; without one it is SQLite and files."""

    def __init__(self, folder: Path, environment: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self._marks: set[bytes] = set()
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
        self.environment = {
            **kept,
            "LLMGW_VAR": str(folder / "var"),
            "LLMGW_PLAIN_HTTP": "1",
            "LLMGW_HUB_ENDPOINT": "http://127.0.0.1:9",
            "PYTHONUNBUFFERED": "1",
            **(environment or {}),
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.password = "a trial's own password"
        self.api_key: str = json.loads(
            self._run("-c", _PREPARE, DJANGO_SUPERUSER_PASSWORD=self.password),
        )["key"]
        cookies = http.cookiejar.CookieJar()
        self._browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(cookies))

    # --- processes ------------------------------------------------------------------

    def manage(self, *arguments: str, **environment: str) -> str:
        """What `manage.py` prints. Raises with what it complained of."""
        return self._run("manage.py", *arguments, **environment)

    def _run(self, *arguments: str, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=120,
        )
        if done.returncode:
            raise CommandFailed(done.stderr.strip())
        return done.stdout

    def start(self, name: str, *command: str) -> None:
        self.folder.joinpath("logs").mkdir(exist_ok=True)
        with self.folder.joinpath("logs", f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, *command],
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def start_web(self) -> None:
        self.start(
            "web",
            *("-m", "uvicorn", "llmgw.asgi:application", "--host", "127.0.0.1", "--port", str(self.port)),
            *("--log-level", "warning", "--no-access-log", "--timeout-graceful-shutdown", "5"),
        )
        wait_until(self.answers, "the web process to answer", tell=self.story, timeout_s=30)

    def start_worker(self) -> None:
        self.start(
            "worker",
            *(
                "-m",
                "celery",
                "--app",
                "llmgw",
                "worker",
                "--beat",
                "--pool",
                "threads",
                "--concurrency",
                "2",
            ),
            *("--loglevel", "warning", "--without-gossip", "--without-mingle", "--without-heartbeat"),
        )

    def start_agent(self, node: str = "local", *options: str) -> None:
        """Registers the node on its first start; later starts find the same identity, port and state."""
        home = self.folder / node
        if not home.exists():
            home.mkdir()
            address = f"http://127.0.0.1:{free_port()}"
            home.joinpath("address").write_text(address)
            self.manage("node_add", node, "--address", address, "--write", str(home / "identity.json"))
            self.mark(json.loads(home.joinpath("identity.json").read_text())["node"])
        listen = home.joinpath("address").read_text().removeprefix("http://")
        self.start(
            f"agent-{node}",
            *("-m", "nodes.agent", "--identity", str(home / "identity.json"), "--state", str(home / "state")),
            *("--listen", listen, *options),
        )

    def mark(self, node: str) -> None:
        """From here on, that node's engines are the trial's."""
        self._marks.add(f"LLMGW_NODE={node}".encode())

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        process = self.processes.pop(name)
        process.send_signal(number)
        process.wait(20)

    def story(self) -> str:
        """What the processes have said, for the message of a failed wait."""
        logs = sorted(self.folder.joinpath("logs").glob("*.log"))
        told = [f"\n--- {path.stem}\n{path.read_text(errors='replace')[-3000:]}" for path in logs]
        with contextlib.suppress(OSError, Refused):
            told.append(f"\n--- replicas\n{json.dumps(self.replicas(), indent=1)}")
        return "".join(told)

    def engines(self) -> list[int]:
        """Processes that carry the mark of one of the trial's nodes."""
        return _pids_with_any(self._marks)

    def strays(self) -> list[int]:
        """Processes of the trial that it did not start itself: engines, and what others left behind."""
        started = {process.pid for process in self.processes.values()}
        return [
            pid for pid in _pids_with_any({*self._marks, str(self.folder).encode()}) if pid not in started
        ]

    def stop(self) -> None:
        for name in ("worker", *[name for name in self.processes if name.startswith("agent")], "web"):
            if name in self.processes:
                self.kill(name, signal.SIGTERM)

    def end(self) -> None:
        """Whatever happened before: nothing of this trial runs on."""
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.processes.clear()
        for pid in self.strays():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    # --- doors ----------------------------------------------------------------------

    def answers(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/healthz", timeout=5) as answer:
            return bool(answer.status == 200)
        return False

    def api(self, method: str, path: str, body: Any = None) -> Any:
        """The JSON that REST answers with. Raises `Refused` with status and body."""
        request = urllib.request.Request(
            f"{self.url}/api/{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                content = answer.read()
        except urllib.error.HTTPError as error:
            raise Refused(error.code, error.read().decode(errors="replace")) from None
        return json.loads(content) if content else None

    def replicas(self, model: str = "") -> list[dict[str, Any]]:
        """Of this model, or all."""
        answer = self.api("GET", f"replicas/?model={model}" if model else "replicas/")
        return list(answer["results"])

    def page(self, path: str) -> str:
        """An admin page's HTML, as ada sees it."""
        with self._browser.open(f"{self.url}{path}", timeout=30) as answer:
            return str(answer.read().decode())

    def log_in(self) -> None:
        login = self.page("/admin/login/")
        token = re.search(r'name="csrfmiddlewaretoken" value="([^"]+)"', login)
        assert token, "the login page has no form"
        form = {
            "username": "ada",
            "password": self.password,
            "csrfmiddlewaretoken": token[1],
            "next": "/admin/",
        }
        self._browser.open(
            urllib.request.Request(
                f"{self.url}/admin/login/",
                data=urllib.parse.urlencode(form).encode(),
                headers={"Referer": f"{self.url}/admin/login/"},
            ),
            timeout=30,
        ).close()


def _pids_with_any(marks: set[bytes]) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal():
                environment = entry.joinpath("environ").read_bytes()
                if any(mark in environment for mark in marks):
                    found.append(int(entry.name))
    return found


class CommandFailed(Exception):
    """A command ended with an error; the text is what it complained of."""


class Refused(Exception):
    """REST said no."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"{status} {body}")
        self.status = status
        self.body = body
