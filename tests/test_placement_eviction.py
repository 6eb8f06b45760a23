"""Whom to evict: no smaller set would do, nor one of as many that was asked for longer ago."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import chain, combinations

from hypothesis import given
from hypothesis import strategies as st

from catalog.spec import ModelSpec
from nodes.eviction import Tenant, cheapest, makes_room
from nodes.placement import Holding, Node, Place, Seat, Want
from nodes.protocol import EngineReport, GpuReport, StateReport
from nodes.seating import Room, place

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def room_of(sizes: list[int], fabric: str = "") -> Room:
    return Room(
        Node(
            number,
            f"n{number}",
            report=StateReport(
                "cluster",
                f"n{number}",
                gpus=tuple(GpuReport(f"{number}-{index}", index, gpu_class="sim") for index in range(size)),
                engines=(EngineReport("sim"),),
                fabric=fabric,
                runs_gangs=bool(fabric),
            ),
        )
        for number, size in enumerate(sizes)
    )


def want(tp: int, nodes: int = 1) -> Want:
    profile = {"name": "p", "engine": "sim", "gpu_class": "sim", "tp": tp * nodes, "nodes": nodes}
    spec = ModelSpec.load(
        {"name": "m", "source": "org/m", "profiles": [profile], "scaling": {"min": 1, "max": 1}}
    )
    return Want(spec, spec.profiles)


@st.composite
def full_rooms(draw: st.DrawFn, fabric: str = "") -> tuple[Room, list[Tenant]]:
    """Nodes that tenants fill; some of them are on two nodes."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    room = room_of(sizes, fabric)
    free = {number: [f"{number}-{index}" for index in range(size)] for number, size in enumerate(sizes)}
    tenants = []
    for number in range(draw(st.integers(0, 6))):
        holdings = []
        for node in draw(st.lists(st.sampled_from(sorted(free)), min_size=1, max_size=2, unique=True)):
            count = draw(st.integers(0, len(free[node])))
            gpus, free[node] = free[node][:count], free[node][count:]
            holdings.append(Holding(Place(node, tuple(gpus))))
        for holding in holdings:
            room.take(holding)
        asked_at = NOW - timedelta(minutes=draw(st.integers(0, 5)))
        tenants.append(Tenant(f"t{number}", tuple(holdings), asked_at))
    for node, gpus in free.items():  # what is left is held by somebody who stays
        room.take(Holding(Place(node, tuple(gpus[: draw(st.integers(0, len(gpus)))]))))
    return room, tenants


def all_sets(tenants: list[Tenant]) -> list[tuple[Tenant, ...]]:
    return list(chain.from_iterable(combinations(tenants, size) for size in range(1, len(tenants) + 1)))


@given(full_rooms(), st.integers(1, 4))
def test_no_cheaper_set_suffices(there: tuple[Room, list[Tenant]], tp: int) -> None:
    room, tenants = there
    chosen = cheapest(want(tp), room, tenants)
    sufficient = [gone for gone in all_sets(tenants) if makes_room(want(tp), room, gone)]
    if not chosen:
        assert not sufficient
        return
    assert makes_room(want(tp), room, chosen)
    best = min((len(gone), sorted((each.asked_at for each in gone), reverse=True)) for gone in sufficient)
    assert (len(chosen), sorted((each.asked_at for each in chosen), reverse=True)) == best


@given(full_rooms(fabric="f"), st.integers(1, 4))
def test_of_what_leaves_for_a_gang_none_is_superfluous(there: tuple[Room, list[Tenant]], tp: int) -> None:
    room, tenants = there
    gang = want(tp, nodes=2)
    if isinstance(place(gang, room), Seat):
        return
    chosen = cheapest(gang, room, tenants)
    if not chosen:
        assert not makes_room(gang, room, tenants)
        return
    assert makes_room(gang, room, chosen)
    if len(chosen) > 1:
        assert not any(makes_room(gang, room, [each for each in chosen if each is not one]) for one in chosen)


@given(full_rooms(), st.integers(1, 4))
def test_what_leaves_already_counts_as_gone(there: tuple[Room, list[Tenant]], tp: int) -> None:
    """Whoever else leaves, one that is evicted besides is needed."""
    room, tenants = there
    leaving, idle = tenants[:2], tenants[2:]
    if makes_room(want(tp), room, leaving):
        return
    chosen = cheapest(want(tp), room, idle, leaving)
    for one in chosen:
        fewer = [each for each in chosen if each is not one]
        assert not makes_room(want(tp), room, [*leaving, *fewer])
