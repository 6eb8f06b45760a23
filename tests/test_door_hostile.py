"""What no page offers and somebody sends all the same: no door falls over."""

from __future__ import annotations

import os
import re
import sys
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test import Client

from catalog.actions import edit_model, mint_key
from catalog.models import Event, Key, Model
from nodes.models import Node, Orphan, Unplaced
from tests.cast import PROFILE, a_model, a_node, a_replica, alice, nobody_is_asked
from tests.pages import as_shown

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
    for path in (
        f"catalog/key/{NUL}/history/",
        f"catalog/model/{HUGE}/history/",
        "nodes/replica/x/history/",
        f"catalog/model/{HUGE}/why/",
        f"catalog/model/{NUL}/why/",
    ):
        assert admin.get(f"/admin/{path}").status_code == 302


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


@pytest.mark.one_database
@pytest.mark.parametrize(
    "words",
    [
        ("model_remove", NOT_UTF8),
        ("model_add", NOT_UTF8, "--source", "sim/x", "--engine", "sim", "--gpu-class", "sim"),
        ("model_add", "m", "--source", NOT_UTF8, "--engine", "sim", "--gpu-class", "sim"),
        ("node_cordon", NOT_UTF8),
        ("node_uncordon", NOT_UTF8),
        ("node_drain", NOT_UTF8),
        ("replica_stop", NOT_UTF8),
        ("roll", NOT_UTF8),
        ("why", NOT_UTF8),
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


@pytest.mark.one_database
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


# --- hostile text, on every page ------------------------------------------------------------------

SCRIPT = "<script>alert('x')</script>"
MARKUP = f"<img src=x onerror=alert(1)></textarea>{SCRIPT}{{{{ 7|add:7 }}}}"
UNSEEN = "\x1b\u202e\x00\u2028"  # they begin a terminal command, turn a line around, end it
TEXT = f"{MARKUP}{UNSEEN}"

ADMIN_PAGES = [
    "/admin/",
    "/admin/catalog/model/",
    "/admin/catalog/model/add/",
    "/admin/catalog/model/{model}/change/",
    "/admin/catalog/model/{model}/history/",
    "/admin/catalog/model/{model}/delete/",
    "/admin/catalog/event/",
    "/admin/catalog/event/{event}/change/",
    "/admin/catalog/event/{event}/history/",
    "/admin/catalog/key/",
    "/admin/nodes/node/",
    "/admin/nodes/node/{node}/change/",
    "/admin/nodes/node/{node}/history/",
    "/admin/nodes/replica/?shown=all",
    "/admin/nodes/replica/{replica}/change/",
    "/admin/nodes/replica/{replica}/history/",
    "/admin/nodes/orphan/",
    "/admin/nodes/orphan/{orphan}/change/",
]


def a_hostile_world() -> dict[str, Any]:
    """Every text that somebody else wrote is hostile; the law keeps from names what cannot be seen."""
    profile = PROFILE | {"name": MARKUP, "args": [MARKUP], "env": {SCRIPT: MARKUP}, "gpu_class": MARKUP}
    fields = {"aliases": [f"alias {MARKUP}"], "description": MARKUP, "source": f"sim/{MARKUP}"}
    model = a_model(MARKUP, **fields, profiles=[profile | {"node_selector": {SCRIPT: MARKUP}}])
    common = {"by": "alice", "door": "command", "ask_paths": nobody_is_asked, "after_change": int}
    form = model.spec.as_text_dict() | {"description": f"now {MARKUP}", "scaling": {"min": 1, "max": 3}}
    edit_model(MARKUP, form, why=TEXT, **common)
    said = TEXT.replace("\0", "")
    facts = {"also": [said], "newest_commit": said}
    Model.objects.update(
        source_state="refuse", source_sentence=said, source_skipped_by=MARKUP, source_facts=facts
    )
    Model.objects.update(source_revision=MARKUP[:64])
    node = a_node(MARKUP, problem=said, address="http://127.0.0.1:9", cordoned_why=said, is_cordoned=True)
    replica = a_replica(model, node, "failed", reason=said, wanted_why=said)
    a_replica(model, node, gpu=1, reason=said)
    replica.ranks.update(command=[said], reason=said)
    Unplaced.objects.create(model=model, missing=1, why=said)
    orphan = Orphan.objects.create(replica=replica.pk, node=node, why=said, launch={"model": said})
    event = Event.objects.get(verb="edit")
    Event.objects.filter(pk=event.pk).update(by=MARKUP)
    return {
        "model": model.pk, "node": node.pk, "replica": replica.pk, "orphan": orphan.pk, "event": event.pk
    }  # fmt: skip


def assert_harmless(html: str) -> None:
    assert "<img src=x" not in html
    assert "<script>alert" not in html
    assert "</textarea><script" not in html
    assert "14" not in re.findall(r"script&gt;(\d*)", html)  # what is shown is no template
    assert not [character for character in html if character in UNSEEN]


@pytest.mark.one_database
@pytest.mark.parametrize("path", ADMIN_PAGES)
def test_hostile_text_is_only_text(admin: Client, path: str) -> None:
    answer = admin.get(path.format(**a_hostile_world()))
    assert answer.status_code == 200
    html = answer.content.decode()
    assert_harmless(html)
    if not path.endswith("/add/") and "/key/" not in path:
        assert "&lt;img src=x" in html


@pytest.mark.one_database
@pytest.mark.parametrize("action", ["check_sources", "pin", "turn_off", "remove"])
def test_hostile_text_is_only_text_where_an_action_is_confirmed(admin: Client, action: str) -> None:
    world = a_hostile_world()
    sent = {"action": action, "_selected_action": [world["model"]]}
    html = admin.post("/admin/catalog/model/", sent).content.decode()
    assert "&lt;img src=x" in html
    assert_harmless(html)


@pytest.mark.one_database
def test_hostile_text_is_only_text_in_a_difference_and_beside_a_field(admin: Client) -> None:
    world = a_hostile_world()
    path = f"/admin/catalog/model/{world['model']}/change/"
    sent = as_shown(admin.get(path)) | {"revision": "1", "description": MARKUP, "name": f"{MARKUP}2"}
    html = admin.post(path, sent).content.decode()
    assert "Changed since you opened this page" in html
    assert_harmless(html)
    sent |= {"revision": Model.objects.get().revision, "scaling_min": MARKUP, "profiles-0-engine": MARKUP}
    answer = admin.post(path, sent)
    assert answer.context["adminform"].form.errors
    assert_harmless(answer.content.decode())


def test_a_search_finds_what_looks_like_markup(admin: Client) -> None:
    a_model("<b>bold</b>")
    html: Any = admin.get("/admin/catalog/model/", {"q": "<b>"}).content.decode()
    assert "&lt;b&gt;bold&lt;/b&gt;" in html
    assert "<b>bold" not in html
