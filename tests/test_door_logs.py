"""What engines wrote and how they ended, through each door, of a real engine under a real agent."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.db import connections
from django.test import AsyncClient, Client

from nodes.actions import register_node
from nodes.api.replicas import FOLLOWERS_LIMIT, followers
from nodes.logs import PIECE_LIMIT_BYTES, visible
from nodes.models import Rank, Replica
from nodes.showing import end_words
from tests.agent_process import AgentProcess
from tests.cast import a_model, a_node, a_replica, alice
from tests.passes import add_model, one_pass
from tests.rest_client import Api, field, sentence
from tests.waiting import wait_until

HOSTILE = b"\x1b[2Jred\tand <script>\n"
SEEN = "\\x1b[2Jred and <script>\n"


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    """It is the node of this database's cluster."""
    agent = AgentProcess(tmp_path)
    node, identity = register_node("here", agent.url, by="ann", door="command")
    agent.identity.write_text(json.dumps(identity))
    agent.node, agent.token = str(node.uuid), identity["token"]
    with agent:
        yield agent


@pytest.fixture
def ready(agent: AgentProcess) -> Replica:
    add_model()
    return passes_until(state="ready")


@pytest.fixture
def api(db: None) -> Api:
    return Api(alice())


def passes_until(**columns: Any) -> Replica:
    def found() -> Replica | None:
        one_pass()
        return Replica.objects.filter(**columns).first()

    replica = wait_until(found, f"a replica with {columns}", timeout_s=30, every_s=0.2)
    assert replica is not None
    return replica


def log_file(agent: AgentProcess, replica: Replica) -> Path:
    return agent.state_folder / "logs" / f"{replica.pk}-1.log"


def manage(*words: str, told_beside: io.StringIO | None = None) -> str:
    told = io.StringIO()
    call_command("replica_log", *words, stdout=told, stderr=told_beside or io.StringIO())
    return told.getvalue()


@pytest.mark.django_db(transaction=True)
def test_a_log_and_the_ends_of_its_processes_are_told_by_every_door(
    agent: AgentProcess, ready: Replica, api: Api
) -> None:
    with log_file(agent, ready).open("ab") as log:
        log.write(HOSTILE)
    where = f"replicas/{ready.pk}/log"
    answer = api.ask("GET", f"{where}?tail=1", Accept="text/plain")
    assert (answer.status_code, answer.content.decode()) == (200, SEEN)
    assert answer.headers["Content-Type"] == "text/plain; charset=utf-8"
    assert answer.headers["Cache-Control"] == "no-store"
    assert manage(str(ready.pk)[:8], "--tail", "1") == SEEN
    assert Rank.objects.get().attempts == []

    os.kill(agent.rank(str(ready.pk))["pid"], signal.SIGKILL)
    passes_until(pk=ready.pk, state="failed")
    passes_until(state="ready")
    (attempt,) = api("GET", f"replicas/{ready.pk}")[1]["ranks"][0]["attempts"]
    assert (attempt["number"], attempt["exit_code"], attempt["signal"]) == (1, -9, 9)
    assert (attempt["cause"], attempt["generation"]) == ("killed", 1)
    assert 0 < attempt["duration_s"] < 60
    assert api.ask("GET", f"{where}?tail=1&attempt=1").content.decode() == SEEN
    beside = io.StringIO()
    over = (str(ready.pk), "--follow", "--attempt", "1")
    assert manage(*over, told_beside=beside).endswith(SEEN), "it is over, and so it ends"
    assert beside.getvalue() == ""
    log_file(agent, ready).write_bytes(b"")
    assert manage(*over, told_beside=beside) == ""
    assert beside.getvalue().startswith("Nothing is written yet. What comes is shown here")
    status, says = sentence(api("GET", f"{where}?attempt=7"))
    assert (status, says) == (404, "No attempt 7 of this replica has written a log on this node.")
    with pytest.raises(CommandError, match="No attempt 7 of this replica"):
        manage(str(ready.pk), "--attempt", "7")

    client = Client()
    client.force_login(User.objects.get())
    html = client.get(f"/admin/nodes/replica/{ready.pk}/change/").content.decode()
    assert "SIGKILL" in html
    assert "The engine was ended by SIGKILL (by hand, or because the node ran out of memory)" in html
    assert f'href="/api/{where}?attempt=1&amp;rank=0"' in html
    assert not one_pass().has_changed


@pytest.fixture
async def browser() -> AsyncIterator[AsyncClient]:
    """As ASGI has it: views run in a thread, which has a connection of its own to the database."""
    yield AsyncClient()
    await sync_to_async(connections.close_all)()


async def followed(browser: AsyncClient, replica: Replica, api: Api) -> Any:
    answer: Any = await browser.get(
        f"/api/replicas/{replica.pk}/log?follow=true&tail=1", headers={"Authorization": f"Bearer {api.text}"}
    )
    assert (answer.status_code, answer.streaming) == (200, True)
    pieces = aiter(answer.streaming_content)
    assert (await anext(pieces)).startswith(b"sim: listening on ")
    return pieces


@pytest.mark.django_db(transaction=True)
async def test_who_follows_a_log_and_goes_makes_room_for_others(
    agent: AgentProcess, ready: Replica, api: Api, browser: AsyncClient
) -> None:
    pieces = await followed(browser, ready, api)
    assert followers.count == 1
    with pytest.raises(TimeoutError):  # as Django cancels what it answers to somebody who has gone
        await asyncio.wait_for(anext(pieces), 0.5)
    assert followers.count == 0


@pytest.mark.django_db(transaction=True)
async def test_a_log_is_followed_until_the_engine_is_over(
    agent: AgentProcess, ready: Replica, api: Api, browser: AsyncClient
) -> None:
    pid = agent.rank(str(ready.pk))["pid"]
    pieces = await followed(browser, ready, api)
    assert followers.count == 1
    with log_file(agent, ready).open("ab", buffering=0) as log:
        log.write(HOSTILE)
        assert (await anext(pieces)).decode() == SEEN
        log.write(b"x" * (PIECE_LIMIT_BYTES * 5))  # without an end, and more than is held back for one
        assert len(await anext(pieces)) > 100
        log.write(b"\nlast words")
    os.kill(pid, signal.SIGKILL)
    rest = b"".join([piece async for piece in pieces])
    assert rest.endswith(b"last words")
    assert followers.count == 0


@pytest.mark.django_db(transaction=True)
def test_more_than_a_process_can_follow_are_sent_elsewhere(
    agent: AgentProcess, ready: Replica, api: Api
) -> None:
    followers.count += FOLLOWERS_LIMIT
    try:
        status, says = sentence(api("GET", f"replicas/{ready.pk}/log?follow=1"))
    finally:
        followers.count -= FOLLOWERS_LIMIT
    assert (status, says) == (503, "32 logs are followed here already; end one of these first")


@pytest.fixture
def silent(db: None) -> Replica:
    """Nothing listens at its node's address."""
    return a_replica(a_model(), a_node(address="http://127.0.0.1:9"))


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("?tail=0", 'tail cannot be "0"; it is a whole number from 1 to 5000'),
        ("?tail=5001", 'tail cannot be "5001"; it is a whole number from 1 to 5000'),
        ("?tail=99999999999", 'tail cannot be "99999999999"; it is a whole number from 1 to 5000'),
        ("?attempt=x", 'attempt cannot be "x"; it is a whole number from 1 to 2147483647'),
        ("?rank=-1", 'rank cannot be "-1"; it is a whole number from 0 to 2147483647'),
        ("?follow=maybe", 'follow cannot be "maybe"; it is one of true, 1, false, 0'),
    ],
)
def test_a_question_about_a_log_is_refused(api: Api, silent: Replica, query: str, says: str) -> None:
    status, told = api("GET", f"replicas/{silent.pk}/log{query}")
    assert (status, told["errors"][0]["sentence"]) == (400, says)


def test_what_there_is_no_log_of_is_said(api: Api, silent: Replica) -> None:
    status, says = sentence(api("GET", f"replicas/{silent.pk}/log"))
    assert status == 503
    assert says.startswith("The agent of gpu-01 at http://127.0.0.1:9 cannot be reached")
    assert sentence(api("GET", f"replicas/{silent.pk}/log?follow=1"))[0] == 503, "and not an empty stream"
    status, says = sentence(api("GET", f"replicas/{silent.pk}/log?rank=3"))
    assert (status, says) == (404, f"replica {silent.pk} has no rank 3")
    unknown = "00000000-0000-4000-8000-000000000009"
    assert sentence(api("GET", f"replicas/{unknown}/log"))[0] == 404
    assert field(api("GET", f"replicas/{silent.pk}/log?head=1"))[2] == "unknown_parameter"
    assert sentence(api("POST", f"replicas/{silent.pk}/log"))[0] == 405


def test_the_command_refuses_in_one_sentence(silent: Replica) -> None:
    id = str(silent.pk)
    for words, says in (
        ((id,), "cannot be reached"),
        ((id, "--follow"), "cannot be reached"),
        ((id, "--rank", "3"), "has no rank 3"),
        ((id, "--tail", "0"), "from 1 to 5000"),
        (("ffff0000",), 'no replica "ffff0000"'),
    ):
        with pytest.raises(CommandError, match=says):
            manage(*words)


@pytest.mark.parametrize(
    ("log", "seen"),
    [
        ("one\ntwo\n", "one\ntwo\n"),
        ("a\tb", "a       b"),
        ("50 %\r100 %\n", "50 %\\r100 %\n"),
        ("\x1b]0;title\x07\n", "\\x1b]0;title\\x07\n"),
        ("\u202eevil\n", "\\u202eevil\n"),
        ("", ""),
    ],
    ids=ascii,
)
def test_a_log_is_made_fit_to_be_seen(log: str, seen: str) -> None:
    assert visible(log) == seen


@pytest.mark.parametrize(
    ("exit_code", "number", "words"),
    [(1, None, "exit code 1"), (0, None, "exit code 0"), (-9, 9, "SIGKILL"), (-99, 99, "signal 99"),
     (None, None, "not seen")],
)  # fmt: skip
def test_by_what_a_process_ended_is_told_in_words(
    exit_code: int | None, number: int | None, words: str
) -> None:
    assert end_words({"exit_code": exit_code, "signal": number}) == words
