"""REST's dry runs: a change is judged as it would be, told with what it brings about, and not made."""

from __future__ import annotations

from typing import Any

import pytest

from catalog.models import Event, Model
from tests.cast import PROFILE, a_model, a_node, a_replica, alice, model_form, viola
from tests.rest_client import Api, field, sentence

pytestmark = pytest.mark.django_db


@pytest.fixture
def api() -> Api:
    return Api(alice())


def tried(api: Api, method: str, path: str, body: Any = None) -> Any:
    """The answer to a dry run, which has changed nothing."""
    before = (Event.objects.count(), list(Model.objects.values()))
    status, told = api(method, f"{path}?dry_run=1", body)
    assert status == 200, told
    assert (Event.objects.count(), list(Model.objects.values())) == before
    return told


def test_one_more_model_is_tried(api: Api) -> None:
    a_node(gpus=1)
    told = tried(api, "POST", "models", model_form(scaling={"min": 2, "max": 2}))
    assert told["model"]["scaling"] == {"min": 2, "max": 2}
    assert told["changes"] == {}
    plan = told["consequences"]["plan"]
    assert [(item["bucket"], item["missing"], item["nodes"]) for item in plan] == [
        ("blocked", 1, []),
        ("start", 0, ["gpu-01"]),
    ]
    assert plan[0]["why"] == "0 of 1 node: 1 lacks 1 free sim"


@pytest.mark.parametrize("method", ["PUT", "PATCH"])
def test_an_edit_is_tried(api: Api, method: str) -> None:
    replica = a_replica(a_model(), a_node())
    told = tried(api, method, "models/tiny", model_form(profiles=[PROFILE | {"tp": 2}]))
    assert told["model"]["profiles"][0]["tp"] == 2
    assert told["changes"]["profiles_changed"]["default"][0] == {"field": "tp", "was": 1, "now": 2}
    (turned,) = told["consequences"]["stale"]
    assert (turned["replica"], turned["nodes"]) == (str(replica.pk), ["gpu-01"])
    assert [each["field"] for each in turned["differences"]] == ["tp", "gpus_per_node"]
    assert told["consequences"]["plan"] == told["consequences"]["lifted"] == []


def test_what_would_wait_no_more_is_told(api: Api) -> None:
    a_model(profiles=[PROFILE | {"tp": 4}])
    a_node()
    told = tried(api, "PATCH", "models/tiny", {"profiles": [PROFILE]})["consequences"]
    assert [item["missing"] for item in told["lifted"]] == [1]
    assert [item["bucket"] for item in told["plan"]] == ["start"]


def test_a_removal_is_tried(api: Api) -> None:
    replica = a_replica(a_model(), a_node())
    told = tried(api, "DELETE", "models/tiny")
    assert (told["model"], told["changes"]) == (None, {})
    (item,) = told["consequences"]["plan"]
    assert (item["bucket"], item["replica"]) == ("drain", str(replica.pk))
    assert api("DELETE", "models/tiny?dry_run=false&why=over")[0] == 204


def test_a_rename_is_tried(api: Api) -> None:
    a_replica(a_model(), a_node())
    told = tried(api, "PATCH", "models/tiny", {"name": "other"})
    assert [each["field"] for each in told["consequences"]["stale"][0]["differences"]] == ["name"]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        pytest.param("POST", "models", model_form(), id="a name that is taken"),
        pytest.param("PATCH", "models/tiny", {"scaling": {"min": 3, "max": 1}}, id="what the law refuses"),
        pytest.param("DELETE", "models/tiny", None, id="a model that others fall back to"),
        pytest.param("DELETE", "models/x", None, id="what is not there"),
    ],
)
def test_what_would_be_refused_is_refused(api: Api, method: str, path: str, body: Any) -> None:
    a_model()
    a_model("user", fallbacks=["tiny"])
    refused = sentence(api(method, f"{path}?dry_run=1", body))
    assert refused == sentence(api(method, path, body))


def test_a_trial_is_told_what_it_is_not(api: Api) -> None:
    a_model()
    answer = api("PATCH", "models/tiny?dry_run=yes", {"description": "d"})
    assert field(answer) == (400, "dry_run", "unknown_choice")
    assert sentence(answer)[1] == 'dry_run cannot be "yes"; it is one of true, 1, false, 0'
    assert field(api("GET", "models/tiny?dry_run=1"))[2] == "unknown_parameter"
    assert Model.objects.get().description == ""


def test_a_trial_is_for_those_who_may_do_it() -> None:
    a_model()
    looker = Api(viola())
    for method, path in (("POST", "models"), ("PATCH", "models/tiny"), ("DELETE", "models/tiny")):
        assert looker(method, f"{path}?dry_run=1", model_form("new"))[0] == 403


def test_a_trial_hides_what_is_hidden(api: Api) -> None:
    a_replica(a_model(profiles=[PROFILE | {"env": {"HF_TOKEN": "abracadabra"}}]), a_node())
    body = {"profiles": [PROFILE | {"env": {"HF_TOKEN": "simsalabim"}}]}
    told = str(tried(api, "PATCH", "models/tiny", body))
    assert "abracadabra" not in told
    assert "simsalabim" not in told
    assert "HF_TOKEN" in told
