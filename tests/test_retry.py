"""When a profile that failed may be tried again, and how that is said."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.protocol import FAILURE_KINDS, Launch
from nodes.retry import Failure, Verdict, is_same_attempt, judge

NOW = datetime(2030, 1, 1, 12, 0, 0, tzinfo=UTC)
LAUNCH = Launch("m", "org/m", {"name": "p"}, fingerprint="0123456789abcdef", revision="c0ffee")


def failure(kind: str, ago_s: float, *, node: int = 1, reason: str = "It exited.") -> Failure:
    return Failure(
        "feedfacecafe", LAUNCH, NOW - timedelta(seconds=ago_s), kind=kind, reason=reason, node=node
    )


def failures(kind: str, *ago_s: float) -> list[Failure]:
    return [failure(kind, each) for each in ago_s]


def verdict(failed: list[Failure], *, wanted: int = 1) -> Verdict:
    return judge("p", failed, wanted=wanted, now=NOW)


@pytest.mark.parametrize(
    ("failed", "wait_s"),
    [
        pytest.param([], 0, id="nothing failed"),
        pytest.param(failures("transient", 0.4), 0.6, id="once: a second"),
        pytest.param(failures("transient", 1.1), 0, id="once, a second ago"),
        pytest.param(failures("transient", 0, 5), 2, id="twice: two"),
        pytest.param(failures("transient", 0, 5, 9, 14), 8, id="four times: eight"),
        pytest.param(failures("transient", *range(0, 500, 40)), 60, id="often: a minute, never more"),
        pytest.param(failures("transient", 0, 700, 800, 900), 1, id="minutes of health in between: anew"),
        pytest.param(failures("", 0, 5), 2, id="of a kind nobody told"),
        pytest.param(failures("from the future", 0, 5), 2, id="of a kind nobody knows"),
        pytest.param(failures("capacity", 10), 20, id="no room: half a minute"),
        pytest.param(failures("disk", 0, 60, 300), 120, id="no disk, three times: two minutes"),
        pytest.param(failures("capacity", *range(0, 3000, 100)), 600, id="no room for long: ten minutes"),
        pytest.param(failures("transient", 0) + failures("disk", 5), 25, id="two kinds: the longer wait"),
        pytest.param(failures("transient", -7200, -7100), 0, id="before the clock was set back"),
        pytest.param(failures("disk", -7200), 0, id="before the clock was set back, slow"),
        pytest.param(failures("transient", 0, -7200), 1, id="before and after the clock was set back"),
    ],
)
def test_a_failure_delays_the_next_try(failed: list[Failure], wait_s: float) -> None:
    found = verdict(failed)
    assert found.may_try is (wait_s == 0)
    if wait_s:
        assert found.retry_at == NOW + timedelta(seconds=wait_s)
        assert f"next try at {found.retry_at:%H:%M:%S} UTC" in found.why


@pytest.mark.parametrize(
    ("failed", "says"),
    [
        pytest.param(
            failures("transient", 0),
            'profile "p" failed: It exited; next try at 12:00:01 UTC',
            id="once",
        ),
        pytest.param(
            failures("transient", 0, 60, 120, 180, 240),
            'profile "p" is in a crash loop (5 failures in ten minutes), the last: It exited; '
            "next try at 12:00:16 UTC",
            id="a crash loop by its name",
        ),
        pytest.param(
            failures("configuration", 86_400),
            'profile "p" failed: It exited; it is tried again after an edit, '
            "or once the failed replica feedface is stopped",
            id="what only a person ends",
        ),
        pytest.param(
            [failure("disk", 0, reason="")],
            'profile "p" failed: its agent gives no reason; next try at 12:00:30 UTC',
            id="without a reason",
        ),
    ],
)
def test_the_wait_is_said(failed: list[Failure], says: str) -> None:
    assert verdict(failed).why == says


def test_eight_replicas_that_fail_at_once_have_failed_once_each() -> None:
    found = verdict(failures("transient", *[0] * 8), wanted=8)
    assert found.retry_at == NOW + timedelta(seconds=1)
    assert "crash loop" not in found.why


def test_a_nodes_own_trouble_sends_the_next_try_elsewhere() -> None:
    found = verdict([failure("node", 30, node=7), failure("node", 90, node=8)])
    assert found.may_try
    assert found.avoid == {7: "It exited"}, "node 8 may be tried again after a minute"
    assert found.retry_at == NOW + timedelta(seconds=30)


def test_a_node_in_trouble_again_is_avoided_for_longer() -> None:
    assert verdict([failure("node", 90, node=8), failure("node", 200, node=8)]).avoid.keys() == {8}


@pytest.mark.parametrize(
    ("now", "is_same"),
    [
        pytest.param(LAUNCH, True, id="nothing"),
        pytest.param(replace(LAUNCH, source_bytes=7), True, id="what shapes no command"),
        pytest.param(replace(LAUNCH, capabilities={"tools": False}), True, id="a capability that is off"),
        pytest.param(replace(LAUNCH, fingerprint="f" * 16), False, id="the profile"),
        pytest.param(replace(LAUNCH, source="org/n"), False, id="the source"),
        pytest.param(replace(LAUNCH, revision="beef"), False, id="the commit"),
        pytest.param(replace(LAUNCH, context_length=1), False, id="the context length"),
        pytest.param(replace(LAUNCH, capabilities={"tools": True}), False, id="a capability"),
    ],
)
def test_it_is_the_same_attempt_after_an_edit_of(now: Launch, is_same: bool) -> None:
    assert is_same_attempt(LAUNCH, now) is is_same


many = st.lists(
    st.builds(failure, st.sampled_from((*FAILURE_KINDS, "")), st.floats(0, 90_000), node=st.integers(0, 3)),
    max_size=12,
)


@given(many, st.integers(0, 9), st.randoms(use_true_random=False))
def test_the_order_of_failures_does_not_matter(failed: list[Failure], wanted: int, random: object) -> None:
    shuffled = random.sample(failed, len(failed))  # type: ignore[attr-defined]
    assert verdict(failed, wanted=wanted) == verdict(shuffled, wanted=wanted)


@given(many)
def test_a_wait_is_said_ends_and_is_bounded(failed: list[Failure]) -> None:
    found = verdict(failed)
    assert bool(found.why) is (not found.may_try or bool(found.avoid))
    if found.retry_at is not None:
        assert NOW < found.retry_at <= NOW + timedelta(minutes=10)
        again = judge("p", failed, wanted=1, now=found.retry_at)
        assert again.may_try
        assert not found.avoid or len(again.avoid) < len(found.avoid)
