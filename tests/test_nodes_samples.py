"""Samples: what is measured, how lines keep values at their places, and what is kept of them."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from hypothesis import given
from hypothesis import strategies as st

from catalog.models import database_now
from nodes import samples, usage
from nodes.models import Sample, Traffic
from nodes.placement import Freshness
from nodes.protocol import GpuReport
from nodes.reconcile import run_pass
from nodes.sampling import (
    DAY_S,
    HOUR_S,
    MINUTE_S,
    SPANS,
    begin,
    floor,
    fold,
    mean,
    mean_of,
    pack,
    put,
    sample,
    unpack,
)
from nodes.tallies import Tally
from tests.fake_agent import FakeAgent
from tests.passes import HOLDER, add_model
from tests.worlds import World, two_nodes

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
VALUES = st.lists(st.none() | st.integers(0, 3), max_size=60)


# --- lines ----------------------------------------------------------------------------------------


@given(VALUES)
def test_a_line_holds_what_was_put_into_it(values: list[Any]) -> None:
    assert unpack(pack(values)) == values


@given(VALUES, st.integers(0, 59), st.integers(0, 3))
def test_a_value_is_put_at_its_place_and_nothing_else_moves(
    values: list[Any], place: int, value: int
) -> None:
    found = unpack(put(pack(values), place, value))
    expected = values + [None] * (place + 1 - len(values))
    expected[place] = value
    assert found == expected


@given(VALUES, st.integers(0, 59), st.integers(0, 3))
def test_to_put_a_value_twice_is_to_put_it_once(values: list[Any], place: int, value: int) -> None:
    once = put(pack(values), place, value)
    assert put(once, place, value) == once == pack(unpack(once))


@given(st.dictionaries(st.integers(0, 59), st.integers(0, 3)), st.randoms())
def test_the_order_of_writers_does_not_matter(values: dict[int, int], dice: Any) -> None:
    def written(places: list[int]) -> list[Any]:
        line: list[Any] = []
        for place in places:
            line = put(line, place, values[place])
        return line

    places = list(values)
    dice.shuffle(places)
    assert written(places) == written(sorted(values))


@given(VALUES)
def test_the_mean_of_a_line_is_that_of_its_values(values: list[Any]) -> None:
    assert mean_of(pack(values)) == mean(values)


def test_what_does_not_change_takes_no_room() -> None:
    line: list[Any] = []
    for place in range(60):
        line = put(line, place, 8)
    assert line == [8, 60]


def test_a_mean_is_of_what_is_known() -> None:
    assert [mean(each) for each in ([], [None], [1, None, 2], [4, 4])] == [None, None, 1.5, 4]
    assert fold([1, 3, None, None, 5], 2) == [2, None, 5]


@pytest.mark.parametrize("span", SPANS.values(), ids=SPANS)
@pytest.mark.parametrize("after_s", [0, 14, 15, 59, 3600, 86_399])
def test_a_span_ends_with_the_last_whole_step_and_has_few_values(span: Any, after_s: int) -> None:
    now = NOON + timedelta(seconds=after_s)
    begins = begin(span, now)
    ends = begins + timedelta(seconds=span.step_s * span.count)
    assert begins.timestamp() % span.step_s == 0
    assert timedelta(0) < now - ends < timedelta(seconds=span.step_s + 60)
    assert span.count <= 300


# --- measured -------------------------------------------------------------------------------------


def with_memory(world: World, name: str, *used_mib: int) -> World:
    node = world.nodes[name]
    assert node.report is not None
    gpus = tuple(
        replace(gpu, used_mib=used, memory_mib=100)
        for gpu, used in zip(node.report.gpus, used_mib, strict=True)
    )
    report = replace(node.report, gpus=gpus, memory_total_mib=1000, memory_free_mib=400)
    world.nodes[name] = replace(node, report=report)
    return world


def busy() -> World:
    world = with_memory(two_nodes(), "a", 50, 60, 0, 0)
    world = world.node("c", freshness=Freshness.LOST).model(low=3, high=3).model("other", low=0, high=0)
    world.replica("one", gpus="0", running=3, waiting=1)
    world.replica("two", gpus="1", running=2, waiting=0)
    world.replica("new", "b", "0", state="starting", running=None, waiting=None)
    return world.replica("gone", "c", "0", state="lost", running=9, waiting=9)


@pytest.mark.parametrize(
    ("subject", "expected"),
    [
        (
            ("node", "a"),
            {
                "gpus": 4,
                "gpus_used": 2,
                "gpu_mib": 110,
                "gpu_total_mib": 400,
                "host_mib": 600,
                "host_total_mib": 1000,
                "running": 5,
                "waiting": 1,
            },
        ),
        (("node", "b"), {"gpus": 4, "gpus_used": 1, "gpu_mib": None, "running": 0, "host_mib": None}),
        (("node", "c"), None),
        (
            ("model", "m"),
            {
                "ready": 2,
                "coming": 1,
                "lost": 1,
                "leaving": 0,
                "missing": 2,
                "gpus_used": 4,
                "gpu_mib": 110,
                "running": 5,
                "waiting": 1,
            },
        ),
        (("model", "other"), {"ready": 0, "missing": 0, "gpus_used": 0, "gpu_mib": 0, "running": 0}),
        (
            ("cluster", ""),
            {"nodes": 3, "nodes_fresh": 2, "gpus": 8, "gpus_used": 4, "gpu_mib": 110, "ready": 2},
        ),
    ],
    ids=[
        "a node that is busy", "a node whose cards tell nothing", "a node that does not answer",
        "a model", "a model that is off", "the cluster",
    ],
)  # fmt: skip
def test_what_is_measured(subject: Any, expected: dict[str, Any] | None) -> None:
    found = sample(busy().snapshot(), {ord("m"): 2}).get(subject)
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert {name: found[name] for name in expected} == expected


def test_a_rank_behind_the_first_has_no_requests_of_its_own() -> None:
    world = two_nodes().model(tp=8, nodes=2).replica("gang", "ab", "0123", running=4, waiting=0)
    found = sample(world.snapshot(), {})
    assert (found["node", "a"]["running"], found["node", "b"]["running"]) == (4, 0)
    assert found["model", "m"]["gpus_used"] == 8


def test_gpus_of_one_name_on_two_nodes_are_two() -> None:
    world = two_nodes()
    for name, used in (("a", 10), ("b", 30)):
        node = world.nodes[name]
        assert node.report is not None
        report = replace(node.report, gpus=(GpuReport("same", 0, used_mib=used),))
        world.nodes[name] = replace(node, report=report)
    world.model().replica("one", "b", "0")
    one = world.replicas[0]
    world.replicas[0] = replace(one, ranks=(replace(one.ranks[0], gpus=("same",)),))
    assert sample(world.snapshot(), {})["model", "m"]["gpu_mib"] == 30


# --- kept -----------------------------------------------------------------------------------------


def kept(name: str, *values: Any, at: datetime = NOON, kind: str = "node") -> None:
    for minute, value in enumerate(values):
        samples.keep(at + timedelta(minutes=minute), {(kind, name): {"gpus": value}})


@pytest.mark.django_db
def test_minutes_are_read_as_they_were_written_over_the_end_of_an_hour() -> None:
    kept("a", 1, 2, 3, 4, at=NOON - timedelta(minutes=2))
    kept("b", 9, at=NOON)
    found = samples.lines(("node", "a"), MINUTE_S, NOON - timedelta(minutes=3), 6)
    assert found == {"gpus": [None, 1, 2, 3, 4, None]}


@pytest.mark.django_db
def test_a_minute_that_is_written_again_is_not_doubled() -> None:
    kept("a", 1, 2)
    kept("a", 1, 2)
    assert Sample.objects.count() == 1
    assert samples.lines(("node", "a"), MINUTE_S, NOON, 3) == {"gpus": [1, 2, None]}


@pytest.mark.django_db
def test_an_hour_that_is_over_becomes_a_place_in_its_day_once() -> None:
    kept("a", *[2] * 30, *[4] * 30)
    assert not Sample.objects.filter(step_s=HOUR_S).exists()
    kept("a", 7, 7, at=NOON + timedelta(hours=1))
    assert samples.lines(("node", "a"), HOUR_S, NOON - timedelta(hours=1), 3) == {"gpus": [None, 3, None]}
    assert Sample.objects.get(step_s=MINUTE_S, begins_at=NOON).is_rolled


@pytest.mark.django_db
def test_a_minute_that_comes_once_its_hour_was_rolled_counts_in_the_day() -> None:
    """Of a writer that was slow, or of a clock that was set back."""
    kept("a", 3, at=NOON)
    kept("a", 7, at=NOON + timedelta(hours=1))
    kept("a", 5, at=NOON + timedelta(minutes=59))
    kept("a", 7, at=NOON + timedelta(hours=1, minutes=1))
    assert samples.lines(("node", "a"), HOUR_S, NOON, 1) == {"gpus": [4]}


@pytest.mark.django_db
def test_hours_that_nobody_rolled_are_rolled_one_after_another() -> None:
    """As after days in which nothing ran here, or a crash between an hour and the next."""
    for hours in (50, 49, 3):
        kept("a", hours, at=NOON - timedelta(hours=hours))
    Sample.objects.filter(step_s=HOUR_S).delete()
    Sample.objects.update(is_rolled=False)
    for minute in range(3):
        kept("a", 1, at=NOON + timedelta(minutes=minute))
    [line] = samples.lines(("node", "a"), HOUR_S, NOON - timedelta(hours=50), 50).values()
    assert [value for value in line if value is not None] == [50, 49, 3]


@pytest.mark.django_db
def test_an_hour_of_many_is_rolled_in_bites() -> None:
    samples.keep(NOON, {("node", f"n-{each}"): {"gpus": each} for each in range(8)})
    rolled = []
    for minute in range(4):
        samples.keep(NOON + timedelta(hours=1, minutes=minute), {("node", "late"): {"gpus": 1}}, bite=3)
        rolled.append(Sample.objects.filter(step_s=HOUR_S).count())
    assert rolled == [3, 6, 8, 8]
    assert samples.lines(("node", "n-7"), HOUR_S, NOON, 1) == {"gpus": [7]}


@pytest.mark.django_db
def test_a_minute_takes_as_many_queries_for_a_hundred_subjects_as_for_two() -> None:
    counts = []
    for number in (2, 100):
        Sample.objects.all().delete()
        for at in (NOON, NOON + timedelta(hours=1)):  # the second one rolls
            values = {("node", f"n-{each}"): {"gpus": each} for each in range(number)}
            with CaptureQueriesContext(connection) as captured:
                samples.keep(at, values)
        counts.append(len(captured))
    assert counts[0] == counts[1] <= 10


@pytest.mark.django_db
def test_minutes_go_after_two_days_and_hours_after_ninety_and_nothing_before_it_is_rolled() -> None:
    now = floor(database_now(), DAY_S)
    for days in (1, 4, 80, 95):
        for step_s in (MINUTE_S, HOUR_S):
            Sample.objects.create(
                kind="node", subject="a", step_s=step_s, begins_at=now - timedelta(days=days), is_rolled=True
            )
    waiting = Sample.objects.create(
        kind="node", subject="b", step_s=MINUTE_S, begins_at=now - timedelta(days=9)
    )
    assert samples.forget() is False
    left = Sample.objects.order_by("-begins_at", "step_s").values_list("subject", "step_s", "begins_at")
    assert [(name, step_s, (now - begins).days) for name, step_s, begins in left] == [
        ("a", MINUTE_S, 1),
        ("a", HOUR_S, 1),
        ("a", HOUR_S, 4),
        ("b", MINUTE_S, 9),
        ("a", HOUR_S, 80),
    ]
    Sample.objects.filter(pk=waiting.pk).update(is_rolled=True)
    samples.forget()
    assert not Sample.objects.filter(pk=waiting.pk).exists()


@pytest.mark.django_db(transaction=True)
def test_a_pass_writes_what_it_has_in_hand(agent_of: Callable[..., FakeAgent]) -> None:
    agent_of()
    add_model()
    add_model("too-big", tp=8)
    run_pass(HOLDER, minutes=samples.Minutes())
    first = {(row.kind, row.subject): row.lines for row in Sample.objects.all()}
    assert set(first) == {("cluster", ""), ("model", "m"), ("model", "too-big"), ("node", "node-a")}
    assert first["model", "too-big"]["missing"][-2:] == [1, 1]


def test_samples_are_due_once_a_minute() -> None:
    minutes = samples.Minutes()
    assert minutes.are_due(NOON)
    minutes.are_kept(NOON)
    minute = timedelta(minutes=1)
    due = [minutes.are_due(NOON + each) for each in (minute * 0, minute * 0.99, minute, -minute)]
    assert due == [False, False, True, True]  # also by a clock that was set back


# --- what requests came to ------------------------------------------------------------------------


def some(requests: int, tokens: int = 0) -> Tally:
    tally = Tally()
    tally.requests, tally.completion_tokens = requests, tokens
    tally.observe("ttft", 0.5)
    return tally


def added(at: datetime, **requests: int) -> None:
    """To models, each by two keys."""
    lot = {
        (key, model.replace("none", ""), "/v1/chat/completions", "2xx"): some(count)
        for model, count in requests.items()
        for key in ("ada", "bob")
    }
    usage.add_lot(uuid.uuid4(), 1, at.timestamp(), lot)


@pytest.mark.django_db
def test_traffic_is_of_a_model_whatever_the_keys_and_of_all_of_them() -> None:
    added(NOON, tiny=2, huge=3, none=1)
    added(NOON + timedelta(minutes=1), tiny=5)

    def told(model: str, step_s: int) -> list[tuple[float, int]]:
        rows = usage.traffic(model, step_s, NOON - timedelta(hours=1), NOON + timedelta(hours=1))
        return [
            ((at - NOON).total_seconds(), tally.requests) for at, tally in sorted(rows, key=lambda r: r[0])
        ]

    assert told("tiny", 60) == [(0, 4), (60, 10)]
    assert told("tiny", 600) == told("tiny", 10_800) == [(0, 14)]
    assert told("huge", 600) == [(0, 6)]
    assert told("", 600) == [(0, 4 + 6 + 2 + 10)]


@pytest.mark.django_db
def test_traffic_is_kept_as_long_as_a_plot_shows_it() -> None:
    now = database_now()
    for model, age in (
        ("1h", timedelta(minutes=61)),
        ("24h", timedelta(hours=24)),
        ("30d", timedelta(days=30)),
    ):
        added(now - age, **{model: 1})
    added(now - timedelta(days=32), old=1)
    while usage.forget_traffic():
        pass
    for name, span in SPANS.items():
        assert Traffic.objects.filter(model=name, step_s=span.step_s).exists()
    assert not Traffic.objects.filter(model="old").exists()
    assert not Traffic.objects.filter(model="30d", step_s__lt=usage.HOUR_S).exists()


def test_the_steps_of_traffic_are_those_of_the_spans() -> None:
    assert set(usage.KEEP_TRAFFIC) == {span.step_s for span in SPANS.values()}
