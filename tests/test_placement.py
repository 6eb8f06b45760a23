"""Where a replica goes, and what is said when it cannot go anywhere."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog.spec import ModelSpec
from nodes.placement import (
    GB,
    Freshness,
    Holding,
    Node,
    Place,
    Seat,
    Unseated,
    Want,
    by_preference,
    could_run,
    freshness,
    refusal,
)
from nodes.protocol import HELD, EngineReport, GpuReport, StateReport, WeightsReport
from nodes.seating import Room, choose, place
from nodes.tickets import weights_key

H100 = "h100-80g"


def cards(count: int, gpu_class: str = H100, **columns: Any) -> tuple[GpuReport, ...]:
    return tuple(GpuReport(f"GPU-{index}", index, gpu_class=gpu_class, **columns) for index in range(count))


def node(name: str, gpus: tuple[GpuReport, ...] = cards(8), **columns: Any) -> Node:
    told = {key: columns.pop(key) for key in list(columns) if key in StateReport.__dataclass_fields__}
    told.setdefault("engines", (EngineReport("vllm"),))
    report = StateReport("cluster", name, gpus=gpus, **told)
    return Node(id=sum(map(ord, name)), name=name, report=columns.pop("report", report), **columns)


def want(*profiles: dict[str, Any], source: str = "org/m", **columns: Any) -> Want:
    first = {"name": "p", "engine": "vllm", "gpu_class": H100, "tp": 4}
    raw = [first | (profile or {}) for profile in profiles or ({},)]
    spec = ModelSpec.load({"name": "m", "source": source, "profiles": raw, "scaling": {"min": 1, "max": 9}})
    return Want(spec=spec, profiles=by_preference(spec.profiles), **columns)


def holding(name: str, commit: str, **columns: Any) -> Node:
    """One whose store has org/m at a commit."""
    held = WeightsReport(weights_key("org/m", commit), "org/m", commit, HELD, size_bytes=100 * 10**9)
    return node(name, weights=("org/m",), holdings=(held,), **columns)


def seated(asked: Want, *nodes: Node) -> Seat:
    seat = place(asked, Room(nodes))
    assert isinstance(seat, Seat), seat
    return seat


def refused(asked: Want, *nodes: Node) -> str:
    seat = place(asked, Room(nodes))
    assert isinstance(seat, Unseated), seat
    return seat.why


CORDONED = node("c", is_cordoned=True)


@pytest.mark.parametrize(
    ("asked", "nodes", "says"),
    [
        pytest.param(
            want(), (), "0 of 0 nodes: none has joined yet; add one with manage.py node_add", id="no node"
        ),
        pytest.param(
            want(),
            (node("a", cards(3)), CORDONED, node("b", cards(2))),
            "0 of 3 nodes: 2 lack 4 free h100-80g, 1 cordoned",
            id="the commonest reason first",
        ),
        pytest.param(
            want(), (node("a", cards(0)),), "0 of 1 node: 1 lacks 4 free h100-80g", id="no GPU at all"
        ),
        pytest.param(
            want(),
            (node("a", cards(8, "a100-80g")),),
            "0 of 1 node: 1 lacks 4 free h100-80g",
            id="another class",
        ),
        pytest.param(
            want({"tp": 1, "min_disk_gb": 140}, weights_key=weights_key("org/m", "c" * 40)),
            (holding("a", "0" * 40, disk_free_bytes=60 * 10**9),),
            "0 of 1 node: 1 short of disk (need 140 GB)",
            id="room for a newer commit than the one it holds",
        ),
        pytest.param(
            want(),
            (node("a", cards(8, is_healthy=False)),),
            "0 of 1 node: 1 lacks 4 free h100-80g",
            id="GPUs that are ill",
        ),
        pytest.param(
            want(),
            (node("a", cards(8, foreign_mib=40_000)),),
            "0 of 1 node: 1 lacks 4 free h100-80g",
            id="GPUs that somebody else uses",
        ),
        pytest.param(
            want(),
            (node("a", taken=frozenset({"GPU-0", "GPU-1", "GPU-2", "GPU-3", "GPU-4"})),),
            "0 of 1 node: 1 lacks 4 free h100-80g",
            id="GPUs that are claimed",
        ),
        pytest.param(want(), (node("a", engines=()),), "0 of 1 node: 1 without vllm", id="no engine"),
        pytest.param(
            want({"node_selector": {"zone": "x", "disk": "fast"}}),
            (node("a", labels={"zone": "x"}), node("b", labels={"zone": "y", "disk": "fast"})),
            "0 of 2 nodes: 1 without the label disk=fast, 1 without the label zone=x",
            id="labels",
        ),
        pytest.param(
            want({"min_memory_gb": 100}),
            (node("a", memory_total_mib=90_000), node("b", memory_total_mib=900_000, memory_free_mib=90_000)),
            "0 of 2 nodes: 2 short of memory (need 100 GB)",
            id="memory, in all or free",
        ),
        pytest.param(
            want({"min_memory_gb": 100}),
            (node("a", memory_total_mib=96_000),),
            "0 of 1 node: 1 short of memory (need 100 GB)",
            id="memory that the system itself needs",
        ),
        pytest.param(
            want({"min_disk_gb": 140}),
            (node("a", disk_free_bytes=139 * 10**9),),
            "0 of 1 node: 1 short of disk (need 140 GB)",
            id="disk",
        ),
        pytest.param(
            want(source_bytes=141 * 10**9 - 5),
            (node("a", disk_free_bytes=139 * 10**9),),
            "0 of 1 node: 1 short of disk (need 141 GB)",
            id="disk for weights of a known size",
        ),
        pytest.param(
            want(),
            (
                node("a", freshness=Freshness.SUSPECT),
                node("b", freshness=Freshness.LOST),
                node("n", report=None),
            ),
            "0 of 3 nodes: 2 out of contact, 1 not heard from yet",
            id="out of contact",
        ),
        pytest.param(
            want(avoid={"p": {97: "It has no GPU"}}),
            (node("a"),),
            "0 of 1 node: 1 where it failed a moment ago (It has no GPU)",
            id="a node that had trouble with it",
        ),
        pytest.param(
            want({"nodes": 2, "tp": 16, "gpus_per_node": 8}),
            (node("a"), node("b")),
            "0 of 2 nodes: 2 without an agent that runs a part of a replica (set nodes to 1)",
            id="a gang, where agents run whole replicas only",
        ),
        pytest.param(
            want(),
            (node("a", is_cordoned=True, is_draining=True), CORDONED),
            "0 of 2 nodes: 1 cordoned, 1 draining",
            id="a node that is to be empty",
        ),
        pytest.param(
            want(
                {},
                *(
                    {"name": f"q{number}", "tp": 8 + number, "gpus_per_node": 8 + number}
                    for number in range(1, 6)
                ),
            ),
            (node("a", cards(1)),),
            '"p": 0 of 1 node: 1 lacks 4 free h100-80g; '
            'profile "q1": 0 of 1 node: 1 lacks 9 free h100-80g; '
            'profile "q2": 0 of 1 node: 1 lacks 10 free h100-80g; '
            'profile "q3": 0 of 1 node: 1 lacks 11 free h100-80g; and 2 more profiles',
            id="of many profiles, four are explained",
        ),
        pytest.param(
            want({}, {"name": "q", "gpu_class": "l40s", "tp": 1}),
            (node("a", cards(2)),),
            '"p": 0 of 1 node: 1 lacks 4 free h100-80g; profile "q": 0 of 1 node: 1 lacks 1 free l40s',
            id="each profile has its own sentence",
        ),
        pytest.param(
            want({}, {"name": "q"}),
            (CORDONED,),
            "0 of 1 node: 1 cordoned",
            id="profiles that say the same say it once",
        ),
    ],
)
def test_why_not(asked: Want, nodes: tuple[Node, ...], says: str) -> None:
    assert refused(asked, *nodes).removeprefix("profile ") == says


@pytest.mark.parametrize(
    ("asked", "there", "gpus"),
    [
        pytest.param(want(), node("a"), ("GPU-0", "GPU-1", "GPU-2", "GPU-3"), id="the first that are free"),
        pytest.param(
            want(),
            node("a", taken=frozenset({"GPU-1", "GPU-2"})),
            ("GPU-4", "GPU-5", "GPU-6", "GPU-7"),
            id="four that are neighbours, past those that are taken",
        ),
        pytest.param(
            want(), node("a", cards(4, foreign_mib=30)), tuple(f"GPU-{n}" for n in range(4)), id="a display"
        ),
        pytest.param(
            want({"engine": "llamacpp", "gpu_class": "", "tp": 1}),
            node("a", cards(0), engines=(EngineReport("llamacpp"),)),
            (),
            id="without a card",
        ),
        pytest.param(
            want({"min_memory_gb": 64, "min_disk_gb": 64, "tp": 1}), node("a"), ("GPU-0",), id="unknown means"
        ),
        pytest.param(
            want({"min_disk_gb": 140, "tp": 1}),
            node("a", disk_free_bytes=5, weights=("org/m",)),
            ("GPU-0",),
            id="the weights are there already",
        ),
        pytest.param(
            want({"min_disk_gb": 140, "tp": 1}, source="/models/m"),
            node("a", disk_free_bytes=5),
            ("GPU-0",),
            id="a path is not fetched",
        ),
        pytest.param(
            want({"node_selector": {"zone": "x"}, "tp": 1}),
            node("a", labels={"zone": "x", "more": "y"}),
            ("GPU-0",),
            id="labels that match",
        ),
    ],
)
def test_a_seat_is_taken_although_or_with(asked: Want, there: Node, gpus: tuple[str, ...]) -> None:
    (only,) = seated(asked, there).places
    assert only.gpus == gpus


@pytest.mark.parametrize(
    ("asked", "nodes", "chosen"),
    [
        pytest.param(
            want({"tp": 1}),
            (node("a"), node("b", weights=("org/m",))),
            "b",
            id="the one that holds the weights",
        ),
        pytest.param(
            want({"tp": 1}, weights_key=weights_key("org/m", "c" * 40)),
            (holding("a", "0" * 40), holding("b", "c" * 40)),
            "b",
            id="the one that holds the weights at the model's commit",
        ),
        pytest.param(
            want({"tp": 1}, weights_key=weights_key("org/m", "c" * 40)),
            (node("a"), node("b", weights=("org/m",))),
            "b",
            id="the one whose older agent does not say which commit it holds",
        ),
        pytest.param(
            want({"tp": 1}, source="/models/m", held_on={"b"}),
            (node("a"), node("b")),
            "b",
            id="the one that is known to have the path",
        ),
        pytest.param(
            want({"tp": 1}, crowd={97: 1}), (node("a"), node("b")), "b", id="the one without a replica yet"
        ),
        pytest.param(
            want({"tp": 1}),
            (node("a"), node("b", taken=frozenset({"GPU-0"}))),
            "b",
            id="the one with the smaller hole",
        ),
        pytest.param(
            want({"tp": 1}), (node("b"), node("a")), "a", id="the first by name, all else being equal"
        ),
    ],
)
def test_of_several_nodes_the_best_is(asked: Want, nodes: tuple[Node, ...], chosen: str) -> None:
    (only,) = seated(asked, *nodes).places
    assert {node.id: node.name for node in nodes}[only.node] == chosen


@pytest.mark.parametrize(
    ("profiles", "chosen"),
    [
        pytest.param(({}, {"name": "q", "priority": 5}), "q", id="the one with the higher priority"),
        pytest.param(({}, {"name": "q"}), "p", id="the first declared, of equals"),
        pytest.param(
            ({}, {"name": "q", "priority": 5, "tp": 16, "gpus_per_node": 16}), "p", id="the one that fits"
        ),
        pytest.param(
            ({}, {"name": "q", "priority": 5, "nodes": 2, "tp": 8}),
            "p",
            id="the one that needs a single node",
        ),
    ],
)
def test_of_several_profiles_the_best_is(profiles: tuple[dict[str, Any], ...], chosen: str) -> None:
    assert seated(want(*profiles), node("a")).profile.name == chosen


@pytest.mark.parametrize(
    ("silence_s", "watched_s", "is_now"),
    [
        pytest.param(None, 1000, Freshness.NEVER, id="never heard from"),
        pytest.param(2, 1000, Freshness.FRESH, id="just heard from"),
        pytest.param(11, 1000, Freshness.SUSPECT, id="silent for a while"),
        pytest.param(91, 1000, Freshness.LOST, id="silent for long"),
        pytest.param(86_400, 5, Freshness.SUSPECT, id="silent for long, but nobody listened"),
    ],
)
def test_freshness(silence_s: float | None, watched_s: float, is_now: Freshness) -> None:
    silence = None if silence_s is None else timedelta(seconds=silence_s)
    found = freshness(silence, timedelta(seconds=watched_s), suspect_after_s=10, lost_after_s=90)
    assert found is is_now


@pytest.mark.parametrize(
    ("report", "could"),
    [
        pytest.param(node("a", cards(1)).report, True, id="a node of the class, however small or busy"),
        pytest.param(node("a", cards(8, "l40s")).report, False, id="a node of another class"),
        pytest.param(node("a", engines=()).report, False, id="a node without the engine"),
    ],
)
def test_which_nodes_a_model_is_meant_for(report: StateReport, could: bool) -> None:
    assert could_run(want().spec, report) is could


@pytest.mark.parametrize(
    ("asked", "there", "held", "says"),
    [
        pytest.param(
            {"min_memory_gb": 100},
            {"memory_total_mib": 190_000},
            Holding(Place(97), memory_gb=100),
            "0 of 1 node: 1 short of memory (need 100 GB)",
            id="memory that others were promised",
        ),
        pytest.param(
            {"min_memory_gb": 50},
            {"memory_free_mib": 90_000},
            Holding(Place(97), memory_gb=50, has_begun=False),
            "0 of 1 node: 1 short of memory (need 50 GB)",
            id="free memory that what is to start there will take",
        ),
        pytest.param(
            {"min_memory_gb": 50},
            {"memory_free_mib": 90_000},
            Holding(Place(97), memory_gb=50),
            "",
            id="free memory as it is, once that has started",
        ),
        pytest.param(
            {"min_disk_gb": 60},
            {"disk_free_bytes": 100 * GB},
            Holding(Place(97), source="org/other", bytes_to_come=50 * GB),
            "0 of 1 node: 1 short of disk (need 60 GB)",
            id="disk that another source will take",
        ),
        pytest.param(
            {"min_disk_gb": 60},
            {"disk_free_bytes": 50 * GB},
            Holding(Place(97), source="org/m", bytes_to_come=50 * GB),
            "",
            id="disk for weights that are on their way already",
        ),
    ],
)
def test_what_others_hold_counts(
    asked: dict[str, Any], there: dict[str, Any], held: Holding, says: str
) -> None:
    room = Room([node("a", **there)])
    room.take(held)
    found = place(want({"tp": 1} | asked), room)
    assert (found.why if isinstance(found, Unseated) else "") == says


@pytest.mark.parametrize(
    ("free", "count", "chosen"),
    [
        pytest.param(range(8), 4, [0, 1, 2, 3], id="all free: the first block"),
        pytest.param([0, 1, 2, 3, 6, 7], 2, [6, 7], id="a pair out of the half that is broken already"),
        pytest.param([0, 1, 3, 4, 5, 6, 7], 1, [3], id="one whose neighbour is taken"),
        pytest.param([2, 3, 4, 5], 4, [2, 3, 4, 5], id="all that is left, neighbours or not"),
        pytest.param([1, 2, 5, 6], 2, [1, 2], id="no block whole: the first that are free"),
        pytest.param([0, 1, 4, 5, 6, 7], 2, [0, 1], id="four stay together"),
        pytest.param([], 0, [], id="none asked for"),
    ],
)
def test_the_exact_gpus(free: Any, count: int, chosen: list[int]) -> None:
    gpus = [GpuReport(str(index), index) for index in free]
    assert choose(gpus, count) == tuple(map(str, chosen))


@pytest.mark.parametrize(
    ("gpus", "asked", "holds"),
    [
        pytest.param(
            cards(8), [{"tp": 4}, {"tp": 2}, {"tp": 1}, {"tp": 1}], [4, 2, 1, 1], id="eight of one class"
        ),
        pytest.param(
            (*cards(4), *(replace(gpu, id=f"L-{gpu.index}", gpu_class="l40s-48g") for gpu in cards(4))),
            [{"tp": 2, "gpu_class": "l40s-48g"}, {"tp": 4}],
            [2, 4],
            id="two classes in one node",
        ),
        pytest.param(
            tuple(
                GpuReport(f"MIG-{index}", index // 7, gpu_class="h100-80g-mig-1g.10gb") for index in range(14)
            ),
            [{"tp": 1, "gpu_class": "h100-80g-mig-1g.10gb"}] * 14,
            [1] * 14,
            id="slices that share the index of their card",
        ),
        pytest.param(
            (GpuReport("GPU-0", 0, "NVIDIA GB10", gpu_class="gb10", memory_mib=None, used_mib=None),),
            [{"tp": 1, "gpu_class": "gb10", "min_memory_gb": 64}],
            [1],
            id="memory shared with the host, without numbers",
        ),
        pytest.param((), [{"engine": "llamacpp", "gpu_class": "", "tp": 1}] * 3, [0, 0, 0], id="no card"),
    ],
)
def test_an_inventory_is_filled(
    gpus: tuple[GpuReport, ...], asked: list[dict[str, Any]], holds: list[int]
) -> None:
    """One after another takes what it asked for, and no GPU twice."""
    room = Room([node("a", gpus, engines=(EngineReport("vllm"), EngineReport("llamacpp")))])
    taken: list[str] = []
    for profile in asked:
        seat = place(want(profile), room)
        assert isinstance(seat, Seat), seat
        room.take(Holding(seat.places[0]))
        taken += seat.places[0].gpus
    assert len(taken) == len(set(taken)) == sum(holds)


# --- laws -------------------------------------------------------------------------------------------

nodes_of_any_kind = st.lists(
    st.builds(
        lambda free, total, taken, is_cordoned, fresh, memory, holds, has: Node(
            id=0,
            name="",
            freshness=fresh,
            is_cordoned=is_cordoned,
            taken=frozenset(f"GPU-{index}" for index in taken),
            report=StateReport(
                "cluster",
                "node",
                gpus=cards(total),
                engines=(EngineReport("vllm"),) if has else (),
                memory_total_mib=memory,
                disk_free_bytes=free,
                weights=("org/m",) if holds else (),
            ),
        ),
        free=st.none() | st.integers(0, 200 * 10**9),
        total=st.integers(0, 8),
        taken=st.frozensets(st.integers(0, 7)),
        is_cordoned=st.booleans(),
        fresh=st.sampled_from(Freshness),
        memory=st.none() | st.integers(0, 200_000),
        holds=st.booleans(),
        has=st.booleans(),
    ),
    max_size=6,
).map(lambda found: [replace(each, id=index, name=f"n{index}") for index, each in enumerate(found)])


@given(nodes_of_any_kind, st.integers(1, 4), st.randoms(use_true_random=False))
def test_the_order_of_nodes_does_not_matter(nodes: list[Node], tp: int, random: Any) -> None:
    asked = want({"tp": tp, "min_disk_gb": 100, "min_memory_gb": 50})
    shuffled = random.sample(nodes, len(nodes))
    assert place(asked, Room(nodes)) == place(asked, Room(shuffled))


@given(nodes_of_any_kind, st.integers(1, 4))
def test_a_seat_is_free_whole_and_on_a_node_that_takes_it(nodes: list[Node], tp: int) -> None:
    seat = place(want({"tp": tp}), Room(nodes))
    if isinstance(seat, Unseated):
        return
    (only,) = seat.places
    there = next(each for each in nodes if each.id == only.node)
    assert there.report is not None
    assert not there.is_cordoned
    assert there.freshness is Freshness.FRESH
    assert len(set(only.gpus)) == tp
    assert not there.taken.intersection(only.gpus)
    assert {gpu.id for gpu in there.report.gpus}.issuperset(only.gpus)


@given(nodes_of_any_kind)
def test_the_reasons_add_up_to_the_number_of_nodes(nodes: list[Node]) -> None:
    seat = place(want({"tp": 9, "gpus_per_node": 9}), Room(nodes))
    assert isinstance(seat, Unseated)
    assert seat.reasons["p"].keys() == {node.name for node in nodes}
    assert all(seat.reasons["p"].values())


@given(
    nodes_of_any_kind,
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 5), st.booleans()), min_size=1, max_size=8),
    st.integers(0, 40),
)
def test_the_seat_is_the_one_that_a_look_at_every_node_finds(
    nodes: list[Node], asked: list[tuple[int, int, bool]], more: int
) -> None:
    """However nodes are kept so as to find it sooner, and whatever was seated before."""
    nodes += [node(f"more-{number}", cards(number % 4)) for number in range(more)]
    room = Room([replace(each, id=index) for index, each in enumerate(nodes)])
    crowd: dict[int, int] = {}
    for tp, crowded_node, is_held in asked:
        wanted = want({"tp": tp}, crowd=dict(crowd), held_on={"n0", "n1"} if is_held else ())
        (profile,) = wanted.profiles
        able = [spot for spot in room.spots.values() if not refusal(wanted, profile, spot)]
        best = min(
            able,
            key=lambda spot: (
                not spot.holds(wanted),
                crowd.get(spot.node.id, 0),
                len(spot.free(H100)),
                spot.node.name,
            ),
            default=None,
        )
        seat = place(wanted, room)
        if best is None:
            assert isinstance(seat, Unseated)
            continue
        assert isinstance(seat, Seat)
        assert seat.places[0].node == best.node.id
        room.take(Holding(seat.places[0]))
        crowd[crowded_node] = crowd.get(crowded_node, 0) + 1
