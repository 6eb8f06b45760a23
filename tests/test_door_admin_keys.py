"""API keys in the admin: made for somebody, shown once, ended, revoked."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client

from catalog.actions import mint_key
from catalog.keys import KeyText
from catalog.models import Event, Key
from tests.cast import alice, viola
from tests.pages import page

pytestmark = [pytest.mark.django_db, pytest.mark.one_database]

ADD = "/admin/catalog/key/add/"


@pytest.fixture
def admin(client: Client) -> Client:
    client.force_login(alice())
    return client


def test_a_new_key_is_shown_once(admin: Client) -> None:
    user = pk_of("alice")
    answer = admin.post(ADD, {"name": "laptop", "user": user, "scope": "manage"})
    text = re.search(r"llmgw_[0-9A-Za-z_]+", answer.content.decode())
    assert text is not None
    assert KeyText.parse(text[0]) is not None
    assert "no-store" in answer["Cache-Control"]
    key = Key.objects.get()
    assert text[0] not in page(admin, "/admin/catalog/key/")
    assert text[0] not in page(admin, f"/admin/catalog/key/{key.pk}/change/")


def test_a_key_is_ones_own_unless_somebody_else_is_chosen(admin: Client) -> None:
    assert admin.get(ADD).context["adminform"].form["user"].value() == pk_of("alice")
    assert "_addanother" not in page(admin, ADD)
    assert "_continue" not in page(admin, ADD)
    assert "Save shows the key, once." in page(admin, ADD)


def test_a_key_that_is_refused_is_said_at_its_field(admin: Client) -> None:
    answer = admin.post(ADD, {"name": "a\u202eb", "user": pk_of("alice"), "scope": "manage"})
    assert answer.context["adminform"].form.errors == {
        "name": ["a key needs a name of at most 200 visible characters, telling what it is for"]
    }
    assert not Key.objects.exists()


def test_a_key_ends_when_it_was_said_to(admin: Client) -> None:
    wanted = {
        "name": "ci",
        "user": pk_of("alice"),
        "scope": "inference",
        "expires_in": "720h",
        "why": "trial",
    }
    admin.post(ADD, wanted)
    key = Key.objects.get()
    assert key.expires_at is not None
    assert key.expires_at - key.created_at == timedelta(days=30)
    assert Event.objects.get(verb="mint").why == "trial"
    assert "expires_in" not in page(admin, f"/admin/catalog/key/{key.pk}/change/")


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("30d", "expires_in must be a duration in h, m, s or ms, such as 1h30m, 1.5s or 300ms"),
        ("-1h", "expires_in must be above 0, such as 720h; leave it out for a key that lasts"),
    ],
    ids=["days", "a time before"],
)
def test_an_end_of_a_key_that_cannot_be_is_said_at_its_field(admin: Client, typed: str, says: str) -> None:
    wanted = {"name": "ci", "user": pk_of("alice"), "scope": "inference", "expires_in": typed}
    answer = admin.post(ADD, wanted)
    assert answer.context["adminform"].form.errors == {"expires_in": [says]}
    assert not Key.objects.exists()


def test_a_key_is_revoked_after_asking(admin: Client) -> None:
    admin.post(ADD, {"name": "laptop", "user": pk_of("alice"), "scope": "manage"})
    key = Key.objects.get()
    chosen = {"action": "revoke", "_selected_action": [key.pk]}
    assert "Refuse these keys" in admin.post("/admin/catalog/key/", chosen).content.decode()
    key.refresh_from_db()
    assert key.revoked_at is None
    admin.post("/admin/catalog/key/", chosen | {"confirmed": "yes", "why": "lost"})
    key.refresh_from_db()
    assert key.revoked_at is not None
    assert Event.objects.get(verb="revoke").why == "lost"


def test_who_is_no_superuser_makes_keys_for_themselves_alone(client: Client) -> None:
    other, maker = alice(), viola()
    maker.user_permissions.add(*Permission.objects.filter(codename__in=["add_key", "change_key"]))
    client.force_login(maker)
    refused = client.post(ADD, {"name": "k", "user": other.pk, "scope": "manage"})
    assert refused.status_code == 200
    assert not Key.objects.exists()
    client.post(ADD, {"name": "k", "user": maker.pk, "scope": "manage"})
    assert Key.objects.get().user == maker


def test_events_on_keys_of_others_are_for_those_who_may_see_the_keys(client: Client) -> None:
    viewer, owner = viola(), alice()
    mint_key("theirs", user=owner, scope="inference", by="alice", door="command", why="a secret project")
    mint_key("hers", user=viewer, scope="inference", by="viola", door="command", why="a laptop")
    client.force_login(viewer)
    theirs, hers = (f"/admin/catalog/event/{event.pk}/change/" for event in Event.objects.order_by("id"))
    assert "a secret project" not in page(client, "/admin/catalog/event/")
    assert client.get(theirs).status_code == 302  # as if it were not there
    assert "a laptop" in page(client, hers)
    client.force_login(owner)
    assert "a secret project" in page(client, theirs)


def pk_of(name: str) -> int:
    return User.objects.get(username=name).pk
