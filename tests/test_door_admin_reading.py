"""The admin's pages for those who use a keyboard or a screen reader, and under the strict content policy."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
from django.test import Client

from catalog.models import Event, Model
from nodes.models import Unplaced
from tests.cast import PROFILE, a_model, a_node, a_replica, alice, edited
from tests.pages import ADD, MODELS, change, form_of, page

pytestmark = [pytest.mark.django_db, pytest.mark.one_database]

Element = tuple[str, dict[str, str]]


class Elements(HTMLParser):
    """All of a page, in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[Element] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {name: value or "" for name, value in attrs}))

    def all(self, *tags: str) -> list[dict[str, str]]:
        return [attributes for tag, attributes in self.found if tag in tags]


@pytest.fixture
def admin(client: Client) -> Client:
    client.force_login(alice())
    return client


@pytest.fixture
def model() -> Model:
    model = a_model(profiles=[PROFILE | {"args": ["--seed", "1"], "env": {"A": "1"}}])
    a_replica(model, a_node())
    edited(model, tp=2)
    Unplaced.objects.create(model=model, missing=1, why="no room")
    return model


def pages_about(model: Model) -> list[str]:
    event = Event.objects.filter(subject_key=model.pk)[0]
    return [
        MODELS,
        ADD,
        change(model),
        f"/admin/catalog/model/{model.pk}/history/",
        f"/admin/catalog/model/{model.pk}/delete/",
        "/admin/catalog/event/",
        f"/admin/catalog/event/{event.pk}/change/",
    ]


def test_every_control_has_a_name_that_is_read_out(admin: Client, model: Model) -> None:
    for path in pages_about(model):
        found = Elements(page(admin, path))
        labelled = {each.get("for", "") for each in found.all("label")}
        for control in found.all("input", "select", "textarea"):
            if control.get("type") in ("hidden", "submit"):
                continue
            is_named = control.get("id") in labelled or "aria-label" in control
            is_inside_its_label = control.get("name") in ("action", "_selected_action", "q")
            assert is_named or is_inside_its_label, (path, control)


def test_the_headings_of_tables_say_what_they_head(admin: Client, model: Model) -> None:
    for path in (change(model), f"/admin/catalog/model/{model.pk}/history/"):
        headings = Elements(page(admin, path)).all("th")
        assert headings
        assert {heading.get("scope") for heading in headings} == {"col", "row"}


def test_a_field_that_was_refused_is_described_by_its_sentence(admin: Client, model: Model) -> None:
    sent = form_of(admin, change(model)) | {"profiles-0-env": "A", "aliases": '"'}
    found = Elements(admin.post(change(model), sent).content.decode())
    ids = {attributes.get("id") for _, attributes in found.found}
    invalid = [each for each in found.all("input", "textarea") if each.get("aria-invalid") == "true"]
    assert [each["name"] for each in invalid] == ["aliases", "profiles-0-env"]
    for each in invalid:
        described = each["aria-describedby"].split()
        assert f"{each['id']}_error" in described
        assert ids.issuperset(described)


def test_nothing_needs_what_the_content_policy_forbids(admin: Client, model: Model) -> None:
    for path in pages_about(model):
        for tag, attributes in Elements(page(admin, path)).found:
            assert tag != "style", path
            assert "style" not in attributes, (path, tag, attributes)
            assert not [name for name in attributes if name.startswith("on")], (path, tag, attributes)
            assert tag != "script" or attributes.get("src", "").startswith(("/static/", "/admin/jsi18n/")), (
                path
            )
