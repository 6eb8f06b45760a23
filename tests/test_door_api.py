"""REST: who comes in, what the answers hold, and how a refusal looks."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.db.models.functions import Now
from django.test import Client
from django.test.utils import CaptureQueriesContext
from rest_framework.exceptions import APIException, PermissionDenied, Throttled

from catalog.actions import revoke_key
from catalog.hiding import HIDDEN
from catalog.keys import ID_BYTES, SECRET_BYTES, KeyText
from catalog.models import Event, Key, Model, Profile
from catalog.rest import answer_error
from tests.cast import PROFILE, a_model, a_node, a_replica, alice, edited, model_form, viola
from tests.rest_client import Api, sentence

pytestmark = pytest.mark.django_db


@pytest.fixture
def api() -> Api:
    return Api(alice())


# --- who comes in ---------------------------------------------------------------------------------

OPEN = ["models", "models/tiny", "keys", "replicas", "nodes", "events", "schema", "nowhere"]


@pytest.mark.one_database
@pytest.mark.parametrize("path", OPEN)
def test_nothing_is_open_without_a_credential(client: Client, path: str) -> None:
    answer = client.get(f"/api/{path}")
    assert answer.status_code == 401
    assert answer["WWW-Authenticate"].startswith("Bearer")
    assert answer.json()["errors"][0]["code"] == "not_authenticated"


def never_minted() -> str:
    return KeyText.from_bytes(bytes(ID_BYTES), bytes(SECRET_BYTES)).reveal()


INVALID = "This API key is not valid: it is unknown, revoked or expired."


@pytest.mark.parametrize(
    ("spoil", "status", "says"),
    [
        pytest.param(lambda api: api.text, 200, "", id="a live key"),
        pytest.param(lambda api: api.text[:-1] + "?", 401, INVALID, id="a key with a typing error"),
        pytest.param(lambda api: never_minted(), 401, INVALID, id="a key that never was"),
        pytest.param(
            lambda api: revoke_key(api.key.pk, by="a", door="api") and api.text, 401, INVALID, id="revoked"
        ),
        pytest.param(
            lambda api: Key.objects.update(expires_at=Now()) and api.text,
            401,
            INVALID,
            id="a key that has expired",
        ),
        pytest.param(
            lambda api: User.objects.update(is_active=False) and api.text,
            401,
            INVALID,
            id="a key of who has left",
        ),
        pytest.param(
            lambda api: Api(User.objects.get(), scope="inference").text,
            403,
            "This API key is for /v1/ alone: use one whose scope is manage, or make one.",
            id="a key for inference",
        ),
        pytest.param(
            lambda api: Api(User.objects.get(), scope="metrics").text,
            403,
            "This API key is for /metrics alone: use one whose scope is manage, or make one.",
            id="a key for metrics",
        ),
        pytest.param(lambda api: "", 401, INVALID, id="no key after Bearer"),
    ],
)
def test_a_key_opens_the_door_while_it_lives(
    api: Api, spoil: Callable[[Api], str], status: int, says: str
) -> None:
    answer = api("GET", "models", Authorization=f"Bearer {spoil(api)}")
    assert answer[0] == status
    assert not says or sentence(answer) == (status, says)


def test_a_secret_of_another_key_does_not_fit(api: Api) -> None:
    other = Api(User.objects.get())
    mixed = other.text.replace(other.key.pk, api.key.pk)
    assert sentence(api("GET", "models", Authorization=f"Bearer {mixed}")) == (401, INVALID)


def test_two_credentials_are_refused(api: Api, client: Client) -> None:
    client.force_login(User.objects.get())
    assert client.get("/api/models").status_code == 200
    answer = client.get("/api/models", headers={"Authorization": f"Bearer {api.text}"})
    assert answer.status_code == 400
    assert answer.json()["errors"][0]["code"] == "two_credentials"


def test_a_session_changes_nothing_without_its_csrf_token() -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(alice())
    answer = client.post("/api/models", json.dumps(model_form()), content_type="application/json")
    assert answer.status_code == 403
    assert not Model.objects.exists()


def test_a_key_may_do_no_more_than_its_owner() -> None:
    a_model()
    looker = viola()
    api = Api(looker)
    assert api("GET", "models")[0] == 200
    says = "Your user may not do this: whoever manages users can give it the permission."
    assert sentence(api("POST", "models", model_form("other"))) == (403, says)
    assert api("PUT", "models/tiny", model_form())[0] == 403
    assert api("DELETE", "models/tiny")[0] == 403
    looker.user_permissions.set(Permission.objects.filter(codename="view_node"))
    assert api("GET", "models")[0] == 403
    assert api("GET", "nodes")[0] == 200
    User.objects.update(is_staff=False)
    assert api("GET", "nodes")[0] == 403
    assert Model.objects.count() == 1


# --- models ---------------------------------------------------------------------------------------


def test_a_model_is_created_read_replaced_and_removed(api: Api) -> None:
    status, made = api("POST", "models", model_form("org/tiny", why="for the trial"))
    assert status == 201
    assert made["scaling"] == {"min": 1, "max": 2}
    assert made["profiles"][0]["startup_timeout"] == "20m"
    assert made["status"]["scaling"] == "kept running: 1 to 2"
    assert (made["status"]["ready"], made["status"]["wanted"]) == (0, 1)
    event = Event.objects.get(verb="add")
    assert (event.by, event.door, event.why) == ("alice", "api", "for the trial")

    status, read = api("GET", "models/org/tiny/")
    assert (status, read["name"]) == (200, "org/tiny")
    row = Profile.objects.get().pk
    status, replaced = api("PUT", "models/org/tiny", read | {"scaling": {"max": 3, "idle_timeout": "90s"}})
    assert (status, replaced["scaling"]) == (200, {"max": 3, "idle_timeout": "1m30s"})
    assert Profile.objects.get().pk == row

    assert [each["name"] for each in api("GET", "models")[1]["results"]] == ["org/tiny"]
    assert api("DELETE", "models/org/tiny?why=over") == (204, None)
    assert api("GET", "models/org/tiny")[0] == 404
    assert Event.objects.get(verb="remove").why == "over"


def test_the_location_of_a_new_model_leads_to_it(api: Api, client: Client) -> None:
    client.force_login(User.objects.get())
    answer = client.post("/api/models", model_form("a b/c"), content_type="application/json")
    assert client.get(answer["Location"]).json()["name"] == "a b/c"


def test_a_put_without_a_name_keeps_it_and_with_another_renames(api: Api) -> None:
    a_model()
    form = model_form()
    del form["name"]
    assert api("PUT", "models/tiny", form)[1]["name"] == "tiny"
    assert api("PUT", "models/tiny", model_form("small"))[1]["name"] == "small"
    assert api("GET", "models/tiny")[0] == 404


def test_an_alias_is_no_address(api: Api) -> None:
    a_model(aliases=["small"])
    assert api("GET", "models/small")[0] == 404


def test_secrets_are_shown_to_nobody_and_survive_being_sent_back(api: Api) -> None:
    model = a_model(profiles=[PROFILE | {"env": {"HF_TOKEN": "abracadabra", "A": "open-to-some"}}])
    a_replica(model, a_node())
    editor = viola()
    editor.user_permissions.add(Permission.objects.get(codename="change_model"))
    theirs = Api(editor)
    _, read = theirs("GET", "models/tiny")
    assert read["profiles"][0]["env"] == {"A": HIDDEN, "HF_TOKEN": HIDDEN}
    assert theirs("PUT", "models/tiny", read | {"description": "new"})[0] == 200
    assert Profile.objects.get().env == {"A": "open-to-some", "HF_TOKEN": "abracadabra"}
    edited(model, env={"A": "open-to-others", "HF_TOKEN": "abracadabra"})
    for path in ("models", "replicas", "events"):
        for_all, for_some = json.dumps(theirs("GET", path)[1]), json.dumps(api("GET", path)[1])
        assert "open-to" not in for_all
        assert "open-to-others" in for_some
        assert "abracadabra" not in for_all + for_some


def test_a_model_that_another_falls_back_to_is_a_conflict(api: Api) -> None:
    a_model("other", scaling={"max": 1})
    a_model(fallbacks=["other"])
    status, says = sentence(api("DELETE", "models/other"))
    assert status == 409
    assert 'model "tiny" falls back to it' in says


@pytest.mark.one_database
@pytest.mark.parametrize(
    ("body", "field", "says"),
    [
        pytest.param(
            model_form() | {"why": 3},
            "why",
            "why must be a text, not a number",
            id="a reason that is no text",
        ),
        pytest.param(
            model_form() | {"skip_source_check": "yes"},
            "skip_source_check",
            "skip_source_check must be true or false, not a text",
            id="a skip that is no bool",
        ),
        pytest.param([], "", "the model: it must be a map of fields, not a list", id="a list"),
        pytest.param({"nmae": "x"}, "nmae", "", id="an unknown key"),
    ],
)
def test_a_wrong_body_is_refused_at_its_field(api: Api, body: Any, field: str, says: str) -> None:
    status, answer = api("POST", "models", body)
    assert status == 400
    assert answer["errors"][0]["field"] == field
    assert answer["errors"][0]["sentence"] == says or not says
    assert not Model.objects.exists()


def test_every_fault_is_told_with_its_profile(api: Api) -> None:
    body = model_form(scaling={"min": 3, "max": 1}, profiles=[PROFILE | {"engine": "warp"}])
    _, answer = api("POST", "models", body)
    assert [(each["field"], each.get("profile")) for each in answer["errors"]] == [
        ("scaling.max", None),
        ("engine", "default"),
    ]


# --- what a request may be ------------------------------------------------------------------------


@pytest.mark.one_database
@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        pytest.param("{", 400, "The body is not JSON", id="half an object"),
        pytest.param("", 400, "a model has no name", id="nothing"),
        pytest.param(b"\xff\xfe", 400, "The body is not JSON", id="no UTF-8"),
        pytest.param('{"a": NaN}', 400, "NaN is no number in JSON", id="NaN"),
        pytest.param('{"a": 1, "a": 2}', 400, "the key 'a' is there twice", id="a key twice"),
        pytest.param("[" * 100_000, 400, "nested too deeply", id="very deep"),
        pytest.param("[" + "9" * 5_000 + "]", 400, "The body is not JSON", id="a number of many digits"),
        pytest.param('{"name": "' + "x" * 1_048_576 + '"}', 413, "larger than 1048576 bytes", id="too large"),
    ],
)
def test_a_body_that_is_no_json_gets_one_sentence(api: Api, body: Any, status: int, says: str) -> None:
    answer = sentence(api("POST", "models", body))
    assert answer[0] == status
    assert says in answer[1]


COSTLY = {
    "no key is known": {f"k{number}": 1 for number in range(60_000)},
    "each profile has keys that are not known": [{f"k{each}": 1 for each in range(20)}] * 4_000,
    "hidden values of nothing": [{"name": "p", "env": {f"E{each}": "(hidden)" for each in range(30_000)}}],
}


@pytest.mark.one_database
@pytest.mark.parametrize("said", COSTLY.values(), ids=COSTLY)
def test_who_makes_a_thousand_mistakes_is_told_of_a_hundred(api: Api, said: Any) -> None:
    body = {"name": "m", "source": "sim/m"} | (said if isinstance(said, dict) else {"profiles": said})
    began = time.process_time()
    status, told = api("POST", "models", body)
    assert time.process_time() - began < 5
    assert (status, len(told["errors"])) == (400, 101)
    assert re.fullmatch(r"\.\.\. and [0-9]+ more; mend these first\.", told["errors"][-1]["sentence"])


def test_a_key_that_comes_again_after_many_others_is_found_at_once(api: Api) -> None:
    keys = ",".join(f'"k{number}": 1' for number in [*range(60_000), 59_999])
    began = time.process_time()
    assert sentence(api("POST", "models", f"{{{keys}}}"))[1].endswith("the key 'k59999' is there twice.")
    assert time.process_time() - began < 5


def test_a_packed_body_is_refused(api: Api) -> None:
    status, says = sentence(api("POST", "models", "{}", **{"Content-Encoding": "gzip"}))
    assert status == 415
    assert says == "A body with Content-Encoding 'gzip' is not read: send it as it is."


def test_a_form_is_no_json(api: Api) -> None:
    status, says = sentence(api("POST", "models", "a=b", content_type="application/x-www-form-urlencoded"))
    assert status == 415
    assert "application/x-www-form-urlencoded" in says


def test_addresses_and_methods_that_are_not_there(api: Api) -> None:
    nothing_here = (404, "There is nothing at this address; GET /api/ tells what there is.")
    assert sentence(api("GET", "nowhere/at/all")) == nothing_here
    assert sentence(api("PATCH", "keys/%0Aa.b", {})) == nothing_here
    unknown = (404, 'model "nobody" is not in the catalog; check the spelling')
    assert sentence(api("GET", "models/nobody")) == unknown
    assert sentence(api("PUT", "models/nobody", model_form("nobody"))) == unknown
    assert sentence(api("DELETE", "models/nobody")) == unknown
    assert sentence(api("GET", "models/a%00b"))[0] == 404
    assert sentence(api("GET", "replicas?model=a%00b"))[0] == 400
    assert sentence(api("GET", "replicas/12345678-0000-0000-0000-000000000000"))[0] == 404
    assert sentence(api("GET", "replicas/------------------------------------"))[0] == 404
    possible = "POST is not possible here; these are: GET, HEAD, PUT, PATCH, DELETE."
    assert sentence(api("POST", "models/nobody", {})) == (405, possible)
    assert sentence(api("OPTIONS", "models/nobody"))[0] == 405
    assert sentence(api("POST", "replicas", {}))[0] == 405


def test_what_is_asked_for_in_another_form_is_told_that_there_is_one(api: Api) -> None:
    says = "This address answers in JSON alone: accept application/json."
    assert sentence(api("GET", "models", Accept="text/html")) == (406, says)
    assert sentence(api("GET", "models?format=html"))[0] == 400


# --- what runs ------------------------------------------------------------------------------------


def test_a_replica_on_its_way_tells_how_long_it_may_take(api: Api) -> None:
    starting = a_replica(a_model(), a_node(), state="starting")
    _, told = api("GET", f"replicas/{starting.pk}")
    assert told["age_s"] + told["deadline_s"] == pytest.approx(20 * 60)
    draining = a_replica(a_model("other"), a_node("gpu-02"), state="draining", wanted="drain")
    assert api("GET", f"replicas/{draining.pk}")[1]["deadline_s"] == 0


def test_a_replica_tells_whether_and_where_it_is_stale(api: Api) -> None:
    model = a_model()
    replica = a_replica(model, a_node(), reason="serving")
    _, fresh = api("GET", f"replicas/{replica.pk}")
    assert (fresh["stale_profile"], fresh["stale_fields"], fresh["restart_needed"]) == (False, [], False)
    assert (fresh["state"], fresh["reason"]) == ("ready", "serving")
    assert (fresh["node"], fresh["port"], fresh["pid"]) == ("gpu-01", 18001, 4242)
    assert 299 < fresh["age_s"] < 400
    assert fresh["launch"]["profile"]["name"] == "default"
    assert fresh["deadline_s"] is None

    edited(model, tp=2)
    _, page = api("GET", "replicas/")
    (stale,) = page["results"]
    assert (stale["stale_profile"], stale["restart_needed"]) == (True, True)
    assert stale["stale_fields"] == ["tp", "gpus_per_node"]
    assert stale["differences"][0] == {"field": "tp", "was": 1, "now": 2}
    assert (stale["id"], stale["pid"]) == (fresh["id"], fresh["pid"])
    assert api("GET", "models/tiny")[1]["status"]["stale"] == 1


def test_a_weight_makes_a_mild_difference(api: Api) -> None:
    model = a_model()
    replica = a_replica(model, a_node())
    edited(model, weight=3)
    _, told = api("GET", f"replicas/{replica.pk}")
    assert (told["stale_profile"], told["stale_fields"], told["restart_needed"]) == (True, ["weight"], False)


def test_an_adopted_replica_without_a_fingerprint_is_unknown(api: Api) -> None:
    replica = a_replica(a_model(), a_node(), fingerprint="", launch={}, is_adopted=True)
    _, told = api("GET", f"replicas/{replica.pk}")
    assert (told["stale_profile"], told["restart_needed"], told["adopted"]) == (None, False, True)


def test_an_edit_of_the_model_makes_a_stale_launch(api: Api) -> None:
    model = a_model()
    replica = a_replica(model, a_node())
    assert api("PUT", "models/tiny", model_form(context_length=4096))[0] == 200
    _, told = api("GET", f"replicas/{replica.pk}")
    assert (told["stale_profile"], told["stale_launch"], told["restart_needed"]) == (False, True, True)
    assert told["launch_differences"] == [{"field": "context_length", "was": None, "now": 4096}]


def test_a_replica_whose_model_has_gone_is_still_told(api: Api) -> None:
    replica = a_replica(a_model(), a_node())
    assert api("DELETE", "models/tiny")[0] == 204
    _, told = api("GET", f"replicas/{replica.pk}")
    assert (told["model"], told["profile"], told["state"]) == ("tiny", "default", "ready")
    assert [found["id"] for found in api("GET", "replicas?model=tiny")[1]["results"]] == [str(replica.pk)]


def test_replicas_are_narrowed_by_model_and_state(api: Api) -> None:
    one, two = a_model("one"), a_model("two")
    a_replica(one, a_node("gpu-01"), "ready")
    a_replica(one, a_node("gpu-02"), "failed", gpu=None)
    a_replica(two, a_node("gpu-03"), "ready")
    assert len(api("GET", "replicas?model=one")[1]["results"]) == 2
    assert len(api("GET", "replicas?model=one&state=ready")[1]["results"]) == 1


def test_a_node_tells_what_is_free(api: Api) -> None:
    node = a_node(gpus=2)
    a_replica(a_model(), node, gpu=1)
    (told,) = api("GET", "nodes")[1]["results"]
    assert (told["name"], told["state"], told["cordoned"]) == ("gpu-01", "fresh", False)
    assert (told["gpus_total"], told["gpus_free"]) == (2, 1)
    assert [bool(gpu["taken_by"]) for gpu in told["gpus"]] == [False, True]


def test_events_are_newest_first_and_narrowed(api: Api) -> None:
    a_model("one")
    a_model("two")
    _, page = api("GET", "events?kind=model")
    assert [event["subject"] for event in page["results"]] == ["two", "one"]
    assert [event["verb"] for event in api("GET", "events?kind=model&subject=one")[1]["results"]] == ["add"]


@pytest.mark.parametrize("path", ["models", "keys", "replicas", "nodes", "events"])
def test_lists_take_the_same_number_of_queries_however_long_they_are(api: Api, path: str) -> None:
    def queries() -> int:
        with CaptureQueriesContext(connection) as seen:
            assert api("GET", path)[0] == 200
        return len(seen)

    a_replica(a_model("first"), a_node("gpu-00"))
    few = queries()
    for number in range(1, 9):
        model, node = a_model(f"model-{number}", aliases=[f"alias-{number}"]), a_node(f"gpu-0{number}")
        a_replica(model, node)
        edited(model, tp=2)
        Api(User.objects.get())
    assert queries() == few


# --- beside the API -------------------------------------------------------------------------------


def test_the_root_leads_to_the_admin_and_its_login(client: Client) -> None:
    answer = client.get("/", follow=True)
    assert answer.redirect_chain[-1][0].startswith("/admin/login/")
    assert "llmgw" in answer.content.decode()


@pytest.mark.one_database
def test_every_kind_of_refusal_has_one_form() -> None:
    context = {"view": None, "request": None}
    for problem, status in ((Throttled(wait=2.5), 429), (APIException(), 500), (PermissionDenied(), 403)):
        answer = answer_error(problem, context)
        assert answer.status_code == status
        assert set(answer.data["errors"][0]) == {"field", "code", "sentence"}
    assert answer_error(Throttled(wait=2.5), context)["Retry-After"] == "3"
    assert answer_error(ZeroDivisionError(), context) is None  # a fault of ours stays an exception
