"""Replicas that move on a person's word: draining nodes and rolls, step by step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from nodes.placement import Freshness
from nodes.plan import plan
from nodes.snapshot import Demand, Roll
from tests.worlds import World, ago, told, two_nodes

STALE = "0" * 16
CONFIGURED = (
    'profile "p" failed: It exited; it is tried again after an edit, or once the failed replica failed-1'
)


def draining() -> World:
    return World().node("a", is_cordoned=True, is_draining=True).node("b")


def rolling(keep: int = 1, *, asked: float = 60, halted: str = "") -> dict[str, Any]:
    return {"roll": Roll(ago(asked), "ann", keep, halted)}


@pytest.mark.parametrize(
    ("world", "does"),
    [
        # a node is drained
        pytest.param(draining().model(), ["start m/p on b b0"], id="nothing new goes to a draining node"),
        pytest.param(
            draining().model().replica("one", gpus="0"),
            ["start m/p on b b0 for one"],
            id="what runs there gets a stand-in elsewhere first, beyond the maximum",
        ),
        pytest.param(
            draining()
            .model()
            .replica("one", gpus="0")
            .replica("new", "b", "0", state="starting", replaces="one"),
            [],
            id="it stays until the stand-in is ready",
        ),
        pytest.param(
            draining().model().replica("one", gpus="0").replica("new", "b", "0", replaces="one"),
            ["drain one: replica new has taken its place"],
            id="and leaves once it is",
        ),
        pytest.param(
            draining()
            .model()
            .replica("one", gpus="0", wanted="drain")
            .replica("new", "b", "0", replaces="one"),
            [],
            id="it leaves once",
        ),
        pytest.param(
            draining().model().replica("one", gpus="0", state="fetching"),
            [
                "stop one: a is draining, and it is not ready yet",
                "blocked m x1: 1 replica is stopping first, as the maximum is 1",
            ],
            id="what only loads there stops at once",
        ),
        pytest.param(
            draining().model(high=2).replica("one", gpus="0", state="fetching"),
            ["stop one: a is draining, and it is not ready yet", "start m/p on b b0"],
            id="what only loads there stops, and loads elsewhere where the maximum allows it",
        ),
        pytest.param(
            World().node("a", is_cordoned=True, is_draining=True).model().replica("one", gpus="0"),
            [
                "drain one: a is draining, and nowhere else is room for it: 0 of 1 node: 1 draining",
                "blocked m x1: 1 replica is stopping first, as the maximum is 1",
            ],
            id="what has nowhere to go leaves all the same",
        ),
        pytest.param(
            draining().model(low=2, high=2).replica("one", gpus="0").replica("two", gpus="1"),
            ["start m/p on b b0 for one", "start m/p on b b1 for two"],
            id="all that run there move at once",
        ),
        pytest.param(
            draining().model().replica("one", gpus="0").failed("configuration", 10),
            [
                (
                    "blocked m x0: replica one stays on a, which is draining, as nothing can replace it: "
                    f"{CONFIGURED} is stopped"
                )
            ],
            id="what nothing can replace stays, and says so",
        ),
        pytest.param(
            draining().model(low=0, high=1, demand=Demand(asked_at=ago(3600))).replica("one", gpus="0"),
            ["drain one: nobody has asked for it for 15m"],
            id="what is idle does not move but goes",
        ),
        pytest.param(
            draining()
            .model(low=0, high=0)
            .replica("one", gpus="0")
            .replica("n", "b", "0", state="starting", replaces="one"),
            ["drain one: the model is off (max 0)", "stop n: the model is off (max 0)"],
            id="turned off meanwhile: it and its stand-in stop",
        ),
        pytest.param(
            draining()
            .model(low=0, high=1, demand=Demand(asked_at=ago(5)))
            .model("n")
            .replica("mine", gpus="0")
            .replica("one", gpus="1", of="n"),
            ["start m/p on b b0 for mine", "start n/p on b b1 for one"],
            id="each model moves, on demand or kept",
        ),
        pytest.param(
            World()
            .node("a", is_cordoned=True, is_draining=True, freshness=Freshness.LOST)
            .node("b")
            .model()
            .replica("one", gpus="0"),
            ["lost one: no contact with a; it is replaced if it can be", "start m/p on b b0"],
            id="a draining node that is lost is a lost node",
        ),
        pytest.param(
            World()
            .node("a", is_cordoned=True)
            .node("b")
            .model()
            .replica("one", gpus="0")
            .replica("new", "b", "0", state="starting", replaces="one"),
            [],
            id="no longer draining: the stand-in still takes its place when it is ready",
        ),
        pytest.param(
            draining()
            .model(low=1, high=2)
            .replica("one", gpus="0", wanted="drain")
            .replica("new", "b", "0", state="starting", replaces="one"),
            [],
            id="what was stopped by hand meanwhile is not missed twice",
        ),
        pytest.param(
            World()
            .node("a", fabric="f", is_cordoned=True, is_draining=True)
            .node("b", fabric="f")
            .node("c", fabric="f")
            .model(nodes=2, tp=2, gpus_per_node=1)
            .replica("one", "ab", "0"),
            ["start m/p on c c0, b b1 for one"],
            id="a gang moves as a whole",
        ),
        # a model is rolled
        pytest.param(
            two_nodes().model().replica("one", gpus="0").says(**rolling()),
            ["rolled m: all that was stale has been replaced"],
            id="roll: nothing is stale",
        ),
        pytest.param(
            two_nodes().model().replica("one", gpus="0", fingerprint="").says(**rolling()),
            ["rolled m: all that was stale has been replaced"],
            id="roll: what is unknown is not stale",
        ),
        pytest.param(
            two_nodes().model().says(**rolling(keep=0)),
            ["start m/p on a a0"],
            id="roll: what is missing comes first",
        ),
        pytest.param(
            two_nodes().model().replica("one", gpus="0", fingerprint=STALE).says(**rolling()),
            ["start m/p on b b0 for one"],
            id="roll: a stand-in beside it, while there is room",
        ),
        pytest.param(
            two_nodes()
            .model(low=2, high=2)
            .replica("one", gpus="0", fingerprint=STALE)
            .replica("two", "b", "0", fingerprint=STALE, created_at=ago(9000))
            .says(**rolling(2)),
            ["start m/p on a a1 for two"],
            id="roll: the oldest first, and one at a time",
        ),
        pytest.param(
            two_nodes()
            .model(low=2, high=2)
            .replica("one", gpus="0", fingerprint=STALE)
            .replica("two", "b", "0", fingerprint=STALE)
            .replica("new", "b", "1", state="starting", replaces="one", created_at=ago(9))
            .says(**rolling(2)),
            [],
            id="roll: it waits for the stand-in",
        ),
        pytest.param(
            two_nodes()
            .model(low=2, high=2)
            .replica("one", gpus="0", fingerprint=STALE)
            .replica("two", "b", "0", fingerprint=STALE)
            .replica("new", "b", "1", replaces="one", created_at=ago(30))
            .says(**rolling(2)),
            ["drain one: replica new has taken its place"],
            id="roll: the stand-in is ready",
        ),
        pytest.param(
            two_nodes()
            .model(low=2, high=2)
            .replica("one", gpus="0", fingerprint=STALE, wanted="drain")
            .replica("two", "b", "0", fingerprint=STALE)
            .replica("new", "b", "1", replaces="one", created_at=ago(30))
            .says(**rolling(2)),
            [],
            id="roll: the next waits until the last has gone",
        ),
        pytest.param(
            two_nodes()
            .model(low=2, high=2)
            .replica("two", "b", "0", fingerprint=STALE)
            .replica("new", "b", "1", replaces="one", created_at=ago(30))
            .says(**rolling(2)),
            ["start m/p on a a0 for two"],
            id="roll: the next",
        ),
        pytest.param(
            two_nodes()
            .model()
            .replica("new", "b", "1", replaces="one", created_at=ago(30), fingerprint=STALE)
            .says(**rolling()),
            ["rolled m: all that was stale has been replaced"],
            id="roll: what was edited after the word is not rolled by it",
        ),
        pytest.param(
            World().node("a", gpus=1).model().replica("one", gpus="0", fingerprint=STALE).says(**rolling()),
            [
                "drain one: rolled by ann; there is no room for its replacement beside it",
                "blocked m x1: replica one is stopping first, to make room",
            ],
            id="roll without room: one leaves first",
        ),
        pytest.param(
            World()
            .node("a", gpus=2)
            .model(low=1, high=2)
            .replica("one", gpus="0", fingerprint=STALE)
            .replica("two", gpus="1", fingerprint=STALE)
            .says(**rolling(2)),
            [
                "drain one: rolled by ann; there is no room for its replacement beside it",
                "blocked m x1: replica one is stopping first, to make room",
            ],
            id="roll without room: one, never two",
        ),
        pytest.param(
            World()
            .node("a", gpus=2)
            .model(low=1, high=2)
            .replica("two", gpus="1", fingerprint=STALE)
            .says(**rolling(2)),
            ["start m/p on a a0"],
            id="roll without room: as many as there were, though the minimum is less",
        ),
        pytest.param(
            World()
            .node("a", gpus=2)
            .model(low=2, high=2)
            .replica("one", gpus="0", fingerprint=STALE)
            .replica("two", gpus="1", fingerprint=STALE, state="starting")
            .says(**rolling(2)),
            [],
            id="roll: it waits while another is not ready",
        ),
        pytest.param(
            World()
            .node("a", gpus=1)
            .model(tp=2)
            .replica("one", gpus="0", fingerprint=STALE)
            .says(**rolling()),
            [
                (
                    'halt m: The roll of "m" stopped: replica one would leave no room for another: '
                    "0 of 1 node: 1 lacks 2 free sim. Put it right, then roll again."
                )
            ],
            id="roll: nothing is stopped for what would not fit even then",
        ),
        pytest.param(
            two_nodes()
            .model()
            .replica("one", gpus="0", fingerprint=STALE)
            .failed("transient", 20)
            .says(**rolling()),
            [
                (
                    'halt m: The roll of "m" stopped: its replacement failed-2 failed: It exited. '
                    "Put it right, then roll again."
                )
            ],
            id="roll: the first replacement that fails halts it",
        ),
        pytest.param(
            two_nodes()
            .model()
            .replica("one", gpus="0", fingerprint=STALE)
            .failed("transient", 200)
            .says(**rolling()),
            ["start m/p on b b0 for one"],
            id="roll: what failed before the word does not",
        ),
        pytest.param(
            two_nodes()
            .model()
            .replica("one", gpus="0", fingerprint=STALE)
            .failed("configuration", 100)
            .says(**rolling()),
            [
                (
                    f'halt m: The roll of "m" stopped: nothing can be started now: {CONFIGURED} is stopped. '
                    "Put it right, then roll again."
                )
            ],
            id="roll: what cannot start is not started",
        ),
        pytest.param(
            two_nodes()
            .model()
            .replica("one", gpus="0", fingerprint=STALE)
            .says(**rolling(halted="it failed")),
            [],
            id="roll: once halted, it stays so",
        ),
        pytest.param(
            two_nodes()
            .model(low=0, high=1, demand=Demand(asked_at=ago(5)))
            .replica("one", gpus="0", fingerprint=STALE)
            .says(**rolling()),
            ["start m/p on b b0 for one"],
            id="roll: one that is on demand, too",
        ),
        pytest.param(
            two_nodes().model(low=2, high=2).replica("one", gpus="0", fingerprint=STALE).says(**rolling(2)),
            ["start m/p on b b0"],
            id="roll: it waits until none is missing",
        ),
    ],
)
def test_the_plan(world: World, does: list[str]) -> None:
    assert told(plan(world.snapshot())) == does


def test_a_mild_difference_is_not_rolled() -> None:
    """What takes effect without a restart needs none."""
    world = two_nodes().model().replica("one", gpus="0").model(weight=3).says(**rolling())
    assert told(plan(world.snapshot())) == ["rolled m: all that was stale has been replaced"]


def test_what_has_changed_of_the_model_is_rolled() -> None:
    world = two_nodes().model().replica("one", gpus="0")
    world.says(spec=replace(world.models["m"].spec, context_length=4096), **rolling())
    assert told(plan(world.snapshot())) == ["start m/p on b b0 for one"]
