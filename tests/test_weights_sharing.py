"""Who gives a rank its weights, what the reconciler tells agents of it, and what tickets open."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.models import Node, Weights
from nodes.placement import GB, Spot, Want, crowded
from nodes.placement import Node as PlacedNode
from nodes.plan import plan
from nodes.progress import left_s, progress_words
from nodes.protocol import (
    DISK,
    FETCHING,
    HELD,
    PARTIAL,
    READY,
    EngineReport,
    Launch,
    StateReport,
    WeightsReport,
)
from nodes.retry import Failure
from nodes.sharing import Holder, Sharing, key_of, needed_sources
from nodes.snapshot import Rank, Replica, Snapshot, launch_of
from nodes.tickets import opens, sign, weights_key
from tests.fake_agent import FakeAgent
from tests.passes import add_model, one_pass
from tests.worlds import World, ago

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NOW = datetime(2030, 1, 1, tzinfo=UTC)
LAUNCH = Launch("m", "org/m", {"name": "p", "engine": "llamacpp"}, revision=COMMIT)
KEY = weights_key("org/m", COMMIT)


# --- tickets --------------------------------------------------------------------------------------

READER = str(uuid.UUID(int=7))
TICKET = sign(["old-token", "its-token"], key=KEY, reader=READER, until_s=1000)


@pytest.mark.parametrize(
    ("ticket", "token", "key", "now_s", "is_open"),
    [
        pytest.param(TICKET, "its-token", KEY, 999.0, True, id="in time"),
        pytest.param(TICKET, "old-token", KEY, 999.0, True, id="while a key is rotated"),
        pytest.param(TICKET, "its-token", KEY, 1000.0, False, id="too late"),
        pytest.param(TICKET, "its-token", "0" * 32, 999.0, False, id="for other weights"),
        pytest.param(TICKET, "another", KEY, 999.0, False, id="at another node"),
        pytest.param(TICKET.replace("1000.", "9999.", 1), "its-token", KEY, 999.0, False, id="made to last"),
        pytest.param(TICKET.replace("7.", "8.", 1), "its-token", KEY, 999.0, False, id="of another reader"),
        pytest.param("", "its-token", KEY, 999.0, False, id="none"),
        pytest.param(TICKET + "\n", "its-token", KEY, 999.0, False, id="with more behind it"),
    ],
)
def test_a_ticket_opens_one_key_at_one_node_for_some_minutes(
    ticket: str, token: str, key: str, now_s: float, *, is_open: bool
) -> None:
    assert opens(ticket, token=token, key=key, now_s=now_s) is is_open


@given(st.text())
def test_no_text_is_a_ticket_by_chance(text: str) -> None:
    assert not opens(text, token="t", key=KEY, now_s=0.0)


# --- who has it -----------------------------------------------------------------------------------


def a_node(id: int, state: str = "") -> PlacedNode:
    holdings = (WeightsReport(KEY, "org/m", COMMIT, state),) if state else ()
    return PlacedNode(id, f"n{id}", report=StateReport("c", f"n{id}", holdings=holdings))


def a_replica(name: str, node: int, state: str = "pending") -> Replica:
    return Replica(name, 1, LAUNCH, (Rank(node, state=state),), created_at=NOW, state_since=NOW, state=state)


def holders(snapshot: Snapshot, node: int) -> tuple[Holder, ...]:
    return Sharing(replace(snapshot, answered=frozenset({1, 2, 3, 4}))).holders(KEY, node)


def test_the_first_of_many_asks_the_hub_and_each_later_one_those_before_it() -> None:
    nodes = tuple(a_node(each) for each in (1, 2, 3))
    snapshot = Snapshot(NOW, nodes, replicas=(a_replica("b", 3), a_replica("a", 2), a_replica("c", 1)))
    assert holders(snapshot, 2) == ()
    assert holders(snapshot, 3) == (Holder(2, True),)
    assert holders(snapshot, 1) == (Holder(2, True), Holder(3, True))


def test_who_holds_it_comes_first_and_who_only_has_a_part_does_not_count() -> None:
    nodes = (a_node(1, HELD), a_node(2, FETCHING), a_node(3, PARTIAL), a_node(4))
    snapshot = Snapshot(NOW, nodes, replicas=(a_replica("a", 4),))
    assert holders(snapshot, 4) == (Holder(1), Holder(2, True))


def test_a_node_out_of_contact_is_not_asked() -> None:
    snapshot = Snapshot(NOW, (a_node(9, HELD), a_node(1)), replicas=(a_replica("b", 9),))
    assert holders(snapshot, 1) == ()


@given(st.permutations([1, 2, 3, 4]), st.sets(st.sampled_from([1, 2, 3, 4])))
def test_no_two_ever_wait_for_each_other(order: list[int], held: set[int]) -> None:
    nodes = tuple(a_node(each, HELD if each in held else FETCHING) for each in (1, 2, 3, 4))
    replicas = tuple(a_replica(f"r{place}", node, FETCHING) for place, node in enumerate(order))
    snapshot = Snapshot(NOW, nodes, replicas=replicas)
    waits = {(node, each.node) for node in order for each in holders(snapshot, node) if each.is_fetching}
    assert all(order.index(later) > order.index(earlier) for later, earlier in waits)


@pytest.mark.parametrize(
    ("source", "revision", "engine", "key"),
    [
        pytest.param("org/m", COMMIT, "vllm", KEY, id="pinned"),
        pytest.param(f"org/m@{COMMIT}:*.gguf", "", "llamacpp", KEY, id="pinned in the source"),
        pytest.param("org/m", "main", "vllm", "", id="a branch may move"),
        pytest.param("org/m", "", "vllm", "", id="unknown"),
        pytest.param("/models/m", "", "vllm", "", id="a path"),
        pytest.param("org/m", COMMIT, "sim", "", id="nothing is read"),
        pytest.param("no source", COMMIT, "vllm", "", id="no source"),
    ],
)
def test_only_what_is_pinned_is_shared(source: str, revision: str, engine: str, key: str) -> None:
    assert key_of(Launch("m", source, {"engine": engine}, revision=revision)) == key


# --- how far it is --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "words", "left"),
    [
        ((1_200_000_000, 4_500_000_000, 110_000_000), "1.2 of 4.5 GB, 110.0 MB/s, 30 s left", 30),
        ((3_000_000, 64_000_000, None), "3.0 of 64.0 MB", None),
        ((500, 2_000, 0), "0.5 of 2.0 kB", None),
        ((2_000, 2_000, 9), "2.0 of 2.0 kB", 0),
    ],
    ids=["while it flows", "before it flows", "while it stands still", "at its end"],
)
def test_progress_tells_what_is_there_how_fast_it_comes_and_when_it_is_over(
    told: tuple[int, int, int | None], words: str, left: int | None
) -> None:
    assert progress_words(*told) == words
    assert left_s(*told) == left


# --- room for it ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("report", "says"),
    [
        pytest.param({"disk_free_bytes": 30 * GB}, "short of disk (need 40 GB)", id="too little"),
        pytest.param({"disk_free_bytes": 50 * GB}, "", id="enough"),
        pytest.param({"disk_free_bytes": 50 * GB, "room_bytes": 30 * GB}, "short of disk (need 40 GB)",
                     id="more than the store may take"),
        pytest.param({"disk_free_bytes": 1, "room_bytes": 50 * GB}, "", id="with what nothing needs"),
        pytest.param(
            {"room_bytes": 30 * GB, "holdings": (WeightsReport(KEY, "org/m", COMMIT, PARTIAL, 10 * GB),)},
            "", id="with what is there of it",
        ),
    ],
)  # fmt: skip
def test_a_node_has_room_for_what_it_lacks_yet(report: dict[str, Any], says: str) -> None:
    world = World().model(engine="llamacpp", gpu_class="", gpus_per_node=0)
    spec = world.models["m"].spec
    want = Want(spec, spec.profiles, source_bytes=40 * GB)
    spot = Spot(PlacedNode(1, "n", report=StateReport("c", "n", **report)))
    assert crowded(want, spec.profiles[0], spot) == says


def test_a_node_that_had_no_room_is_passed_over_until_it_has() -> None:
    world = World().node("a").model(engine="vllm", gpu_class="sim")
    launch = launch_of(world.models["m"], world.models["m"].spec.profiles[0])
    failure = Failure("r", launch, ago(700), DISK, "full", ord("a"), ago(800), total_bytes=40 * GB)
    world.failures.append((world.models["m"].id, failure))
    report = world.nodes["a"].report
    assert report is not None
    for room, starts in ((30 * GB, 0), (50 * GB, 1)):
        report = replace(report, engines=(EngineReport("vllm"),), room_bytes=room, disk_free_bytes=room)
        world.nodes["a"] = replace(world.nodes["a"], report=report)
        assert len(plan(world.snapshot()).start) == starts


def test_room_that_appears_ends_a_long_wait() -> None:
    world = World().node("a").model(engine="vllm", gpu_class="sim")
    launch = launch_of(world.models["m"], world.models["m"].spec.profiles[0])
    for times, seconds in enumerate((40, 100, 200, 400)):
        failure = Failure(f"r{times}", launch, ago(seconds), DISK, "full", ord("a"), ago(500), 40 * GB)
        world.failures.append((world.models["m"].id, failure))
    report = world.nodes["a"].report
    assert report is not None
    part = WeightsReport(key_of(launch), "org/m", COMMIT, PARTIAL, 10 * GB)
    for room, starts in ((20 * GB, 0), (30 * GB, 1)):
        report = replace(report, engines=(EngineReport("vllm"),), room_bytes=room, holdings=(part,))
        world.nodes["a"] = replace(world.nodes["a"], report=report)
        assert len(plan(world.snapshot()).start) == starts, room


# --- a pass ---------------------------------------------------------------------------------------


@pytest.mark.django_db(transaction=True)
def test_agents_are_told_who_has_the_weights_with_a_ticket_that_opens_them(
    agent_of: Callable[..., FakeAgent],
) -> None:
    held = WeightsReport(KEY, "org/m", COMMIT, HELD, size_bytes=5, total_bytes=5)
    first = agent_of("node-a", engines=("llamacpp",), holdings=(held,))
    second = agent_of("node-b", engines=("llamacpp",))
    third = agent_of("node-c", engines=("llamacpp",))
    model = add_model(low=3, high=3, engine="llamacpp")
    type(model).objects.update(source_revision=COMMIT)
    one_pass()
    told = {agent.address: next(iter(agent.assignments.values())) for agent in (first, second, third)}
    assert [(peer.url, peer.is_fetching) for peer in told[second.address].peers][:1] == [
        (first.address, False)
    ]
    peers = {peer.url: peer for peer in told[third.address].peers}
    ticket = peers[first.address].ticket
    assert opens(ticket, token=first.token, key=KEY, now_s=float(first.clock))
    assert not opens(ticket, token=first.token, key=KEY, now_s=float(first.clock) + 700)
    assert not opens(ticket, token=second.token, key=KEY, now_s=float(first.clock))
    assert told[first.address].needed == (f"org/m@{COMMIT}",)
    shown = Weights.objects.get()
    assert (shown.node.name, shown.repo, shown.revision, shown.state) == ("node-a", "org/m", COMMIT, HELD)


@pytest.mark.django_db(transaction=True)
def test_who_asks_for_peers_again_is_told_again_and_a_settled_cluster_is_left_alone(
    agent_of: Callable[..., FakeAgent],
) -> None:
    agent = agent_of("node-a", engines=("llamacpp",), first_state=FETCHING)
    model = add_model(engine="llamacpp")
    type(model).objects.update(source_revision=COMMIT)
    one_pass()
    (replica,) = agent.ranks
    agent.become(replica, FETCHING, wants_peers=True, done_bytes=5, total_bytes=10, bytes_per_s=3)
    agent.requests.clear()
    one_pass()
    assert len(agent.commands()) == 1
    agent.become(replica, READY, wants_peers=False)
    one_pass()
    agent.requests.clear()
    one_pass()
    assert agent.commands() == []


@pytest.mark.django_db(transaction=True)
def test_what_a_store_no_longer_has_is_no_longer_shown(agent_of: Callable[..., FakeAgent]) -> None:
    held = WeightsReport(KEY, "org/m", COMMIT, HELD, size_bytes=5, is_used=True)
    other = replace(held, key="1" * 32, repo="org/other", size_bytes=2**60, reason="x" * 9000)
    agent = agent_of("node-a", holdings=(held, other))
    one_pass()
    assert set(Weights.objects.values_list("repo", "is_used")) == {("org/m", True), ("org/other", True)}
    agent.holdings = (replace(held, is_used=False),)
    one_pass()
    assert list(Weights.objects.values_list("repo", "is_used")) == [("org/m", False)]
    Node.objects.all().delete()
    assert not Weights.objects.exists()


def test_what_models_need_is_told_by_commit_where_it_is_known() -> None:
    world = World().model("a").model("b").says("b", source_revision=COMMIT)
    assert needed_sources(world.models.values()) == ("org/m", f"org/m@{COMMIT}")
