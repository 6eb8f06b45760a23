"""What a bench decides: whom it asks when, how hard next, what the numbers say, and which weights follow."""

from __future__ import annotations

import heapq
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog.durations import SECOND
from catalog.parts import Slo
from catalog.reading import CatalogError
from catalog.spec import ModelSpec
from nodes.bench.asks import DISTRIBUTIONS, Ask, Lengths, Row, arrivals, read_rows
from nodes.bench.figures import Figures, Outcome, Promise, is_gone, is_lost, quantile
from nodes.bench.options import CONFIRMING, Options, load_of
from nodes.bench.prompts import Prompts
from nodes.bench.search import Search
from nodes.bench.weighing import Capacity, build_of, weigh

seeds = st.integers(0, 2**32)
rates = st.floats(0.05, 2_000)


# --- arrivals and lengths ---------------------------------------------------------------------------


@given(seeds, rates)
def test_a_seed_gives_the_same_step_again(seed: int, rate: float) -> None:
    lasting_s = 50 / rate
    steps = [arrivals(rate, lasting_s, Lengths(), Random(seed).random, first=7) for _ in range(2)]
    assert steps[0] == steps[1]
    assert [ask.number for ask in steps[0]] == list(range(7, 7 + len(steps[0])))
    assert all(0 <= one.due_s <= other.due_s < lasting_s for one, other in pairwise(steps[0]))


def test_arrivals_come_as_a_poisson_process_does() -> None:
    asks = arrivals(50, 400, Lengths(), Random(3).random)
    gaps = [other.due_s - one.due_s for one, other in pairwise(asks)]
    assert len(asks) == pytest.approx(20_000, rel=0.03)
    assert statistics.mean(gaps) == pytest.approx(0.02, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.02, rel=0.03), "gaps are spread like their mean"
    assert sum(gap > 0.06 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-3), rel=0.1)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_lengths_have_the_mean_they_were_told(distribution: str) -> None:
    lengths, chance = Lengths(distribution, 400, 80, spread=0.5), Random(5).random
    rows = [lengths.draw(chance) for _ in range(20_000)]
    assert statistics.mean(row.prompt_tokens for row in rows) == pytest.approx(400, rel=0.02)
    assert statistics.mean(row.output_tokens for row in rows) == pytest.approx(80, rel=0.02)
    spread = {"fixed": 0.0, "lognormal": 0.5, "uniform": 0.5 / math.sqrt(3)}[distribution]
    assert statistics.stdev(row.prompt_tokens for row in rows) == pytest.approx(400 * spread, rel=0.05)


@given(seeds, st.sampled_from(DISTRIBUTIONS), st.integers(1, 5_000), st.floats(0, 1))
def test_no_length_is_below_one(seed: int, distribution: str, mean: int, spread: float) -> None:
    row = Lengths(distribution, mean, mean, spread).draw(Random(seed).random)
    assert row.prompt_tokens >= 1 <= row.output_tokens


def test_a_dataset_is_drawn_from() -> None:
    lines = [
        '{"prompt_tokens": 3, "output_tokens": 4}',
        "",
        '{"messages": [{"role": "user", "content": "hi"}], "output_tokens": 9}',
    ]
    rows = read_rows(lines, "chats.jsonl")
    assert rows == (Row(3, 4), Row(0, 9, ({"role": "user", "content": "hi"},)))
    drawn = {ask.row.output_tokens for ask in arrivals(100, 1, Lengths(rows=rows), Random(1).random)}
    assert drawn == {4, 9}
    body = json.loads(Prompts("m", "1", 0.0).body(Ask(0, 0.0, rows[1])))
    assert body["messages"] == [{"role": "user", "content": "hi"}]
    assert body["max_tokens"] == 9


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        pytest.param(["{"], "Line 1 of the dataset d cannot be used: it is no JSON;", id="no JSON"),
        pytest.param(
            ["[" * 100_000], "Line 1 of the dataset d cannot be used: it is no JSON;", id="too deep"
        ),
        pytest.param(["[1]"], "it is no JSON object", id="a list"),
        pytest.param(
            ['{"prompt_tokens": 1}'], "its output_tokens is no whole number from 1", id="no answer's length"
        ),
        pytest.param(
            ['{"prompt_tokens": true, "output_tokens": 1}'], "its prompt_tokens is no whole", id="a bool"
        ),
        pytest.param(
            ['{"messages": ["x"], "output_tokens": 1}'], "its messages are no list of maps", id="no messages"
        ),
        pytest.param([" ", ""], "The dataset d has no rows;", id="nothing"),
        pytest.param(
            ['{"prompt_tokens": 1, "output_tokens": 1}'] * 100_001, "has more than 100000 rows", id="too many"
        ),
    ],
)
def test_a_dataset_that_cannot_be_read_says_where(lines: list[str], says: str) -> None:
    with pytest.raises(CatalogError) as refused:
        read_rows(lines, "d")
    assert says in str(refused.value)


@given(seeds, st.integers(1, 3_000), st.floats(0, 1))
def test_prompts_have_their_length_and_share_what_they_are_to(seed: int, tokens: int, shared: float) -> None:
    prompts = Prompts("m", str(seed), shared)
    texts = [
        json.loads(prompts.body(Ask(number, 0.0, Row(tokens, 1))))["messages"][0]["content"]
        for number in (1, 2)
    ]
    words = [text.split(" ") for text in texts]
    assert [len(each) for each in words] == [tokens, tokens]
    common = tokens - max(1, round(tokens * (1 - shared)))
    assert words[0][:common] == words[1][:common]
    if tokens - common >= 20:
        assert words[0][common:] != words[1][common:]


# --- the search -------------------------------------------------------------------------------------

searches = st.builds(
    Search,
    start=st.floats(0.1, 500),
    floor=st.just(0.05),
    ceiling=st.just(2_000.0),
    growth=st.floats(1.2, 4),
    precision=st.floats(0.01, 0.5),
)


def searched(search: Search, capacity: float) -> tuple[Search, list[float]]:
    tried = []
    while (rate := search.next_rate()) is not None:
        tried.append(rate)
        assert len(tried) < 200, "it comes to an end"
        before = search.part_done
        search = search.told(rate, holds=rate <= capacity)
        assert 0 <= before <= 1
    return search, tried


@given(searches, st.floats(0.01, 3_000))
def test_a_search_ends_close_to_what_holds(search: Search, capacity: float) -> None:
    found, tried = searched(search, capacity)
    assert all(search.floor <= rate <= search.ceiling for rate in tried)
    if capacity < search.floor:
        assert found.held is None
    elif capacity >= search.ceiling:
        assert found.held == search.ceiling
    else:
        assert found.held is not None
        assert found.held <= capacity < found.held * (1 + search.precision) * (1 + 1e-6)
    assert found.is_confirmed is (found.held is not None)


@given(searches, st.floats(0.1, 1_500), st.integers(1, 5))
def test_what_does_not_hold_again_is_lowered_until_it_does(
    search: Search, capacity: float, unlucky: int
) -> None:
    found, _ = searched(search, capacity)
    search, left = replace(found, is_confirmed=False), unlucky
    while (rate := search.next_rate()) is not None:
        assert search.is_settled or search.held is None
        search, left = search.told(rate, holds=left <= 0), left - 1
    if search.held is not None:
        assert found.held is not None
        assert search.is_confirmed
        lowered = found.held / min(1 + search.precision, search.growth) ** unlucky
        assert search.held <= max(lowered, search.floor) * (1 + 1e-6)


@given(searches, st.floats(0.1, 1_500), st.integers(0, 5))
def test_one_hiccup_on_the_way_up_changes_nothing(search: Search, capacity: float, at: int) -> None:
    undisturbed, _ = searched(search, capacity)
    number = 0
    while (rate := search.next_rate()) is not None:
        is_hiccup = number == at and search.failed is None and search.doubted is None
        number += 1
        search = search.told(rate, holds=rate <= capacity and not is_hiccup)
    assert search.held == undisturbed.held


# --- the numbers ------------------------------------------------------------------------------------


@given(st.lists(st.floats(0, 100), min_size=1, max_size=300), st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_is_the_smallest_that_so_many_do_not_exceed(values: list[float], level: float) -> None:
    found = quantile(sorted(values), level)
    assert found in values
    assert sum(value <= found for value in values) >= level * len(values)
    assert sum(value < found for value in values) < level * len(values)


def outcome(
    due_s: float, ttft_s: float = 0.1, tpot_s: float = 0.01, tokens: int = 11, **more: Any
) -> Outcome:
    first_s = due_s + ttft_s
    return Outcome(0, due_s, due_s, first_s, first_s + tpot_s * (tokens - 1), tokens, **more)


def figures(outcomes: Sequence[Outcome], **more: Any) -> Figures:
    return Figures.of(10, outcomes, since_s=0, until_s=100, **more)


def test_times_count_from_when_a_request_was_due() -> None:
    late = Outcome(0, due_s=1.0, sent_s=3.0, first_s=3.5, last_s=4.5, output_tokens=11)
    assert [late.ttft_s, late.tpot_s, late.took_s] == pytest.approx([2.5, 0.1, 3.5])
    assert figures([late]).was_late


@pytest.mark.parametrize(
    ("outcomes", "says"),
    [
        pytest.param([outcome(each) for each in range(99)], "", id="all well"),
        pytest.param([], "no request was due", id="nothing was asked"),
        pytest.param(
            [outcome(each, ttft_s=3 if each < 2 else 0.1) for each in range(99)],
            "TTFT p99 3 s is above 1 s",
            id="two of 99 are late",
        ),
        pytest.param(
            [outcome(each / 2, ttft_s=3 if each < 2 else 0.1) for each in range(200)], "", id="two of 200"
        ),
        pytest.param(
            [outcome(each, tpot_s=0.2) for each in range(9)],
            "TPOT p99 200 ms is above 50 ms",
            id="slow tokens",
        ),
        pytest.param(
            [outcome(each, problem="it broke off" if each < 2 else "") for each in range(99)],
            "2 of 99 requests failed: it broke off",
            id="two fail",
        ),
        pytest.param([outcome(50, tokens=1, ttft_s=0.9, tpot_s=0)], "", id="one token has no pace"),
    ],
)
def test_what_a_step_misses_is_said(outcomes: list[Outcome], says: str) -> None:
    assert figures(outcomes).misses(Promise(1.0, 0.05)) == says


def test_what_piles_up_does_not_hold_however_long_one_may_wait() -> None:
    found = figures([outcome(each / 10, ttft_s=each / 50) for each in range(1_000)])
    assert found.backlog_after == 167
    assert found.misses(Promise(3_600, 0)).startswith("requests pile up: 0 open at first, 167 at the end")
    steady = figures([outcome(each / 10, ttft_s=5) for each in range(1_000)], open_dues_s=[99, 99.5])
    assert (
        Figures.of(10, [outcome(e / 10, ttft_s=5) for e in range(1_000)], since_s=20, until_s=100).misses(
            Promise(6, 0)
        )
        == ""
    )
    assert steady.backlog_after == 53


@given(st.lists(st.tuples(st.floats(0, 2), st.floats(0, 0.1)), min_size=1, max_size=250), st.floats(0.1, 1.9))
def test_what_is_given_up_early_would_have_missed(pairs: list[tuple[float, float]], limit_s: float) -> None:
    """Whatever is still to come: the requests seen so far are cut off at any moment."""
    outcomes = [outcome(index / 10, ttft_s, tpot_s) for index, (ttft_s, tpot_s) in enumerate(pairs)]
    promise = Promise(limit_s, 0.05)
    is_given_up = is_lost(outcomes, [], 1_000.0, since_s=0, planned=len(outcomes), promise=promise)
    missed = figures(outcomes).misses(promise)
    assert is_given_up == ("p99" in missed)


def test_whoever_waits_already_for_too_long_counts_as_slow() -> None:
    promise = Promise(1.0, 0)
    assert is_lost([], [0.0, 0.5], 1.6, since_s=0, planned=100, promise=promise)
    assert not is_lost([], [0.0, 0.7], 1.6, since_s=0, planned=100, promise=promise)
    assert not is_lost([], [0.0, 0.5], 1.6, since_s=0.1, planned=100, promise=promise), "before it counted"


BROKEN, REFUSED, BUSY = "it broke off (reset)", "status 500: no memory", "status 429: Too many requests"


@pytest.mark.parametrize(
    ("problems", "gone"),
    [
        pytest.param([""] * 30 + [BROKEN] * 5, True, id="five broken connections"),
        pytest.param([BROKEN] * 4, False, id="four of them"),
        pytest.param([BROKEN] * 4 + ["", BROKEN], False, id="not in a row"),
        pytest.param([REFUSED] * 20, True, id="twenty failures"),
        pytest.param([REFUSED] * 19, False, id="nineteen"),
        pytest.param([BUSY] * 200, False, id="too many requests"),
        pytest.param([REFUSED] * 19 + [BUSY], False, id="nineteen, and an answer"),
        pytest.param([BUSY] * 30 + [BROKEN] * 5, True, id="too many, and then nobody"),
    ],
)
def test_an_engine_that_answers_is_not_gone(problems: list[str], gone: bool) -> None:
    assert is_gone(problems) is gone


# --- all of it, on an engine of values ---------------------------------------------------------------


def served(asks: Iterable[Ask], slots: int, ttft_s: float, tpot_s: float) -> list[Outcome]:
    """First come, first served, so many at once: what the sim engine does, without a clock."""
    free = [0.0] * slots
    outcomes = []
    for ask in asks:
        first_s = max(ask.due_s, heapq.heappop(free)) + ttft_s
        last_s = first_s + tpot_s * (ask.row.output_tokens - 1)
        heapq.heappush(free, last_s)
        outcomes.append(Outcome(ask.number, ask.due_s, ask.due_s, first_s, last_s, ask.row.output_tokens))
    return outcomes


def benched(options: Options, promise: Promise, slots: int, ttft_s: float, tpot_s: float) -> Search:
    search, step = options.search(), 0
    while (rate := search.next_rate()) is not None:
        chance = Random(f"{options.seed}:{step}").random
        ramp_s, lasting_s = 2.0, options.step_s(rate) * (CONFIRMING if search.is_settled else 1)
        asks = arrivals(rate, ramp_s + lasting_s, options.lengths(), chance)
        seen = served(asks, slots, ttft_s, tpot_s)
        found = Figures.of(rate, seen, since_s=ramp_s, until_s=ramp_s + lasting_s)
        search, step = search.told(rate, holds=not found.misses(promise)), step + 1
    return search


SLOTS, TTFT_S, TPOT_S, TOKENS = 32, 0.1, 0.02, 41
MOST = SLOTS / (TTFT_S + TPOT_S * (TOKENS - 1))


@pytest.mark.parametrize(
    ("limit_s", "capacity"),
    [
        pytest.param(0.45, 30.9, id="a wait of 350 ms"),
        pytest.param(1.0, 33.5, id="a wait of 900 ms"),
        pytest.param(30.0, MOST, id="any wait that does not grow"),
    ],
)
def test_a_bench_finds_the_capacity_within_a_tenth(limit_s: float, capacity: float) -> None:
    """Which is known by runs so long that chance plays no part in them, or by what slots can do at most."""
    promise, lengths = Promise(limit_s, 0.05), Lengths("fixed", 1, TOKENS)
    for part, holds in ((0.95, True), (1.05, False)):
        rate = capacity * part
        asks = arrivals(rate, 20_000 / rate, lengths, Random(1).random)
        seen = served(asks, SLOTS, TTFT_S, TPOT_S)
        long = Figures.of(rate, seen, since_s=10, until_s=20_000 / rate)
        assert (not long.misses(promise)) is holds
    options = Options(distribution="fixed", output_tokens=TOKENS, step=30 * SECOND)
    found = benched(options, promise, SLOTS, TTFT_S, TPOT_S)
    assert found.held == pytest.approx(capacity, rel=0.1)


# --- options ----------------------------------------------------------------------------------------


def test_options_are_kept_as_they_were_given() -> None:
    given = {"distribution": "uniform", "spread": 0.25, "step": "90s", "ttft_p99": "1.5s", "seed": 7}
    options = Options.load(given)
    assert (options.step, options.ttft_p99, options.seed) == (90 * SECOND, 1_500_000_000, 7)
    assert load_of(options.as_dict()) == options
    assert options.promise(Slo(7, 2 * SECOND)) == Promise(1.5, 2.0)
    assert [options.step_s(rate) for rate in (0.1, 1, 100, 5_000)] == [360, 100, 90, 20]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        pytest.param([], "the bench: it must be a map of fields, not a list", id="no map"),
        pytest.param({"sed": 1}, 'the bench: unknown key "sed"; did you mean seed?', id="a typo"),
        pytest.param(
            {"through": "x"}, 'the bench: through "x" is not known; choose replica or gateway', id="a way"
        ),
        pytest.param({"distribution": "zipf"}, 'distribution "zipf" is not known', id="a distribution"),
        pytest.param({"prompt_tokens": 0}, "prompt_tokens must be from 1 to 1000000", id="no prompt"),
        pytest.param({"output_tokens": -1}, "output_tokens cannot be below 0", id="a negative length"),
        pytest.param({"start_rate": 9, "max_rate": 5}, "start_rate 9 is above max_rate 5", id="from above"),
        pytest.param({"max_rate": 1e9}, "max_rate is above 5000; give a smaller number", id="too fast"),
        pytest.param({"start_rate": 0}, "start_rate must be from 0.01 to 5000", id="no rate"),
        pytest.param({"distribution": "uniform", "spread": 1.5}, "spread is above 1", id="lengths below 0"),
        pytest.param({"precision": 0.001}, "precision must be from 0.01 to 0.5", id="too precise"),
        pytest.param({"step": "1h"}, "step must last from 1s to 10m", id="a step too long"),
        pytest.param({"warmup": "soon"}, "warmup", id="no duration"),
        pytest.param({"shared_prefix": 2}, "shared_prefix is above 1", id="more than all"),
    ],
)
def test_options_that_cannot_be_are_refused(given: object, says: str) -> None:
    with pytest.raises(CatalogError) as refused:
        Options.load(given)
    assert says in str(refused.value)


def test_a_rate_that_is_none_is_compared_with_no_other() -> None:
    with pytest.raises(CatalogError) as refused:
        Options.load({"max_rate": -1})
    assert str(refused.value) == "the bench: max_rate must be from 0.01 to 5000 requests a second"


# --- weights ----------------------------------------------------------------------------------------


def spec_with(**weights: float) -> ModelSpec:
    profiles = [
        {"name": name, "engine": "sim", "gpu_class": f"class-{name}", "weight": weight}
        for name, weight in weights.items()
    ]
    return ModelSpec.load({"name": "m", "source": "sim/x", "profiles": profiles})


def capacity(spec: ModelSpec, name: str, rate: float, **more: Any) -> Capacity:
    build = build_of(next(profile for profile in spec.profiles if profile.name == name))
    return Capacity(
        **{"profile": name, "build": build, "rate": rate, "promise": (1.0, 0.05), "load": "a"} | more
    )


def test_the_lightest_keeps_its_weight_and_the_others_follow() -> None:
    spec = spec_with(slow=2, fast=2, other=9)
    weighing = weigh(
        spec, [capacity(spec, "fast", 30), capacity(spec, "slow", 9), capacity(spec, "slow", 10)]
    )
    assert [(each.profile, each.was, each.weight, each.gpu_class) for each in weighing.proposals] == [
        ("slow", 2, 2, "class-slow"),
        ("fast", 2, 6, "class-fast"),
    ]
    assert [each.profile for each in weighing.changes] == ["fast"]


@pytest.mark.parametrize(
    ("measured", "says"),
    [
        pytest.param([], "No profile of m was measured up to its limit", id="nothing"),
        pytest.param(
            [("slow", {"build": "old"})], "No profile of m was measured up to its limit", id="another build"
        ),
        pytest.param([("slow", {})], "Of m only slow was measured under this load", id="one alone"),
        pytest.param(
            [("fast", {}), ("slow", {"load": "b"})], "Of m only slow was measured", id="another load"
        ),
        pytest.param([("fast", {}), ("slow", {"promise": (2.0, 0)})], "Of m only slow", id="another promise"),
    ],
)
def test_where_nothing_can_be_compared_no_weight_is_proposed(measured: Any, says: str) -> None:
    spec = spec_with(slow=1, fast=1)
    weighing = weigh(spec, [capacity(spec, name, 10, **more) for name, more in measured])
    assert weighing.says.startswith(says)
    assert not weighing.changes


def test_a_single_profile_has_a_weight_that_says_nothing() -> None:
    spec = spec_with(only=1)
    assert (
        weigh(spec, [capacity(spec, "only", 10)]).says
        == "m has one profile alone, so its weight says nothing."
    )


@given(st.floats(0.001, 1_000), st.floats(0.001, 1_000), st.floats(0.1, 900), st.floats(0.1, 900))
def test_weights_are_what_a_profile_may_have(one: float, other: float, fast: float, slow: float) -> None:
    spec = spec_with(one=one, other=other)
    for each in weigh(spec, [capacity(spec, "one", fast), capacity(spec, "other", slow)]).proposals:
        spec_with(one=each.weight)
