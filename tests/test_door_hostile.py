"""What no page offers and somebody sends all the same: no door falls over."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test import Client

from catalog.actions import mint_key
from catalog.models import Event, Key, Model
from nodes.models import Node
from tests.cast import a_model, a_node, a_replica, alice

pytestmark = pytest.mark.django_db

NUL, HUGE = "%00", "9" * 30
NOT_UTF8 = os.fsdecode(b"\xff")  # as an argument of a shell arrives


@pytest.fixture
def admin(client: Client) -> Client:
    client.force_login(alice())
    return client


@pytest.fixture
def key() -> Key:
    owner = alice()
    return mint_key("laptop", user=owner, scope="manage", by="alice", door="command")[0]


@pytest.mark.parametrize(
    "query",
    [
        f"catalog/model/?source_state__exact={NUL}",
        f"catalog/event/?kind={NUL}",
        f"catalog/event/?subject={NUL}",
        f"catalog/event/?q={NUL}",
        f"catalog/key/?scope__exact={NUL}",
        f"nodes/replica/?state__exact={NUL}",
        f"nodes/replica/?model__id__exact={HUGE}",
        f"nodes/replica/?ranks__node__id__exact={HUGE}",
        "nodes/node/?p=99999",
    ],
)
def test_a_list_that_is_asked_for_the_impossible_shows(admin: Client, query: str) -> None:
    assert admin.get(f"/admin/{query}", follow=True).status_code == 200


def test_a_row_whose_id_is_none_is_not_there(admin: Client) -> None:
    for path in (f"catalog/key/{NUL}/change/", f"catalog/model/{HUGE}/change/", "nodes/replica/x/change/"):
        assert admin.get(f"/admin/{path}").status_code == 302  # to the first page, with a message
    for path in (f"catalog/key/{NUL}/history/", f"catalog/model/{HUGE}/history/", "nodes/replica/x/history/"):
        assert admin.get(f"/admin/{path}").status_code == 404


@pytest.mark.parametrize("chosen", ["\0", "x", "-1", HUGE])
@pytest.mark.parametrize(
    ("path", "action"),
    [("catalog/model", "remove"), ("nodes/replica", "stop"), ("nodes/node", "cordon")],
)
def test_an_action_on_what_was_never_listed_does_nothing(
    admin: Client, path: str, action: str, chosen: str
) -> None:
    a_replica(a_model(), a_node())
    sent = {"action": action, "_selected_action": [chosen], "confirmed": "yes"}
    answer = admin.post(f"/admin/{path}/", sent, follow=True)
    assert answer.status_code == 200
    assert (Model.objects.count(), Node.objects.filter(is_cordoned=True).count()) == (1, 0)


def test_a_key_that_was_never_listed_is_not_revoked(client: Client, key: Key) -> None:
    client.force_login(key.user)
    sent = {"action": "revoke", "_selected_action": ["\0"], "confirmed": "yes"}
    answer = client.post("/admin/catalog/key/", sent, follow=True)
    assert "What was chosen is not in this list; choose again." in answer.content.decode()
    key.refresh_from_db()
    assert key.revoked_at is None


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "\u202e", ""], ids=["long", "NUL", "turned", "empty"])
def test_a_login_of_nobody_is_refused(client: Client, name: str) -> None:
    answer = client.post("/admin/login/", {"username": name, "password": "x"})
    assert answer.status_code == 200
    assert answer.context["form"].errors


def test_a_reason_with_a_nul_is_kept_without_it(admin: Client) -> None:
    replica = a_replica(a_model(), a_node())
    for path, action, pk in (("node", "cordon", Node.objects.get().pk), ("replica", "stop", replica.pk)):
        sent = {"action": action, "_selected_action": [pk], "confirmed": "yes", "why": "w\0y"}
        admin.post(f"/admin/nodes/{path}/", sent)
    replica.refresh_from_db()
    assert (Node.objects.get().cordoned_why, replica.wanted_why) == ("wy", "wy")
    assert {event.why for event in Event.objects.exclude(kind="model")} == {"wy"}


@pytest.mark.parametrize(
    "words",
    [
        ("model_remove", NOT_UTF8),
        ("model_add", NOT_UTF8, "--source", "sim/x", "--engine", "sim", "--gpu-class", "sim"),
        ("model_add", "m", "--source", NOT_UTF8, "--engine", "sim", "--gpu-class", "sim"),
        ("node_cordon", NOT_UTF8),
        ("node_uncordon", NOT_UTF8),
        ("node_add", NOT_UTF8, "--address", "http://a:1", "--write", "never-written.json"),
        ("key_create", "laptop", "--user", NOT_UTF8),
        ("key_create", NOT_UTF8, "--user", "alice"),
        ("key_revoke", NOT_UTF8),
        ("replicas", "--model", NOT_UTF8),
    ],
    ids=lambda words: words[0],
)
def test_bytes_that_are_no_text_are_refused_in_a_sentence(words: tuple[str, ...]) -> None:
    alice()
    with pytest.raises(CommandError) as no:
        call_command(*words, stdout=sys.stdout)
    assert str(no.value).endswith((".", "remove it", "spelling", "what it is for"))


def test_a_reason_that_is_no_text_is_kept_visibly() -> None:
    a_node()
    call_command("node_cordon", "gpu-01", "--why", f"new {NOT_UTF8} fans", stdout=sys.stdout)
    assert Node.objects.get().cordoned_why == Event.objects.get().why == "new \\udcff fans"


@pytest.mark.parametrize(
    ("fields", "host"),
    [
        pytest.param({"why": "x" * 3_000_000}, "localhost", id="a form of three megabytes"),
        pytest.param({f"field-{number}": "" for number in range(20_001)}, "localhost", id="too many fields"),
        pytest.param({}, "elsewhere.example.org", id="a host of another name"),
    ],
)
def test_a_request_that_cannot_be_read_is_told_what_to_do(
    admin: Client, fields: dict[str, str], host: str
) -> None:
    answer = admin.post("/admin/catalog/model/add/", fields, headers={"Host": host})
    assert answer.status_code == 400
    assert "Send less; or let whoever runs llmgw add the host" in answer.content.decode()


def test_a_search_finds_what_looks_like_markup(admin: Client) -> None:
    a_model("<b>bold</b>")
    html: Any = admin.get("/admin/catalog/model/", {"q": "<b>"}).content.decode()
    assert "&lt;b&gt;bold&lt;/b&gt;" in html
    assert "<b>bold" not in html
