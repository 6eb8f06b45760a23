"""Who is left out for failing, for how long, and who never is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.gateway.breaker import ABSENT_S, EJECTED_S, ERRORS, FORGIVEN_S, LONGEST_S, Breaker, Outcome
from llmgw.gateway.routing import Target

A, B, C = (Target(name, "m", f"http://{name}", "key") for name in "abc")
FINE, FAILED, NEUTRAL, ABSENT, STRANGE = Outcome


def _names(targets: object) -> str:
    return "".join(target.replica for target in targets)  # type: ignore[attr-defined]


def _ejected(now_s: float = 0) -> Breaker:
    """A has failed too often, B has not."""
    breaker = Breaker()
    for _ in range(ERRORS):
        breaker.tell("a", FAILED, now_s, [A, B])
    return breaker


def _routable(breaker: Breaker, now_s: float, *targets: Target) -> str:
    return _names(breaker.routable(targets or (A, B), now_s))


def test_one_that_fails_again_and_again_is_left_out_for_a_while() -> None:
    breaker = Breaker()
    for _ in range(ERRORS - 1):
        breaker.tell("a", FAILED, 0, [A, B])
        assert _routable(breaker, 0) == "ab"
    breaker.tell("a", FAILED, 0, [A, B])
    assert _routable(breaker, 0) == "b"
    assert _routable(breaker, EJECTED_S - 0.1) == "b"
    assert _routable(breaker, EJECTED_S) == "ab"


@pytest.mark.parametrize(
    ("outcome", "is_out"),
    [
        pytest.param(FINE, False, id="an answer in between begins the count anew"),
        pytest.param(NEUTRAL, True, id="being busy in between does not"),
    ],
)
def test_errors_count_in_a_row(outcome: Outcome, is_out: bool) -> None:
    breaker = Breaker()
    for _ in range(ERRORS - 1):
        breaker.tell("a", FAILED, 0, [A, B])
    breaker.tell("a", outcome, 0, [A, B])
    breaker.tell("a", FAILED, 0, [A, B])
    assert _routable(breaker, 0) == ("b" if is_out else "ab")


def test_being_busy_is_never_held_against_one() -> None:
    breaker = Breaker()
    for _ in range(100):
        breaker.tell("a", NEUTRAL, 0, [A, B])
    assert _routable(breaker, 0) == "ab"


def test_afterwards_one_request_tries_it_and_lets_the_others_in() -> None:
    breaker = _ejected()
    assert _routable(breaker, EJECTED_S) == "ab"
    breaker.ask("a")
    assert _routable(breaker, EJECTED_S) == "b", "one probe is enough"
    breaker.tell("a", FINE, EJECTED_S, [A, B])
    assert _routable(breaker, EJECTED_S) == "ab"
    breaker.ask("a")
    assert _routable(breaker, EJECTED_S) == "ab"


@pytest.mark.parametrize("outcome", [pytest.param(NEUTRAL, id="its client left")])
def test_a_probe_that_says_nothing_is_made_again(outcome: Outcome) -> None:
    breaker = _ejected()
    breaker.ask("a")
    breaker.tell("a", outcome, EJECTED_S, [A, B])
    assert _routable(breaker, EJECTED_S) == "ab"


def test_each_failed_probe_leaves_it_out_for_longer_up_to_a_bound() -> None:
    breaker, now_s, waits = _ejected(), 0.0, []
    for _ in range(12):
        left_out_s = next(s for s in range(1000) if _routable(breaker, now_s + s) == "ab")
        waits.append(left_out_s)
        now_s += left_out_s
        breaker.ask("a")
        breaker.tell("a", FAILED, now_s, [A, B])
    assert waits[:4] == [30, 60, 90, 120]
    assert max(waits) == LONGEST_S


def test_what_was_begun_before_it_was_left_out_does_not_leave_it_out_for_longer() -> None:
    breaker = _ejected()
    for _ in range(20):
        breaker.tell("a", FAILED, 1, [A, B])
    assert _routable(breaker, EJECTED_S) == "ab"


def test_a_long_time_without_an_error_is_a_new_beginning() -> None:
    breaker = _ejected()
    breaker.ask("a")
    breaker.tell("a", FINE, EJECTED_S, [A, B])
    later_s = FORGIVEN_S + 1
    for _ in range(ERRORS):
        breaker.tell("a", FAILED, later_s, [A, B])
    assert _routable(breaker, later_s) == "b"
    assert _routable(breaker, later_s + EJECTED_S) == "ab"


def test_the_last_one_is_never_left_out() -> None:
    breaker = Breaker()
    for _ in range(100):
        breaker.tell("a", FAILED, 0, [A])
    assert _routable(breaker, 0, A) == "a"
    breaker = _ejected()
    for _ in range(100):
        breaker.tell("b", FAILED, 0, [A, B])
    assert _routable(breaker, 0) == "b"
    assert _routable(breaker, 0, A) == "a", "when the other is gone"


@pytest.mark.parametrize(
    "outcome", [pytest.param(ABSENT, id="nobody listens"), pytest.param(STRANGE, id="somebody else listens")]
)
def test_nobody_is_sent_for_a_second_even_to_the_last_where(outcome: Outcome) -> None:
    breaker = Breaker()
    breaker.tell("a", outcome, 0, [A])
    assert _routable(breaker, 0, A) == ""
    assert _routable(breaker, 0) == "b"
    assert _routable(breaker, ABSENT_S, A) == "a"


def test_a_stranger_in_its_place_is_no_error_of_a_replica() -> None:
    breaker = Breaker()
    for _ in range(100):
        breaker.tell("a", STRANGE, 0, [A, B])
    assert _routable(breaker, ABSENT_S) == "ab"


def test_one_that_comes_back_as_new_has_no_past() -> None:
    breaker = _ejected()
    breaker.forget(["a", "nobody"])
    assert _routable(breaker, 0) == "ab"


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from([FINE, FAILED, NEUTRAL]), st.floats(0, 40)),
        max_size=60,
    )
)
def test_somebody_can_always_be_asked(happenings: list[tuple[str, Outcome, float]]) -> None:
    breaker, now_s = Breaker(), 0.0
    for name, outcome, later_s in happenings:
        now_s += later_s
        breaker.ask(name)
        breaker.tell(name, outcome, now_s, [A, B, C])
        for targets in ((A, B, C), (A, B), (C,)):
            routable = breaker.routable(targets, now_s)
            assert routable
            assert _names(routable) in ("abc", "ab", "bc", "ac", "a", "b", "c"), "in the order given"
