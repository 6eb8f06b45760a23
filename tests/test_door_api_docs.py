"""What /api/ tells of itself: a description that is exact, and a page of it."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import call_command
from django.test import Client

from catalog.differences import MODEL_KEYS, PROFILE_KEYS
from catalog.parts import LIMIT_KEYS, TIMEOUT_KEYS
from catalog.reading import CatalogError
from catalog.schema import models
from catalog.schema.fields import DURATION
from catalog.spec import ModelSpec
from llmgw.docs import schema
from tests.cast import PROFILE, alice, model_form, viola
from tests.rest_client import Api

MODEL = schema()["components"]["schemas"]["ModelRequest"]["properties"]
PROFILE_SHAPE = schema()["components"]["schemas"]["ProfileRequest"]["properties"]


def test_the_description_is_valid_and_made_without_a_warning() -> None:
    call_command("spectacular", "--validate", "--fail-on-warn", stdout=io.StringIO())


def test_it_has_each_field_of_the_law_and_no_other() -> None:
    beside = {"status", "why", "skip_source_check"}
    assert {*models.ModelSerializer().fields} - beside == {*MODEL_KEYS}
    assert [*models.ProfileSerializer().fields] == [*PROFILE_KEYS]
    known = ModelSpec.load(
        model_form(
            scaling={"min": 1, "max": 1, "idle_timeout": "20m"},
            capabilities={"tools": True, "vision": True, "embeddings": True},
            limits={**dict.fromkeys(LIMIT_KEYS, 1), "over_max_output": "clamp"},
            timeouts=dict.fromkeys(TIMEOUT_KEYS, "1m"),
        )
    ).as_text_dict()
    assert {*models.ScalingSerializer().fields} == {*known["scaling"]}
    assert {*models.CapabilitiesSerializer().fields} == {*known["capabilities"]}
    assert {*models.LimitsSerializer().fields} == {*known["limits"]}
    assert {*models.TimeoutsSerializer().fields} == {*known["timeouts"]}
    assert {*known["slo"]} | {"ttft_p99", "tpot_p99"} == {*models.SloSerializer().fields}


def test_a_body_has_no_other_fields_but_what_was_told_may_be_sent_back() -> None:
    for name, shape in schema()["components"]["schemas"].items():
        assert ("additionalProperties" in shape) is name.endswith("Request"), name
    assert MODEL["status"]["readOnly"] is True


def _judged(place: dict[str, Any], key: str, value: Any) -> set[str]:
    """The fields at fault where a model has this value in this place."""
    form = model_form() | {key: value} if place is MODEL else model_form(profiles=[PROFILE | {key: value}])
    try:
        ModelSpec.load(form)
    except CatalogError as no:
        return {fault.field for fault in no.faults if fault.code in ("too_long", "range", "type", "required")}
    return set()


LIMITS = [
    pytest.param(place, key, told, id=f"{what} {key}")
    for what, place in (("model", MODEL), ("profile", PROFILE_SHAPE))
    for key, told in place.items()
    if key in (*MODEL_KEYS, *PROFILE_KEYS) and {"maxLength", "maximum", "minimum", "items"} & told.keys()
]


@pytest.mark.parametrize(("place", "key", "told"), LIMITS)
def test_its_limits_are_those_of_the_law(place: dict[str, Any], key: str, told: dict[str, Any]) -> None:
    assert not _judged(place, key, _at_its_most(told))
    for beyond in _beyond(told):
        assert _judged(place, key, beyond) == {key}


def _at_its_most(told: dict[str, Any]) -> Any:
    if "items" in told:
        return [PROFILE] if "$ref" in told["items"] else [_at_its_most(told["items"])]
    return "x" * told["maxLength"] if "maxLength" in told else told["maximum"]


def _beyond(told: dict[str, Any]) -> list[Any]:
    if "items" in told:
        inner = [] if "$ref" in told["items"] else [[each] for each in _beyond(told["items"])]
        return [["x"] * (told["maxItems"] + 1), *inner]
    if "maxLength" in told:
        return ["x" * (told["maxLength"] + 1)]
    return [told["maximum"] + 1, *([told["minimum"] - 1] if "minimum" in told else [])]


def test_the_limits_are_many() -> None:
    assert len(LIMITS) >= 18


@pytest.mark.parametrize("text", ["20m", "1h30m", "1.5s", "300ms", "0s", "-5m"])
def test_a_duration_looks_as_it_is_written(text: str) -> None:
    assert re.fullmatch(DURATION, text)


@pytest.mark.parametrize("text", ["20", "m", "1d", "1m1h", " 1m", "1,5s"])
def test_what_is_no_duration_does_not(text: str) -> None:
    assert not re.fullmatch(DURATION, text)


@pytest.mark.django_db
def test_whoever_may_come_in_is_given_the_description() -> None:
    status, told = Api(User.objects.create_user("no role", is_staff=True))("GET", "schema/")
    assert (status, told) == (200, schema())


# --- the page -------------------------------------------------------------------------------------


@pytest.fixture
def page(client: Client) -> str:
    client.force_login(alice())
    answer = client.get("/api/docs/")
    assert answer.status_code == 200
    return answer.content.decode()


@pytest.mark.django_db
def test_every_page_of_the_admin_leads_to_it(client: Client) -> None:
    client.force_login(viola())
    for path in ("/admin/", "/admin/catalog/model/"):
        assert b'<a href="/api/docs">REST</a>' in client.get(path).content


@pytest.mark.django_db
def test_the_page_has_every_operation_and_every_shape(page: str) -> None:
    told = schema()
    for path, operations in told["paths"].items():
        assert f"<code>{path}</code>" in page
        for each in operations.values():
            assert f'id="{each["operationId"]}"' in page
    for name in told["components"]["schemas"]:
        assert f'<h3 id="{name}">' in page


@pytest.mark.django_db
def test_the_links_of_the_page_lead_somewhere(page: str) -> None:
    anchors = {*re.findall(r'href="#([^"]+)"', page)}
    assert len(anchors) > 20
    assert anchors - {"content-start"} <= {*re.findall(r'id="([^"]+)"', page)}


@pytest.mark.django_db
def test_the_page_needs_no_script_and_no_other_host(page: str) -> None:
    ours = page.partition('<div id="content"')[2]
    assert "<script" not in ours
    assert "style=" not in page
    assert not re.search(r'(src|href)="(https?:)?//', page)


@pytest.mark.django_db
def test_the_page_is_behind_the_login_and_is_only_read(client: Client) -> None:
    assert client.get("/api/docs")["Location"].startswith("/admin/login/")
    client.force_login(alice())
    assert client.post("/api/docs").status_code == 405
