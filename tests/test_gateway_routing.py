"""Which replica a request goes to."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from llmgw.gateway.routing import Target, pick


def _target(name: str, weight: float = 1) -> Target:
    return Target(name, "m", f"http://{name}", "secret", weight)


A, B, C = _target("a"), _target("b"), _target("c")


def test_nobody_is_picked_from_nothing() -> None:
    assert pick([], {}, 0) is None
    assert pick([A, B], {}, 0, without={"a", "b"}) is None


def test_the_one_with_the_least_in_flight_is_picked() -> None:
    assert pick([A, B, C], {"a": 2, "b": 1, "c": 2}, 0) is B


def test_one_that_was_tried_is_passed_over_even_when_it_is_idle() -> None:
    assert pick([A, B], {"b": 9}, 0, without={"a"}) is B


def test_equals_take_turns() -> None:
    assert Counter(pick([A, B, C], {}, turn) for turn in range(9)) == {A: 3, B: 3, C: 3}


def test_three_of_four_go_to_one_with_three_times_the_weight() -> None:
    light, heavy = _target("light", 1), _target("heavy", 3)
    in_flight: Counter[str] = Counter()
    for turn in range(40):
        target = pick([light, heavy], in_flight, turn)
        assert target is not None
        in_flight[target.replica] += 1
    assert in_flight == {"light": 10, "heavy": 30}


def test_a_secret_is_not_in_what_a_log_would_show() -> None:
    assert "secret" not in repr(A)


@given(
    loads=st.lists(st.integers(0, 50), min_size=1, max_size=8),
    weights=st.lists(st.floats(0.1, 10), min_size=8, max_size=8),
    turn=st.integers(0, 1000),
)
def test_no_replica_would_be_less_loaded_than_the_one_picked(
    loads: list[int], weights: list[float], turn: int
) -> None:
    targets = [_target(str(index), weights[index]) for index in range(len(loads))]
    in_flight = {str(index): load for index, load in enumerate(loads)}
    picked = pick(targets, in_flight, turn)
    assert picked is not None
    after = {target: (in_flight[target.replica] + 1) / target.weight for target in targets}
    assert after[picked] == min(after.values())
