"""Who lets a machine join, and what a join token opens: one machine, soon, and no more than its maker may."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import Group, User
from django.core.management import CommandError, call_command
from django.db import connection
from django.db.models.functions import Now
from django.test import Client

from catalog.actions import mint_key, revoke_key
from catalog.models import Event, Revision
from nodes.actions import cordon, drain_node, identity_of, register_node
from nodes.bundle import ROOT, bundle, join_line
from nodes.conversation import is_token_of
from nodes.joining import Machine, find_join_token, join, mint_join_token, revoke_join_token
from nodes.models import Claim, JoinToken, Node, Replica
from tests.cast import a_model, a_node, a_replica, alice
from tests.pages import page, text_of
from tests.rest_client import Api

CLAIM, OTHER = "a" * 64, "b" * 64
ADDRESS = "https://10.0.0.7:8378"


def a_token(**told: Any) -> tuple[JoinToken, str]:
    return mint_join_token(**{"by": "alice", "door": "command"} | told)


def says(**fields: str) -> dict[str, str]:
    """What a machine says of itself when it joins."""
    return {"name": "", "host": "gpu-07", "address": ADDRESS, "certificate": "", "claim": CLAIM} | fields


def ask(method: str, text: str, **fields: str) -> tuple[int, Any]:
    """As a machine does, with that token. The status, and the sentence of a refusal."""
    headers = {"Authorization": f"Bearer {text}"}
    body = json.dumps(says(**fields)) if method == "POST" else ""
    answer = Client().generic(
        method, "/api/nodes/join", body, content_type="application/json", headers=headers
    )
    told: Any = answer.json() if answer["Content-Type"] == "application/json" else answer.content
    return answer.status_code, told if answer.status_code == 200 else told["errors"][0]["sentence"]


# --- a machine joins --------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_a_machine_becomes_a_node_and_gets_what_its_agent_keeps() -> None:
    token, text = a_token(labels={"zone": "a"})
    status, told = ask("POST", text, certificate="AB:" * 31 + "AB")
    node = Node.objects.get()
    assert (status, told) == (200, {**identity_of(node), "labels": {"zone": "a"}})
    assert (node.name, node.address, node.certificate) == ("gpu-07", ADDRESS, "ab" * 32)
    token.refresh_from_db()
    assert (token.node, token.used_at is None) == (node, False)
    told_of = [(event.verb, event.kind, event.subject, event.by) for event in Event.objects.order_by("id")]
    assert told_of == [
        ("mint", "join token", token.pk, "alice"),
        ("join", "node", "gpu-07", "alice"),
        ("use", "join token", token.pk, "alice"),
    ]


@pytest.mark.django_db
def test_a_token_is_kept_as_a_digest_alone() -> None:
    token, text = a_token()
    kept = json.dumps([list(JoinToken.objects.values()), list(Event.objects.values())], default=str)
    assert text not in kept
    assert text.rpartition("_")[2][:32] not in kept
    assert find_join_token(text) == token
    assert find_join_token(text[:-1] + "x") is None
    assert find_join_token("") is None


@pytest.mark.django_db
def test_a_join_that_is_repeated_is_the_same_join() -> None:
    _, text = a_token()
    first = ask("POST", text)
    assert ask("POST", text, address="https://10.0.0.8:8378") == first
    assert Node.objects.get().address == "https://10.0.0.8:8378"
    assert ask("GET", text)[0] == 200
    status, sentence = ask("POST", text, claim=OTHER)
    assert status == 400
    assert sentence == (
        "This join token was used already, by gpu-07; make a new one (manage.py node_join_token, or Add node "
        "in the admin)."
    )
    assert Node.objects.count() == 1


@pytest.mark.django_db
def test_a_node_that_joins_again_stays_the_one_it_is() -> None:
    node, identity = register_node("gpu-07", "http://10.0.0.7:8378", by="ann", door="command")
    known = {name: identity[name] for name in ("cluster", "node", "token")}
    _, text = a_token()
    status, told = ask("POST", text, host="renamed", **known)
    assert (status, {**told}) == (200, {**identity, "labels": {}})
    assert Node.objects.get().pk == node.pk
    assert Node.objects.get().address == ADDRESS


@pytest.mark.django_db
def test_another_machine_takes_a_nodes_place_only_by_its_name_and_when_it_is_silent() -> None:
    node, identity = register_node("gpu-07", ADDRESS, by="ann", door="command")
    _, anybody = a_token()
    status, sentence = ask("POST", anybody)
    assert (status, sentence[:33]) == (409, 'There is a node "gpu-07" already;')
    Node.objects.update(seen_at=Now())
    _, named = a_token(name="gpu-07")
    status, sentence = ask("POST", named, host="spare")
    assert (status, "answers at this moment, from https://10.0.0.7:8378; stop the agent" in sentence) == (
        409,
        True,
    )

    Node.objects.update(seen_at=Now() - timedelta(minutes=5))
    status, told = ask("POST", named, host="spare")
    assert (status, told["node"]) == (200, str(node.uuid))
    assert told["token"] != identity["token"]
    node.refresh_from_db()
    assert not is_token_of(node, identity["token"]), "the machine that was it is it no more"
    assert is_token_of(node, told["token"])


REFUSED = {
    "another cluster's node": (
        {"cluster": "c1000000-0000-4000-8000-000000000001"}, 409, "is a node of another cluster",
    ),
    "a name that the token is not for": ({"name": "gpu-08"}, 409, 'This join token is for "gpu-07"'),
    "an address that is none": ({"address": "here"}, 400, "is no address of an agent"),
    "a checksum that is none": ({"certificate": "abc"}, 400, "is no certificate's checksum"),
    "no claim": ({"claim": ""}, 400, "A machine that joins sends a claim of its own"),
    "a node that was never one": ({"node": "x", "token": "y", "name": "z"}, 409, "This join token is for"),
    "a text with a NUL": ({"host": "\0"}, 400, "NUL"),
}  # fmt: skip


@pytest.mark.django_db
@pytest.mark.parametrize(("fields", "status", "words"), REFUSED.values(), ids=REFUSED)
def test_a_join_that_is_refused_uses_nothing_up(fields: dict[str, str], status: int, words: str) -> None:
    token, text = a_token(name="gpu-07")
    got, sentence = ask("POST", text, **fields)
    assert (got, words in sentence) == (status, True), sentence
    token.refresh_from_db()
    assert (token.used_at, Node.objects.count()) == (None, 0)


@pytest.mark.django_db
def test_a_node_asks_for_no_other_name() -> None:
    _, identity = register_node("gpu-07", ADDRESS, by="ann", door="command")
    known = {name: identity[name] for name in ("cluster", "node", "token")}
    status, sentence = ask("POST", a_token()[1], name="gpu-08", **known)
    assert (status, sentence.startswith('This machine is the node "gpu-07" already')) == (409, True)


@pytest.mark.django_db(transaction=True)
def test_of_two_machines_with_one_token_one_joins() -> None:
    token, _ = a_token()
    together, told = threading.Barrier(2), []

    def arrive(number: int) -> None:
        machine = Machine(**says(host=f"gpu-{number}", claim=str(number) * 64))
        together.wait()
        try:
            told.append(join(token, machine)["name"])
        except ValueError as no:
            told.append(str(no))
        finally:
            connection.close()

    threads = [threading.Thread(target=arrive, args=(number,)) for number in (1, 2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
    assert len(told) == 2
    assert Node.objects.count() == 1
    assert sum("This join token was used already" in each for each in told) == 1


# --- what a token opens, and for how long -----------------------------------------------------------------


def an_admin() -> User:
    user = User.objects.create_user("adam", is_staff=True)
    user.groups.add(Group.objects.get(name="admin"))
    return user


def deactivate(user: User) -> None:
    User.objects.filter(pk=user.pk).update(is_active=False)


ENDS: dict[str, tuple[Callable[[JoinToken, User], object], str]] = {
    "it has expired": (
        lambda token, user: JoinToken.objects.update(expires_at=Now() - timedelta(seconds=1)),
        "This join token expired at",
    ),
    "it was revoked": (
        lambda token, user: revoke_join_token(token, by="ann", door="command"), "This join token was revoked",
    ),
    "its maker has left": (lambda token, user: deactivate(user), "may add no nodes any more"),
    "its maker's role was taken": (lambda token, user: user.groups.clear(), "may add no nodes any more"),
    "the key it was made with was revoked": (
        lambda token, user: revoke_key(token.key_id, by="ann", door="command"), "may add no nodes any more",
    ),
}  # fmt: skip


@pytest.mark.django_db
@pytest.mark.parametrize(("end", "words"), ENDS.values(), ids=ENDS)
def test_a_token_opens_nothing_any_more_once(end: Callable[[JoinToken, User], object], words: str) -> None:
    user = an_admin()
    key, _ = mint_key("script", user=user, scope="manage", by="adam", door="command")
    token, text = a_token(maker=user, key=key)
    assert ask("GET", text)[0] == 200
    end(token, user)
    for method in ("GET", "POST"):
        status, sentence = ask(method, text)
        assert (status, words in sentence) == (401, True), sentence
    assert not Node.objects.exists()


@pytest.mark.django_db
def test_a_token_opens_nothing_else_and_nothing_else_opens_its_door() -> None:
    _, text = a_token()
    _, key = mint_key("k", user=alice(), scope="manage", by="alice", door="command")
    node, identity = register_node("gpu-08", ADDRESS, by="ann", door="command")
    doors = ("/api/nodes", "/api/models", f"/api/nodes/{node.uuid}/hint", "/v1/models")
    for path in doors[:3]:
        method = "POST" if path.endswith("hint") else "GET"
        answer = Client().generic(method, path, headers={"Authorization": f"Bearer {text}"})
        assert answer.status_code == 401, path
    for other in (key, identity["token"], ""):
        assert ask("GET", other)[0] == 401
        assert ask("POST", other)[0] == 401
    session = Client()
    session.force_login(User.objects.get(username="alice"))
    assert session.get("/api/nodes/join").status_code == 401


# --- the code ---------------------------------------------------------------------------------------------


SHARED = ("certificates", "exposition", "progress", "protocol", "tickets")


@pytest.mark.one_database
def test_the_code_is_the_same_each_time_and_only_what_an_agent_needs() -> None:
    made = bundle()
    assert made == bundle()
    names = zipfile.ZipFile(io.BytesIO(made.content)).namelist()
    assert len(names) == len(set(names))
    assert {"__main__.py", "nodes/agent/sim/recorded/vllm/oom.log", ".constraints.txt"} <= {
        re.sub(r"recorded/vllm/\w+\.log", "recorded/vllm/oom.log", name) for name in names
    }
    beside = {name for name in names if not name.startswith(("catalog/", "nodes/agent/", "nodes/engines/"))}
    shared = {f"nodes/{name}.py" for name in ("__init__", *SHARED)}
    assert beside == {"__main__.py", ".constraints.txt", *shared}
    assert not {"catalog/models.py", "catalog/actions/__init__.py", "catalog/hub.py"} & set(names)


@pytest.mark.django_db
def test_the_code_is_given_out_for_the_token() -> None:
    status, content = ask("GET", a_token()[1])
    assert (status, content) == (200, bundle().content)


@pytest.mark.one_database
def test_the_line_quotes_what_is_not_its_own() -> None:
    line = join_line("https://llmgw.example", ["--name", "a'b; rm -rf /"])
    assert line.endswith(f"{bundle().sha256} https://llmgw.example --name 'a'\"'\"'b; rm -rf /'")
    assert "\n" not in line


# --- REST, the admin and the shell ------------------------------------------------------------------------


@pytest.mark.django_db
def test_a_token_is_made_seen_and_revoked_over_rest() -> None:
    api = Api(alice())
    status, made = api(
        "POST", "join-tokens", {"name": "gpu-07", "labels": {"zone": "a"}, "expires_in": "10m"}
    )
    assert (status, made["state"], made["name"], made["labels"]) == (201, "live", "gpu-07", {"zone": "a"})
    assert made["line"] == join_line("http://testserver")
    assert find_join_token(made["token"]).key == api.key
    seen = api("GET", f"join-tokens/{made['id']}")[1]
    assert seen == {name: value for name, value in made.items() if name not in ("token", "line")}
    assert api("DELETE", f"join-tokens/{made['id']}") == (204, None)
    assert api("GET", "join-tokens?state=revoked")[1]["results"][0]["id"] == made["id"]
    assert api("GET", "join-tokens/x")[1]["errors"][0]["sentence"] == (
        'there is no join token "x"; GET /api/join-tokens lists them'
    )


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"expires_in": "169h"}, "expires_in"),
        ({"expires_in": "1s"}, "expires_in"),
        ({"labels": {"a": "b\nc"}}, "labels"),
        ({"name": "join"}, "name"),
        ({"name": "a\tb"}, "name"),
    ],
    ids=[
        "for too long",
        "for too short",
        "a label of two lines",
        "a name that is taken",
        "a tab in its name",
    ],
)
def test_a_token_that_cannot_be_is_refused_at_its_field(body: dict[str, Any], field: str) -> None:
    status, told = Api(alice())("POST", "join-tokens", body)
    assert (status, told["errors"][0]["field"]) == (400, field)
    assert not JoinToken.objects.exists()


@pytest.mark.django_db
def test_a_node_is_added_in_the_admin_by_a_line_that_is_shown_once(client: Client) -> None:
    client.force_login(alice())
    assert "Add node" in page(client, "/admin/nodes/node/")
    assert "Save shows the line" in page(client, "/admin/nodes/jointoken/add/")
    answer = client.post(
        "/admin/nodes/jointoken/add/",
        {
            "node_name": "gpu-07",
            "labels": "zone=a",
            "expires_in": "30m",
            "plain_http": "on",
            "engine_tls": "on",
            "why": "new rack",
        },
    )
    html = answer.content.decode()
    token = JoinToken.objects.get()
    (text,) = re.findall(r"llmgw_\w{46,}", html)
    assert find_join_token(text) == token
    assert "--plain-http --engine-tls" in text_of(html)
    assert bundle().sha256 in html
    assert "no-store" in answer["Cache-Control"]
    assert token.expires_at - token.created_at == timedelta(minutes=30)
    assert Event.objects.get(verb="mint").why == "new rack"
    for path in ("/admin/nodes/jointoken/", f"/admin/nodes/jointoken/{token.pk}/change/"):
        shown = page(client, path)
        assert text not in shown
        assert "gpu-07" in shown
    wrong = client.post(
        "/admin/nodes/jointoken/add/", {"node_name": "join", "labels": "x", "expires_in": "1y"}
    )
    errors = wrong.context["adminform"].form.errors
    assert {*errors} == {"labels", "expires_in"}
    wrong = client.post("/admin/nodes/jointoken/add/", form(node_name="join"))
    assert wrong.context["adminform"].form.errors == {
        "node_name": [
            'A node cannot be called "join", as its address would lead elsewhere: give it another name.'
        ]
    }


def form(**typed: str) -> dict[str, str]:
    return {"node_name": "", "labels": "", "expires_in": "", "why": ""} | typed


def manage(*words: str) -> str:
    said = io.StringIO()
    call_command(*words, stdout=said, stderr=said, no_color=True)
    return said.getvalue()


@pytest.mark.django_db
def test_the_shell_prints_the_line_and_the_token(settings: Any) -> None:
    settings.LLMGW_PLAIN_HTTP = False
    said = manage("node_join_token", "gpu-07", "--url", "https://llmgw.example/", "--label", "zone=a")
    assert join_line("https://llmgw.example") in said.splitlines()
    token = JoinToken.objects.get()
    assert find_join_token(said.split()[-1]) == token
    assert (token.node_name, token.labels, token.maker) == ("gpu-07", {"zone": "a"}, None)
    assert manage("node_join_token", "--revoke", token.pk) == f"Revoked {token.pk}.\n"
    for loopback in ("http://127.0.0.1:8000", "http://localhost:8000", "http://[::1]:8000"):
        assert join_line(loopback) in manage("node_join_token", "--url", loopback).splitlines()
    for words, sentence in {
        ("--revoke", token.pk): "There is no live join token",
        (): "--url is missing: give scheme and host",
        ("--url", "http://llmgw.example"): "--url http://llmgw.example: give scheme and host",
        ("--url", "https://x", "--label", "zone"): "write NAME=value",
        ("--url", "https://x", "--expires-in", "1y"): "expires_in must be a duration",
    }.items():
        with pytest.raises(CommandError, match=sentence):
            manage("node_join_token", *words)


# --- a node is removed ------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_a_node_that_has_something_is_drained_before_it_is_removed() -> None:
    model, node = a_model(), a_node()
    replica = a_replica(model, node)
    api = Api(alice())
    first = api("DELETE", "nodes/gpu-01")
    assert (first[0], first[1]["errors"][0]["sentence"]) == (
        409, "The node gpu-01 has 1 replica; drain it first (manage.py node_drain), then remove it.",
    )  # fmt: skip
    with pytest.raises(CommandError, match="gpu-01 has 1 replica; drain it first"):
        manage("node_remove", "gpu-01")
    drain_node(node, by="alice", why="", door="command")
    assert (
        "is being drained and has 1 replica still"
        in api("DELETE", "nodes/gpu-01")[1]["errors"][0]["sentence"]
    )
    Replica.objects.filter(pk=replica.pk).update(state="stopped")
    Claim.objects.all().delete()
    assert api("DELETE", "nodes/gpu-01?why=sold") == (204, None)
    assert not Node.objects.exists()
    event = Event.objects.get(verb="remove")
    assert (event.kind, event.subject, event.why, event.by) == ("node", "gpu-01", "sold", "alice")
    assert api("DELETE", "nodes/gpu-01")[0] == 404


@pytest.mark.django_db
def test_a_node_that_runs_what_nobody_accounts_for_is_not_removed_under_it() -> None:
    node = a_node()
    node.orphans.create(replica="7a1b3c4d-0000-4000-8000-000000000000", why="its model is gone")
    with pytest.raises(CommandError, match="runs engines that nothing here accounts for; stop these orphans"):
        manage("node_remove", "gpu-01")
    Node.objects.update(seen_at=Now() - timedelta(days=1))
    assert manage("node_remove", "gpu-01").startswith("Removed gpu-01.")


@pytest.mark.django_db
def test_the_removal_of_a_lost_node_ends_what_it_had() -> None:
    model, node, other = a_model(), a_node(), a_node("gpu-02")
    lost, gang = (a_replica(model, node, state="lost", gpu=number) for number in (0, 1))
    gang.ranks.create(node=other, rank=1, state="ready")
    drain_node(node, by="alice", why="", door="command")
    before = Revision.current()
    identity = identity_of(node)
    assert manage("node_remove", "gpu-01", "--why", "burnt") == (
        "Removed gpu-01. If its agent is still on the machine, `uninstall` in its folder takes it off.\n"
    )
    lost.refresh_from_db()
    gang.refresh_from_db()
    assert (lost.state, lost.reason, lost.wanted) == ("stopped", "gpu-01 was removed", "stop")
    assert (gang.state, gang.wanted) == ("lost", "stop"), "its other rank is told to stop first"
    assert gang.revision == lost.revision > before
    assert list(Claim.objects.values_list("node__name", flat=True)) == []
    hint = Client().post(
        f"/api/nodes/{identity['node']}/hint", headers={"Authorization": f"Bearer {identity['token']}"}
    )
    assert hint.status_code == 401


@pytest.mark.django_db
def test_nodes_are_removed_in_the_admin(client: Client) -> None:
    empty, full = a_node("gpu-01"), a_node("gpu-02")
    a_replica(a_model(), full)
    cordon(empty, by="alice", why="", door="command")
    client.force_login(alice())
    chosen = {"action": "remove", "_selected_action": [empty.pk, full.pk]}
    asked = client.post("/admin/nodes/node/", chosen).content.decode()
    assert "Forget these?" in asked
    assert "tiny/default" in text_of(asked)
    told = client.post("/admin/nodes/node/", chosen | {"confirmed": "yes", "why": "sold"}, follow=True)
    said = text_of(told.content.decode())
    assert "1 of 2 nodes removed." in said
    assert "The node gpu-02 has 1 replica; drain it first" in said
    assert [node.name for node in Node.objects.all()] == ["gpu-02"]


# --- hints ------------------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_a_hint_wants_the_nodes_own_token() -> None:
    one, identity = register_node("gpu-01", ADDRESS, by="ann", door="command")
    _, other = register_node("gpu-02", ADDRESS, by="ann", door="command")
    path = f"/api/nodes/{one.uuid}/hint"
    for text, status in ((identity["token"], 204), (other["token"], 401), ("", 401)):
        assert Client().post(path, headers={"Authorization": f"Bearer {text}"}).status_code == status
    assert Client().get(path, headers={"Authorization": f"Bearer {identity['token']}"}).status_code == 405
    Node.objects.filter(pk=one.pk).update(token_generation=2)
    assert Client().post(path, headers={"Authorization": f"Bearer {identity['token']}"}).status_code == 401


HINTS = """
import threading, django
django.setup()
from nodes.tasks import hint
for _ in range(50):
    hint()
for each in threading.enumerate():
    if isinstance(each, threading.Timer):
        each.join()
"""


@pytest.mark.one_database
def test_many_hints_at_once_are_a_look_now_and_one_later(tmp_path: Path) -> None:
    environment = {**os.environ, "LLMGW_VAR": str(tmp_path), "DJANGO_SETTINGS_MODULE": "llmgw.settings"}
    environment.pop("REDIS_URL", None)
    done = subprocess.run(
        [sys.executable, "-c", HINTS], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "broker").rglob("*.msg"))) == 2
