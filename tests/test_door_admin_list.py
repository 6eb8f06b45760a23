"""The list of models in the admin: what it says at a glance, what it can be narrowed to, and its actions."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models.functions import Now
from django.test import Client
from django.test.utils import CaptureQueriesContext

from catalog.actions import edit_model
from catalog.models import Event, Model, Name, Profile, Tombstone
from nodes.models import Demand, Gateway, Node, Rank, Replica, Unplaced
from tests.cast import a_model, a_node, a_replica, alice, edited, model_form, nobody_is_asked, viola
from tests.pages import MODELS, page, text_of

pytestmark = [pytest.mark.django_db, pytest.mark.one_database]


@pytest.fixture
def admin(client: Client) -> Client:
    client.force_login(alice())
    return client


def test_the_list_says_how_much_runs_and_what_is_stale(admin: Client) -> None:
    model, node = a_model(), a_node()
    a_replica(model, node, gpu=0)
    a_replica(model, node, "starting", gpu=1)
    edited(model, tp=2)
    said = text_of(page(admin, MODELS))
    assert "kept running: 1 to 2" in said
    assert "1 of 2" in said
    assert "2 stale" in said


def test_the_list_says_why_a_want_is_unplaced(admin: Client) -> None:
    model = a_model()
    Unplaced.objects.create(model=model, missing=1, why="0 of 1 node: 1 lacks 1 free sim")
    said = text_of(page(admin, MODELS))
    assert "0 of 1 node: 1 lacks 1 free sim" in said
    assert "0 of 1" in said


def test_a_mild_difference_is_not_counted_among_what_needs_a_person(admin: Client) -> None:
    model = a_model()
    a_replica(model, a_node())
    edited(model, weight=2)
    html = page(admin, MODELS)
    assert '<span class="badge ">1 stale</span>' in html
    assert "no restart needed" in html


def test_the_list_takes_the_same_number_of_queries_however_long_it_is(admin: Client) -> None:
    def queries(path: str) -> int:
        with CaptureQueriesContext(connection) as seen:
            assert admin.get(path).status_code == 200
        return len(seen)

    paths = [MODELS, f"{MODELS}?state=stale", f"{MODELS}?state=short&engine=sim", f"{MODELS}?q=model&o=-6"]
    node, gateway = a_node(gpus=40), Gateway.objects.create()
    for number in range(10):
        a_replica(a_model(f"model-{number}", aliases=[f"alias-{number}"]), node, gpu=number)
    Replica.objects.filter(model__name="model-1").update(state="starting")
    edited(Model.objects.get(name="model-2"), tp=2)
    page(admin, MODELS)
    few = [queries(path) for path in paths]
    for much in (100, 500):
        many_models(much, node, gateway)
        assert Model.objects.count() == much
        assert [queries(path) for path in paths] == few


def many_models(until: int, node: Node, gateway: Gateway) -> None:
    """Each with names, a profile, a replica that is stale, and demand."""
    numbers = range(Model.objects.count(), until)
    rows = Model.objects.bulk_create(
        Model(name=f"model-{number}", source="sim/x", scaling_min=1, scaling_max=2) for number in numbers
    )
    names = [(row.name, True, row) for row in rows] + [(f"alias of {row.name}", False, row) for row in rows]
    Name.objects.bulk_create(
        Name(name=name, is_canonical=is_first, model=row) for name, is_first, row in names
    )
    profiles = Profile.objects.bulk_create(
        Profile(model=row, name="default", engine="sim", gpu_class="sim", fingerprint="f" * 16)
        for row in rows
    )
    replicas = Replica.objects.bulk_create(
        Replica(model=each.model, profile=each, state="ready", fingerprint="e" * 16, launch={"model": "m"})
        for each in profiles
    )
    Rank.objects.bulk_create(Rank(replica=replica, node=node, state="ready") for replica in replicas)
    Demand.objects.bulk_create(Demand(gateway=gateway, model=row, asked_at=Now()) for row in rows)


NARROWED = [
    ("", ["runs", "asked", "off", "short", "stale"]),
    ("scaling=kept", ["runs", "short", "stale"]),
    ("scaling=on-demand", ["asked"]),
    ("scaling=off", ["off"]),
    ("state=short", ["short"]),
    ("state=stale", ["stale"]),
    ("engine=llamacpp", ["off"]),
    ("engine=sglang", []),
    ("source_state__exact=warn", ["off"]),
    ("q=the-alias", ["asked"]),
    ("q=on+a+disk", ["off"]),
    ("scaling=rubbish&state=rubbish&engine=rubbish", ["runs", "asked", "off", "short", "stale"]),
    ("o=-6&scaling=on-demand", ["asked"]),
]


@pytest.mark.parametrize(("query", "names"), NARROWED, ids=[query or "nothing" for query, _ in NARROWED])
def test_the_list_can_be_narrowed(admin: Client, query: str, names: list[str]) -> None:
    node = a_node(gpus=8)
    a_replica(a_model("runs"), node, gpu=0)
    a_model("asked", aliases=["the-alias"], scaling={"max": 1})
    off = a_model("off", description="on a disk", scaling={})
    Profile.objects.filter(model=off).update(engine="llamacpp")
    Model.objects.filter(pk=off.pk).update(source_state="warn")
    short = a_model("short", scaling={"min": 2, "max": 2})
    a_replica(short, node, gpu=1)
    a_replica(short, node, "failed", gpu=2)
    stale = a_model("stale")
    a_replica(stale, node, gpu=3)
    edited(stale, tp=2)
    answer = admin.get(f"{MODELS}?{query}")
    assert sorted(row.name for row in answer.context["cl"].result_list) == sorted(names)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda model, node: None, id="nothing runs"),
        pytest.param(lambda model, node: a_replica(model, node, "starting"), id="one is starting"),
        pytest.param(lambda model, node: a_replica(model, node, "failed"), id="one has failed"),
        pytest.param(lambda model, node: a_replica(model, node, wanted="drain"), id="the one is drained"),
        pytest.param(
            lambda model, node: (
                a_replica(model, node),
                Unplaced.objects.create(model=model, missing=1, why="no room"),
            ),
            id="the second has no place",
        ),
    ],
)
def test_what_is_narrowed_to_what_is_short_is_what_the_badge_counts(admin: Client, make: Any) -> None:
    make(a_model(), a_node())
    said = text_of(page(admin, f"{MODELS}?state=short"))
    assert any(f"{ready} of {wanted} " in said for ready, wanted in [(0, 1), (1, 2)]), said


def test_the_list_says_how_old_a_check_is_and_when_a_model_was_last_asked_for(admin: Client) -> None:
    asked, never = a_model("asked"), a_model("never")
    Model.objects.filter(pk=asked.pk).update(source_checked_at=Now() - timedelta(hours=3, minutes=1))
    for minutes in (12, 90):
        gateway = Gateway.objects.create()
        then = Now() - timedelta(minutes=minutes, seconds=5)
        Demand.objects.create(gateway=gateway, model=asked, asked_at=then)
    Demand.objects.create(gateway=Gateway.objects.create(), model=asked, asked_at=None)
    said = text_of(page(admin, MODELS))
    assert "found 3 h ago 12 min ago" in said
    for order, names in (("6", [never.name, asked.name]), ("-6", [asked.name, never.name])):
        listed = admin.get(f"{MODELS}?o={order}").context["cl"].result_list
        assert [row.name for row in listed] == names


@pytest.mark.parametrize(
    ("state", "words"), [("", "not checked"), ("ok", "found"), ("warn", "warning"), ("refuse", "refused")]
)
def test_a_source_has_a_word_and_not_a_colour_alone(admin: Client, state: str, words: str) -> None:
    Model.objects.filter(pk=a_model().pk).update(source_state=state)
    assert f">{words}</span>" in page(admin, MODELS)


def test_hostile_names_are_shown_as_text(admin: Client) -> None:
    a_model("<script>alert(1)</script>", description="<img src=x>", source="sim/<b>")
    html = page(admin, MODELS)
    assert "<script>alert" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html


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
    asked = admin.post(MODELS, {"action": "remove", "_selected_action": chosen})
    assert "Take these out of the catalog?" in asked.content.decode()
    answer = admin.post(
        MODELS, {"action": "remove", "_selected_action": chosen, "confirmed": "yes"}, follow=True
    )
    said = text_of(answer.content.decode()).replace("&quot;", '"')
    assert 'model "tiny" falls back to it' in said
    assert "0 of 1 model removed." in said
    assert Model.objects.count() == 2


def test_a_model_and_what_it_falls_back_to_go_in_one_go(admin: Client) -> None:
    last = a_model("last", aliases=["end"])
    second = a_model("second", fallbacks=["end"])
    first = a_model("first", fallbacks=["second", "last"])
    answer = admin.post(MODELS, chosen("remove", last, second, first, confirmed="yes"), follow=True)
    assert "3 of 3 models removed." in answer.content.decode()
    assert not Model.objects.exists()


def a_circle() -> tuple[Model, Model]:
    one = a_model("one")
    other = a_model("other", fallbacks=["one"])
    form = model_form("one", fallbacks=["other"])
    edit_model("one", form, by="alice", door="command", ask_paths=nobody_is_asked, after_change=int)
    return one, other


def test_models_that_fall_back_to_each_other_go_together(admin: Client) -> None:
    one, other = a_circle()
    answer = admin.post(MODELS, chosen("remove", one, confirmed="yes"), follow=True)
    assert "0 of 1 model removed." in answer.content.decode()
    alone = a_model("alone")
    sent = chosen("remove", alone, other, one, confirmed="yes", why="old")
    answer = admin.post(MODELS, sent, follow=True)
    assert "3 of 3 models removed." in answer.content.decode()
    assert not Model.objects.exists()
    removed = Event.objects.filter(verb="remove")
    assert sorted(removed.values_list("subject", "why")) == [
        ("alone", "old"),
        ("one", "old"),
        ("other", "old"),
    ]
    assert set(Tombstone.objects.values_list("name", flat=True)) == {"one", "other", "alone"}


def test_a_circle_that_another_falls_back_to_stays_whole(admin: Client) -> None:
    one, other = a_circle()
    a_model("user", fallbacks=["other"])
    answer = admin.post(MODELS, chosen("remove", other, one, confirmed="yes"), follow=True)
    said = text_of(answer.content.decode()).replace("&quot;", '"')
    assert said.count('model "user" falls back to it') == 1
    assert "0 of 2 models removed." in said
    assert Model.objects.count() == 3


# --- actions --------------------------------------------------------------------------------------


def chosen(action: str, *models: Model, **more: str) -> dict[str, Any]:
    return {"action": action, "_selected_action": [str(model.pk) for model in models], **more}


def test_turning_off_asks_lists_what_stops_and_counts(admin: Client) -> None:
    on, off = a_model("on"), a_model("off", scaling={})
    a_replica(on, a_node())
    asked = text_of(admin.post(MODELS, chosen("turn_off", on, off)).content.decode())
    assert re.search(r"on on/default \w{8} on gpu-01, ready, will stop off no replica runs", asked), asked
    assert Model.objects.get(pk=on.pk).scaling_min == 1

    sent = chosen("turn_off", on, off, confirmed="yes", why="the lease ends")
    answer = admin.post(MODELS, sent, follow=True)
    assert "1 of 2 models turned off." in answer.content.decode()
    assert (Model.objects.get(pk=on.pk).scaling_min, Model.objects.get(pk=on.pk).scaling_max) == (0, 0)
    event = Event.objects.get(verb="edit")
    assert (event.subject, event.why, event.door) == ("on", "the lease ends", "admin")


def test_what_todays_law_refuses_can_be_turned_off(admin: Client) -> None:
    model = a_model()
    Profile.objects.filter(model=model).update(args=["--port", "80"])
    answer = admin.post(MODELS, chosen("turn_off", model, confirmed="yes"), follow=True)
    assert "1 of 1 model turned off." in answer.content.decode()


def test_what_went_while_somebody_was_asked_is_counted_among_the_chosen(admin: Client) -> None:
    kept, gone = a_model("kept"), a_model("gone")
    sent = chosen("turn_off", kept, gone, confirmed="yes")
    gone.delete()
    answer = admin.post(MODELS, sent, follow=True)
    assert "1 of 2 models turned off." in answer.content.decode()


def test_checking_many_asks_a_silent_hub_once(admin: Client, settings: Any) -> None:
    settings.LLMGW_HUB_ENDPOINT = "http://127.0.0.1:9"
    models = [a_model(f"m-{number}") for number in range(3)]
    Profile.objects.update(engine="vllm", gpu_class="h100")
    Model.objects.update(source="org/real")
    answer = admin.post(MODELS, chosen("check_sources", *models, confirmed="yes"), follow=True)
    assert "0 of 3 models checked." in answer.content.decode()
    assert Event.objects.filter(verb="check").count() == 1


def test_checking_many_counts_those_that_were_answered(admin: Client) -> None:
    models = [a_model(f"m-{number}") for number in range(3)]
    assert "What runs is left alone." in admin.post(MODELS, chosen("check_sources", *models)).content.decode()
    answer = admin.post(
        MODELS, chosen("check_sources", *models, confirmed="yes", why="a new mirror"), follow=True
    )
    assert "3 of 3 models checked." in answer.content.decode()
    assert {event.why for event in Event.objects.filter(verb="check")} == {"a new mirror"}


def test_who_may_only_look_is_offered_no_action(client: Client) -> None:
    model = a_model()
    client.force_login(viola())
    assert 'name="action"' not in page(client, MODELS)
    for action in ("check_sources", "pin", "turn_off", "remove"):
        client.post(MODELS, chosen(action, model, confirmed="yes"))
    assert Model.objects.get().scaling_min == 1
    assert Event.objects.count() == 1
