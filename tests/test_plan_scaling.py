"""How many there should be: busy and slack between minimum and maximum, and idle ones that make room."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.placement import Freshness
from nodes.plan import plan
from nodes.scaling import load_now
from nodes.snapshot import PRESSED, SLACK, Demand, Load
from tests.worlds import NOW, World, ago, told, two_nodes

ASKED = Demand(asked_at=ago(1), waiting=1)


def pressed(seconds: float, replicas: int = 1) -> Load:
    return Load(PRESSED, ago(seconds), replicas)


def slack(seconds: float, replicas: int = 2) -> Load:
    return Load(SLACK, ago(seconds), replicas)


def full_of_idle() -> World:
    """Four GPUs, of models on demand: x, asked for an hour ago, holds two; y, two hours; z, three."""
    world = World().node("a")
    for hours, (name, gpus) in enumerate((("x", "01"), ("y", "2"), ("z", "3")), 1):
        demand = Demand(asked_at=ago(hours * 3600))
        world.model(name, 0, 1, demand=demand, idle_timeout="10h", tp=len(gpus))
        world.replica(f"{name}1", gpus=gpus, of=name, state_since=ago(99_999))
    return world


@pytest.mark.parametrize(
    ("world", "does"),
    [
        pytest.param(
            two_nodes().model(low=1, high=2).replica("one", gpus="0").says(load=pressed(16)),
            ["start m/p on b b0"],
            id="requests have waited for a while: one more",
        ),
        pytest.param(
            two_nodes().model(low=1, high=2).replica("one", gpus="0").says(load=pressed(14)),
            [],
            id="requests wait, but not for long",
        ),
        pytest.param(
            two_nodes().model(low=1, high=1).replica("one", gpus="0").says(load=pressed(99)),
            [],
            id="requests wait, and the maximum is reached",
        ),
        pytest.param(
            two_nodes()
            .model(low=1, high=3)
            .replica("one", gpus="0")
            .replica("two", gpus="1", state="starting")
            .says(load=pressed(99)),
            [],
            id="requests wait, and one more loads already",
        ),
        pytest.param(
            World().node("a", gpus=1).model(low=1, high=2).replica("one", gpus="0").says(load=pressed(99)),
            ["blocked m x1: 0 of 1 node: 1 lacks 1 free sim"],
            id="requests wait, and there is no room",
        ),
        pytest.param(
            two_nodes().model(low=0, high=2, demand=ASKED).replica("one", gpus="0").says(load=pressed(16)),
            ["start m/p on b b0"],
            id="on demand, and busy: one more",
        ),
        pytest.param(
            two_nodes()
            .model(low=1, high=2)
            .replica("old", gpus="0")
            .replica("new", "b", "0", created_at=ago(900))
            .says(load=slack(301)),
            ["drain new: 2 run, and one or more had nothing to do for 5m"],
            id="some had nothing to do for long: one goes",
        ),
        pytest.param(
            two_nodes()
            .model(low=1, high=2)
            .replica("old", gpus="0")
            .replica("new", "b", "0")
            .says(load=slack(299)),
            [],
            id="some had nothing to do, but not for long",
        ),
        pytest.param(
            two_nodes()
            .model(low=2, high=3)
            .replica("old", gpus="0")
            .replica("new", "b", "0")
            .says(load=slack(999)),
            [],
            id="some had nothing to do, and the minimum is reached",
        ),
        pytest.param(
            two_nodes()
            .model(low=0, high=2, demand=Demand(asked_at=ago(5)))
            .replica("old", gpus="0")
            .replica("new", "b", "0", created_at=ago(900))
            .says(load=slack(301)),
            ["drain new: 2 run, and one or more had nothing to do for 5m"],
            id="on demand: down to one while it is asked for",
        ),
        pytest.param(
            two_nodes()
            .model(low=1, high=3)
            .replica("old", gpus="0")
            .replica("new", "b", "0")
            .replica("going", gpus="1", wanted="drain")
            .says(load=slack(999)),
            [],
            id="some had nothing to do, and one is leaving already",
        ),
        # eviction
        pytest.param(
            full_of_idle().model("m", 0, 1, demand=ASKED),
            [
                'evict z1: idle for 3h, and model "m" needs its room',
                "blocked m x1: 0 of 1 node: 1 lacks 1 free sim; 1 idle replica is evicted",
            ],
            id="the one that nobody has asked for the longest makes room",
        ),
        pytest.param(
            full_of_idle().model("m", 0, 1, demand=ASKED, tp=2),
            [
                'evict x1: idle for 1h, and model "m" needs its room',
                "blocked m x1: 0 of 1 node: 1 lacks 2 free sim; 1 idle replica is evicted",
            ],
            id="one that suffices sooner than two",
        ),
        pytest.param(
            full_of_idle().model("m", 0, 1, demand=ASKED, tp=3),
            [
                'evict z1: idle for 3h, and model "m" needs its room',
                'evict x1: idle for 1h, and model "m" needs its room',
                "blocked m x1: 0 of 1 node: 1 lacks 3 free sim; 2 idle replicas are evicted",
            ],
            id="two, where that is what it takes",
        ),
        pytest.param(
            full_of_idle().model("m", 0, 1, demand=ASKED, tp=8),
            ["blocked m x1: 0 of 1 node: 1 lacks 8 free sim"],
            id="none, where all of them would not suffice",
        ),
        pytest.param(
            full_of_idle().model("m"),
            [
                'evict z1: idle for 3h, and model "m" needs its room',
                "blocked m x1: 0 of 1 node: 1 lacks 1 free sim; 1 idle replica is evicted",
            ],
            id="one that is kept may evict as well",
        ),
        pytest.param(
            World()
            .node("a", gpus=1)
            .model("y", 0, 1, idle_timeout="10h", demand=Demand(asked_at=ago(7200)))
            .replica("y1", gpus="0", of="y", wanted="drain", state="draining")
            .model("m", demand=ASKED),
            ["blocked m x1: 0 of 1 node: 1 lacks 1 free sim; what is stopping makes room for it"],
            id="what leaves already is waited for",
        ),
        pytest.param(
            World()
            .node("a", gpus=1)
            .model("y", 0, 1, demand=Demand(asked_at=ago(600)))
            .replica("y1", gpus="0", of="y", state_since=ago(100))
            .model("m", 0, 1, demand=ASKED),
            ["blocked m x1: 0 of 1 node: 1 lacks 1 free sim"],
            id="one that has just been loaded stays",
        ),
        pytest.param(
            World()
            .node("a", gpus=1)
            .model("y", 0, 1, demand=Demand(asked_at=ago(300), in_flight=1))
            .replica("y1", gpus="0", of="y")
            .model("m", 0, 1, demand=ASKED),
            ["blocked m x1: 0 of 1 node: 1 lacks 1 free sim"],
            id="one with a request in flight stays",
        ),
        pytest.param(
            World()
            .node("a", gpus=1)
            .model("y", 0, 1, demand=Demand(asked_at=ago(300)))
            .replica("y1", gpus="0", of="y", running=1)
            .model("m", 0, 1, demand=ASKED),
            ["blocked m x1: 0 of 1 node: 1 lacks 1 free sim"],
            id="one whose engine is at work stays",
        ),
        pytest.param(
            World()
            .node("a", gpus=1)
            .model("y", 0, 1, demand=Demand(asked_at=ago(300), is_known=False))
            .replica("y1", gpus="0", of="y")
            .model("m", 0, 1, demand=ASKED),
            ["blocked m x1: 0 of 1 node: 1 lacks 1 free sim"],
            id="one of which nobody knows whether it is in use stays",
        ),
        pytest.param(
            World()
            .node("a", gpus=1)
            .model("y", 0, 1, demand=Demand(asked_at=ago(20)))
            .replica("y1", gpus="0", of="y")
            .model("m", 0, 1, demand=ASKED),
            ["blocked m x1: 0 of 1 node: 1 lacks 1 free sim"],
            id="one that was asked for a moment ago stays",
        ),
        pytest.param(
            World()
            .node("a", gpus=1)
            .model("y")
            .replica("y1", gpus="0", of="y")
            .model("m", 0, 1, demand=ASKED),
            ["blocked m x1: 0 of 1 node: 1 lacks 1 free sim"],
            id="one that is kept is not evicted",
        ),
        pytest.param(
            World()
            .node("a", gpus=1, freshness=Freshness.SUSPECT)
            .model("y", 0, 1, demand=Demand(asked_at=ago(300)))
            .replica("y1", gpus="0", of="y")
            .model("m", 0, 1, demand=ASKED),
            ["blocked m x1: 0 of 1 node: 1 out of contact"],
            id="nothing is evicted from a node out of contact",
        ),
        pytest.param(
            World()
            .node("a", gpus=1)
            .model("y", 0, 2, demand=Demand(asked_at=ago(300)), idle_timeout="10h")
            .replica("y1", gpus="0", of="y")
            .model("m", 1, 2)
            .node("b", gpus=1)
            .replica("m1", "b", "0")
            .says("m", load=pressed(99)),
            ["blocked m x1: 0 of 2 nodes: 2 lack 1 free sim"],
            id="nothing is evicted for one more than needed",
        ),
        # profiles that keep failing
        pytest.param(
            two_nodes()
            .model(profiles=[{"name": "q", "priority": -1}])
            .failed("transient", 30, 100, 200, 300, 400),
            ["start m/q on a a0"],
            id="a crash loop gives way to the next profile for a while",
        ),
        pytest.param(
            two_nodes().model(profiles=[{"name": "q", "priority": -1}]).failed("capacity", 5),
            ["start m/q on a a0"],
            id="what waits long for room gives way",
        ),
        pytest.param(
            two_nodes().model(profiles=[{"name": "q", "priority": -1}]).failed("capacity", 100),
            ["start m/p on a a0"],
            id="what waited long has its turn again",
        ),
        pytest.param(
            two_nodes()
            .model(profiles=[{"name": "q", "priority": -1, "tp": 8}])
            .failed("transient", 70, 100, 200, 300, 400),
            ["start m/p on a a0"],
            id="a crash loop is tried again where nothing else fits",
        ),
        pytest.param(
            two_nodes()
            .model(profiles=[{"name": "q", "priority": -1}])
            .failed("transient", 700, 800, 900, 1000, 1100),
            ["start m/p on a a0"],
            id="a crash loop of a while ago is forgiven",
        ),
    ],
)
def test_the_plan(world: World, does: list[str]) -> None:
    assert told(plan(world.snapshot())) == does


def test_whoever_gives_way_is_named() -> None:
    world = two_nodes().model(profiles=[{"name": "q", "priority": -1}])
    (start,) = plan(world.failed("transient", 70, 100, 200, 300, 400).snapshot()).start
    assert start.why == '1 wanted, 0 there before it; profile "p" keeps failing and gives way for a while'


def test_one_more_says_for_what() -> None:
    world = two_nodes().model(low=1, high=2).replica("one", gpus="0").says(load=pressed(16))
    (start,) = plan(world.snapshot()).start
    assert start.why == "requests have waited for 15 s with 1 running"


@pytest.mark.parametrize(
    ("world", "level"),
    [
        pytest.param(World().model(high=3).replica("one", waiting=1), PRESSED, id="one waits, one runs"),
        pytest.param(
            World().model(high=3).replica("one", waiting=1).replica("two", running=9),
            "",
            id="one waits, two run",
        ),
        pytest.param(
            World().model(high=3, demand=Demand(waiting=2)).replica("one").replica("two"),
            PRESSED,
            id="they wait at the gateways",
        ),
        pytest.param(
            World().model(high=3).replica("one").replica("two", running=1), SLACK, id="one of two works"
        ),
        pytest.param(
            World().model(high=3).replica("one", running=2).replica("two"), "", id="each could work"
        ),
        pytest.param(World().model(high=3).replica("one"), "", id="one is the least"),
        pytest.param(
            World().model(low=2, high=3).replica("one").replica("two"), "", id="the minimum is kept"
        ),
        pytest.param(
            World().model(high=3).replica("one", running=None).replica("two"), "", id="one does not tell"
        ),
        pytest.param(World().model(high=1).replica("one", waiting=9), "", id="there is no more to be had"),
        pytest.param(World().model(high=3), "", id="none runs"),
        pytest.param(
            World().model(high=3).replica("one", waiting=9, state="starting"), "", id="none is ready"
        ),
        pytest.param(
            World().model(high=3).replica("one").replica("two", wanted="drain"), "", id="one is leaving"
        ),
    ],
)
def test_how_busy_it_is(world: World, level: str) -> None:
    found = load_now(world.models["m"], world.replicas, None, NOW)
    assert (found.level if found else "") == level
    assert found is None or found.since == NOW


@given(st.floats(-100, 100), st.integers(1, 3), st.sampled_from([PRESSED, SLACK]))
def test_the_clock_goes_on_while_nothing_changes(since: float, replicas: int, level: str) -> None:
    world = World().model(high=3).replica("one", waiting=1)
    known = Load(level, NOW - timedelta(seconds=since), replicas)
    found = load_now(world.models["m"], world.replicas, known, NOW)
    is_the_same = level == PRESSED and replicas == 1 and since >= 0
    assert found == (known if is_the_same else Load(PRESSED, NOW, 1))
