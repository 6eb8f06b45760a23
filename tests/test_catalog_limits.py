"""A model's limits and time-outs: kept, told by every door, named by the history, no reason to restart."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from django.core.management import call_command
from django.db import IntegrityError, transaction
from django.test import Client

from catalog.actions import patch_model
from catalog.management.model_options import FIELDS
from catalog.models import Event, Model
from catalog.parts import LIMIT_KEYS, OVER_MAX_OUTPUT, TIMEOUT_KEYS, Limits
from catalog.spec import ModelSpec
from nodes.models import Replica
from nodes.showing import staleness_of
from tests.cast import a_model, a_node, a_replica, alice, model_form, nobody_is_asked
from tests.doors import ADDING, BASE, EDITING, Form
from tests.pages import page

LIMITS: dict[str, Any] = {
    "requests_per_minute": 60,
    "tokens_per_minute": 9_000,
    "concurrency": 4,
    "over_max_output": "clamp",
}
TIMEOUTS = {"hold": "5m", "connect": "1.5s", "first_byte": "1m30s", "idle": "20s"}
WORDS = (
    "60 requests a minute, 9000 tokens a minute, 4 at once, over max output: clamp, hold 5m, connect 1.5s,"
    " first byte 1m30s, idle 20s"
)


def bounded(name: str = "m", **fields: Any) -> Form:
    return model_form(name, scaling={"max": 1}, max_output=4_096, limits=LIMITS, timeouts=TIMEOUTS) | fields


# --- the law --------------------------------------------------------------------------------------


def test_what_is_zero_or_empty_is_left_out() -> None:
    nothing = {**dict.fromkeys(LIMIT_KEYS, 0), "over_max_output": ""}
    spec = ModelSpec.load(model_form(limits=nothing, timeouts=dict.fromkeys(TIMEOUT_KEYS, 0)))
    assert spec == ModelSpec.load(model_form())
    assert not {"limits", "timeouts"} & spec.as_dict().keys()


def test_what_is_set_is_written_as_it_was_read() -> None:
    told = ModelSpec.load(bounded()).as_text_dict()
    assert (told["limits"], told["timeouts"]) == (LIMITS, TIMEOUTS)
    assert ModelSpec.load(bounded()).as_dict()["timeouts"]["connect"] == 1_500_000_000


def test_limits_are_no_part_of_what_a_profile_is() -> None:
    (plain,), (limited,) = (ModelSpec.load(form).profiles for form in (model_form(), bounded()))
    assert plain.fingerprint() == limited.fingerprint()


@pytest.mark.parametrize(
    ("own", "bound", "beyond"),
    [
        pytest.param(Limits(), Limits(), (), id="none, where there is none"),
        pytest.param(Limits(1, 2, 3), Limits(), (), id="some, where there is none"),
        pytest.param(Limits(1, 2, 3), Limits(1, 2, 3), (), id="the same"),
        pytest.param(Limits(2, 2, 3), Limits(1, 3, 3), ("requests_per_minute",), id="one is higher"),
        pytest.param(Limits(0, 5, 0), Limits(1, 5, 1), ("requests_per_minute", "concurrency"), id="no limit"),
    ],
)
def test_no_limit_is_beyond_every_limit(own: Limits, bound: Limits, beyond: tuple[str, ...]) -> None:
    assert own.beyond(bound) == beyond


# --- the doors ------------------------------------------------------------------------------------


@pytest.mark.one_database
@pytest.mark.django_db
@pytest.mark.parametrize("door", ADDING)
def test_every_door_adds_a_model_with_limits(client: Client, door: str) -> None:
    client.force_login(alice())
    assert ADDING[door](client, bounded()).refusals == []
    assert Model.objects.get(name="m").spec == ModelSpec.load(bounded())


@pytest.mark.one_database
@pytest.mark.django_db
@pytest.mark.parametrize("door", EDITING)
def test_every_door_changes_limits_and_the_history_names_them(client: Client, door: str) -> None:
    client.force_login(alice())
    a_model(BASE, scaling={"max": 1}, max_output=4_096)
    assert EDITING[door](client, bounded(BASE)).refusals == []
    row = Model.objects.get()
    assert row.spec == ModelSpec.load(bounded(BASE))
    changed = Event.objects.get(verb="edit").detail["changed"]
    assert [(each["field"], each["now"]) for each in changed] == [("limits", LIMITS), ("timeouts", TIMEOUTS)]
    assert "requests_per_minute=60" in page(client, f"/admin/catalog/model/{row.pk}/history/")


@pytest.mark.one_database
@pytest.mark.django_db
@pytest.mark.parametrize("door", EDITING)
def test_every_door_takes_limits_back(client: Client, door: str) -> None:
    client.force_login(alice())
    a_model(BASE, **{key: value for key, value in bounded().items() if key != "name"})
    none: dict[str, Any] = {
        "PATCH": {"limits": None, "timeouts": None},
        "model_edit": {
            "limits": dict.fromkeys((*LIMIT_KEYS, "over_max_output"), ""),
            "timeouts": dict.fromkeys(TIMEOUT_KEYS, ""),
        },
    }
    form = model_form(BASE, scaling={"max": 1}, max_output=4_096)
    assert EDITING[door](client, form | none.get(door, {})).refusals == []
    assert Model.objects.get().spec == ModelSpec.load(form)


@pytest.mark.one_database
@pytest.mark.django_db
@pytest.mark.parametrize("door", [*ADDING, *EDITING])
def test_every_door_warns_of_what_contradicts(client: Client, door: str) -> None:
    client.force_login(alice())
    a_model(BASE, scaling={"max": 1})
    said = (ADDING | EDITING)[door](client, bounded(max_output=9_001))
    assert said.refusals == []
    assert any("tokens_per_minute 9000 is below the max_output 9001" in each for each in said.warnings)


@pytest.mark.one_database
@pytest.mark.django_db
def test_whatever_shows_a_model_shows_its_limits(client: Client) -> None:
    client.force_login(alice())
    row = a_model(**bounded())
    assert WORDS in page(client, "/admin/catalog/model/")
    shown = client.get(f"/admin/catalog/model/{row.pk}/change/").context["adminform"].form
    assert {key: shown[key].value() for key in (*LIMITS, *TIMEOUTS)} == LIMITS | TIMEOUTS
    told = client.get("/api/models/m").json()
    assert (told["limits"], told["timeouts"]) == (LIMITS, TIMEOUTS)
    assert WORDS in printed("models")
    assert json.loads(printed("models", "--json"))[0]["limits"] == LIMITS
    assert "requests_per_minute: 60" in printed("catalog_export")


def printed(*words: str) -> str:
    told = io.StringIO()
    call_command(*words, stdout=told)
    return told.getvalue()


# --- what runs ------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_limits_and_time_outs_make_no_replica_stale() -> None:
    row = a_model(scaling={"max": 1})
    a_replica(row, a_node())
    how: dict[str, Any] = {"by": "a", "door": "api", "ask_paths": nobody_is_asked, "after_change": int}
    patch_model(row.name, {"limits": LIMITS, "timeouts": TIMEOUTS, "max_output": 1}, **how)
    judged = staleness_of(Replica.objects.select_related("model", "profile").get())
    assert (judged.stale_profile, judged.stale_launch, judged.restart_needed) == (False, False, False)


# --- the database ---------------------------------------------------------------------------------


@pytest.mark.django_db
@pytest.mark.parametrize(
    "columns",
    [
        *(pytest.param({key: -1}, id=f"{key} below none") for key in LIMIT_KEYS),
        *(pytest.param({f"timeout_{key}_ns": -1}, id=f"{key} below nothing") for key in TIMEOUT_KEYS),
        *(pytest.param({f"timeout_{key}_ns": 10**14}, id=f"{key} of a day") for key in TIMEOUT_KEYS),
        pytest.param({"over_max_output": "cut"}, id="an unknown way with long answers"),
    ],
)
def test_the_database_refuses(columns: dict[str, Any]) -> None:
    row = a_model()
    with pytest.raises(IntegrityError), transaction.atomic():
        Model.objects.filter(pk=row.pk).update(**columns)


@pytest.mark.django_db
@pytest.mark.parametrize("chosen", OVER_MAX_OUTPUT)
def test_what_the_law_knows_the_database_takes(chosen: str) -> None:
    assert a_model(max_output=1, limits={"over_max_output": chosen}).over_max_output == chosen


@pytest.mark.one_database
@pytest.mark.django_db
def test_the_page_and_the_options_tell_what_an_empty_time_out_is(client: Client) -> None:
    client.force_login(alice())
    html = page(client, "/admin/catalog/model/add/")
    for help_text in ("for a replica to be there; empty: 1m", "for an answer to begin; empty: 10m"):
        assert help_text in html
    options = {option: said for option, (_, _, said) in FIELDS.items()}
    assert options["timeout-hold"] == "for a replica to be there; 1m, if left out"
