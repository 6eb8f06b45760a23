"""Why a model does not run where or as wanted, as a table of situations; and that the reasons add up."""

from __future__ import annotations

import pytest
from hypothesis import given

from nodes.agenda import agenda
from nodes.placement import Freshness
from nodes.plan import plan
from nodes.snapshot import Demand, Roll, Snapshot
from nodes.why import Why, explain
from tests.test_plan_laws import worlds
from tests.worlds import World, ago, two_nodes


def why(snapshot: Snapshot) -> Why:
    return explain(snapshot, agenda(plan(snapshot), snapshot), snapshot.models[0])


@pytest.mark.parametrize(
    ("world", "says"),
    [
        pytest.param(
            World().node("a").model(low=0, high=0),
            'model "m" is off (max 0), and nothing of it runs',
            id="it is off",
        ),
        pytest.param(
            World().node("a").model(low=0),
            'model "m" is on demand and nobody asks for it; the first request loads it',
            id="nobody asks for it",
        ),
        pytest.param(
            World().node("a").model().replica("one", gpus="0"),
            'model "m" runs as wanted: 1 of 1 ready, each as the catalog has it',
            id="it runs",
        ),
        pytest.param(
            World().node("a").model(low=0, demand=Demand(asked_at=ago(5))).replica("one", gpus="0"),
            'model "m" runs as wanted: 1 of 1 ready, each as the catalog has it',
            id="it was asked for, and runs",
        ),
    ],
)
def test_where_all_is_as_wanted_it_says_that(world: World, says: str) -> None:
    found = why(world.snapshot())
    assert (found.amiss, found.notes, found.is_as_wanted, found.says) == ((), (), True, says)


@pytest.mark.parametrize(
    ("world", "ready", "amiss"),
    [
        pytest.param(
            World().node("a", gpus=1).model(low=2, high=2).replica("one", gpus="0"),
            "1 of 2",
            ["1 of 2 replicas cannot be started: 0 of 1 node: 1 lacks 1 free sim"],
            id="there is no room for the second",
        ),
        pytest.param(
            two_nodes().model(),
            "0 of 1",
            ["the next pass starts p on a: 1 wanted, 0 there before it"],
            id="the next pass starts it",
        ),
        pytest.param(
            World().node("a").model().replica("one", state="starting", reason="loading weights: 40 %"),
            "0 of 1",
            ["replica one (p) on a is starting: loading weights: 40 %"],
            id="it is on its way",
        ),
        pytest.param(
            World().node("a").model().replica("one", wanted="drain", wanted_why="a is draining"),
            "0 of 1",
            [
                "1 of 1 replica cannot be started: 1 replica is stopping first, as the maximum is 1",
                "replica one (p) on a is ready and to drain: a is draining",
            ],
            id="it is on its way out",
        ),
        pytest.param(
            World().node("a").model().replica("one", gpus="0", fingerprint="f" * 16),
            "1 of 1",
            [
                (
                    'replica one (p) on a is stale: Profile "p" has changed since it started; '
                    "it keeps running as started until it is stopped and started again."
                )
            ],
            id="it runs as the catalog had it",
        ),
        pytest.param(
            World().node("a").model().replica("one").says(roll=Roll(ago(60), "ann", 1, halted="It stopped.")),
            "1 of 1",
            ["It stopped."],
            id="a roll of it has halted",
        ),
        pytest.param(
            World().node("a", freshness=Freshness.LOST).model().replica("one", gpus="0"),
            "0 of 1",
            [
                "1 of 1 replica cannot be started: 0 of 1 node: 1 out of contact",
                "the next pass gives up replica one: no contact with a; it is replaced if it can be",
            ],
            id="its node is gone",
        ),
        pytest.param(
            World().node("a").model().says(fault="it breaks the law"),
            "0 of 1",
            ["1 of 1 replica cannot be started: it breaks the law"],
            id="it breaks the law",
        ),
        pytest.param(
            World().node("a").model().failed("configuration", 5),
            "0 of 1",
            [
                (
                    '1 of 1 replica cannot be started: profile "p" failed: It exited; it is tried again '
                    "after an edit, or once the failed replica failed-5 is stopped"
                )
            ],
            id="it has failed and waits for an edit",
        ),
    ],
)
def test_each_thing_that_is_amiss_is_a_sentence(world: World, ready: str, amiss: list[str]) -> None:
    found = why(world.snapshot())
    assert list(found.amiss) == amiss
    assert found.says == f'model "m" does not run as wanted: {ready} ready'
    assert not found.is_as_wanted


@pytest.mark.parametrize(
    ("world", "notes"),
    [
        pytest.param(
            two_nodes().model().replica("one", gpus="0").failed("transient", 40, 900),
            ('profile "p" failed 2 times within the hour, last at 11:59:20 UTC on a: It exited',),
            id="it runs again",
        ),
        pytest.param(
            two_nodes().model().replica("one", state="starting").failed("node", 2, on="b"),
            ('profile "p" failed once within the hour, last at 11:59:58 UTC on b: It exited',),
            id="it is being tried elsewhere",
        ),
        pytest.param(two_nodes().model().failed("transient", 0.5), (), id="the wait says it already"),
        pytest.param(two_nodes().model().replica("one").failed("transient", 4000), (), id="long ago"),
        pytest.param(two_nodes().model().replica("one").failed("transient", -60), (), id="in the future"),
        pytest.param(
            two_nodes().model().failed("transient", 5).model(args=["--ttft", "1s"]).replica("one"),
            (),
            id="before an edit",
        ),
    ],
)
def test_what_failed_before_it_is_not_forgotten(world: World, notes: tuple[str, ...]) -> None:
    assert why(world.snapshot()).notes == notes


def test_every_profile_says_what_every_node_says() -> None:
    world = World().node("a", gpus=1).node("b", gpus=2).node("c", is_cordoned=True)
    world.model(tp=2, profiles=[{"name": "small", "tp": 1, "priority": 1}]).replica("one", gpus="0")
    found = why(world.snapshot())
    assert list(found.reasons) == ["small", "p"], "by preference"
    assert found.reasons["small"] == {"a": "lack 1 free sim", "b": "", "c": "cordoned"}
    assert found.rooms["small"] == "1 of 3 nodes has room for one more"
    assert found.reasons["p"]["a"] == "lack 2 free sim"
    assert found.rooms["p"] == "1 of 3 nodes has room for one more"
    assert found.notes == (
        'nothing runs of profile "small", which comes first: 1 of 3 nodes has room for one more',
    )


def test_a_node_with_room_for_a_part_alone_says_so() -> None:
    world = World().node("a", fabric="x").node("b", fabric="y").node("c", fabric="y").model(tp=2, nodes=2)
    found = why(world.snapshot())
    assert found.reasons["p"] == {"a": "in a fabric where too few have room (need 2 nodes)", "b": "", "c": ""}


@given(worlds())
def test_the_reasons_add_up_to_the_nodes(snapshot: Snapshot) -> None:
    items = agenda(plan(snapshot), snapshot)
    for model in snapshot.models:
        found = explain(snapshot, items, model)
        assert set(found.reasons) == {profile.name for profile in model.spec.profiles}
        for by_node in found.reasons.values():
            assert set(by_node) == {node.name for node in snapshot.nodes}
        blocked = [item for item in items if item.bucket == "blocked" and item.model == found.model]
        assert not (found.is_as_wanted and blocked)
