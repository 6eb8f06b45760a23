"""Models in the admin: what the pages show, and that saving goes through the law."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import Permission
from django.test import Client

from catalog.hiding import HIDDEN
from catalog.models import Event, Model, Profile
from nodes.models import Replica
from tests.cast import PROFILE, a_model, a_node, a_replica, alice, edited, viola
from tests.hub_server import COMMIT, Hub, running_hub
from tests.pages import ADD, MODELS, change, faults_in, form_of, page, text_of

pytestmark = [pytest.mark.django_db, pytest.mark.one_database]


@pytest.fixture
def admin(client: Client) -> Client:
    client.force_login(alice())
    return client


@pytest.fixture
def hub(settings: Any) -> Iterator[Hub]:
    with running_hub() as hub:
        settings.LLMGW_HUB_ENDPOINT = hub.url
        yield hub


NEWER = "b" * 40
REAL = {"scaling_max": "1", "profiles-0-name": "default", "profiles-0-gpu_class": "h100"}


def a_real_model(admin: Client, hub: Hub, **typed: str) -> Model:
    """One whose weights are on the hub."""
    hub.has_repository("org/real", "a.safetensors")
    sent = form_of(admin, ADD) | REAL | {"name": "real", "source": "org/real"} | typed
    answer = admin.post(ADD, sent)
    assert answer.status_code == 302, faults_in(answer)
    return Model.objects.get(name="real")


def check_of(model: Model) -> str:
    return f"/admin/catalog/model/{model.pk}/check/"


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
    assert (answer.status_code, answer.headers.get("Location")) == (302, MODELS), faults_in(answer)
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


def test_a_new_models_first_profile_is_there_and_named(admin: Client) -> None:
    opened = form_of(admin, ADD)
    assert opened["profiles-0-name"] == "default"
    said = faults_in(admin.post(ADD, opened | {"name": "tiny", "source": "sim/tiny"}))
    wanted = 'model "tiny" profile "default": gpu_class is required for engine "vllm"'
    assert said == ({}, [{"gpu_class": [wanted]}], [])


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


def test_a_refused_source_is_saved_only_on_the_operators_word_and_with_a_reason(
    admin: Client, hub: Hub
) -> None:
    sent = form_of(admin, ADD) | REAL | {"name": "m", "source": "org/mispelt"}
    answer = admin.post(ADD, sent)
    (sentence,) = answer.context["adminform"].form.errors["source"]
    assert "org/mispelt" in sentence
    assert 'id="id_source_error"' in answer.content.decode()

    answer = admin.post(ADD, sent | {"skip_source_check": "on", "why": " "})
    assert answer.context["adminform"].form.errors == {
        "why": ['model "m": the source check is skipped only for a reason; say why, for the history to keep']
    }
    assert not Model.objects.exists()

    assert admin.post(ADD, sent | {"skip_source_check": "on", "why": "it comes tomorrow"}).status_code == 302
    model = Model.objects.get(name="m")
    assert model.source_skipped_by == "alice"
    assert "Kept on the word of alice." in page(admin, change(model))
    assert Event.objects.get(verb="add", subject="m").why == "it comes tomorrow"


def test_what_the_check_found_is_proposed_at_the_fields_that_were_left_empty(admin: Client, hub: Hub) -> None:
    model = a_real_model(admin, hub, context_length="")
    Model.objects.filter(pk=model.pk).update(source_facts={**model.source_facts, "context_length": 32768})
    form = admin.get(change(model)).context["adminform"].form
    assert "own context length is 32768 tokens" in text_of(form["context_length"].help_text)
    html = page(admin, change(model))
    assert "set min_disk_gb to 1, or to more" in html
    sent = form_of(admin, change(model)) | {"context_length": "4096", "profiles-0-min_disk_gb": "1"}
    admin.post(change(model), sent)
    html = page(admin, change(model))
    assert "own context length" not in html
    assert "set min_disk_gb" not in html


def test_check_now_asks_and_comes_back_with_what_was_found(admin: Client, hub: Hub) -> None:
    model = a_real_model(admin, hub)
    hub.replies.clear()
    assert f'action="{check_of(model)}"' in page(admin, change(model))
    answer = admin.post(check_of(model), follow=True)
    assert answer.redirect_chain == [(change(model), 302)]
    assert [message.level_tag for message in answer.context["messages"]] == ["error"]
    assert "org/real" in str(answer.content.decode())
    model.refresh_from_db()
    assert (model.source_state, model.source_revision) == ("refuse", COMMIT)
    event = Event.objects.get(verb="check")
    assert (event.by, event.door) == ("alice", "admin")
    history = text_of(page(admin, f"/admin/catalog/model/{model.pk}/history/"))
    assert "source_state ok refuse" in history


@pytest.mark.parametrize("method", ["get", "head"])
def test_looking_checks_nothing(admin: Client, hub: Hub, method: str) -> None:
    model = a_real_model(admin, hub)
    assert getattr(admin, method)(check_of(model)).status_code == 405
    assert not Event.objects.filter(verb="check").exists()


def test_a_check_that_comes_from_elsewhere_is_refused(hub: Hub) -> None:
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(alice())
    assert strict.post(check_of(a_model())).status_code == 403


def test_who_may_only_look_cannot_check_and_is_shown_no_button(client: Client) -> None:
    model = a_model()
    client.force_login(viola())
    assert check_of(model) not in page(client, change(model))
    assert client.post(check_of(model)).status_code == 403


def test_a_branch_that_moved_on_is_pinned_after_asking(admin: Client, hub: Hub) -> None:
    model = a_real_model(admin, hub)
    assert "Pin the new commit" not in page(admin, change(model))
    hub.has_repository("org/real", "a.safetensors", sha=NEWER)
    hub.has_repository("org/real", "a.safetensors", revision=COMMIT)
    admin.post(check_of(model))
    assert "Pin the new commit" in page(admin, change(model))
    chosen = {"action": "pin", "_selected_action": [model.pk]}
    assert f"from commit {COMMIT} to {NEWER}" in text_of(admin.post(MODELS, chosen).content.decode())
    admin.post(MODELS, chosen | {"confirmed": "yes", "why": "it answers better"})
    model.refresh_from_db()
    assert model.source_revision == NEWER
    assert Event.objects.get(verb="pin").why == "it answers better"
    assert "Pin the new commit" not in page(admin, change(model))


def test_a_model_that_todays_law_refuses_says_so_and_can_be_scaled(admin: Client) -> None:
    model = a_model()
    assert "would be refused today" not in page(admin, change(model))
    Profile.objects.filter(model=model).update(args=["--port", "80"])
    for path in (change(model), event_of(model)):
        said = text_of(page(admin, path)).replace("&quot;", '"')
        assert 'model "tiny" profile "default": argument "--port" is set by llmgw' in said, path
    assert "would be refused today" in page(admin, change(model))
    assert admin.post(change(model), form_of(admin, change(model)) | {"scaling_max": "7"}).status_code == 302
    assert Model.objects.get(pk=model.pk).scaling_max == 7
    assert admin.post(change(model), form_of(admin, change(model)) | {"description": "x"}).status_code == 200


def test_the_page_of_a_model_lists_what_failed_until_it_is_dealt_with_or_edited(admin: Client) -> None:
    model = a_model()
    failed = a_replica(model, a_node(), "failed", gpu=None, reason="out of memory")
    link = f"/admin/nodes/replica/{failed.pk}/change/"
    assert link in page(admin, change(model))
    Replica.objects.update(wanted="stop")
    assert link not in page(admin, change(model))
    Replica.objects.update(wanted="run")
    edited(model, tp=2)
    assert link not in page(admin, change(model))


def test_the_page_of_a_model_lists_its_replicas_and_the_finding(admin: Client) -> None:
    model = a_model()
    replica = a_replica(model, a_node(), reason="serving")
    edited(model, tp=2)
    html = page(admin, change(model))
    assert f"/admin/nodes/replica/{replica.pk}/change/" in html
    assert "stale profile" in html
    assert "has changed since it started (tp, gpus_per_node)" in text_of(html)
    assert model.source_sentence in text_of(html).replace("&quot;", '"')


# --- what it will run -----------------------------------------------------------------------------


def test_the_page_says_what_each_profile_will_run_and_what_is_worth_a_look(admin: Client, hub: Hub) -> None:
    model = a_real_model(
        admin, hub, tools="on", **{"profiles-0-env": "OMP_NUM_THREADS=8\nHF_TOKEN=abracadabra"}
    )
    html = page(admin, change(model))
    said = text_of(html)
    profile = Profile.objects.get(model=model)
    assert f"needs 1 node with vllm, 1 x h100 fingerprint {profile.fingerprint} command" in said
    assert "--served-model-name" in said
    assert "OMP_NUM_THREADS=8" in said
    assert "--tool-call-parser" in said
    assert "abracadabra" not in html


def test_what_cannot_run_says_why_in_the_place_of_a_command(admin: Client, hub: Hub) -> None:
    model = a_real_model(admin, hub)
    Profile.objects.filter(model=model).update(engine="warp")
    assert re.search(r"cannot run [^<]*warp", text_of(page(admin, change(model))))


def test_who_may_only_look_sees_what_will_run_and_no_value_of_the_environment(client: Client) -> None:
    model = a_model(profiles=[PROFILE | {"env": {"OMP_NUM_THREADS": "8"}}])
    client.force_login(viola())
    said = text_of(page(client, change(model)))
    assert "needs 1 node with sim, 1 x sim" in said
    assert f"OMP_NUM_THREADS={HIDDEN}" in said


# --- who may see and do what ----------------------------------------------------------------------


def test_who_may_only_look_sees_the_model_and_no_secret(client: Client) -> None:
    model = a_model(profiles=[PROFILE | {"env": {"HF_TOKEN": "abracadabra", "OMP_NUM_THREADS": "8"}}])
    a_replica(model, a_node())
    client.force_login(viola())
    html = page(client, change(model))
    assert f"OMP_NUM_THREADS&quot;: &quot;{HIDDEN}" in html
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


def test_who_may_see_environments_sees_values_and_no_secret(client: Client) -> None:
    model = a_model(profiles=[PROFILE | {"env": {"HF_TOKEN": "abracadabra", "OMP_NUM_THREADS": "8"}}])
    replica = a_replica(model, a_node())
    looker = viola()
    pages = (change(model), f"/admin/nodes/replica/{replica.pk}/change/", event_of(model), history_of(model))
    client.force_login(looker)
    assert not any("OMP_NUM_THREADS&quot;: &quot;8" in page(client, path) for path in pages)
    looker.user_permissions.add(Permission.objects.get(codename="see_env"))
    for path in pages:
        html = page(client, path)
        assert "OMP_NUM_THREADS&quot;: &quot;8" in html, path
        assert "abracadabra" not in html, path


def test_a_secret_is_not_in_the_source_of_a_superusers_page(admin: Client) -> None:
    model = a_model(profiles=[PROFILE | {"env": {"HF_TOKEN": "abracadabra", "OMP_NUM_THREADS": "8"}}])
    html = page(admin, change(model))
    assert f"HF_TOKEN={HIDDEN}\nOMP_NUM_THREADS=8" in html
    assert "abracadabra" not in html


def event_of(model: Model) -> str:
    return f"/admin/catalog/event/{Event.objects.get(verb='add', subject_key=model.pk).pk}/change/"


def history_of(model: Model) -> str:
    return f"/admin/catalog/model/{model.pk}/history/"


def test_events_are_read_only(admin: Client) -> None:
    a_model()
    event = Event.objects.get()
    assert "add" in page(admin, f"/admin/catalog/event/{event.pk}/change/")
    assert admin.post(f"/admin/catalog/event/{event.pk}/change/", {"why": "other"}).status_code == 403
    assert admin.post(f"/admin/catalog/event/{event.pk}/delete/", {"post": "yes"}).status_code == 403
    assert admin.get("/admin/catalog/event/add/").status_code == 403


@pytest.mark.parametrize("what", ["change", "delete", "check", "history", "why"])
def test_a_button_on_the_page_of_what_is_gone_leads_to_a_word_about_it(admin: Client, what: str) -> None:
    """As a second click on it does, too."""
    model = a_model()
    path = f"/admin/catalog/model/{model.pk}/{what}/"
    sent = {"_selected_action": [str(model.pk)], "action": "remove", "confirmed": "yes"}
    Model.objects.all().delete()
    answer = (
        admin.get(path, follow=True) if what in ("history", "why") else admin.post(path, sent, follow=True)
    )
    assert answer.status_code == 200
    assert "exist. Perhaps it was deleted?" in text_of(answer.content.decode())
