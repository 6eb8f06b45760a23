"""What a change of the catalog would bring about, as a table of changes, and as a law: what it foretells is
what the plan then does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from catalog.spec import ModelSpec
from nodes.agenda import Item, agenda
from nodes.consequences import (
    Consequences,
    consequences,
    with_added,
    with_edited,
    with_model,
    without,
)
from nodes.plan import plan
from nodes.snapshot import Snapshot
from tests.test_plan_laws import worlds
from tests.worlds import World


def edited(world: World, **fields: Any) -> Consequences:
    """The model m of the world with some fields of its JSON otherwise; `profile` has its profile's."""
    now = world.snapshot()
    was = now.models[0]
    raw = was.spec.as_dict()
    profile = fields.pop("profile", {})
    raw |= fields | {"profiles": [{**raw["profiles"][0], "gpus_per_node": 0, **profile}]}
    then, model = with_edited(now, was, ModelSpec.load(raw))
    return consequences(now, then, [(was, model)])


def removed(world: World) -> Consequences:
    now = world.snapshot()
    return consequences(now, without(now, now.models[0]), [])


def added(world: World, **profile: Any) -> Consequences:
    now = world.snapshot()
    spec = ModelSpec.load(
        {
            "name": "new",
            "source": "org/new",
            "profiles": [{"name": "p", "engine": "sim", "gpu_class": "sim"} | profile],
            "scaling": {"min": 1, "max": 1},
        }
    )
    then, _ = with_added(now, spec)
    return consequences(now, then, [])


def line(item: Item) -> str:
    where = f" on {', '.join(item.nodes)}" if item.nodes else ""
    return f"{item.bucket} {item.model}{where}: {item.why}"


def one() -> World:
    return World().node("a", gpus=2).model().replica("one", gpus="0")


@pytest.mark.parametrize(
    ("change", "stale", "items"),
    [
        pytest.param(lambda: edited(one(), description="new"), [], [], id="words change nothing"),
        pytest.param(
            lambda: edited(one(), profile={"tp": 2}),
            ["one: tp, gpus_per_node"],
            [],
            id="a replica turns stale",
        ),
        pytest.param(
            lambda: edited(one(), profile={"weight": 2}), [], [], id="what needs no restart makes none stale"
        ),
        pytest.param(
            lambda: edited(one(), context_length=4096),
            ["one: context_length"],
            [],
            id="a field of the model that shapes the launch",
        ),
        pytest.param(
            lambda: edited(one(), scaling={"min": 2, "max": 2}),
            [],
            ["start m on a: 2 wanted, 1 there before it"],
            id="one more is placed",
        ),
        pytest.param(
            lambda: edited(one(), scaling={"min": 3, "max": 3}),
            [],
            [
                "blocked m: 0 of 1 node: 1 lacks 1 free sim",
                "start m on a: 3 wanted, 1 there before it",
            ],
            id="two more, and one of them finds no room",
        ),
        pytest.param(
            lambda: edited(one(), scaling={"min": 0, "max": 0}),
            [],
            ["drain m on a: the model is off (max 0)"],
            id="it is turned off",
        ),
        pytest.param(
            lambda: removed(one()),
            [],
            ['drain m on a: model "m" was removed from the catalog'],
            id="it is removed",
        ),
        pytest.param(
            lambda: added(one()),
            [],
            ["start new on a: 1 wanted, 0 there before it"],
            id="a new one is placed",
        ),
        pytest.param(
            lambda: added(one(), tp=2),
            [],
            ["blocked new: 0 of 1 node: 1 lacks 2 free sim"],
            id="a new one finds no room",
        ),
        pytest.param(
            lambda: removed(
                World().node("a", gpus=4).model(low=4, high=4)
                .replica("one", gpus="0").replica("two", gpus="1")
                .replica("three", gpus="2").replica("four", gpus="3")
            ),
            [],
            ['held m on a: model "m" was removed from the catalog'] * 4,
            id="too much would end at once",
        ),
    ],
)  # fmt: skip
def test_a_change_tells_what_it_brings_about(
    change: Callable[[], Consequences], stale: list[str], items: list[str]
) -> None:
    found = change()
    told = [f"{each.replica}: {', '.join(field.field for field in each.fields)}" for each in found.stale]
    assert (told, [line(item) for item in found.items]) == (stale, items)
    assert bool(found) is bool(stale or items)


def test_a_want_that_would_wait_no_more_is_lifted() -> None:
    world = World().node("a", gpus=1).model(tp=2)
    found = edited(world, profile={"tp": 1})
    assert [item.why for item in found.lifted] == ["0 of 1 node: 1 lacks 2 free sim"]
    assert [item.bucket for item in found.items] == ["start"]


def test_what_stands_against_a_model_stays_where_scaling_alone_differs() -> None:
    now = one().says(fault="it breaks the law").snapshot()
    was = now.models[0]
    scaled = replace(was.spec, scaling=replace(was.spec.scaling, max=3))
    assert with_edited(now, was, scaled)[1].fault == was.fault
    assert with_edited(now, was, replace(was.spec, description="new"))[1].fault == ""


@given(worlds())
def test_no_change_has_no_consequences(snapshot: Snapshot) -> None:
    for model in snapshot.models:
        then, same = with_edited(snapshot, model, model.spec)
        assert not consequences(snapshot, then, [(model, same)])


@given(worlds())
def test_what_is_foretold_is_what_the_plan_does_then(snapshot: Snapshot) -> None:
    before = agenda(plan(snapshot), snapshot)
    for model in snapshot.models:
        off = replace(model.spec, scaling=replace(model.spec.scaling, min=0, max=0))
        then, changed = with_edited(snapshot, model, off)
        after = agenda(plan(then), then)
        found = consequences(snapshot, then, [(model, changed)])
        assert all(item in after for item in found.items)
        assert len(after) - len(found.items) <= len(before)
        assert with_model(then, model) == snapshot
