"""An engine that speaks TLS, from its agent's option to a client of the gateway: a real agent and a real sim
engine, a pass of the reconciler, the real application."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import call_command
from django.test import Client, override_settings
from pytest_django import DjangoDbBlocker

from nodes.actions import register_node
from nodes.agent.home import Home
from nodes.bench.asks import Ask, Row
from nodes.bench.prompts import Prompts
from nodes.checks import Claims
from nodes.engines import ENGINES
from nodes.generator import Aim, Generator
from nodes.interview import EngineGone, Interview, Subject
from nodes.models import Rank, Replica
from nodes.origins import origin_of
from tests.agent_process import AgentProcess, ask
from tests.passes import add_model, one_pass
from tests.rest_client import Api
from tests.stage import LoopThread, Play, Web, change, make_key, text_of
from tests.waiting import wait_until

pytestmark = [pytest.mark.lasting_database, pytest.mark.one_database]

STRANGE = "shows another certificate than it was started with"


@dataclass
class Scene:
    """The node "here", known by the certificate of its agent, runs a replica of "m"."""

    agent: AgentProcess
    checksum: str
    replica: Replica
    play: Play


@pytest.fixture(scope="module")
def scene(
    django_db_setup: None, django_db_blocker: DjangoDbBlocker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("node")
    home = Home(folder)
    if not home.has_certificate():
        pytest.skip("no openssl")
    agent = AgentProcess(folder, "--engine-tls", tls=(home.certificate, home.key))
    with django_db_blocker.unblock(), override_settings(LLMGW_HOLD_S=0.3):
        try:
            node, identity = register_node(
                "here", agent.url, certificate=home.checksum(), by="ann", door="command"
            )
            agent.identity.write_text(json.dumps(identity))
            agent.node, agent.token = str(node.uuid), identity["token"]
            with agent, LoopThread() as thread:
                model = add_model(args=["--tpot", "5ms"])
                change(model)
                replica = wait_until(
                    ready, "a replica to be ready", tell=agent.story, timeout_s=30, every_s=0.1
                )
                with Web() as web:
                    play = Play(web, thread, None, make_key()[1], model, replica)  # type: ignore[arg-type]
                    yield Scene(agent, home.checksum(), replica, play)
        finally:
            call_command("flush", verbosity=0, interactive=False)


def ready() -> Replica | None:
    one_pass()
    return Replica.objects.filter(state="ready").first()


def test_a_client_is_served_over_tls_by_whoever_has_the_certificate(scene: Scene) -> None:
    play, agent = scene.play, scene.agent
    asked: dict[str, Any] = {"model": "m", "max_tokens": 8}
    assert play.chat(**asked).choices[0].message.content
    assert text_of(play.chunks(**asked))

    # A client that leaves frees the engine, and the connections of others are kept.
    rank = Rank.objects.get()
    with play.web.connection() as connection:
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": "?"}],
            "max_tokens": 4000,
            "stream": True,
        }
        connection.sendall(play.request(json.dumps(body).encode()))
        wait_until(lambda: running(agent, rank) == 1, "the engine to begin")
    wait_until(lambda: running(agent, rank) == 0, "the engine to stop, long before it is done", timeout_s=5)
    assert play.chat(**asked)

    # What shows another is told nothing, and everybody why.
    use(rank, "0" * 64)
    refusal = wait_until(lambda: refused(play), "the gateway to see that it is another")
    assert (refusal.status, refusal.body["code"]) == (503, "unavailable")
    assert STRANGE in refusal.body["message"]

    use(rank, scene.checksum)
    wait_until(lambda: not refused(play), "the gateway to see that it is the one")


def running(agent: AgentProcess, rank: Rank) -> float:
    """How many requests the engine works on, by its own word."""
    origin = origin_of(rank.replica)
    assert origin is not None
    key = {"Authorization": f"Bearer {origin.key}"}
    said = ask(f"{origin.url}/metrics", headers=key, certificate=agent.certificate).body.decode()
    lines = [line for line in said.splitlines() if line.startswith("vllm:num_requests_running")]
    return sum(float(line.split()[-1]) for line in lines)


def use(rank: Rank, certificate: str) -> None:
    Rank.objects.update(certificate=certificate)
    change(rank.replica)


def refused(play: Play) -> Any:
    """None where it was answered."""
    with contextlib.suppress(AssertionError):
        return play.refused(model="m", max_tokens=2)
    return None


def test_who_asks_the_engine_past_the_gateway_knows_it_as_well(scene: Scene) -> None:
    origin = origin_of(scene.replica)
    assert origin is not None
    assert origin.url.startswith("https://127.0.0.1:")
    with pytest.raises(OSError, match=r"refused|reset|closed|[Rr]emote"):
        ask(origin.url.replace("https", "http") + "/health")

    for certificate, problem in (
        (origin.certificate, ""),
        ("0" * 64, f"it {STRANGE}"),
        ("", "its certificate is not trusted"),
    ):
        with Generator(Aim(origin.url, origin.key, certificate)) as generator:
            volley = generator.begin([Ask(0, 0.0, Row(4, 2))], Prompts("m", "a", 0.0).body)
            assert volley.wait(10)
            assert [each.problem for each in volley.outcomes] == [problem]

    subject = Subject(
        *(origin.url, origin.key, ENGINES["sim"], Claims("m", embeddings=True)),
        certificate=origin.certificate,
    )
    interview = Interview(subject, patience_s=5)
    asyncio.run(interview.hold())
    assert all(finding.works for finding in interview.findings)
    with pytest.raises(EngineGone, match="shows another certificate than its engine was started with"):
        asyncio.run(Interview(replace(subject, certificate="0" * 64), patience_s=5).hold())


def test_every_door_tells_that_it_speaks_tls(scene: Scene, client: Client) -> None:
    replica, user = scene.replica, User.objects.get(username="ada")
    User.objects.filter(pk=user.pk).update(is_superuser=True, is_staff=True)
    user.refresh_from_db()
    api = Api(user)
    _, told = api("GET", f"replicas/{replica.pk}")
    assert told["certificate"] == told["ranks"][0]["certificate"] == scene.checksum
    assert api("GET", "nodes/here")[1]["engine_tls"] is True
    assert f"{told['port']} (TLS)" in manage("replicas")
    assert json.loads(manage("replicas", "--json"))[0]["certificate"] == scene.checksum
    client.force_login(user)
    page = client.get(f"/admin/nodes/replica/{replica.pk}/change/").content.decode()
    assert f"SHA-256 {scene.checksum}" in page
    assert ", over TLS" in page
    for port, is_plain in ((18_000, True), (None, False)):
        Rank.objects.update(certificate="", port=port)
        page = client.get(f"/admin/nodes/replica/{replica.pk}/change/").content.decode()
        assert ("none: plain HTTP" in page) is is_plain
    node = client.get(f"/admin/nodes/node/{Rank.objects.get().node_id}/change/").content.decode()
    assert "engines speak" in node.lower()
    assert ">TLS<" in node


def manage(*words: str) -> str:
    told = io.StringIO()
    call_command(*words, stdout=told)
    return told.getvalue()
