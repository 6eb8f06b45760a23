"""Models and keys in the admin: what the pages show, and that saving goes through the law."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from catalog.actions import edit_model
from catalog.hiding import HIDDEN
from catalog.keys import KeyText
from catalog.models import Event, Key, Model, Profile
from nodes.models import Unplaced
from tests.cast import (
    PROFILE,
    a_model,
    a_node,
    a_replica,
    alice,
    edited,
    model_form,
    nobody_is_asked,
    viola,
)
from tests.hub_server import Hub, running_hub

pytestmark = pytest.mark.django_db

LIST, ADD = "/admin/catalog/model/", "/admin/catalog/model/add/"


@pytest.fixture
def admin(client: Client) -> Client:
    client.force_login(alice())
    return client


@pytest.fixture
def hub(settings: Any) -> Iterator[Hub]:
    with running_hub() as hub:
        settings.LLMGW_HUB_ENDPOINT = hub.url
        yield hub


def page(client: Client, path: str) -> str:
    answer = client.get(path)
    assert answer.status_code == 200, answer
    return answer.content.decode()


def change(model: Model) -> str:
    return f"/admin/catalog/model/{model.pk}/change/"


def form_of(client: Client, path: str) -> dict[str, Any]:
    return as_shown(client.get(path))


def as_shown(answer: Any) -> dict[str, Any]:
    """What a browser would send if this page were saved as it is."""
    form, formset = answer.context["adminform"].form, answer.context["inline_admin_formsets"][0].formset
    values = {
        bound.html_name: bound.value()
        for each in (form, formset.management_form, *formset.forms)
        for bound in each
    }
    return {name: value for name, value in values.items() if value is not None and value is not False}


def bob_saves(form: dict[str, Any], *, name: str = "tiny", why: str = "") -> None:
    common: dict[str, Any] = {"ask_paths": nobody_is_asked, "after_change": int}
    edit_model(name, form, by="shell:bob", why=why, door="command", **common)


def faults_in(answer: Any) -> Any:
    formset = answer.context["inline_admin_formsets"][0].formset
    return answer.context["adminform"].form.errors, formset.errors, formset.non_form_errors()


def text_of(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))


# --- the list -------------------------------------------------------------------------------------


def test_the_list_says_how_much_runs_and_what_is_stale(admin: Client) -> None:
    model, node = a_model(), a_node()
    a_replica(model, node, gpu=0)
    a_replica(model, node, "starting", gpu=1)
    edited(model, tp=2)
    said = text_of(page(admin, LIST))
    assert "kept running: 1 to 2" in said
    assert "1 of 2" in said
    assert "2 stale" in said


def test_the_list_says_why_a_want_is_unplaced(admin: Client) -> None:
    model = a_model()
    Unplaced.objects.create(model=model, missing=1, why="0 of 1 node: 1 lacks 1 free sim")
    said = text_of(page(admin, LIST))
    assert "0 of 1 node: 1 lacks 1 free sim" in said
    assert "0 of 1" in said


def test_a_mild_difference_is_not_counted_among_what_needs_a_person(admin: Client) -> None:
    model = a_model()
    a_replica(model, a_node())
    edited(model, weight=2)
    html = page(admin, LIST)
    assert '<span class="badge ">1 stale</span>' in html
    assert "no restart needed" in html


def test_the_list_takes_the_same_number_of_queries_however_long_it_is(admin: Client) -> None:
    def queries() -> int:
        with CaptureQueriesContext(connection) as seen:
            page(admin, LIST)
        return len(seen)

    node = a_node(gpus=40)
    a_replica(a_model("first"), node, gpu=0)
    page(admin, LIST)
    few = queries()
    for number in range(1, 12):
        a_replica(a_model(f"model-{number}", aliases=[f"alias-{number}"]), node, gpu=number)
    assert queries() == few


def test_hostile_names_are_shown_as_text(admin: Client) -> None:
    a_model("<script>alert(1)</script>", description="<img src=x>", source="sim/<b>")
    html = page(admin, LIST)
    assert "<script>alert" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html


# --- one model ------------------------------------------------------------------------------------


def test_a_model_is_added_with_what_was_typed(admin: Client) -> None:
    sent = form_of(admin, ADD) | {
        "name": "tiny",
        "aliases": "small\r\nlittle\r\n",
        "source": "sim/tiny",
        "scaling_min": "0",
        "scaling_max": "3",
        "idle_timeout": "1h30m",
        "tools": "on",
        "why": "for the trial",
        "profiles-0-name": "default",
        "profiles-0-engine": "sim",
        "profiles-0-gpu_class": "sim",
        "profiles-0-tp": "2",
        "profiles-0-startup_timeout": "90s",
        "profiles-0-args": "--ctx-size\r\n4096",
        "profiles-0-env": "A=1\r\nB=two words",
    }
    answer = admin.post(ADD, sent)
    assert (answer.status_code, answer.headers.get("Location")) == (302, LIST), faults_in(answer)
    spec = Model.objects.get(name="tiny").spec
    assert spec.as_text_dict() == {
        "name": "tiny",
        "aliases": ["small", "little"],
        "source": "sim/tiny",
        "profiles": [
            {
                "name": "default",
                "engine": "sim",
                "gpu_class": "sim",
                "tp": 2,
                "gpus_per_node": 2,
                "nodes": 1,
                "args": ["--ctx-size", "4096"],
                "env": {"A": "1", "B": "two words"},
                "weight": 1,
                "startup_timeout": "1m30s",
            }
        ],
        "scaling": {"max": 3, "idle_timeout": "1h30m"},
        "slo": {"TTFTp99": "0s", "TPOTp99": "0s"},
        "capabilities": {"tools": True},
    }
    event = Event.objects.get(verb="add", subject="tiny")
    assert (event.by, event.door, event.why) == ("alice", "admin", "for the trial")


def test_saving_a_page_as_it_is_changes_nothing(admin: Client) -> None:
    model = a_model(
        aliases=["small"],
        description="two\nlines",
        fallbacks=[a_model("other", scaling={"max": 1}).name],
        routing_profile="prefix",
        context_length=4096,
        slo={"TTFTp99": "300ms"},
        capabilities={"vision": True},
        profiles=[
            PROFILE
            | {"env": {"HF_TOKEN": "abc", "EMPTY": ""}, "args": ["", " spaced", "line\nend"], "weight": 0.5},
            PROFILE | {"name": "wide", "tp": 4, "pp": 2, "gpus_per_node": 8, "priority": -1},
        ],
    )
    was = model.spec
    answer = admin.post(change(model), form_of(admin, change(model)))
    assert answer.status_code == 302
    assert Model.objects.get(pk=model.pk).spec == was


def test_an_edit_keeps_what_it_does_not_touch(admin: Client) -> None:
    model = a_model(profiles=[PROFILE, PROFILE | {"name": "wide", "tp": 2}])
    kept = Profile.objects.get(model=model, name="default").pk
    sent = form_of(admin, change(model)) | {"profiles-1-tp": "4", "why": "wider"}
    assert admin.post(change(model), sent).status_code == 302
    assert Profile.objects.get(model=model, name="default").pk == kept
    assert Profile.objects.get(model=model, name="wide").gpus_per_node == 4


def test_a_profile_is_removed_by_its_tick(admin: Client) -> None:
    model = a_model(profiles=[PROFILE, PROFILE | {"name": "wide", "tp": 2}])
    sent = form_of(admin, change(model)) | {"profiles-0-DELETE": "on"}
    assert admin.post(change(model), sent).status_code == 302
    assert [profile.name for profile in Profile.objects.filter(model=model)] == ["wide"]


def test_a_model_of_many_profiles_and_aliases_is_saved(admin: Client) -> None:
    model = a_model(
        profiles=[PROFILE | {"name": f"p{number}"} for number in range(100)],
        aliases=[f"alias-{number}" for number in range(2_000)],
    )
    sent = form_of(admin, change(model)) | {"profiles-99-tp": "2", "description": "wide"}
    assert admin.post(change(model), sent).status_code == 302
    spec = Model.objects.get(pk=model.pk).spec
    assert (len(spec.profiles), spec.profiles[99].tp, len(spec.aliases)) == (100, 2, 2_000)


def test_a_refusal_is_shown_at_its_field_with_everything_typed_kept(admin: Client) -> None:
    model = a_model()
    sent = form_of(admin, change(model)) | {
        "scaling_min": "5",
        "profiles-0-engine": "warp",
        "profiles-0-args": "--x\n--y",
        "description": "half written",
    }
    answer = admin.post(change(model), sent)
    assert answer.status_code == 200
    form, formset = answer.context["adminform"].form, answer.context["inline_admin_formsets"][0].formset
    assert form.errors == {"scaling_max": ['model "tiny": scaling max 2 is below min 5']}
    assert list(formset.errors[0]) == ["engine"]
    assert 'engine "warp" is not known' in formset.errors[0]["engine"][0]
    assert form["description"].value() == "half written"
    assert formset.forms[0]["args"].value() == "--x\n--y"
    assert Model.objects.get(pk=model.pk).spec == model.spec


def test_a_line_that_cannot_be_read_is_shown_at_its_field(admin: Client) -> None:
    model = a_model()
    answer = admin.post(change(model), form_of(admin, change(model)) | {"profiles-0-env": "A=1\nB"})
    errors = answer.context["inline_admin_formsets"][0].formset.errors
    assert errors == [{"env": ["line 2 has no =; write NAME=value"]}]


def test_a_refused_source_is_saved_only_on_the_operators_word(admin: Client, hub: Hub) -> None:
    sent = form_of(admin, ADD) | {
        "name": "m",
        "source": "org/mispelt",
        "scaling_max": "1",
        "profiles-0-name": "default",
        "profiles-0-gpu_class": "h100",
    }
    answer = admin.post(ADD, sent)
    assert answer.status_code == 200, faults_in(answer)
    (sentence,) = answer.context["adminform"].form.errors["source"]
    assert "org/mispelt" in sentence
    assert not Model.objects.exists()

    assert admin.post(ADD, sent | {"skip_source_check": "on", "why": "it comes tomorrow"}).status_code == 302
    model = Model.objects.get(name="m")
    assert model.source_skipped_by == "alice"
    assert "Kept on the word of alice." in page(admin, change(model))
    assert Event.objects.get(verb="add", subject="m").why == "it comes tomorrow"


def test_the_page_of_a_model_lists_its_replicas_and_the_finding(admin: Client) -> None:
    model = a_model()
    replica = a_replica(model, a_node(), reason="serving")
    edited(model, tp=2)
    html = page(admin, change(model))
    assert f"/admin/nodes/replica/{replica.pk}/change/" in html
    assert "stale profile" in html
    assert "has changed since it started (tp, gpus_per_node)" in text_of(html)
    assert model.source_sentence in text_of(html).replace("&quot;", '"')


def test_removing_asks_lists_what_stops_and_removes_with_a_reason(admin: Client) -> None:
    model = a_model()
    a_replica(model, a_node())
    path = f"/admin/catalog/model/{model.pk}/delete/"
    asked = text_of(page(admin, path))
    assert re.search(r"tiny/default \w{8} on gpu-01, ready, will stop", asked), asked
    answer = admin.post(path, {"confirmed": "yes", "why": "no longer asked for"}, follow=True)
    assert "1 of 1 model removed." in answer.content.decode()
    assert not Model.objects.exists()
    assert Event.objects.get(verb="remove").why == "no longer asked for"


def test_a_model_that_another_falls_back_to_stays(admin: Client) -> None:
    a_model("other", scaling={"max": 1})
    a_model(fallbacks=["other"])
    chosen = [str(pk) for pk in Model.objects.values_list("pk", flat=True).filter(name="other")]
    asked = admin.post(LIST, {"action": "remove", "_selected_action": chosen})
    assert "Take these out of the catalog?" in asked.content.decode()
    answer = admin.post(
        LIST, {"action": "remove", "_selected_action": chosen, "confirmed": "yes"}, follow=True
    )
    said = text_of(answer.content.decode()).replace("&quot;", '"')
    assert 'model "tiny" falls back to it' in said
    assert "0 of 1 model removed." in said
    assert Model.objects.count() == 2


def test_the_history_of_a_model_is_its_events(admin: Client) -> None:
    model = a_model()
    edited(model, tp=2)
    a_model("other")
    history = page(admin, f"/admin/catalog/model/{model.pk}/history/")
    assert re.findall(r"\w+ model \w+", text_of(history)) == ["edit model tiny", "add model tiny"]


# --- who changed what in between ------------------------------------------------------------------


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
    assert "scaling min=1 max=2 max=1" in said
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


def test_the_history_is_for_those_who_may_see_events(client: Client) -> None:
    model, looker = a_model(), viola()
    looker.user_permissions.remove(Permission.objects.get(codename="view_event"))
    client.force_login(looker)
    assert client.get(f"/admin/catalog/model/{model.pk}/history/").status_code == 403


# --- who may see and do what ----------------------------------------------------------------------


def test_who_may_only_look_sees_the_model_and_no_secret(client: Client) -> None:
    model = a_model(profiles=[PROFILE | {"env": {"HF_TOKEN": "abracadabra", "OMP_NUM_THREADS": "8"}}])
    a_replica(model, a_node())
    client.force_login(viola())
    html = page(client, change(model))
    assert "OMP_NUM_THREADS" in html
    assert HIDDEN in html
    assert "abracadabra" not in html
    assert client.post(change(model), {"name": "other"}).status_code == 403
    assert client.get(f"/admin/catalog/model/{model.pk}/delete/").status_code == 403


def test_a_hidden_secret_survives_the_edit_of_who_may_not_see_it(client: Client) -> None:
    model = a_model(profiles=[PROFILE | {"env": {"HF_TOKEN": "abracadabra"}}])
    editor = viola()
    editor.user_permissions.add(Permission.objects.get(codename="change_model"))
    client.force_login(editor)
    sent = form_of(client, change(model))
    assert sent["profiles-0-env"] == f"HF_TOKEN={HIDDEN}"
    assert client.post(change(model), sent | {"profiles-0-tp": "2"}).status_code == 302
    profile = Profile.objects.get(model=model)
    assert (profile.tp, profile.env) == (2, {"HF_TOKEN": "abracadabra"})


def test_events_are_read_only(admin: Client) -> None:
    a_model()
    event = Event.objects.get()
    assert "add" in page(admin, f"/admin/catalog/event/{event.pk}/change/")
    assert admin.post(f"/admin/catalog/event/{event.pk}/change/", {"why": "other"}).status_code == 403
    assert admin.post(f"/admin/catalog/event/{event.pk}/delete/", {"post": "yes"}).status_code == 403
    assert admin.get("/admin/catalog/event/add/").status_code == 403


# --- keys -----------------------------------------------------------------------------------------


def test_a_new_key_is_shown_once(admin: Client) -> None:
    user = pk_of("alice")
    answer = admin.post("/admin/catalog/key/add/", {"name": "laptop", "user": user, "scope": "manage"})
    text = re.search(r"llmgw_[0-9A-Za-z_]+", answer.content.decode())
    assert text is not None
    assert KeyText.parse(text[0]) is not None
    assert "no-store" in answer["Cache-Control"]
    key = Key.objects.get()
    assert text[0] not in page(admin, "/admin/catalog/key/")
    assert text[0] not in page(admin, f"/admin/catalog/key/{key.pk}/change/")


def test_a_key_that_is_refused_is_said_at_its_field(admin: Client) -> None:
    answer = admin.post(
        "/admin/catalog/key/add/", {"name": "a\u202eb", "user": pk_of("alice"), "scope": "manage"}
    )
    assert answer.context["adminform"].form.errors == {
        "name": ["a key needs a name of at most 200 visible characters, telling what it is for"]
    }
    assert not Key.objects.exists()


def test_a_key_is_revoked_after_asking(admin: Client) -> None:
    admin.post("/admin/catalog/key/add/", {"name": "laptop", "user": pk_of("alice"), "scope": "manage"})
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
    refused = client.post("/admin/catalog/key/add/", {"name": "k", "user": other.pk, "scope": "manage"})
    assert refused.status_code == 200
    assert not Key.objects.exists()
    client.post("/admin/catalog/key/add/", {"name": "k", "user": maker.pk, "scope": "manage"})
    assert Key.objects.get().user == maker


def pk_of(name: str) -> int:
    return User.objects.get(username=name).pk
