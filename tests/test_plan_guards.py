"""What the plan does not do although it could: too much at once, on the strength of silence, half a gang."""

from __future__ import annotations

import pytest

from nodes.placement import Freshness
from nodes.plan import plan
from nodes.snapshot import Demand, Model
from tests.worlds import World, ago, told, two_nodes

LOST, SUSPECT = Freshness.LOST, Freshness.SUSPECT
REMOVED = 'model "gone" was removed from the catalog'
DRAINED = "a is draining, and nowhere else is room for it: 0 of 1 node: 1 draining"
SILENT = (
    "alarm: 2 of 3 nodes are silent at once, which looks like the network of the control plane: "
    "nothing is taken as lost, replaced or evicted until more of them answer"
)
SAYS_YES = "they run on until a person says yes with manage.py reconcile_allow, or the catalog is put right"


def ready(count: int, *, of: str | None, low: int = 1, high: int = 9) -> World:
    """One node that runs so many replicas, of a model or (None) of one that was removed."""
    world = World().node("a", gpus=12)
    if of is not None:
        world.model(of, low, high)
    for number in range(count):
        world.replica(f"{of or 'x'}{number}", gpus=f"{number}", of=of, created_at=ago(9000 - number))
    return world


def gang(fabric: str = "f", **profile: object) -> World:
    """Two nodes of one fabric, and a model that needs both."""
    shape = {"nodes": 2, "tp": 4, "gpus_per_node": 2} | profile
    return World().node("a", gpus=4, fabric="f").node("b", gpus=4, fabric=fabric).model(**shape)


def three(*freshness: Freshness) -> World:
    world = World()
    for name, each in zip("abc", freshness, strict=True):
        world.node(name, freshness=each)
    return world


@pytest.mark.parametrize(
    ("world", "does"),
    [
        # too much at once
        pytest.param(
            ready(3, of=None),
            [f"drain x{number}: {REMOVED}" for number in range(3)],
            id="three of three stop: that is few",
        ),
        pytest.param(
            ready(4, of=None),
            [f"held: 4 of 4 ready replicas would stop at once ({REMOVED}); {SAYS_YES}"],
            id="four of four wait for a yes",
        ),
        pytest.param(
            ready(9, of="m", low=0, high=0),
            [f"held: 9 of 9 ready replicas would stop at once (the model is off (max 0)); {SAYS_YES}"],
            id="turned off, it waits for a yes",
        ),
        pytest.param(
            ready(9, of="m", high=5),
            [f"held: 4 of 9 ready replicas would stop at once (9 run and the maximum is 5); {SAYS_YES}"],
            id="four of nine wait for a yes",
        ),
        pytest.param(
            ready(9, of="m", high=6),
            [f"drain m{number}: 9 run and the maximum is 6" for number in (6, 7, 8)],
            id="three of nine do not",
        ),
        pytest.param(
            ready(12, of="m", high=8),
            [f"drain m{number}: 12 run and the maximum is 8" for number in (8, 9, 10, 11)],
            id="a third of twelve does not",
        ),
        pytest.param(
            ready(9, of="m", high=5).node("b").model("n"),
            [
                "start n/p on a a9",
                f"held: 4 of 9 ready replicas would stop at once (9 run and the maximum is 5); {SAYS_YES}",
            ],
            id="what is missing elsewhere starts all the same",
        ),
        pytest.param(
            World()
            .node("a", gpus=8)
            .model(low=0, high=9, demand=Demand(asked_at=ago(9999)))
            .replica("m0", gpus="0")
            .replica("m1", gpus="1")
            .replica("m2", gpus="2")
            .replica("m3", gpus="3"),
            [f"drain m{number}: nobody has asked for it for 15m" for number in range(4)],
            id="what is idle unloads without a yes",
        ),
        pytest.param(
            World()
            .node("a", gpus=8, is_cordoned=True, is_draining=True)
            .model(low=4, high=4)
            .replica("m0", gpus="0")
            .replica("m1", gpus="1")
            .replica("m2", gpus="2")
            .replica("m3", gpus="3"),
            [
                *(f"drain m{number}: {DRAINED}" for number in range(4)),
                "blocked m x4: 4 replicas are stopping first, as the maximum is 4",
            ],
            id="what runs on a draining node has a person's yes",
        ),
        # silence
        pytest.param(
            three(LOST, SUSPECT, Freshness.FRESH).model().replica("one", gpus="0"),
            [SILENT],
            id="most are silent: nothing is lost",
        ),
        pytest.param(
            three(LOST, SUSPECT, Freshness.FRESH).model(low=2, high=2).replica("one", gpus="0"),
            [
                "start m/p on c c0",
                SILENT,
            ],
            id="most are silent: what was missing before starts",
        ),
        pytest.param(
            three(LOST, Freshness.FRESH, Freshness.FRESH).model().replica("one", gpus="0"),
            ["lost one: no contact with a; it is replaced if it can be", "start m/p on b b0"],
            id="one of three is silent: it is lost",
        ),
        pytest.param(
            three(LOST, Freshness.FRESH, Freshness.NEVER).model().replica("one", gpus="0"),
            ["lost one: no contact with a; it is replaced if it can be", "start m/p on b b0"],
            id="one that never answered is not silent",
        ),
        pytest.param(
            three(LOST, SUSPECT, Freshness.FRESH)
            .model("y", 0, 1, demand=Demand(asked_at=ago(300)), tp=4)
            .replica("y1", "c", "0123", of="y")
            .model("m", 0, 1, demand=Demand(waiting=1)),
            [
                "blocked m x1: 0 of 3 nodes: 2 out of contact, 1 lacks 1 free sim",
                SILENT,
            ],
            id="most are silent: nothing is evicted",
        ),
        # gangs
        pytest.param(gang(), ["start m/p on a a0 a1, b b0 b1"], id="a gang starts in one fabric"),
        pytest.param(
            gang("g"),
            ["blocked m x1: 0 of 2 nodes: 2 in a fabric where too few have room (need 2 nodes)"],
            id="two fabrics are none",
        ),
        pytest.param(
            gang(gpus_per_node=2, min_memory_gb=0).node("c").replica("r", "b", "012", of=None, wanted="stop"),
            [
                (
                    "blocked m x1: 0 of 3 nodes: 1 in a fabric where too few have room (need 2 nodes), "
                    "1 lacks 2 free sim, 1 without an agent that runs a part of a replica (set nodes to 1); "
                    "what is stopping makes room for it"
                )
            ],
            id="a gang is whole or nothing, and every node says why",
        ),
        pytest.param(
            gang().replica("one", "ab", "01", state="pending"),
            [],
            id="a gang that was assigned is waited for",
        ),
        pytest.param(
            World()
            .node("a", fabric="f")
            .node("b", fabric="f", freshness=LOST)
            .node("c", fabric="f")
            .model(nodes=2, tp=4, gpus_per_node=2)
            .replica("one", "ab", "01"),
            [
                "lost one: no contact with b; it is replaced if it can be",
                "stop one: its part on b is lost, and with it the whole",
                "start m/p on a a2 a3, c c0 c1",
            ],
            id="a gang that lost a part is replaced as a whole",
        ),
        pytest.param(
            World()
            .node("a", fabric="f")
            .node("b", fabric="f", freshness=LOST)
            .node("c", fabric="f")
            .model(nodes=2, tp=4, gpus_per_node=2)
            .replica("one", "ab", "01", state="lost", wanted="stop")
            .replica("new", "ac", "23"),
            [],
            id="once",
        ),
        pytest.param(
            World()
            .node("a", gpus=2, fabric="f")
            .node("b", gpus=2, fabric="f")
            .model("y", 0, 1, demand=Demand(asked_at=ago(300)))
            .replica("y1", "a", "0", of="y")
            .model("z", 0, 1, demand=Demand(asked_at=ago(500)))
            .replica("z1", "b", "0", of="z")
            .model("m", 0, 1, demand=Demand(waiting=1), nodes=2, tp=4, gpus_per_node=2),
            [
                'evict z1: idle for 8m20s, and model "m" needs its room',
                'evict y1: idle for 5m, and model "m" needs its room',
                "blocked m x1: 0 of 2 nodes: 2 lack 2 free sim; 2 idle replicas are evicted",
            ],
            id="room is made for a gang on all its nodes",
        ),
        pytest.param(
            World()
            .node("a", gpus=2, fabric="f")
            .node("b", gpus=2, fabric="f")
            .model("y", 0, 1, demand=Demand(asked_at=ago(300)))
            .replica("y1", "a", "0", of="y")
            .model("z", 0, 1, demand=Demand(asked_at=ago(500)), tp=2)
            .replica("z1", "b", "01", of="z")
            .model("m", 0, 1, demand=Demand(waiting=1), nodes=2, tp=2, gpus_per_node=1),
            [
                'evict z1: idle for 8m20s, and model "m" needs its room',
                (
                    "blocked m x1: 0 of 2 nodes: 1 in a fabric where too few have room (need 2 nodes), "
                    "1 lacks 1 free sim; 1 idle replica is evicted"
                ),
            ],
            id="no more than the gang needs",
        ),
        pytest.param(
            two_nodes().model(profiles=[{"name": "q", "priority": -1}], nodes=2, tp=2, gpus_per_node=1),
            [
                (
                    "blocked m x1: 0 of 2 nodes: "
                    "2 without an agent that runs a part of a replica (set nodes to 1)"
                )
            ],
            id="agents that run whole replicas are asked for no part of one",
        ),
        pytest.param(
            two_nodes().model(
                nodes=2, tp=2, gpus_per_node=1, profiles=[{"name": "q", "priority": -1, "nodes": 1, "tp": 1}]
            ),
            ["start m/q on a a0"],
            id="where no gang can run, a profile for one node does",
        ),
    ],
)
def test_the_plan(world: World, does: list[str]) -> None:
    assert told(plan(world.snapshot())) == does


def test_why_each_node_says_no_is_kept() -> None:
    world = World().node("a", gpus=0).node("b", is_cordoned=True).model()
    (blocked,) = plan(world.snapshot()).blocked
    assert blocked.reasons == {"p": {"a": "lack 1 free sim", "b": "cordoned"}}


def test_the_yes_is_to_what_is_held() -> None:
    held = plan(ready(9, of="m", high=5).snapshot()).held
    assert held is not None
    assert [end.replica for end in held.drain] == ["m5", "m6", "m7", "m8"]
    assert not held.stop


def test_what_only_loads_is_held_with_the_ready() -> None:
    world = ready(6, of="m", low=0, high=0).replica("late", gpus="9", state="starting")
    held = plan(world.snapshot()).held
    assert held is not None
    assert [end.replica for end in held.stop] == ["late"]


def test_a_gang_takes_the_fabric_that_holds_the_weights() -> None:
    world = World().node("a", fabric="f").node("b", fabric="f").node("c", fabric="g").node("d", fabric="g")
    world.model(nodes=2, tp=2, gpus_per_node=1)
    model: Model = world.models["m"]
    world.says(held_on=frozenset({"c", "d"}))
    assert model.held_on != world.models["m"].held_on
    assert told(plan(world.snapshot())) == ["start m/p on c c0, d d0"]
