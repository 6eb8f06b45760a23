"""What others changed, in the admin: forms that were opened before somebody saved, and the history."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.contrib.auth.models import Permission
from django.test import Client

from catalog.actions import edit_model
from catalog.models import Event, Model
from nodes.actions import stop_replica
from tests.cast import PROFILE, a_model, a_node, a_replica, alice, edited, model_form, nobody_is_asked, viola
from tests.pages import as_shown, change, form_of, page, text_of

pytestmark = [pytest.mark.django_db, pytest.mark.one_database]


@pytest.fixture
def admin(client: Client) -> Client:
    client.force_login(alice())
    return client


def bob_saves(form: dict[str, Any], *, name: str = "tiny", why: str = "") -> None:
    common: dict[str, Any] = {"ask_paths": nobody_is_asked, "after_change": int}
    edit_model(name, form, by="shell:bob", why=why, door="command", **common)


# --- forms of before ------------------------------------------------------------------------------


def test_a_form_of_before_somebody_saved_is_refused_with_what_they_changed(admin: Client) -> None:
    model = a_model(profiles=[PROFILE, PROFILE | {"name": "wide", "tp": 2}])
    opened = form_of(admin, change(model)) | {"description": "mine", "why": "for the trial"}
    theirs = model_form(profiles=[PROFILE | {"priority": 3, "env": {"A": "1"}}], scaling={"max": 1})
    bob_saves(theirs, why="it was slow")

    answer = admin.post(change(model), opened)
    assert answer.status_code == 200
    said = text_of(answer.content.decode())
    assert "Changed since you opened this page" in said
    assert re.search(r"\b\d s ago [\d: -]+ shell:bob command edit model tiny it was slow", said), said
    assert "scaling max=2 min=1 max=1" in said
    assert "profile default: priority not set 3" in said
    assert "profile default: env not set A=1" in said
    assert "profile wide there removed" in said
    assert Model.objects.get(pk=model.pk).spec.description == ""
    form = answer.context["adminform"].form
    assert [form[name].value() for name in ("description", "why")] == ["mine", "for the trial"]

    assert admin.post(change(model), as_shown(answer)).status_code == 302
    spec = Model.objects.get(pk=model.pk).spec
    assert (spec.description, [profile.name for profile in spec.profiles]) == ("mine", ["default", "wide"])


def test_a_second_tab_of_the_same_person_is_somebody_else_too(admin: Client) -> None:
    model = a_model()
    first, second = (form_of(admin, change(model)) | {"description": tab} for tab in ("one", "two"))
    assert admin.post(change(model), first).status_code == 302
    assert "was changed by alice since you read it" in text_of(
        admin.post(change(model), second).content.decode()
    )
    assert Model.objects.get(pk=model.pk).description == "one"


def test_what_is_changed_while_the_difference_is_read_is_shown_too(admin: Client) -> None:
    model = a_model()
    opened = form_of(admin, change(model)) | {"description": "mine"}
    bob_saves(model_form(description="bob's first"))
    shown = as_shown(admin.post(change(model), opened))
    bob_saves(model_form(description="bob's second"))
    answer = admin.post(change(model), shown)
    assert "bob's first bob's second" in text_of(answer.content.decode()).replace("&#x27;", "'")
    assert Model.objects.get(pk=model.pk).description == "bob's second"


@pytest.mark.parametrize("revision", ["", "one", "-1", "9" * 40, "\u0661"])
def test_a_form_that_does_not_say_what_was_read_saves_nothing(admin: Client, revision: str) -> None:
    model = a_model()
    sent = form_of(admin, change(model)) | {"revision": revision, "description": "mine"}
    assert "since you read it" in text_of(admin.post(change(model), sent).content.decode())
    assert Model.objects.get(pk=model.pk).description == ""


def test_a_secret_that_somebody_changed_is_not_shown_in_the_difference(admin: Client) -> None:
    model = a_model(profiles=[PROFILE | {"env": {"HF_TOKEN": "abracadabra"}}])
    opened = form_of(admin, change(model))
    bob_saves(model_form(profiles=[PROFILE | {"env": {"HF_TOKEN": "open sesame"}}]))
    html = admin.post(change(model), opened).content.decode()
    assert "profile default: env HF_TOKEN=(hidden) HF_TOKEN=(hidden)" in text_of(html)
    assert "abracadabra" not in html
    assert "open sesame" not in html


def test_a_history_says_who_when_why_and_through_which_door_and_survives_a_rename(admin: Client) -> None:
    model = a_model("before", context_length=4096)
    bob_saves(model_form("after", context_length=8192), name="before", why="a better name")
    a_model("before")
    said = text_of(page(admin, f"/admin/catalog/model/{model.pk}/history/"))
    assert re.search(r"\d s ago [\d: -]+ shell:bob command edit model after a better name", said), said
    assert "name before after" in said
    assert "context_length 4096 8192" in said
    assert said.count("add model before") == 1


def test_events_of_a_time_before_they_had_a_key_are_found_by_the_name(admin: Client) -> None:
    model = a_model()
    Event.objects.filter(subject="tiny").update(subject_key="")
    assert "add model tiny" in text_of(page(admin, f"/admin/catalog/model/{model.pk}/history/"))


def test_a_long_history_is_read_page_by_page(admin: Client) -> None:
    model = a_model()
    common = {"kind": "model", "subject": "tiny", "subject_key": model.pk, "verb": "edit"}
    Event.objects.bulk_create(Event(**common, why=f"reason {number}") for number in range(60))
    path = f"/admin/catalog/model/{model.pk}/history/"
    assert "61 events" in text_of(page(admin, path))
    assert "reason 59" in page(admin, path)
    assert "reason 59" not in page(admin, path + "?p=2")
    assert "add model tiny" in text_of(page(admin, path + "?p=99999"))


def test_an_event_of_a_replica_tells_what_it_runs_and_leads_to_it(admin: Client) -> None:
    replica = a_replica(a_model(), a_node())
    stop_replica(replica, by="bob", why="it is old", door="command")
    event = Event.objects.get(kind="replica")
    called = str(replica)
    assert f"stop replica {called}" in text_of(page(admin, "/admin/catalog/event/"))
    assert f"stop replica {called}" in text_of(page(admin, f"/admin/nodes/replica/{replica.pk}/history/"))
    link = f'<a href="/admin/nodes/replica/{replica.pk}/change/">{called}</a>'
    assert link in page(admin, f"/admin/catalog/event/{event.pk}/change/")
    replica.delete()
    assert link not in page(admin, f"/admin/catalog/event/{event.pk}/change/")
    assert called in page(admin, f"/admin/catalog/event/{event.pk}/change/")


def test_the_history_is_for_those_who_may_see_events(client: Client) -> None:
    model, looker = a_model(), viola()
    looker.user_permissions.remove(Permission.objects.get(codename="view_event"))
    client.force_login(looker)
    assert client.get(f"/admin/catalog/model/{model.pk}/history/").status_code == 403


def test_the_history_of_a_model_is_its_events(admin: Client) -> None:
    model = a_model()
    edited(model, tp=2)
    a_model("other")
    history = page(admin, f"/admin/catalog/model/{model.pk}/history/")
    assert re.findall(r"\w+ model \w+", text_of(history)) == ["edit model tiny", "add model tiny"]
