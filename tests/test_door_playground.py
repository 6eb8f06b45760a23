"""The playground's door: who gets a key there, what becomes of the last one, and what the page may hold."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import pytest
from django.conf import settings
from django.contrib.auth.models import User
from django.db import IntegrityError, transaction
from django.test import Client

from catalog.actions import mint_key, renew_playground_key, revoke_key
from catalog.keys import KeyText
from catalog.models import Event, Key
from tests.cast import a_model, alice, viola
from tests.pages import page
from tests.stage import Play, playing

pytestmark = pytest.mark.django_db

PAGE, KEY = "/admin/playground/", "/admin/playground/key/"
SCRIPTS = Path(__file__).parent.parent / "llmgw" / "static" / "llmgw"


@pytest.fixture
def admin(client: Client) -> Client:
    client.force_login(alice())
    return client


def renewed(client: Client) -> str:
    answer = client.post(KEY)
    assert "no-store" in answer["Cache-Control"]
    return str(answer.json()["key"])


def is_good(text: str) -> bool:
    key = KeyText.parse(text)
    assert key is not None
    return key.matches(Key.objects.get(pk=key.id).digest, settings.LLMGW_KEY_PEPPER)


def test_one_has_one_key_there_and_a_new_text_ends_the_last(admin: Client) -> None:
    first, second = renewed(admin), renewed(admin)
    assert not is_good(first)
    assert is_good(second)
    key = Key.objects.get()
    assert (key.name, key.user.username, key.scope) == ("playground of alice", "alice", "inference")
    assert key.expires_at
    assert timedelta(minutes=59) < key.expires_at - key.created_at < timedelta(hours=1, minutes=1)
    told = Event.objects.filter(kind="key").order_by("id").values_list("verb", "by", "door", "subject")
    assert [*told] == [("mint", "alice", "admin", key.pk), ("renew", "alice", "admin", key.pk)]


def test_what_it_was_limited_to_and_what_others_have_stays(admin: Client) -> None:
    renewed(admin)
    Key.objects.update(concurrency=2)
    other = Client()
    other.force_login(User.objects.create_superuser("bob"))
    renewed(other)
    mint_key(
        "playground of alice", user=User.objects.get(username="alice"), scope="inference", by="x", door="x"
    )
    renewed(admin)
    rows = Key.objects.order_by("created_at").values_list("user__username", "is_playground", "concurrency")
    assert [*rows] == [("alice", True, 2), ("bob", True, 0), ("alice", False, 0)]


def test_a_key_that_was_revoked_stays_so_and_there_is_another(admin: Client) -> None:
    renewed(admin)
    gone = Key.objects.get()
    revoke_key(gone.pk, by="bob", door="command")
    assert is_good(renewed(admin))
    gone.refresh_from_db()
    assert gone.revoked_at
    assert Key.objects.exclude(pk=gone.pk).get().revoked_at is None


def test_the_database_keeps_a_second_one_out() -> None:
    user = alice()
    renew_playground_key(user, by="alice", door="admin")
    with pytest.raises(IntegrityError), transaction.atomic():
        Key.objects.create(id="another0", name="x", user=user, digest="x", is_playground=True)


@pytest.mark.one_database
def test_a_key_is_given_to_no_other_site_and_by_no_link() -> None:
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(alice())
    assert strict.post(KEY).status_code == 403
    assert strict.get(KEY).status_code == 405
    token = re.search(r'name="csrfmiddlewaretoken" value="([^"]+)"', page(strict, PAGE))
    assert token
    assert strict.post(KEY, headers={"X-CSRFToken": token[1]}).status_code == 200


@pytest.mark.one_database
def test_the_page_holds_no_key_and_asks_for_none(admin: Client) -> None:
    text = renewed(admin)
    shown = page(admin, PAGE)
    assert text not in shown
    assert "llmgw_" not in shown
    assert 'data-origin="http://testserver"' in shown
    assert Key.objects.count() == 1


@pytest.mark.one_database
def test_who_may_make_no_key_finds_no_way_there(client: Client, admin: Client) -> None:
    model = a_model("a b/c")
    assert f'href="{PAGE}?model=a%20b%2Fc"' in page(admin, f"/admin/catalog/model/{model.pk}/change/")
    assert f'href="{PAGE}"' in page(admin, "/admin/")
    client.force_login(viola())
    assert client.get(PAGE).status_code == 403
    assert client.post(KEY).status_code == 403
    assert PAGE not in page(client, "/admin/") + page(client, f"/admin/catalog/model/{model.pk}/change/")
    assert not Key.objects.exists()


@pytest.mark.one_database
@pytest.mark.parametrize("word", ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("])
def test_its_scripts_make_no_markup_of_texts(word: str) -> None:
    scripts = [path.read_text() for path in SCRIPTS.glob("*.js")]
    assert len(scripts) >= 4
    assert not any(word in script for script in scripts)


@pytest.mark.django_db(transaction=True)
def test_a_renewed_key_is_known_to_the_gateway_at_once() -> None:
    """Its id is, from before: what opened a moment ago opens nothing, and the new text does."""
    with playing() as play:
        user = User.objects.get(username="ada")
        _, first = renew_playground_key(user, by="ada", door="admin")
        assert status(play, first) == 200
        _, second = renew_playground_key(user, by="ada", door="admin")
        assert status(play, second) == 200
        assert status(play, first) == 401


def status(play: Play, key: str) -> int:
    return play.send("GET", "/v1/models", Authorization=f"Bearer {key}").status
