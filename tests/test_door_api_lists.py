"""REST: lists are narrowed, searched, ordered and read page by page; what is not known is refused."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import pytest
from django.contrib.auth.models import User

from catalog.models import Event, Model
from tests.cast import PROFILE, a_model, a_node, a_replica, alice, model_form
from tests.rest_client import Api, field, sentence

pytestmark = pytest.mark.django_db


@pytest.fixture
def api() -> Api:
    return Api(alice())


def names(api: Api, path: str, key: str = "name") -> list[Any]:
    """Of all pages, in order."""
    found, url = [], path
    while url:
        status, page = api("GET", url)
        assert status == 200, page
        found += [row[key] for row in page["results"]]
        url = (page["next"] or "").partition("/api/")[2]
    return found


# --- narrowed -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "found"),
    [
        pytest.param("", ["kept", "demand", "off"], id="all"),
        pytest.param("scaling=kept", ["kept"], id="kept running"),
        pytest.param("scaling=on-demand", ["demand"], id="on demand"),
        pytest.param("scaling=off", ["off"], id="off"),
        pytest.param("engine=llamacpp", ["off"], id="by engine"),
        pytest.param("gpu_class=sim", ["kept", "demand"], id="by GPU class"),
        pytest.param("gpu_class=sim&scaling=kept", ["kept"], id="by two"),
        pytest.param("gpu_class=none", [], id="by what nothing is"),
        pytest.param("source_state=unchecked", ["off"], id="by what the check found"),
        pytest.param("search=DEM", ["demand"], id="a part of a name, in another case"),
        pytest.param("search=little", ["kept"], id="a part of an alias"),
        pytest.param("search=gguf", ["off"], id="a part of a source"),
        pytest.param("search=%25", [], id="a per cent sign is a per cent sign"),
        pytest.param("order=name", ["demand", "kept", "off"], id="by name"),
        pytest.param("order=-name", ["off", "kept", "demand"], id="by name, turned round"),
        pytest.param("order=-added&scaling=kept", ["kept"], id="ordered and narrowed"),
    ],
)
def test_models_are_found(api: Api, query: str, found: list[str]) -> None:
    a_model("kept", aliases=["a-little-one"])
    a_model("demand", scaling={"max": 1})
    off = {"source": "/models/x.gguf", "scaling": {}, "profiles": [{"name": "cpu", "engine": "llamacpp"}]}
    said = {"skip_source_check": True, "why": "no node yet"}
    assert api("POST", "models", model_form("off", **off) | said)[0] == 201
    assert names(api, f"models?{query}") == found


def test_replicas_are_found(api: Api) -> None:
    one, two = a_model("one"), a_model("two", profiles=[PROFILE | {"name": "other"}])
    a_replica(one, a_node("gpu-01"), "ready")
    a_replica(one, a_node("gpu-02"), "failed", gpu=None)
    a_replica(two, a_node("gpu-03"), "ready")
    assert names(api, "replicas?model=one", "node") == ["gpu-01", "gpu-02"]
    assert names(api, "replicas?model=one&state=ready", "node") == ["gpu-01"]
    assert names(api, "replicas?node=gpu-03", "model") == ["two"]
    assert names(api, "replicas?profile=other", "model") == ["two"]
    assert names(api, "replicas?wanted=drain", "model") == []
    assert names(api, "replicas?search=tw", "model") == ["two"]
    assert names(api, "replicas?order=-state", "state") == ["ready", "ready", "failed"]


def test_nodes_and_events_are_found(api: Api) -> None:
    a_node("gpu-01", is_cordoned=True)
    a_node("gpu-02")
    assert names(api, "nodes?cordoned=true") == ["gpu-01"]
    assert names(api, "nodes?search=02&cordoned=false") == ["gpu-02"]
    a_model("one")
    a_model("two")
    assert names(api, "events?kind=model", "subject") == ["two", "one"]
    assert names(api, "events?kind=model&order=at", "subject") == ["one", "two"]
    assert names(api, "events?subject=one&verb=add&by=alice&door=command", "subject") == ["one"]
    assert names(api, "events?search=TW", "subject") == ["two"]
    event = Event.objects.get(subject="one")
    assert api("GET", f"events/{event.pk}")[1]["subject"] == "one"
    assert sentence(api("GET", "events/0")) == (404, "there is no event 0; GET /api/events lists them")


# --- what is not known ----------------------------------------------------------------------------


@pytest.mark.one_database
@pytest.mark.parametrize(
    ("path", "where", "says"),
    [
        pytest.param(
            "models?stat=ok",
            "",
            'the parameter "stat" is not known; these are: '
            "source_state, scaling, engine, gpu_class, search, order, limit, cursor",
            id="an unknown parameter",
        ),
        pytest.param(
            "models/tiny?limit=1",
            "",
            'the parameter "limit" is not known; there is none here',
            id="of no list",
        ),
        pytest.param(
            "models?scaling=lots",
            "scaling",
            'scaling cannot be "lots"; it is one of kept, on-demand, off',
            id="an unknown value",
        ),
        pytest.param(
            "nodes?cordoned=", "cordoned", 'cordoned cannot be ""; it is one of true, false', id="none"
        ),
        pytest.param(
            "replicas?state=ready&state=failed",
            "state",
            "the parameter state is given more than once; give it once",
            id="twice",
        ),
        pytest.param(
            "events?subject=a%00b",
            "subject",
            "the parameter subject holds a NUL character; remove it",
            id="NUL",
        ),
        pytest.param(
            "models?order=source",
            "order",
            'order cannot be "source"; it is one of added, name, changed, -added, -name, -changed',
            id="an unknown order",
        ),
        *(
            pytest.param(
                f"models?limit={quote(limit)}",
                "limit",
                f'limit must be a whole number from 1 to 1000, and is "{limit}"',
                id=f"a limit of {limit or 'nothing'}",
            )
            for limit in ("0", "1001", "-1", "ten", "1.5", "", "9" * 50, "²")
        ),
        *(
            pytest.param(
                f"models?cursor={cursor}",
                "cursor",
                "cursor is none of this list; begin without it",
                id=f"a cursor of {what}",
            )
            for cursor, what in (
                ("x", "nothing"),
                ("WyJhIiwgImIiXQ:x:y", "somebody's own"),
                ("%C3%A9:a:b", "é"),
            )
        ),
    ],
)
def test_what_a_list_does_not_know_is_refused(api: Api, path: str, where: str, says: str) -> None:
    a_model()
    answer = api("GET", path)
    assert field(answer)[:2] == (400, where)
    assert sentence(answer) == (400, says)


def test_a_cursor_belongs_to_its_list_and_its_order(api: Api) -> None:
    for number in range(2):
        a_model(f"model-{number}")
        a_node(f"node-{number}")
    cursor = api("GET", "models?limit=1&order=name")[1]["next"].partition("cursor=")[2].partition("&")[0]
    says = "cursor is of the list in the order name; keep that order, or begin without the cursor"
    assert sentence(api("GET", f"models?cursor={cursor}")) == (400, says)
    assert sentence(api("GET", f"models?order=-name&cursor={cursor}")) == (400, says)
    other = "cursor is none of this list; begin without it"
    assert sentence(api("GET", f"nodes?order=name&cursor={cursor}")) == (400, other)


# --- page by page ---------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["added", "-added", "name", "-name", "changed", "-changed"])
@pytest.mark.parametrize(
    "limit", [2, *(pytest.param(each, marks=pytest.mark.one_database) for each in (1, 5, 6))]
)
def test_pages_follow_each_other_in_every_order(api: Api, order: str, limit: int) -> None:
    for name in ("b", "d", "a", "e", "c"):
        a_model(name)
    # Some in another precision than the database's own, and two at one moment.
    Model.objects.filter(name__in="ab").update(changed_at=Model.objects.get(name="a").changed_at)
    whole = names(api, f"models?order={order}")
    assert names(api, f"models?order={order}&limit={limit}") == whole
    assert sorted(whole) == ["a", "b", "c", "d", "e"]


def test_equal_values_do_not_hide_rows(api: Api) -> None:
    model, node = a_model(), a_node()
    all_of_them = {str(a_replica(model, node, gpu=None).pk) for _ in range(12)}
    found = names(api, "replicas?order=state&limit=5", "id")
    assert len(found) == 12
    assert set(found) == all_of_them


def test_rows_that_stay_are_read_once_while_others_come_and_go(api: Api) -> None:
    for name in "bdfhj":
        a_model(name)
    _, page = api("GET", "models?order=name&limit=2")
    assert [row["name"] for row in page["results"]] == ["b", "d"]
    a_model("a")
    a_model("e")
    Model.objects.get(name="d").delete()  # the one that the next page begins after
    assert names(api, page["next"].partition("/api/")[2]) == ["e", "f", "h", "j"]


def test_the_next_page_keeps_what_was_asked_for(api: Api) -> None:
    for number in range(3):
        a_model(f"kept-{number}")
        a_model(f"off-{number}", scaling={})
    assert names(api, "models?scaling=kept&search=kept&limit=1") == ["kept-0", "kept-1", "kept-2"]


def test_a_list_has_at_most_so_many_rows(api: Api) -> None:
    for number in range(101):
        Event.objects.create(verb="add", kind="model", subject=str(number))
    assert len(api("GET", "events")[1]["results"]) == 100
    assert len(api("GET", "events?limit=1000")[1]["results"]) == 102  # and the key that asks
    assert User.objects.count() == 1
