"""A model's page tells what a change would bring about before it is saved, and keeps what was typed."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.messages import get_messages
from django.test import Client

from catalog.hiding import HIDDEN
from catalog.models import Event, Model
from tests.cast import PROFILE, a_model, a_node, a_replica, alice, viola
from tests.pages import ADD, as_shown, change, faults_in, form_of, page, text_of

pytestmark = [pytest.mark.django_db, pytest.mark.one_database]


@pytest.fixture
def admin(client: Client) -> Client:
    client.force_login(alice())
    return client


def foretold(client: Client, path: str, **typed: Any) -> Any:
    """The page as it is after the button was pressed; nothing has changed by that."""
    before = (Event.objects.count(), list(Model.objects.values()))
    answer = client.post(path, form_of(client, path) | typed | {"_foretell": "What would this change?"})
    assert answer.status_code == 200
    assert (Event.objects.count(), list(Model.objects.values())) == before
    return answer


def section(answer: Any) -> str:
    return text_of(
        answer.content.decode().partition("What this would change</h2>")[2].partition("</section>")[0]
    )


def test_an_edit_tells_which_replicas_turn_stale_and_keeps_what_was_typed(admin: Client) -> None:
    model = a_model()
    replica = a_replica(model, a_node())
    typed = {"profiles-0-tp": "2", "why": "wider", "scaling_max": "3"}
    answer = foretold(admin, change(model), **typed)
    told = section(answer)
    assert "Nothing is saved yet" in told
    assert "scaling max=2 max=3" in told
    assert (
        f"Would be stale, and run on as started replica profile node differs in {str(replica.pk)[:8]}" in told
    )
    assert "default gpu-01 tp, gpus_per_node" in told
    of_model, of_profiles, others = faults_in(answer)
    assert [of_model, *filter(None, of_profiles), *others] == [{}]
    again = as_shown(answer)
    assert {name: again[name] for name in typed} == typed
    assert "Please correct" not in answer.content.decode()
    assert admin.post(change(model), again).status_code == 302
    assert Model.objects.get().spec.profiles[0].tp == 2
    assert Event.objects.get(verb="edit").why == "wider"


def test_an_edit_tells_what_would_be_placed_where_and_what_could_not(admin: Client) -> None:
    model = a_model()
    a_replica(model, a_node())
    answer = foretold(admin, change(model), scaling_min="3", scaling_max="3")
    html = answer.content.decode()
    assert '<span class="badge bad">1 short</span>' in html
    assert '<span class="badge good">start</span>' in html
    told = section(answer)
    assert "0 of 1 node: 1 lacks 1 free sim" in told
    assert "tiny/default gpu-01 (1 GPU) 3 wanted, 1 there before it" in told


def test_an_edit_that_changes_nothing_says_so(admin: Client) -> None:
    model = a_model()
    assert "It is as it is stored: nothing." in section(foretold(admin, change(model)))
    words_alone = section(foretold(admin, change(model), description="new"))
    assert "Nothing that runs, starts or waits would change." in words_alone


def test_a_new_model_tells_where_it_would_run(admin: Client) -> None:
    a_node()
    new = {
        "name": "new",
        "source": "sim/new",
        "scaling_min": "1",
        "scaling_max": "1",
        "profiles-TOTAL_FORMS": "1",
        "profiles-0-name": "default",
        "profiles-0-engine": "sim",
        "profiles-0-gpu_class": "sim",
    }
    answer = foretold(admin, ADD, **new)
    assert "start new/default gpu-01 (1 GPU) 1 wanted, 0 there before it" in section(answer)
    assert admin.post(ADD, as_shown(answer)).status_code == 302
    assert Model.objects.get().name == "new"


def test_what_would_be_refused_is_refused_at_its_field(admin: Client) -> None:
    model = a_model()
    answer = foretold(admin, change(model), scaling_min="9", scaling_max="3")
    assert "What this would change</h2>" not in answer.content.decode()
    assert "scaling max 3 is below min 9" in str(faults_in(answer)[0])


def test_what_others_have_changed_meanwhile_is_shown_instead(admin: Client) -> None:
    model = a_model()
    typed = form_of(admin, change(model))
    admin.post(change(model), typed | {"description": "theirs"})
    answer = admin.post(change(model), typed | {"description": "mine", "_foretell": "?"})
    html = answer.content.decode()
    assert "Changed since you opened this page" in html
    assert Model.objects.get().description == "theirs"


def test_what_is_seldom_meant_is_said_and_secrets_stay_hidden(admin: Client) -> None:
    model = a_model(profiles=[PROFILE | {"env": {"HF_TOKEN": "abracadabra"}}])
    a_replica(model, a_node())
    answer = foretold(admin, change(model), idle_timeout="10s", **{"profiles-0-env": "HF_TOKEN=simsalabim"})
    html = answer.content.decode()
    before_the_form = html.partition("What this would change</h2>")[2].partition("</section>")[0]
    assert "under a minute" in before_the_form
    assert HIDDEN in before_the_form
    assert "simsalabim" not in before_the_form
    assert "abracadabra" not in html
    assert [*get_messages(answer.wsgi_request)] == []


def test_the_button_is_for_who_may_save(admin: Client) -> None:
    model = a_model()
    assert 'name="_foretell"' in page(admin, change(model))
    assert 'name="_foretell"' in page(admin, ADD)
    admin.force_login(viola())
    assert 'name="_foretell"' not in page(admin, change(model))
