"""What the next pass would do: a table of situations, each with the plan it leads to."""

from __future__ import annotations

import dataclasses

import pytest

from nodes.orders import orders
from nodes.placement import Freshness
from nodes.plan import plan
from nodes.protocol import Launch
from nodes.snapshot import Demand, Roll
from tests.worlds import World, ago, told, two_nodes

ASKED = Demand(asked_at=ago(1), waiting=3)
IDLE = Demand(asked_at=ago(3600))


@pytest.mark.parametrize(
    ("world", "does"),
    [
        # min and max
        pytest.param(World(), [], id="nothing is wanted and nothing there"),
        pytest.param(two_nodes().model(), ["start m/p on a a0"], id="one is wanted and none there"),
        pytest.param(
            two_nodes().model(low=3, high=3, tp=2),
            ["start m/p on a a0 a1", "start m/p on b b0 b1", "start m/p on a a2 a3"],
            id="three spread over two nodes",
        ),
        pytest.param(
            two_nodes().model(low=2, high=2).replica("one", gpus="0"),
            ["start m/p on b b0"],
            id="the second goes where the first is not",
        ),
        pytest.param(two_nodes().model().replica("one", gpus="0"), [], id="what is wanted is there"),
        pytest.param(
            two_nodes().model().replica("one", gpus="0", state="pending"),
            [],
            id="what was assigned is waited for",
        ),
        pytest.param(
            two_nodes().model(low=1, high=3).replica("one", gpus="0").replica("two", gpus="1"),
            [],
            id="between min and max nothing is touched",
        ),
        pytest.param(
            two_nodes().model().replica("old", gpus="0").replica("new", "b", "0", created_at=ago(5)),
            ["drain new: 2 run and the maximum is 1"],
            id="over max the newest goes",
        ),
        pytest.param(
            two_nodes()
            .model()
            .replica("stale", gpus="0", fingerprint="0" * 16)
            .replica("new", "b", "0", created_at=ago(5)),
            ["drain stale: 2 run and the maximum is 1"],
            id="over max a stale one goes before a new one",
        ),
        pytest.param(
            two_nodes()
            .model()
            .replica("stale", gpus="0", fingerprint="0" * 16)
            .replica("loading", "b", "0", state="starting"),
            ["stop loading: 2 run and the maximum is 1"],
            id="over max one that is not ready goes first, undrained",
        ),
        pytest.param(
            two_nodes().model(low=0, high=0).replica("one", gpus="0"),
            ["drain one: the model is off (max 0)"],
            id="a model that is off stops",
        ),
        pytest.param(
            two_nodes().model(low=0, high=0, demand=ASKED),
            [],
            id="a model that is off is not woken by demand",
        ),
        pytest.param(
            two_nodes().model().replica("going", gpus="0", wanted="drain"),
            ["blocked m x1: 1 replica is stopping first, as the maximum is 1"],
            id="the next one waits for the last one to stop",
        ),
        pytest.param(
            two_nodes().model(low=1, high=2).replica("going", gpus="0", wanted="stop"),
            ["start m/p on b b0"],
            id="unless the maximum leaves room for both",
        ),
        # edits and removals
        pytest.param(
            two_nodes().model().replica("one", gpus="0", fingerprint="0" * 16),
            [],
            id="an edited profile touches nothing that runs",
        ),
        pytest.param(
            two_nodes().model().replica("one", gpus="0", fingerprint=""),
            [],
            id="an unknown fingerprint touches nothing that runs",
        ),
        pytest.param(
            two_nodes().replica("one", gpus="0", of=None),
            ['drain one: model "gone" was removed from the catalog'],
            id="a removed model is drained",
        ),
        pytest.param(
            two_nodes().replica("one", gpus="0", of=None, state="fetching"),
            ['stop one: model "gone" was removed from the catalog'],
            id="a removed model that only loads is stopped",
        ),
        pytest.param(
            two_nodes().replica("one", gpus="0", of=None, wanted="drain"), [], id="a removal is ordered once"
        ),
        # on demand
        pytest.param(two_nodes().model(low=0, high=1), [], id="on demand: nobody asks"),
        pytest.param(
            two_nodes().model(low=0, high=2, demand=ASKED),
            ["start m/p on a a0"],
            id="on demand: somebody waits",
        ),
        pytest.param(
            two_nodes().model(low=0, high=1, demand=Demand(asked_at=ago(5))),
            ["start m/p on a a0"],
            id="on demand: somebody has just given up waiting",
        ),
        pytest.param(
            two_nodes().model(low=0, high=1, demand=Demand(asked_at=ago(60))),
            [],
            id="on demand: somebody gave up a minute ago",
        ),
        pytest.param(
            two_nodes().model(low=0, high=1, demand=Demand(asked_at=ago(-3600))),
            [],
            id="on demand: somebody asked before the clock was set back",
        ),
        pytest.param(
            two_nodes().model(low=0, high=2, demand=ASKED).replica("one", gpus="0", state="starting"),
            [],
            id="on demand: it loads already",
        ),
        pytest.param(
            two_nodes().model(low=0, high=1, demand=IDLE).replica("one", gpus="0"),
            ["drain one: nobody has asked for it for 15m"],
            id="on demand: idle past the default",
        ),
        pytest.param(
            two_nodes().model(low=0, high=1, idle_timeout="2h", demand=IDLE).replica("one", gpus="0"),
            [],
            id="on demand: idle, but not for as long as it says",
        ),
        pytest.param(
            two_nodes().model(low=0, high=1).replica("one", gpus="0"),
            ["drain one: nobody has asked for it for 15m"],
            id="on demand: never asked for since it is ready",
        ),
        pytest.param(
            two_nodes().model(low=0, high=1, demand=IDLE).replica("one", gpus="0", state_since=ago(60)),
            [],
            id="on demand: the clock begins when it is ready",
        ),
        pytest.param(
            two_nodes().model(low=0, high=1, demand=IDLE).replica("one", gpus="0", state="starting"),
            [],
            id="on demand: the clock stands while it loads",
        ),
        pytest.param(
            two_nodes()
            .model(low=0, high=1, demand=Demand(asked_at=ago(3600), in_flight=1))
            .replica("one", gpus="0"),
            [],
            id="on demand: the clock stands while a request is in flight",
        ),
        pytest.param(
            two_nodes().model(low=0, high=1, demand=IDLE).replica("one", gpus="0", running=1),
            [],
            id="on demand: the clock stands while its engine has a request",
        ),
        pytest.param(
            two_nodes()
            .model(low=0, high=1, demand=Demand(asked_at=ago(3600), is_known=False))
            .replica("one", gpus="0"),
            [],
            id="on demand: without a report it is unknown, not idle",
        ),
        pytest.param(
            World(watching_since=ago(60))
            .node("a")
            .model(low=0, high=1, demand=IDLE)
            .replica("one", gpus="0"),
            [],
            id="on demand: the clock stands while nobody listens",
        ),
        pytest.param(
            two_nodes().model(low=1, high=1, demand=IDLE).replica("one", gpus="0"),
            [],
            id="one that is kept is not unloaded",
        ),
        # nodes
        pytest.param(
            World().node("a", is_cordoned=True).node("b").model(),
            ["start m/p on b b0"],
            id="a cordoned node gets nothing",
        ),
        pytest.param(
            World().node("a", is_cordoned=True).model().replica("one", gpus="0"),
            [],
            id="a cordoned node keeps what it has",
        ),
        pytest.param(
            World().node("a", freshness=Freshness.SUSPECT).node("b").model().replica("one", gpus="0"),
            [],
            id="a suspect node's replica still counts",
        ),
        pytest.param(
            World().node("a", freshness=Freshness.LOST).node("b").model().replica("one", gpus="0"),
            ["lost one: no contact with a; it is replaced if it can be", "start m/p on b b0"],
            id="a lost node's replica is replaced",
        ),
        pytest.param(
            World()
            .node("a", freshness=Freshness.LOST)
            .node("b")
            .model()
            .replica("one", gpus="0", state="lost"),
            ["start m/p on b b0"],
            id="it is taken as lost once",
        ),
        pytest.param(
            two_nodes()
            .model()
            .replica("back", gpus="0", created_at=ago(9000))
            .replica("instead", "b", "0", created_at=ago(100)),
            ["drain instead: 2 run and the maximum is 1"],
            id="back with surplus: the newest goes",
        ),
        # adoption
        pytest.param(
            two_nodes().model().stranger("stray", gpus="2"),
            ["adopt stray on a"],
            id="a stranger of ours is adopted",
        ),
        pytest.param(
            two_nodes().model().replica("one", gpus="0").stranger("stray", gpus="2"),
            ["adopt stray on a", "drain stray: 2 run and the maximum is 1"],
            id="adopted and too many",
        ),
        pytest.param(
            two_nodes().model(low=0, high=0).stranger("stray", gpus="2"),
            ["adopt stray on a", "drain stray: the model is off (max 0)"],
            id="adopted and off",
        ),
        pytest.param(
            two_nodes().model().replica("one", gpus="0").stranger("stray", gpus="0"),
            ["orphan stray: GPU a0 is claimed by replica one; it is left running"],
            id="not adopted: its GPU is claimed",
        ),
        pytest.param(
            two_nodes().model().replica("one", "b", "0").stranger("one", gpus="2"),
            ["orphan one: replica one is assigned to b, not to this node; it is left running"],
            id="not adopted: its replica is elsewhere",
        ),
        pytest.param(
            two_nodes().model().replica("one", "b", "0").stranger("s", gpus="2", launch=Launch("x", "", {})),
            ['orphan s: model "x" is not in the catalog; it is left running'],
            id="not adopted: no such model",
        ),
        pytest.param(
            two_nodes()
            .model()
            .replica("one", "b", "0")
            .stranger("s", gpus="2", launch=Launch("m", "", {"name": "p", "nodes": 2})),
            ["orphan s: it is a part of a replica over several nodes; it is left running"],
            id="not adopted: a part of a gang",
        ),
        pytest.param(
            two_nodes().model().replica("one", "b", "0").stranger("over", gpus="2", state="failed"),
            [],
            id="a stranger that has ended is nobody's affair",
        ),
        pytest.param(
            World().node("a", gpus=1).model().stranger("ended", gpus="0", is_over_here=True),
            ["blocked m x1: 0 of 1 node: 1 lacks 1 free sim"],
            id="what is over here and runs there holds its GPU",
        ),
        # failures
        pytest.param(
            two_nodes().model().failed("transient", 0.5),
            ['blocked m x1: profile "p" failed: It exited; next try at 12:00:00 UTC'],
            id="a crash a moment ago is backed off from",
        ),
        pytest.param(
            two_nodes().model().failed("transient", 30), ["start m/p on a a0"], id="and then tried again"
        ),
        pytest.param(
            two_nodes().model().failed("node", 5), ["start m/p on b b0"], id="a node's own trouble: elsewhere"
        ),
        pytest.param(
            World().node("a").model().failed("node", 5),
            [
                (
                    "blocked m x1: 0 of 1 node: 1 where it failed a moment ago (It exited); "
                    'profile "p" may be tried where it failed from 12:00:55 UTC'
                )
            ],
            id="a node's own trouble, and no other node",
        ),
        pytest.param(
            two_nodes().model(profiles=[{"name": "q", "priority": -1}]).failed("configuration", 5000),
            ["start m/q on a a0"],
            id="a wrong configuration gives way to the next profile",
        ),
        pytest.param(
            two_nodes().model(profiles=[{"name": "q", "priority": -1}]).failed("transient", 0),
            ['blocked m x1: profile "p" failed: It exited; next try at 12:00:01 UTC'],
            id="a short wait does not",
        ),
        pytest.param(
            two_nodes()
            .model(profiles=[{"name": "q", "priority": -1, "tp": 8}])
            .failed("configuration", 5000),
            [
                (
                    "blocked m x1: 0 of 2 nodes: 2 lack 8 free sim; "
                    'profile "p" failed: It exited; it is tried again after an edit, '
                    "or once the failed replica failed-5 is stopped"
                )
            ],
            id="all that is in the way is said",
        ),
        # room
        pytest.param(
            World().node("a", gpus=3).model(low=2, high=2, tp=2),
            ["start m/p on a a0 a1", "blocked m x1: 0 of 1 node: 1 lacks 2 free sim"],
            id="as many as there is room for",
        ),
        pytest.param(
            World().node("a", gpus=1).model("m").model("n"),
            ["start m/p on a a0", "blocked n x1: 0 of 1 node: 1 lacks 1 free sim"],
            id="one GPU is not given away twice",
        ),
        pytest.param(
            World().node("a", gpus=1, taken=frozenset({"a0"})).model(),
            ["blocked m x1: 0 of 1 node: 1 lacks 1 free sim"],
            id="an orphan's GPU is taken",
        ),
        pytest.param(
            World().node("a").model(low=2, high=2).says(fault="it breaks the law").replica("one", gpus="0"),
            ["blocked m x1: it breaks the law"],
            id="nothing of a model that breaks the law is started",
        ),
        pytest.param(
            World().node("a").model().says(fault="it breaks the law").replica("one", gpus="0"),
            ["blocked m x0: it breaks the law"],
            id="a model that breaks the law is said, and what runs of it runs on",
        ),
        pytest.param(
            World()
            .node("a")
            .model(low=1, high=1)
            .says(fault="it breaks the law")
            .replica("one", gpus="0")
            .replica("two", gpus="1", created_at=ago(60)),
            ["drain two: 2 run and the maximum is 1", "blocked m x0: it breaks the law"],
            id="a model that breaks the law is scaled down",
        ),
        pytest.param(
            World()
            .node("a", is_cordoned=True, is_draining=True)
            .node("b")
            .model()
            .says(fault="it breaks the law")
            .replica("one", gpus="0"),
            [
                (
                    "blocked m x0: replica one stays on a, which is draining, as nothing can replace it: "
                    "it breaks the law"
                )
            ],
            id="what cannot be replaced stays on a draining node, and says why",
        ),
        pytest.param(
            World()
            .node("a")
            .model()
            .says(fault="it breaks the law", roll=Roll(ago(10), "ann", 1))
            .replica("one", gpus="0", fingerprint="0123456789abcdef"),
            [
                "blocked m x0: it breaks the law",
                (
                    'halt m: The roll of "m" stopped: nothing can be started now: it breaks the law. '
                    "Put it right, then roll again."
                ),
            ],
            id="a roll of a model that breaks the law stops",
        ),
    ],
)
def test_the_plan(world: World, does: list[str]) -> None:
    assert told(plan(world.snapshot())) == does


@pytest.mark.parametrize(
    ("world", "tells"),
    [
        pytest.param(
            two_nodes().model().replica("one", gpus="01", state="pending"),
            ["run one on a: a0 a1"],
            id="a new one",
        ),
        pytest.param(two_nodes().model().replica("one", gpus="0"), [], id="one that it reports"),
        pytest.param(
            two_nodes().model().replica("one", gpus="0", state="starting", knows_launch=False),
            ["run one on a: a0"],
            id="one whose record it has lost",
        ),
        pytest.param(
            two_nodes().model().replica("one", gpus="0", wanted="drain"),
            ["stop one on a within 30 s"],
            id="to drain",
        ),
        pytest.param(
            two_nodes().model().replica("one", gpus="0", wanted="stop"),
            ["stop one on a within 5 s"],
            id="to stop",
        ),
        pytest.param(
            World(seen_revision=6)
            .node("a")
            .model()
            .replica("one", wanted="drain", revision=7, wanted_since=ago(9)),
            [],
            id="not to drain, while a gateway may still send it requests",
        ),
        pytest.param(
            World(seen_revision=6)
            .node("a")
            .model()
            .replica("one", wanted="drain", revision=None, wanted_since=ago(0)),
            [],
            id="not to drain, in the pass that decides it",
        ),
        pytest.param(
            World(seen_revision=7)
            .node("a")
            .model()
            .replica("one", wanted="drain", revision=7, wanted_since=ago(9)),
            ["stop one on a within 30 s"],
            id="to drain, once every gateway knows",
        ),
        pytest.param(
            World(seen_revision=6)
            .node("a")
            .model()
            .replica("one", wanted="drain", revision=7, wanted_since=ago(10)),
            ["stop one on a within 30 s"],
            id="to drain, when a gateway is stuck",
        ),
        pytest.param(
            World(seen_revision=6)
            .node("a")
            .model()
            .replica("one", wanted="drain", revision=7, wanted_since=ago(-9)),
            ["stop one on a within 30 s"],
            id="to drain, when the clock was set back meanwhile",
        ),
        pytest.param(
            World(seen_revision=6)
            .node("a")
            .model()
            .replica("one", wanted="stop", revision=7, state="starting"),
            ["stop one on a within 5 s"],
            id="to stop what serves nobody yet",
        ),
        pytest.param(
            two_nodes().model().replica("one", gpus="0", wanted="drain", state="draining"),
            [],
            id="one that drains",
        ),
        pytest.param(
            two_nodes().model().replica("one", gpus="0", wanted="stop", state="pending"),
            ["stop one on a within 5 s"],
            id="to bury what it may never have heard of",
        ),
        pytest.param(
            two_nodes().model().stranger("ended", gpus="0", is_over_here=True),
            ["stop ended on a within 5 s"],
            id="to stop what is over by our record",
        ),
        pytest.param(
            two_nodes().model().stranger("ended", is_over_here=True, state="draining"), [], id="which it does"
        ),
        pytest.param(two_nodes().model().stranger("stray"), [], id="nothing of an engine nobody knows"),
        pytest.param(
            World().node("a", freshness=Freshness.SUSPECT).model().replica("one", state="pending"),
            [],
            id="nothing, as it did not answer",
        ),
    ],
)
def test_what_an_agent_is_told(world: World, tells: list[str]) -> None:
    assert [
        f"run {each.replica} on {chr(each.node)}: {' '.join(each.gpus)}"
        if each.launch
        else f"stop {each.replica} on {chr(each.node)} within {each.drain_s} s"
        for each in orders(world.snapshot())
    ] == tells


def test_a_launch_holds_all_that_shapes_the_command() -> None:
    model = two_nodes().model(args=["--ttft", "1s"]).models["m"]
    model = dataclasses.replace(model, source_revision="c0ffee", source_bytes=7)
    (start,) = plan(dataclasses.replace(two_nodes().snapshot(), models=(model,))).start
    profile = model.spec.profiles[0]
    assert start.launch == Launch(
        "m",
        "org/m",
        profile.as_dict(),
        fingerprint=profile.fingerprint(),
        revision="c0ffee",
        context_length=0,
        capabilities={},
        source_bytes=7,
    )


def test_a_start_says_for_what() -> None:
    (kept,) = plan(two_nodes().model(low=2, high=2).replica("one", gpus="0").snapshot()).start
    (asked,) = plan(two_nodes().model(low=0, high=1, demand=ASKED).snapshot()).start
    assert (kept.why, asked.why) == ("2 wanted, 1 there before it", "asked for, 3 waiting")
