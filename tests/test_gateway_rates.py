"""A sliding minute: what was used counts until it has slid out, and how long that takes is told."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.gateway import rates
from llmgw.gateway.rates import MINUTE_S, Windows

pytestmark = pytest.mark.one_database


def test_what_was_used_slides_out_in_the_minute_after() -> None:
    windows = Windows()
    windows.add("a", 60, 600.0)
    assert [_room(windows, "a", 600 + at_s) for at_s in (0, 59, 60, 90, 119, 120)] == [0, 0, 0, 30, 59, 60]


def _room(windows: Windows, name: str, now_s: float) -> int:
    """How much of a limit of 60 is left."""
    return max(amount for amount in range(61) if windows.wait_s(name, amount, 60, now_s) == 0)


def test_counters_do_not_know_of_each_other() -> None:
    windows = Windows()
    windows.add("a", 5, 0)
    windows.add("b", 7, 0)
    assert [_room(windows, name, 1) for name in ("a", "b", "c")] == [55, 53, 60]


@pytest.mark.parametrize(
    ("used_at", "now_s", "wait_s"),
    [
        pytest.param([], 600, 0, id="nothing was used"),
        pytest.param([600] * 9, 610, 0, id="room for one more"),
        pytest.param([600] * 10, 610, 56, id="full: the next minute, and a tenth of it"),
        pytest.param([600] * 10, 665, 1, id="full in the minute before"),
        pytest.param([600] * 20, 610, 83, id="more than the limit"),
    ],
)
def test_when_there_will_be_room_is_told(used_at: list[float], now_s: float, wait_s: float) -> None:
    windows = Windows()
    for at_s in used_at:
        windows.add("a", 1, at_s)
    assert windows.wait_s("a", 1, 10, now_s) == pytest.approx(wait_s)


def test_more_than_the_limit_never_fits() -> None:
    assert Windows().wait_s("a", 11, 10, 0) == math.inf


USES = st.lists(st.tuples(st.floats(0, 90), st.integers(1, 8)), max_size=60)


@given(uses=USES, limit=st.integers(1, 20))
def test_within_the_limit_whatever_comes_and_after_the_wait_there_is_room(
    uses: list[tuple[float, int]], limit: int
) -> None:
    windows, now_s = Windows(), 0.0
    for gap_s, amount in uses:
        now_s += gap_s
        wait_s = windows.wait_s("a", amount, limit, now_s)
        if wait_s == 0:
            windows.add("a", amount, now_s)
        elif amount <= limit:
            assert windows.wait_s("a", amount, limit, now_s + wait_s + 0.001) == 0
            assert wait_s <= 2 * MINUTE_S
        assert windows.wait_s("a", 0, limit, now_s) == 0, "the limit was never passed"


@given(uses=USES, limit=st.integers(1, 20))
def test_no_minute_sees_more_than_twice_the_limit(uses: list[tuple[float, int]], limit: int) -> None:
    """The window takes the minute before as spread evenly; it may not have been."""
    windows, now_s = Windows(), 0.0
    let_in: list[tuple[float, int]] = []
    for gap_s, amount in uses:
        now_s += gap_s / 10
        if windows.wait_s("a", amount, limit, now_s) == 0:
            windows.add("a", amount, now_s)
            let_in.append((now_s, amount))
    for begin_s, _ in let_in:
        assert sum(amount for at_s, amount in let_in if begin_s <= at_s < begin_s + MINUTE_S) <= 2 * limit


def test_quiet_counters_are_forgotten() -> None:
    windows = Windows()
    for number in range(1_000):
        windows.add(f"old {number}", 1, 0)
    windows.add("kept", 1, 60)
    assert _room(windows, "old 1", 60) == 59
    for minute in (2, 3):
        windows.add("kept", 1, 60 * minute)
    assert (set(windows._before), set(windows._counters)) == ({"kept"}, {"kept"})


def test_a_new_name_costs_no_more_where_there_are_many() -> None:
    """Names are as many as keys and models are, and each may be new in a busy minute."""
    windows = Windows()
    for number in range(200_000):  # a look through all of them for each would take minutes
        windows.add(f"key {number}", 1, 600.0)
    assert _room(windows, "key 7", 600.0) == 59


@pytest.mark.parametrize(
    ("limit", "processes", "share"),
    [(10, 1, 10), (10, 3, 3), (2, 4, 1), (10, 0, 10)],
    ids=["one process has it all", "three share", "more processes than limit", "nobody was counted"],
)
def test_a_process_has_its_share_and_never_none(limit: int, processes: int, share: int) -> None:
    assert rates.share(limit, processes) == share


@pytest.mark.parametrize(
    ("own", "says"),
    [
        pytest.param(
            60, "may have 60 requests a minute and has them: try again in 4 s", id="the whole of it"
        ),
        pytest.param(
            20, "60 requests a minute, 20 of them through this process, and has them", id="a process's share"
        ),
    ],
)
def test_who_is_over_a_limit_hears_which_and_until_when(own: int, says: str) -> None:
    refused = rates.over_limit("The key llmgw_abc_...", "requests a minute", 60, own, 3.2)
    assert (refused.status, refused.code, refused.retry_after_s) == (429, "rate_limit_exceeded", 4)
    assert refused.message.startswith("The key llmgw_abc_... may have ")
    assert says in refused.message
