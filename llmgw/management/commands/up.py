"""`make up`: all of llmgw on this machine, for a trial. Loopback only, and one Ctrl-C stops it all.

It prepares what is missing (tables, an operator with a key, a node, a demo model), then supervises web and
gateway, worker and beat, and an agent with two simulated GPUs. What is done to models and nodes, verbs do.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shlex
import socket
import sys
import tempfile
import textwrap
import threading
import time
from argparse import ArgumentParser, ArgumentTypeError
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import IO, Any

from django.conf import settings
from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError

from catalog.actions import add_model, mint_key
from catalog.keys import KeyText
from catalog.models import Key, Model
from llmgw.supervisor import Supervisor
from nodes.actions import register_node
from nodes.tasks import wake

DOOR = "up"
OPERATOR, NODE = "admin", "local"
DEMO_NAME = "demo"
DEMO = {
    "name": DEMO_NAME,
    "description": "Synthetic answers from the sim engine: no weights, no GPU.",
    "source": "sim/demo",
    "profiles": [{"name": "default", "engine": "sim", "gpu_class": "sim"}],
    "scaling": {"min": 1, "max": 1},
}

STOP_S = 10  # the agent stops its engines within this; what is still there afterwards is killed
ANSWER_S = 60
TAKEN_AWAY = ("model_not_found", "off")  # an operator has removed the demo model, or switched it off


class Command(BaseCommand):
    help = "Start all of llmgw on this machine, for a trial (loopback only). Ctrl-C stops it."
    requires_system_checks = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--port", type=_port, default=8000, help="where web and gateway listen (8000)")

    def handle(self, *args: Any, port: int, **options: Any) -> None:
        var: Path = settings.LLMGW_VAR
        url = f"http://127.0.0.1:{port}"
        with (var / "up.lock").open("a+") as lock:
            elsewhere = _lock(lock, url)
            if elsewhere is not None:
                self.stdout.write(
                    f"llmgw is running already, at {elsewhere}/admin/ (access: {var / 'up.json'})."
                )
                return
            _refuse_a_busy_port(port)
            call_command("migrate", verbosity=0)
            access, is_new = _access(var / "up.json", url)
            agent_port = _free_port(port + 1)
            identity = _identity(var / "agent.json", f"http://127.0.0.1:{agent_port}")

            def greet() -> None:
                threading.Thread(target=self._greet, args=(access, is_new), daemon=True).start()

            supervisor = Supervisor(stop_s=STOP_S, on_started=greet)
            environment = {
                "LLMGW_ACCESS_LOG": str(var / "access.log"),  # the terminal is for what needs a person
                **os.environ,
                "LLMGW_GATEWAY_URL": f"http://127.0.0.1:{port}",
                "LLMGW_PLAIN_HTTP": "1",
                "LLMGW_DRAIN_S": str(STOP_S // 2),
                "LLMGW_LINGER_S": "0.1",
                "PYTHONUNBUFFERED": "1",
                "PYTHONWARNINGS": "ignore:You're running the worker with superuser",  # it speaks JSON only
            }
            for name, command in _programs(port, agent_port, identity, var / "agent").items():
                supervisor.add(name, command, env=environment, cwd=str(settings.BASE_DIR))
            supervisor.loop()
        if not supervisor.was_asked_to_stop:
            raise CommandError("A program stopped by itself, and the others with it: its last lines say why.")

    def _greet(self, access: dict[str, str], is_new: bool) -> None:
        """Waits for the first chat to be answered, and tells how to get in."""
        began = time.monotonic()
        trouble, is_settled = _ask(access)
        while not is_settled and time.monotonic() - began < ANSWER_S:
            time.sleep(1)
            trouble, is_settled = _ask(access)
        seconds = f"{time.monotonic() - began:.1f} s"
        news = f"The model {access['model']} answered its first chat after {seconds}."
        if trouble and is_settled:
            news = f"llmgw runs. {trouble}"
        elif trouble:
            news = f"No chat within {seconds}. The last try: {trouble} The admin's replicas say more."
        self.stdout.write(_box(news, access, is_new, can_chat=not (trouble and is_settled)))
        self.stdout.flush()


def _port(text: str) -> int:
    if not text.isdecimal() or not 1024 <= int(text) <= 65000:
        raise ArgumentTypeError(f"PORT is {text!r}, which is not a number from 1024 to 65000.")
    return int(text)


def _lock(file: IO[str], url: str) -> str | None:
    """None: we are alone. Otherwise the URL of the supervisor that is not.

    The supervisor holds a POSIX lock, which no child inherits, and a flock, which its keepers do. So a killed
    supervisor is told from a running one, and the next one waits until the programs of the last have stopped.
    """
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        return file.read()
    deadline = time.monotonic() + STOP_S + 5
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise CommandError(
                    "Programs of a killed `make up` do not stop: find them with `ps -ef`."
                ) from None
            time.sleep(0.1)
    file.truncate(0)
    file.write(url)
    file.flush()
    return None


def _refuse_a_busy_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise CommandError(
                f"Port {port} cannot be used ({error.strerror}). Choose another: PORT={port + 111} make up"
            ) from None


def _free_port(first: int) -> int:
    for port in range(first, first + 100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise CommandError(f"No free port from {first} to {first + 99} for the agent: choose another PORT.")


def _programs(port: int, agent_port: int, identity: Path, agent_state: Path) -> dict[str, list[str]]:
    return {
        "web": [
            *(sys.executable, str(settings.BASE_DIR / "manage.py"), "web", "--direct"),
            *("--host", "127.0.0.1", "--port", str(port)),
        ],
        "worker": [
            *(sys.executable, "-m", "celery", "--app", "llmgw", "--quiet", "worker", "--beat"),
            *("--pool", "threads", "--concurrency", "4", "--loglevel", "warning"),
            *("--without-gossip", "--without-mingle", "--without-heartbeat"),
        ],
        "agent": [
            *(sys.executable, "-m", "nodes.agent", "--identity", str(identity), "--state", str(agent_state)),
            *("--listen", f"127.0.0.1:{agent_port}", "--control-plane", f"http://127.0.0.1:{port}"),
            *("--sim-gpus", "2:sim"),
            *("--engines-stop-with-agent", "--stop-grace", f"{STOP_S // 2}s"),
        ],
    }


# --- what is made once ----------------------------------------------------------


def _access(path: Path, url: str) -> tuple[dict[str, str], bool]:
    """How to get in, and whether it is new. It is made anew when it cannot be read, or its key is gone."""
    kept = _kept_access(path)
    access = {**(kept or _make_access()), "url": url}
    _write_private(path, access)
    return access, kept is None


def _kept_access(path: Path) -> dict[str, str] | None:
    try:
        access: dict[str, str] = json.loads(path.read_text())
        key = KeyText.parse(access["api_key"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return access if key is not None and Key.objects.filter(pk=key.id, revoked_at=None).exists() else None


def _make_access() -> dict[str, str]:
    password = secrets.token_urlsafe(15)
    user, _ = get_user_model().objects.get_or_create(
        username=OPERATOR, defaults={"is_staff": True, "is_superuser": True}
    )
    user.set_password(password)
    user.save()
    _, api_key = mint_key("make up", user=user, scope=Key.Scope.MANAGE, by=OPERATOR, door=DOOR)
    if not Model.objects.filter(name=DEMO_NAME).exists():
        # No node is asked for a path: a model that only simulates has no weights.
        add_model(
            DEMO, by=OPERATOR, why="something to try", door=DOOR, ask_paths=lambda *_: (), after_change=wake
        )
    return {"url": "", "user": OPERATOR, "password": password, "api_key": api_key, "model": DEMO_NAME}


def _identity(path: Path, address: str) -> Path:
    """The file by which the agent knows who it is and who may command it."""
    _, identity = register_node(NODE, address, by=OPERATOR, door=DOOR)
    _write_private(path, identity)
    return path


def _write_private(path: Path, content: dict[str, Any]) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as draft:  # mode 0600
        json.dump(content, draft, indent=2)
        draft.write("\n")
    Path(draft.name).replace(path)


# --- the greeting ---------------------------------------------------------------


def _ask(access: dict[str, str]) -> tuple[str, bool]:
    """Chats once, through the gateway. What went wrong, or nothing; and whether another try is in vain."""
    host, _, port = access["url"].removeprefix("http://").rpartition(":")
    connection = HTTPConnection(host, int(port), timeout=ANSWER_S)
    chat = {"model": access["model"], "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    headers = {"Authorization": f"Bearer {access['api_key']}", "Content-Type": "application/json"}
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(chat), headers)
        answer = connection.getresponse()
        body = json.load(answer)
    except (OSError, HTTPException, ValueError) as error:
        return f"{type(error).__name__}: {error}.", False
    finally:
        connection.close()
    if answer.status == 200:
        return "", True
    return str(body["error"]["message"]), body["error"]["code"] in TAKEN_AWAY


def _box(news: str, access: dict[str, str], is_new: bool, *, can_chat: bool) -> str:
    url, key = access["url"], access["api_key"]
    kept = settings.LLMGW_VAR / "up.json"
    if not is_new:  # it was shown once, and the shell finds it where it is kept
        key = rf"""$(sed -n 's/.*"api_key": "\(.*\)".*/\1/p' {shlex.quote(str(kept))})"""
    lines = [
        *textwrap.wrap(news, 80),
        "",
        f"admin     {url}/admin/",
        f"REST      {url}/api/",
        f"OpenAI    {url}/v1",
    ]
    if is_new:
        lines += ["", f"user      {access['user']}", f"password  {access['password']}", f"API key   {key}"]
        lines += ["", f"This is shown once, and kept in {kept}. Try:"]
    else:
        lines += ["", f"User, password and API key are in {kept}. Try:"]
    width = max(len(line) for line in lines)
    rule = "+" + "-" * (width + 2) + "+"
    bearer = f'-H "Authorization: Bearer {key}"'
    curl = (
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f"  {bearer} \\\n"
        f"""  -d '{{"model": "{access["model"]}", "messages": [{{"role": "user", "content": "Hello"}}]}}'"""
    )
    if not can_chat:
        curl = f"curl {url}/v1/models \\\n  {bearer}"
    return "\n".join(
        ["", rule, *(f"| {line:{width}} |" for line in lines), rule, curl, "", "Ctrl-C stops it all.", ""]
    )
