"""What an older law let in: every door shows it, says what is wrong with it today, scales it and stops it."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from django.core.management import call_command
from django.test import Client
from django.utils.html import escape

from catalog.models import Event, Model, Name, Profile
from catalog.parts import Scaling
from tests.cast import a_model, a_node, a_replica, alice
from tests.doors import address_of, manage
from tests.pages import MODELS, change, form_of, page

pytestmark = [pytest.mark.django_db, pytest.mark.one_database]


def planted(**columns: Any) -> Callable[[], object]:
    return lambda: Profile.objects.update(**columns)


def renamed(name: str) -> None:
    row = Model.objects.get()
    Name.objects.create(name=name, model=row)
    Name.objects.filter(model=row, is_canonical=True).delete()
    Name.objects.filter(name=name).update(is_canonical=True)
    Model.objects.update(name=name)


PLANTS = [
    pytest.param(planted(args=["--port", "80"]), 'argument "--port" is set by llmgw', id="an owned argument"),
    pytest.param(planted(engine="warp"), 'engine "warp" is not known', id="an engine of old"),
    pytest.param(planted(gpu_class=""), "gpu_class is required", id="no GPU class"),
    pytest.param(planted(tp=4), "1 nodes x 1 GPUs does not match TP 4 x PP 1", id="GPUs that do not match"),
    pytest.param(planted(weight=2_000), "weight is above 1000", id="too much weight"),
    pytest.param(planted(env={"A\x07": "1"}), 'env "A\\x07" holds control', id="an env name that rings"),
    pytest.param(planted(env={"A": "secret:no way"}), "secret:", id="a malformed reference"),
    pytest.param(planted(name="a\u200bb"), 'name "a\\u200bb" holds control', id="a profile nobody can tell"),
    pytest.param(
        lambda: Model.objects.update(routing_profile="shortest"),
        '"shortest" is not known',
        id="a routing of old",
    ),
    pytest.param(
        lambda: Model.objects.update(description="x" * 10_001),
        "description is longer",
        id="a long description",
    ),
    pytest.param(
        lambda: Model.objects.update(context_length=2**40),
        "context_length is out of range",
        id="a long context",
    ),
    pytest.param(
        lambda: renamed("a\u202eb"), 'name "a\\u202eb" holds control', id="a name that turns around"
    ),
    pytest.param(lambda: renamed(" m"), "begins or ends with a space", id="a name that begins with a space"),
]


@pytest.fixture
def plant(request: pytest.FixtureRequest, client: Client) -> Model:
    client.force_login(alice())
    a_replica(a_model(), a_node())
    request.param()
    return Model.objects.get()


# --- the doors that scale -------------------------------------------------------------------------


def by_admin_form(client: Client, model: Model, scaling: Scaling) -> None:
    sent = form_of(client, change(model))
    sent |= {"scaling_min": str(scaling.min), "scaling_max": str(scaling.max)}
    answer = client.post(change(model), sent)
    assert answer.status_code == 302, answer.context["errors"]


def by_patch(client: Client, model: Model, scaling: Scaling) -> None:
    body = {"scaling": {"min": scaling.min, "max": scaling.max}}
    answer = client.patch(address_of(model.name), json.dumps(body), content_type="application/json")
    assert answer.status_code == 200, answer.json()


def by_put(client: Client, model: Model, scaling: Scaling) -> None:
    form = client.get(address_of(model.name)).json()
    form["scaling"] = {"min": scaling.min, "max": scaling.max}
    answer = client.put(address_of(model.name), json.dumps(form), content_type="application/json")
    assert answer.status_code == 200, answer.json()


def by_command(client: Client, model: Model, scaling: Scaling) -> None:
    said = manage("model_edit", model.name, f"--min={scaling.min}", f"--max={scaling.max}")
    assert said.refusals == []


DOORS = (by_admin_form, by_patch, by_put, by_command)


@pytest.mark.parametrize(("plant", "says"), PLANTS, indirect=["plant"])
def test_every_door_scales_and_stops_it_and_leaves_the_rest(plant: Model, says: str, client: Client) -> None:
    was = plant.spec
    for number, door in enumerate(DOORS, 3):
        for scaling in (Scaling(1, number), Scaling(0, 0)):
            door(client, plant, scaling)
            assert Model.objects.get().spec == replace(was, scaling=scaling)
    assert Event.objects.filter(verb="edit").count() == 2 * len(DOORS)


@pytest.mark.parametrize(("plant", "says"), PLANTS, indirect=["plant"])
def test_every_door_shows_it_with_what_is_wrong(plant: Model, says: str, client: Client) -> None:
    assert client.get(MODELS).status_code == 200
    assert escape(says) in page(client, change(plant))
    (told,) = client.get("/api/models").json()["results"]
    assert says in told["status"]["faults"][0]
    assert client.get(address_of(plant.name)).json() == told
    printed = io.StringIO()
    call_command("models", stdout=printed)
    assert says in printed.getvalue()
    for command in (("models", "--plain"), ("replicas", "--diff"), ("catalog_export",)):
        call_command(*command, stdout=io.StringIO(), stderr=io.StringIO())


@pytest.mark.parametrize(("plant", "says"), PLANTS, indirect=["plant"])
def test_an_edit_of_anything_else_says_what_is_wrong(plant: Model, says: str, client: Client) -> None:
    said = manage("model_edit", plant.name, "--max-output", "7")
    assert any(says in sentence for sentence in said.refusals)
    assert manage("model_remove", plant.name).refusals == []
