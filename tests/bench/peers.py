"""Other proxies, to be measured beside ours: each in front of the same engines, one process on one core.

Python ones are installed on first use, each at the version named here into an environment of its own in the
user's cache folder. What cannot be had here is Absent, which says why.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from tests.bench.served import clean_environment, is_answering, running
from tests.bench.stub_engine import MODEL
from tests.services import free_port
from tests.waiting import wait_until

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llmgw-bench"
START_S = 120


class Absent(Exception):
    """A peer that is not measured; its text says why."""


@dataclass(frozen=True, slots=True)
class Proxy:
    """One that listens. `pid` is of the process that all of its others descend from."""

    name: str
    url: str
    key: str
    pid: int


Starter = Callable[[Sequence[int], int | None], AbstractContextManager[Proxy]]

NGINX = """
daemon off; worker_processes 1; pid nginx.pid; error_log stderr error; {user}
events {{ worker_connections 4096; }}
http {{
    access_log off; keepalive_requests 1000000; client_max_body_size 16m; client_body_buffer_size 1m;
    client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi; uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
    upstream engines {{ {servers} keepalive 512; keepalive_requests 1000000; }}
    server {{
        listen 127.0.0.1:{port} backlog=4096;
        location / {{
            proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection "";
            proxy_buffering off;
        }}
    }}
}}
"""


@contextlib.contextmanager
def nginx(ports: Sequence[int], core: int | None) -> Iterator[Proxy]:
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        raise Absent("nginx is not on PATH: install Debian's nginx-light.")
    with tempfile.TemporaryDirectory(prefix="llmgw-bench-") as folder:
        port = free_port()
        servers = " ".join(f"server 127.0.0.1:{each};" for each in ports)
        user = "user root;" if os.getuid() == 0 else ""
        configuration = Path(folder, "nginx.conf")
        configuration.write_text(NGINX.format(user=user, servers=servers, port=port))
        command = [program, "-p", folder, "-c", str(configuration), "-e", "stderr"]
        with _started("nginx", command, f"http://127.0.0.1:{port}", "none", core) as proxy:
            yield proxy


@contextlib.contextmanager
def sglang_router(ports: Sequence[int], core: int | None) -> Iterator[Proxy]:
    python, port = _environment("sglang-router", "0.3.2"), free_port()
    command = [python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--policy", "cache_aware", "--log-level", "error", "--prometheus-port", str(free_port())]
    command += ["--worker-startup-check-interval", "1", "--worker-urls"]
    command += [f"http://127.0.0.1:{each}" for each in ports]
    with _started("sglang-router", command, f"http://127.0.0.1:{port}", "none", core) as proxy:
        yield proxy


@contextlib.contextmanager
def litellm(ports: Sequence[int], core: int | None) -> Iterator[Proxy]:
    python, port = _environment("litellm", "1.108.0", "proxy"), free_port()
    key = "sk-bench"
    models = [
        {
            "model_name": MODEL,
            "litellm_params": {
                "model": f"openai/{MODEL}",
                "api_base": f"http://127.0.0.1:{each}/v1",
                "api_key": "none",
            },
        }
        for each in ports
    ]
    with tempfile.TemporaryDirectory(prefix="llmgw-bench-") as folder:
        configuration = Path(folder, "config.yaml")
        configuration.write_text(
            json.dumps({"model_list": models, "general_settings": {"master_key": key}})  # which is YAML, too
        )
        command = [str(Path(python).parent / "litellm"), "--config", str(configuration)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
        with _started("litellm", command, f"http://127.0.0.1:{port}", key, core) as proxy:
            yield proxy


PEERS: dict[str, Starter] = {"nginx": nginx, "sglang-router": sglang_router, "litellm": litellm}


@contextlib.contextmanager
def _started(name: str, command: Sequence[str], url: str, key: str, core: int | None) -> Iterator[Proxy]:
    environment = clean_environment(LITELLM_LOCAL_MODEL_COST_MAP="True", NO_PROXY="127.0.0.1")
    with tempfile.TemporaryFile() as log, running(command, core=core, env=environment, log=log) as process:

        def words() -> str:
            return os.pread(log.fileno(), 100_000, 0).decode(errors="replace")[-2_000:]

        def is_up() -> bool:
            if process.poll() is not None:
                raise Absent(f"{name} ended with code {process.returncode}: {words()}")
            return is_answering(f"{url}/v1/models", key)

        try:
            wait_until(is_up, f"{name} to answer", tell=words, timeout_s=START_S)
        except AssertionError as error:
            raise Absent(str(error)) from error
        yield Proxy(name, url, key, process.pid)


def _environment(package: str, version: str, extra: str = "") -> str:
    """The interpreter of an environment that has it."""
    folder = CACHE / f"{package}-{version}"
    python, ready = folder / "bin" / "python", folder / "ready"
    if not ready.exists():
        wanted = f"{package}[{extra}]=={version}" if extra else f"{package}=={version}"
        print(f"Installing {wanted} into {folder} ...", file=sys.stderr)
        for command in (
            [sys.executable, "-m", "venv", str(folder)],
            [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wanted],
        ):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise Absent(f"{wanted} cannot be installed here: {done.stderr.strip()[-500:]}")
        ready.touch()
    return str(python)
