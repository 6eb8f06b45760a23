"""Everything at once, for drills: three agents with sim engines and a worker as real processes, and the web
process' application, on the database under test; and what each door says of a model at one moment.
"""

from __future__ import annotations

import contextlib
import html
import http.client
import io
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management import call_command
from django.db import connection
from django.test import Client, override_settings
from pytest_django import DjangoDbBlocker

from catalog.models import Event, Model, Revision
from nodes.actions import register_node
from nodes.models import Lease, Node, Replica
from tests.agent_process import PORT_RANGE, ROOT, AgentProcess
from tests.cast import alice
from tests.fault_proxy import FaultProxy
from tests.pages import page
from tests.stage import MESSAGES, Web, make_key
from tests.waiting import wait_until

TICK_S, LEASE_S, AGENT_TIMEOUT_S, SUSPECT_AFTER_S, LOST_AFTER_S = 0.5, 3, 1, 2, 4
TIMES = {
    "LLMGW_TICK_S": TICK_S,
    "LLMGW_LEASE_S": LEASE_S,
    "LLMGW_AGENT_TIMEOUT_S": AGENT_TIMEOUT_S,
    "LLMGW_SUSPECT_AFTER_S": SUSPECT_AFTER_S,
    "LLMGW_LOST_AFTER_S": LOST_AFTER_S,
}
ENOUGH = 50  # requests that went through a fault: fewer say nothing


def database_url() -> str:
    """Of the test database: a worker is a process of its own, and finds only what was committed."""
    name = connection.settings_dict["NAME"]
    if connection.vendor == "sqlite":
        return f"sqlite:///{name}"
    return f"{os.environ['DATABASE_URL'].rpartition('/')[0]}/{name}"


class Member(AgentProcess):
    """An agent whose node is registered here, and that is reached through a wire which can be cut."""

    def __init__(self, folder: Path, name: str, ports: str) -> None:
        folder.mkdir()
        super().__init__(folder, "--port-range", ports)
        self.name = name
        self.wire = FaultProxy(self.port)

    def ranks(self) -> list[dict[str, Any]]:
        return list(self.state().get("ranks", ()))

    def commands(self) -> list[bytes]:
        """The first lines of all that it was told to do."""
        return [each.partition(b"\r\n")[0] for each in self.wire.requests if is_command(each)]

    def register(self) -> None:
        _, identity = register_node(self.name, self.wire.url, by="ann", door="command")
        self.node, self.token = identity["node"], identity["token"]
        self.identity.write_text(json.dumps(identity))


class Worker:
    """A real worker with a beat."""

    def __init__(self, log: Path) -> None:
        self.log = log
        with log.open("ab") as written:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "celery", "--app", "llmgw", "--quiet", "worker", "--beat"),
                    *("--pool", "threads", "--concurrency", "1", "--loglevel", "warning"),
                    *("--without-gossip", "--without-mingle", "--without-heartbeat"),
                ],
                cwd=ROOT,
                env={
                    **os.environ,
                    "LLMGW_VAR": str(settings.LLMGW_VAR),
                    "DATABASE_URL": database_url(),
                    **{name: str(value) for name, value in TIMES.items()},
                },
                stdin=subprocess.DEVNULL,
                stdout=written,
                stderr=written,
            )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


@dataclass
class Drill:
    """Nodes a, b and c, each with two cards. The model "parrot" fills a node, and runs twice."""

    members: dict[str, Member]
    web: Web
    key: str
    folder: Path
    browser: Client
    workers: list[Worker] = field(default_factory=list)

    # --- what runs

    def start_worker(self) -> Worker:
        worker = Worker(self.folder / "worker.log")
        self.workers.append(worker)
        return worker

    def kill_worker(self) -> None:
        self.workers.pop().kill()

    def kill_workers(self) -> None:
        while self.workers:
            self.kill_worker()

    def manage(self, *words: str) -> str:
        told = io.StringIO()
        call_command(*words, stdout=told, stderr=told)
        return told.getvalue()

    def replicas(self, model: str = "parrot") -> list[Replica]:
        """Those that are not over, oldest first."""
        rows = Replica.objects.filter(launch__model=model).exclude(state__in=Replica.OVER)
        return list(rows.order_by("created_at"))

    def where(self, model: str = "parrot") -> list[str]:
        """The nodes of those that are ready and to stay."""
        rows = [each for each in self.replicas(model) if (each.state, each.wanted) == ("ready", "run")]
        return sorted(each.ranks.get().node.name for each in rows)

    def wait_until_ready(self, count: int, model: str = "parrot", timeout_s: float = 40) -> None:
        """So many are ready, and nothing else of it is under way."""
        wait_until(
            lambda: len(self.where(model)) == count == len(self.replicas(model)),
            f"{count} of {model} to be ready",
            tell=self.story,
            timeout_s=timeout_s,
            every_s=0.2,
        )

    def wait_until_routed(self, count: int) -> None:
        wait_until(
            lambda: len(self.web.targets()) == count,
            f"the gateway to know {count} replicas",
            tell=self.story,
        )

    # --- what is said

    def says(self, model: str) -> list[str]:
        """What every door says of the model, when all say the same; empty while they do not."""
        told = self._rest(model)
        return told if self._shell(model) == self._admin(model) == told else []

    def wait_until_all_say(self, model: str, *parts: str, timeout_s: float = 30) -> list[str]:
        """Until REST, `manage.py why` and the admin's page say the same, and each part is in a sentence."""

        def agreed() -> list[str]:
            told = self._rest(model)  # alone, until it is worth asking the others
            is_said = all(any(part in each for each in told) for part in parts)
            return self.says(model) if is_said else []

        def tell() -> str:
            doors = json.dumps([self._rest(model), self._shell(model), self._admin(model)], indent=1)
            return doors + self.story()

        return wait_until(agreed, f"all doors to say {parts}", tell=tell, timeout_s=timeout_s, every_s=0.3)

    def _rest(self, model: str) -> list[str]:
        told = self.browser.get(f"/api/models/{model}/why").json()
        return [_bare(each) for each in (told["says"], *told["amiss"], *told["notes"])]

    def _shell(self, model: str) -> list[str]:
        told = self.manage("why", model).partition("\n\n")[0]
        return [_bare(line.removeprefix("  - ")) for line in told.splitlines()]

    def _admin(self, model: str) -> list[str]:
        pk = Model.objects.values_list("pk", flat=True).get(name=model)
        content = page(self.browser, f"/admin/catalog/model/{pk}/why/").partition('<div id="content"')[2]
        found = re.findall(r"<(?:p|li)>(.*?)</(?:p|li)>", content.partition("<h2>")[0])
        return [_bare(html.unescape(each)) for each in found]

    # --- what must hold

    def audit(self) -> None:
        """One engine for each replica, on cards of its own; and where all is as wanted nothing is written or
        told any more."""
        wanted = {str(each.pk): each.generation for each in Replica.objects.exclude(state__in=Replica.OVER)}
        found: list[tuple[str, int]] = []
        for member in self.members.values():
            alive = [each for each in member.ranks() if each["state"] not in ("stopped", "failed")]
            cards = [card for each in alive for card in each.get("gpus", ())]
            assert len(cards) == len(set(cards)), alive
            assert len(member.engines()) == len(alive), alive
            found += [(each["replica"], each["generation"]) for each in alive]
        assert sorted(found) == sorted(wanted.items())
        assert len(found) == len(dict(found))
        passes, written = self._passes(), self._written()
        wait_until(lambda: self._passes() >= passes + 3, "three more passes", timeout_s=20)
        assert self._written() == written

    @staticmethod
    def _passes() -> int:
        return Lease.objects.values_list("token", flat=True).get()

    def _written(self) -> tuple[object, ...]:
        commands = sum(len(each.commands()) for each in self.members.values())
        return Event.objects.count(), Revision.current(), commands

    def story(self) -> str:
        told = [f"\n--- worker\n{(self.folder / 'worker.log').read_text(errors='replace')[-2000:]}"]
        told += [
            f"\n--- node {row.name} seen {row.seen_at} {row.problem} {row.is_cordoned}"
            for row in Node.objects.order_by("name")
        ]
        rows = Replica.objects.order_by("created_at").values(
            *("pk", "model__name", "state", "wanted", "reason", "wanted_why", "ranks__node__name")
        )
        return "".join([*told, *(f"\n{row}" for row in rows)])


@contextlib.contextmanager
def drilling(database: DjangoDbBlocker, folder: Path) -> Iterator[Drill]:
    """For all tests of a module, which put back what they change. Mark it `lasting_database`."""
    first = int(PORT_RANGE.partition("-")[0])
    with (
        database.unblock(),
        override_settings(**TIMES),
        contextlib.ExitStack() as stack,
    ):
        stack.callback(call_command, "flush", verbosity=0, interactive=False)
        members = {}
        for number, name in enumerate("abc"):
            ports = f"{first + number * 13}-{first + number * 13 + 12}"
            member = members[name] = Member(folder / name, name, ports)
            stack.enter_context(member.wire.running())
            member.register()
            stack.enter_context(member)
        browser = Client()
        browser.force_login(alice())
        drill = Drill(members, stack.enter_context(Web()), make_key()[1], folder, browser)
        stack.callback(drill.kill_workers)
        drill.start_worker()
        add_sim(drill, "parrot", "tp=2", count=2)
        drill.wait_until_ready(2, timeout_s=60)
        yield drill


def add_sim(drill: Drill, name: str, *profile: str, count: int = 1) -> None:
    drill.manage(
        *("model_add", name, "--source", f"sim/{name}", "--engine", "sim", "--gpu-class", "sim"),
        *("--min", str(count), "--max", str(count), *(f"--profile={each}" for each in profile)),
    )


def _bare(sentence: str) -> str:
    return sentence.strip().rstrip(".:")


# --- traffic --------------------------------------------------------------------------------------


@dataclass
class Traffic:
    """Requests one after another on a thread of its own. answered: whole ones; refused: by status."""

    drill: Drill
    model: str
    answered: int = 0
    refused: list[tuple[int, str]] = field(default_factory=list)
    _is_over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        host = self.drill.web.url.removeprefix("http://")
        body = json.dumps({"model": self.model, "messages": MESSAGES, "max_tokens": 2}).encode()
        headers = {"Authorization": f"Bearer {self.drill.key}", "Content-Type": "application/json"}
        line = http.client.HTTPConnection(host, timeout=30)
        while not self._is_over.wait(0.05) or self.answered + len(self.refused) < ENOUGH:
            line.request("POST", "/v1/chat/completions", body, headers)
            answer = line.getresponse()
            content = answer.read()
            if answer.status == 200:
                assert json.loads(content)["choices"][0]["finish_reason"] == "length"
                self.answered += 1
            else:
                self.refused.append((answer.status, content.decode()))
        line.close()


@contextlib.contextmanager
def traffic(drill: Drill, model: str = "parrot") -> Iterator[Traffic]:
    """While the fault lasts, and until enough have gone through it."""
    flowing = Traffic(drill, model)
    thread = threading.Thread(target=flowing.run)
    thread.start()
    try:
        yield flowing
    finally:
        flowing._is_over.set()
        thread.join(60)
    assert not thread.is_alive(), "a request hangs"
    assert flowing.answered + len(flowing.refused) >= ENOUGH, "its thread has failed"


def is_command(request: bytes) -> bool:
    return request.startswith((b"PUT ", b"DELETE "))
