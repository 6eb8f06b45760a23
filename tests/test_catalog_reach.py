"""What a key opens: one law, whichever door says it; no more than who asks for it; never all for none."""

from __future__ import annotations

import importlib
import io
import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from django.apps import apps
from django.contrib.auth.models import Permission, User
from django.core.management import CommandError, call_command
from django.test import Client
from django.utils.html import escape
from hypothesis import given
from hypothesis import strategies as st

from catalog.actions import (
    ChangedSince,
    edit_key,
    import_catalog,
    mint_key,
    patch_model,
    remove_model,
    remove_models,
    revoke_key,
)
from catalog.keys import KeyText
from catalog.models import Event, Key, Model, Revision
from catalog.parts import LIMIT_KEYS, Limits
from catalog.reach import Reach
from catalog.reading import INT_LIMIT, CatalogError
from catalog.typed import write_list
from tests.cast import a_model, alice, nobody_is_asked, viola
from tests.pages import page
from tests.rest_client import Api, field, sentence

REACHES = st.builds(
    Reach,
    st.none() | st.lists(st.sampled_from(["a", "b", "c"]), unique=True).map(sorted).map(tuple),
    st.builds(Limits, *[st.integers(0, 3)] * 3),
    st.sampled_from(["", "x", "y"]),
)

# --- the law --------------------------------------------------------------------------------------


@given(REACHES)
def test_a_reach_reads_back_as_it_was_written(reach: Reach) -> None:
    assert Reach.load(json.loads(json.dumps(reach.as_dict()))) == reach


@given(REACHES, REACHES, REACHES)
def test_no_key_gets_further_by_way_of_another(first: Reach, second: Reach, third: Reach) -> None:
    assert not first.faults_beyond(first)
    assert not first.faults_beyond(Reach())
    if not second.faults_beyond(first) and not third.faults_beyond(second):
        assert not third.faults_beyond(first)


@given(REACHES, REACHES)
def test_what_is_within_opens_no_model_and_no_request_more(inner: Reach, outer: Reach) -> None:
    if inner.is_within(outer):
        assert (
            outer.models is None or set(inner.models or ["more"]) <= set(outer.models) or inner.models == ()
        )
        for key in LIMIT_KEYS:
            own, limit = getattr(inner.limits, key), getattr(outer.limits, key)
            assert not limit or 0 < own <= limit
        assert inner.cache_scope == outer.cache_scope


# --- the doors ------------------------------------------------------------------------------------

Form = Mapping[str, Any]
Door = Callable[[Client, Form], list[str]]


def _of_page(answer: Any) -> list[str]:
    if answer.status_code == 302 or "shown-once" in answer.content.decode():
        return []
    errors = answer.context["adminform"].form.errors
    said = [each for sentences in errors.values() for each in sentences]
    assert all(escape(each) in answer.content.decode() for each in said)
    return said


def _typed(form: Form) -> dict[str, Any]:
    told = {key: value for key, value in form.items() if key != "models"}
    if form.get("models") is not None:
        told |= {"only_these": "on", "models": write_list(form["models"])}
    return told


def admin_adds(client: Client, form: Form) -> list[str]:
    named = {"name": "k", "user": User.objects.get(username="alice").pk, "scope": "inference"}
    return _of_page(client.post("/admin/catalog/key/add/", named | _typed(form)))


def admin_edits(client: Client, form: Form) -> list[str]:
    key = Key.objects.get()
    sent = {"revision": key.revision} | _typed(form)
    return _of_page(client.post(f"/admin/catalog/key/{key.pk}/change/", sent))


def _rest(answer: Any) -> list[str]:
    told = answer.json()
    return [] if answer.status_code in (200, 201) else [error["sentence"] for error in told["errors"]]


def rest_adds(client: Client, form: Form) -> list[str]:
    return _rest(client.post("/api/keys", {"name": "k"} | dict(form), content_type="application/json"))


def rest_edits(client: Client, form: Form) -> list[str]:
    where = f"/api/keys/{Key.objects.get().pk}"
    return _rest(client.patch(where, dict(form), content_type="application/json"))


def _words(form: Form) -> list[str]:
    words = [f"--{key.replace('_', '-')}={value}" for key, value in form.items() if key != "models"]
    return [*words, *(["--models", *form["models"]] if "models" in form else [])]


def _manage(*words: str) -> list[str]:
    try:
        call_command(*words, stdout=io.StringIO(), stderr=io.StringIO())
    except CommandError as no:
        return str(no).splitlines()
    return []


def command_adds(client: Client, form: Form) -> list[str]:
    return _manage("key_create", "k", "--user", "alice", *_words(form))


def command_edits(client: Client, form: Form) -> list[str]:
    return _manage("key_edit", Key.objects.get().pk, *_words(form))


ADDING: dict[str, Door] = {"the admin adds": admin_adds, "POST": rest_adds, "key_create": command_adds}
EDITING: dict[str, Door] = {"the admin edits": admin_edits, "PATCH": rest_edits, "key_edit": command_edits}
DOORS = ADDING | EDITING

WHOLE: Form = {
    "models": ["tiny", "biggest"],
    "requests_per_minute": 60,
    "tokens_per_minute": 9_000,
    "concurrency": 4,
    "cache_scope": "team a",
}
KEPT = Reach(("big", "tiny"), Limits(60, 9_000, 4), "team a")


@pytest.fixture
def catalog() -> None:
    a_model("tiny")
    a_model("big", aliases=["biggest"])


@pytest.fixture
def admin(client: Client, catalog: None) -> Client:
    client.force_login(alice())
    return client


def a_key(**reach: Any) -> Key:
    user = User.objects.filter(username="alice").first() or alice()
    return mint_key("k", user=user, scope="inference", by="alice", door="command", reach=reach)[0]


def reach() -> Reach:
    return Key.objects.get().reach


BAD = [
    pytest.param({"models": ["tinny"]}, 'the key: model "tinny" is not in the catalog', id="no such model"),
    pytest.param({"models": ["a\u200bb"]}, "holds control or invisible characters", id="an unseen name"),
    pytest.param(
        {"concurrency": -1},
        "the key: concurrency cannot be below 0, and is -1; use 0 for none",
        id="below none",
    ),
    pytest.param(
        {"requests_per_minute": "many"},
        "the key: requests_per_minute must be a whole number, not a text",
        id="a word for a number",
    ),
    pytest.param(
        {"tokens_per_minute": INT_LIMIT + 1},
        f"the key: tokens_per_minute is out of range; at most {INT_LIMIT} is possible",
        id="beyond its column",
    ),
    pytest.param({"cache_scope": "x" * 201}, "cache_scope is longer than 200 characters", id="a long scope"),
    pytest.param({"cache_scope": "a\u202eb"}, "holds control or invisible", id="a scope that turns around"),
]


@pytest.mark.django_db
@pytest.mark.one_database
@pytest.mark.parametrize(("form", "says"), BAD)
def test_every_door_says_the_same_and_saves_nothing(admin: Client, form: Form, says: str) -> None:
    first = rest_adds(admin, form)
    assert says in first[0]
    assert {name: door(admin, form) for name, door in ADDING.items()} == dict.fromkeys(ADDING, first)
    assert not Key.objects.exists()
    a_key(concurrency=1)
    before = list(Event.objects.values())
    assert {name: door(admin, form) for name, door in EDITING.items()} == dict.fromkeys(EDITING, first)
    assert (reach(), list(Event.objects.values())) == (Reach(limits=Limits(concurrency=1)), before)


@pytest.mark.django_db
@pytest.mark.one_database
@pytest.mark.parametrize("door", DOORS)
def test_every_door_says_what_a_key_opens(admin: Client, door: str) -> None:
    if door in EDITING:
        a_key()
    assert DOORS[door](admin, WHOLE) == []
    assert reach() == KEPT
    detail = Event.objects.latest("id").detail
    told = {each["field"]: each["now"] for each in detail.get("changed", ())} or detail
    assert {key: told[key] for key in WHOLE} == {**WHOLE, "models": ["big", "tiny"]}


@pytest.mark.django_db
@pytest.mark.one_database
def test_a_key_opens_every_model_unless_it_is_said_which(admin: Client) -> None:
    for door in ADDING.values():
        assert door(admin, {}) == []
    assert [key.reach for key in Key.objects.all()] == [Reach()] * len(ADDING)


@pytest.mark.django_db
@pytest.mark.one_database
@pytest.mark.parametrize(
    ("door", "form"),
    [
        ("the admin edits", {}),
        ("PATCH", dict.fromkeys(WHOLE)),
        ("key_edit", dict.fromkeys([*LIMIT_KEYS, "cache_scope"], "")),
    ],
)
def test_what_was_set_is_taken_back(admin: Client, door: str, form: Form) -> None:
    key = a_key(**WHOLE)
    assert EDITING[door](admin, form) == []
    if door == "key_edit":
        assert _manage("key_edit", key.pk, "--all-models") == []
    assert reach() == Reach()


@pytest.mark.django_db
@pytest.mark.one_database
@pytest.mark.parametrize("door", ["the admin adds", "POST", "the admin edits", "PATCH"])
def test_an_empty_list_is_refused_and_is_never_all(admin: Client, door: str) -> None:
    if door in EDITING:
        a_key(models=["tiny"])
    says = "the key: models names none, and it would open nothing; name one, or leave models out to open all"
    assert DOORS[door](admin, {"models": []}) == [says]
    assert [key.reach.models for key in Key.objects.all()] == [("tiny",)] * (door in EDITING)


@pytest.mark.django_db
@pytest.mark.one_database
def test_models_that_are_named_without_the_tick_are_no_key_for_all(admin: Client) -> None:
    named = {"name": "k", "user": User.objects.get().pk, "scope": "inference", "models": "tiny"}
    says = "models are named, and the key is to open every model; tick the box above, or name none"
    assert _of_page(admin.post("/admin/catalog/key/add/", named)) == [says]
    assert not Key.objects.exists()


@pytest.mark.django_db
@pytest.mark.one_database
def test_whatever_shows_a_key_shows_what_it_opens(admin: Client) -> None:
    key = a_key(**WHOLE)
    words = "60 requests a minute, 9000 tokens a minute, 4 at once"
    listed = page(admin, "/admin/catalog/key/")
    assert words in listed
    assert "big, tiny" in listed
    shown = admin.get(f"/admin/catalog/key/{key.pk}/change/").context["adminform"].form
    assert (shown["models"].value(), shown["only_these"].value()) == ("big\ntiny", True)
    told = {**WHOLE, "models": ["big", "tiny"]}
    got = admin.get(f"/api/keys/{key.pk}").json()
    assert {field: got[field] for field in WHOLE} == told
    assert admin.get("/api/keys").json()["results"] == [got]
    assert json.loads(_printed("key_list", "--json")) == [got]
    assert f"big, tiny; {words}; cache scope team a" in _printed("key_list")


def _printed(*words: str) -> str:
    told = io.StringIO()
    call_command(*words, stdout=told)
    return told.getvalue()


@pytest.mark.django_db
@pytest.mark.one_database
def test_key_edit_tells_what_it_changed(admin: Client) -> None:
    key = a_key(models=["tiny"], concurrency=2)
    assert _printed("key_edit", key.pk, "--models", "big", "--concurrency", "").splitlines() == [
        f"Changed {key.pk}:",
        "FIELD        WAS   IS NOW",
        "concurrency  2     not set",
        "models       tiny  big",
    ]
    assert _printed("key_edit", key.pk, "--models", "biggest") == f"Nothing of {key.pk} changes.\n"
    told = json.loads(_printed("key_edit", key.pk, "--cache-scope", "a", "--json"))
    assert (told["changed"], told["key"]["cache_scope"]) == (
        [{"field": "cache_scope", "was": None, "now": "a"}],
        "a",
    )
    assert _manage("key_edit", "nobody") == ['there is no key "nobody"; look at the list of keys']


# --- models come and go ---------------------------------------------------------------------------


@pytest.mark.django_db
@pytest.mark.one_database
def test_a_rename_keeps_a_model_in_the_list(catalog: None) -> None:
    a_key(models=["tiny"])
    call_command("model_edit", "tiny", "--name", "small", stdout=io.StringIO())
    assert reach().models == ("small",)


def _removed_by_verb() -> None:
    remove_model("tiny", by="alice", door="command", after_change=int)


def _removed_in_a_knot() -> None:
    edit: dict[str, Any] = {
        "by": "alice",
        "door": "command",
        "ask_paths": nobody_is_asked,
        "after_change": int,
    }
    for name, other in (("tiny", "big"), ("big", "tiny")):
        patch_model(name, {"fallbacks": [other]}, **edit)
    remove_models(["tiny", "big"], by="alice", door="admin", after_change=int)


def _removed_by_import() -> None:
    big = Model.objects.get(name="big").spec.as_dict()
    how: dict[str, Any] = {"ask_paths": nobody_is_asked, "after_change": int}
    import_catalog([big], prune=True, is_trial=False, is_sure=True, by="alice", door="command", **how)


@pytest.mark.django_db
@pytest.mark.one_database
@pytest.mark.parametrize(
    "remove",
    [
        pytest.param(_removed_by_verb, id="alone"),
        pytest.param(_removed_in_a_knot, id="with what falls back to it"),
        pytest.param(_removed_by_import, id="with a file"),
    ],
)
def test_a_key_whose_models_are_gone_opens_none(admin: Client, remove: Callable[[], None]) -> None:
    key = a_key(models=["tiny"])
    other = mint_key("o", user=key.user, scope="inference", by="alice", door="command")[0]
    remove()
    a_model("tiny")
    (key, other) = Key.objects.get(pk=key.pk), Key.objects.get(pk=other.pk)
    assert (key.reach.models, other.reach.models) == ((), None)
    assert other.revision < key.revision < Revision.current(), "whoever asks what is newer must hear of it"
    assert "no model" in page(admin, "/admin/catalog/key/")
    other.delete()
    assert admin_edits(admin, {"models": [], "concurrency": 3}) == []
    assert reach() == Reach((), Limits(concurrency=3))


# --- no more than who asks ------------------------------------------------------------------------


def _limited_api(**reach: Any) -> Api:
    return Api(User.objects.filter(username="alice").first() or alice(), reach=reach)


BEYOND = [
    pytest.param(
        {"models": ["tiny"]},
        {},
        "models",
        'which opens "tiny" alone; name models among those',
        id="all models",
    ),
    pytest.param(
        {"models": ["tiny"]},
        {"models": ["tiny", "biggest"]},
        "models",
        'which opens "tiny" alone; leave out "big"',
        id="one more model",
    ),
    pytest.param(
        {"requests_per_minute": 60},
        {"requests_per_minute": 61},
        "requests_per_minute",
        "whose requests_per_minute is 60; give one of 1 to 60",
        id="one request more",
    ),
    pytest.param(
        {"concurrency": 2}, {}, "concurrency", "whose concurrency is 2; give one of 1 to 2", id="no limit"
    ),
    pytest.param(
        {"cache_scope": "a"}, {"cache_scope": "b"}, "cache_scope", 'whose cache_scope is "a"; give the same',
        id="another's cache",
    ),
]  # fmt: skip


@pytest.mark.django_db
@pytest.mark.one_database
@pytest.mark.parametrize(("own", "asked", "where", "says"), BEYOND)
def test_a_key_asked_for_with_a_key_does_no_more_than_that(
    catalog: None, own: Form, asked: Form, where: str, says: str
) -> None:
    api = _limited_api(**own)
    other = a_key(
        models=["tiny"], concurrency=1, requests_per_minute=1, cache_scope=own.get("cache_scope", "")
    )
    answers = [
        api("POST", "keys", {"name": "k"} | dict(asked)),
        api("PATCH", f"keys/{other.pk}", {where: asked.get(where)}),
        api("PATCH", f"keys/{api.key.pk}", {where: asked.get(where)}),
    ]
    for answer in answers:
        assert field(answer) == (400, where, "range")
        assert sentence(answer)[1] == f"a key may do no more than the key that it is asked for with, {says}"
    assert Key.objects.count() == 2
    assert api("POST", "keys", {"name": "k"} | dict(own))[0] == 201


@pytest.mark.django_db
@pytest.mark.one_database
def test_a_key_is_bound_by_what_the_asking_one_is_now(catalog: None) -> None:
    api = _limited_api(concurrency=5)
    assert api("POST", "keys", {"name": "k", "concurrency": 5})[0] == 201
    edit_key(api.key.pk, {"concurrency": 4}, by="alice", door="command")
    assert field(api("POST", "keys", {"name": "k", "concurrency": 5}))[1] == "concurrency"


@pytest.mark.django_db
@pytest.mark.one_database
@pytest.mark.parametrize(
    ("patch", "is_narrower"),
    [
        ({"concurrency": 1}, True),
        ({"models": ["tiny"], "requests_per_minute": 5}, True),
        ({"concurrency": 3}, False),
        ({"concurrency": None}, False),
        ({"models": None}, False),
        ({"cache_scope": "b"}, False),
    ],
)
def test_who_may_make_no_keys_narrows_theirs_and_widens_none(
    catalog: None, patch: Form, is_narrower: bool
) -> None:
    user = viola()
    user.user_permissions.add(Permission.objects.get(codename="change_key"))
    told: dict[str, Any] = {"by": "alice", "door": "command"}
    stored = {"models": ["tiny", "big"], "concurrency": 2}
    key, _ = mint_key("k", user=user, scope="inference", reach=stored, **told)
    client = Client()
    client.force_login(user)
    said = rest_edits(client, patch)
    assert said == ([] if is_narrower else [
        "you may narrow what a key opens and nothing else, since you may make no keys; ask somebody who may"
    ])  # fmt: skip
    key.refresh_from_db()
    assert (key.reach != Reach(("big", "tiny"), Limits(concurrency=2))) is is_narrower


@pytest.mark.django_db
@pytest.mark.one_database
def test_a_key_of_another_is_not_there(catalog: None) -> None:
    key = a_key()
    user = viola()
    user.user_permissions.add(*Permission.objects.filter(codename__in=["change_key", "add_key"]))
    answer = Api(user)("PATCH", f"keys/{key.pk}", {"concurrency": 1})
    assert sentence(answer) == (404, f'there is no key "{key.pk}"; GET /api/keys lists them')
    assert not Event.objects.filter(verb="edit").exists()


# --- what others do meanwhile ---------------------------------------------------------------------


@pytest.mark.django_db
@pytest.mark.one_database
def test_an_edit_counts_as_a_change_and_one_that_changes_nothing_does_not(catalog: None) -> None:
    key = a_key()
    assert edit_key(key.pk, {"concurrency": 2}, by="bob", door="api", why="as agreed")
    revision = Key.objects.get().revision
    assert key.revision < revision == Revision.current()
    event = Event.objects.get(verb="edit")
    assert (event.kind, event.subject, event.by, event.why, event.revision) == (
        *("key", key.pk, "bob", "as agreed"),
        revision,
    )
    assert edit_key(key.pk, {"concurrency": 2}, by="bob", door="api") == []
    assert (Key.objects.get().revision, Event.objects.filter(verb="edit").count()) == (revision, 1)


@pytest.mark.django_db
@pytest.mark.one_database
def test_two_edits_of_different_fields_are_both_kept(catalog: None) -> None:
    key = a_key()
    edit_key(key.pk, {"concurrency": 2}, by="bob", door="api")
    edit_key(key.pk, {"models": ["tiny"]}, by="eve", door="api")
    assert reach() == Reach(("tiny",), Limits(concurrency=2))


@pytest.mark.django_db
@pytest.mark.one_database
def test_of_two_edits_of_one_version_one_is_told_what_the_other_did(admin: Client) -> None:
    key = a_key()
    told = admin.get(f"/api/keys/{key.pk}")
    edit_key(key.pk, {"concurrency": 2}, by="bob", door="api")
    says = f'key "{key.pk}" was changed by bob since you read it; read it again, and repeat the edit'
    headers = {"If-Match": told["ETag"]}
    answer = admin.patch(
        f"/api/keys/{key.pk}", {"concurrency": 9}, content_type="application/json", headers=headers
    )
    assert answer.status_code == 412
    assert answer.json()["errors"][0]["sentence"] == says
    assert [change["by"] for change in answer.json()["changes"]] == ["bob"]
    with pytest.raises(ChangedSince):
        edit_key(key.pk, {"concurrency": 9}, expected=key.revision, by="a", door="admin")
    sent = {"revision": key.revision, "concurrency": "9"}
    refused = admin.post(f"/admin/catalog/key/{key.pk}/change/", sent)
    assert says in refused.context["adminform"].form.errors["__all__"]
    assert "bob" in refused.content.decode()
    again = sent | {"revision": refused.context["adminform"].form["revision"].value()}
    assert admin.post(f"/admin/catalog/key/{key.pk}/change/", again).status_code == 302
    assert reach().limits.concurrency == 9


@pytest.mark.django_db
@pytest.mark.one_database
@pytest.mark.parametrize("door", EDITING)
def test_a_revoked_key_stays_as_it_was(admin: Client, door: str) -> None:
    key = a_key()
    revoke_key(key.pk, by="bob", door="api")
    if door == "the admin edits":
        sent = {"revision": Key.objects.get().revision, "concurrency": "1"}
        assert admin.post(f"/admin/catalog/key/{key.pk}/change/", sent).status_code == 403
        assert "every model" in page(admin, f"/admin/catalog/key/{key.pk}/change/")
    else:
        says = f'key "{key.pk}" was revoked, and opens nothing for good; make another'
        assert EDITING[door](admin, {"concurrency": 1}) == [says]
    assert reach() == Reach()


@pytest.mark.django_db
@pytest.mark.one_database
def test_a_model_that_goes_while_a_key_is_made_is_missed(catalog: None) -> None:
    _removed_by_verb()
    with pytest.raises(CatalogError, match=r'^the key: model "tiny" is not in the catalog'):
        a_key(models=["tiny"])
    assert not Key.objects.exists()


@pytest.mark.django_db
@pytest.mark.one_database
def test_the_secret_is_told_by_key_create_alone(catalog: None) -> None:
    alice()
    made = json.loads(_printed("key_create", "k", "--user", "alice", "--models", "tiny", "--json"))
    text = KeyText.parse(made["key"])
    assert text is not None
    assert made["models"] == ["tiny"]
    told = _printed("key_edit", made["id"], "--concurrency", "1", "--json") + _printed("key_list", "--json")
    assert text.secret not in told


@pytest.mark.django_db
@pytest.mark.one_database
@pytest.mark.parametrize(
    ("migration", "undo", "asked"),
    [
        pytest.param(
            "0007_scope_metrics", "revoke_what_would_open_v1", {"scope": "metrics"}, id="for /metrics"
        ),
        pytest.param(
            "0008_key_reach", "revoke_what_would_open_all", {"reach": {"models": ["tiny"]}}, id="of one model"
        ),
    ],
)
def test_before_older_code_comes_back_a_key_that_it_would_open_more_with_is_revoked(
    catalog: None, migration: str, undo: str, asked: Mapping[str, Any]
) -> None:
    told: dict[str, Any] = {"user": alice(), "by": "alice", "door": "command"}
    narrow = mint_key("narrow", **{"scope": "inference", **asked}, **told)[0]
    wide = mint_key("wide", scope="inference", **told)[0]
    getattr(importlib.import_module(f"catalog.migrations.{migration}"), undo)(apps, None)
    assert list(Key.objects.filter(revoked_at=None)) == [wide]
    assert Key.objects.get(pk=narrow.pk).revoked_at
