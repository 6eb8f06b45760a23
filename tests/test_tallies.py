"""Tallies and histograms: what is added stays what it was, and percentiles are as good as their buckets."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from statistics import quantiles

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.tallies import BOUNDS_S, CODES_AT_ONCE, OTHER, TIMES, Histogram, Tally, total

pytestmark = pytest.mark.one_database

seconds = st.floats(min_value=0, max_value=5_000, allow_nan=False)


def _histogram(times: list[float]) -> Histogram:
    found = Histogram()
    for time in times:
        found.observe(time)
    return found


def _tally(lasted: list[tuple[str, float]], codes: list[str]) -> Tally:
    found = Tally()
    for time, lasting in lasted:
        found.requests += 1
        found.completion_tokens += 7
        found.observe(time, lasting)
    for code in codes:
        found.errors += 1
        found.count_code(code)
    return found


codes = st.sampled_from([f"code_{number}" for number in range(CODES_AT_ONCE)])
tallies = st.builds(_tally, st.lists(st.tuples(st.sampled_from(TIMES), seconds), max_size=5), st.lists(codes))


def test_bounds_rise_evenly() -> None:
    steps = [high / low for low, high in pairwise(BOUNDS_S)]
    assert (BOUNDS_S[0], BOUNDS_S[-1]) == (0.001, 1000)
    assert all(1.2 < step < 1.3 for step in steps)


@given(st.lists(seconds), st.lists(seconds))
def test_histograms_add_up_to_that_of_all(some: list[float], others: list[float]) -> None:
    found = _histogram(some)
    found.add(_histogram(others))
    assert found.counts == _histogram(some + others).counts
    assert found.count == len(some) + len(others)
    assert math.isclose(found.total_s, sum(some) + sum(others), abs_tol=1e-6)


@given(st.lists(seconds))
def test_a_histogram_is_kept_as_a_short_list_and_read_again(times: list[float]) -> None:
    histogram = _histogram(times)
    kept = json.loads(json.dumps(histogram.as_list()))
    found = Histogram.of_list(kept)
    assert found.counts == histogram.counts
    assert math.isclose(found.total_s, histogram.total_s, abs_tol=1e-6)
    assert len(kept) == 1 or kept[-1] > 0


@given(st.lists(st.floats(min_value=0.001, max_value=999), min_size=100, max_size=300))
def test_a_percentile_lies_in_the_right_bucket(times: list[float]) -> None:
    histogram = _histogram(times)
    ordered = sorted(times)
    for part in (0.5, 0.9, 0.99):
        found = histogram.quantile(part)
        true = ordered[math.ceil(part * len(ordered)) - 1]
        place = next(place for place, bound in enumerate(BOUNDS_S) if true <= bound)
        assert found is not None
        assert (BOUNDS_S[place - 1] if place else 0) <= found <= BOUNDS_S[place]


def test_percentiles_of_even_times_are_near() -> None:
    times = [0.1 + 0.4 * step / 1000 for step in range(1000)]
    cuts = quantiles(times, n=100)
    histogram = _histogram(times)
    for percent in (10, 50, 90, 99):
        assert histogram.quantile(percent / 100) == pytest.approx(cuts[percent - 1], rel=0.1)


@pytest.mark.parametrize(
    ("times", "found"),
    [([], None), ([5000.0], 1000.0), ([0.0], 0.0005)],
    ids=["of nothing there is none", "slower than the last bound", "none at all"],
)
def test_percentiles_at_the_ends(times: list[float], found: float | None) -> None:
    assert _histogram(times).quantile(0.5) == found


@given(st.lists(tallies, max_size=4))
def test_tallies_add_up_in_any_order(some: list[Tally]) -> None:
    assert _counts(total(some)) == _counts(total(reversed(some)))
    assert total(some).requests == sum(tally.requests for tally in some)
    assert sum(total(some).codes.values()) == total(some).errors


@given(tallies)
def test_a_tally_survives_being_kept(tally: Tally) -> None:
    assert _counts(Tally.of(json.loads(json.dumps(tally.as_dict())))) == _counts(tally)


def _counts(tally: Tally) -> object:
    times = {time: histogram.counts for time, histogram in tally.times.items()}
    return (tally.requests, tally.errors, tally.completion_tokens, tally.codes, times)


def test_codes_are_told_apart_up_to_a_number() -> None:
    tally = Tally()
    for number in range(1000):
        tally.count_code(f"code-{number}")
    assert len(tally.codes) == CODES_AT_ONCE + 1
    assert tally.codes[OTHER] == 1000 - CODES_AT_ONCE
