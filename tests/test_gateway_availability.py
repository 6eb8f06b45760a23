"""Where a model stands, and what those hear who ask for one that is not ready."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from llmgw.gateway import availability
from llmgw.gateway.admission import ModelEntry, Refused
from llmgw.gateway.availability import Situation

MODEL = ModelEntry(1, "qwen3-8b", is_on_demand=True)


def _refusal(call: Callable[[], object]) -> Refused:
    with pytest.raises(Refused) as caught:
        call()
    return caught.value


@pytest.mark.parametrize(
    ("model", "situation", "is_ready", "status", "reason"),
    [
        pytest.param(MODEL, Situation(), True, "ready", "", id="a ready replica is all that counts"),
        pytest.param(
            ModelEntry(1, "m", is_off=True), Situation(), False, "off", "max 0", id="off is off by intent"
        ),
        pytest.param(
            MODEL,
            Situation(on_the_way=(("fetching", "41 % of 8 GB"),), unplaced="no room for another"),
            False,
            "loading",
            "fetching: 41 % of 8 GB",
            id="one on its way counts more than one that has no place",
        ),
        pytest.param(
            MODEL,
            Situation(unplaced="0 of 3 nodes: 3 lack 1 free sim"),
            False,
            "unavailable",
            "0 of 3 nodes",
            id="nothing fits",
        ),
        pytest.param(MODEL, Situation(), False, "on_demand", "loaded when asked for", id="nobody asked yet"),
        pytest.param(
            ModelEntry(1, "m"), Situation(), False, "loading", "about to be placed", id="just added"
        ),
    ],
)
def test_a_model_stands_where_its_replicas_do(
    model: ModelEntry, situation: Situation, is_ready: bool, status: str, reason: str
) -> None:
    standing = availability.standing(model, situation, is_ready=is_ready)
    assert standing.status == status
    assert reason in standing.reason


def test_a_model_that_is_off_is_refused_without_a_word_of_trying_again() -> None:
    refused = _refusal(lambda: availability.check_is_on(ModelEntry(1, "m", is_off=True)))
    assert (refused.status, refused.code, refused.retry_after_s) == (503, "off", None)
    assert "Try again" not in refused.message


def test_nobody_waits_for_a_replica_that_only_an_edit_can_help() -> None:
    stuck = Situation(unplaced='profile "default" failed: unknown flag --foo', needs_edit=True)
    refused = _refusal(lambda: availability.check_can_be_ready(MODEL, stuck))
    assert (refused.status, refused.code) == (503, "unavailable")
    assert "unknown flag --foo" in refused.message


@pytest.mark.parametrize(
    "situation",
    [
        pytest.param(Situation(unplaced="0 of 2 nodes: 2 lack a free GPU"), id="room may come"),
        pytest.param(
            Situation(on_the_way=(("starting", ""),), unplaced="a flag is wrong", needs_edit=True),
            id="another profile is being tried",
        ),
    ],
)
def test_a_replica_that_may_come_is_waited_for(situation: Situation) -> None:
    availability.check_can_be_ready(MODEL, situation)


@pytest.mark.parametrize(
    ("situation", "code", "says"),
    [
        pytest.param(
            Situation(on_the_way=(("starting", "loading weights"),)),
            "loading",
            "starting: loading weights",
            id="what is on its way",
        ),
        pytest.param(
            Situation(unplaced="0 of 2 nodes: 2 cordoned"),
            "unavailable",
            "0 of 2 nodes",
            id="why nothing fits",
        ),
        pytest.param(Situation(), "loading", "its load has not begun", id="that nothing happened"),
    ],
)
def test_who_waited_in_vain_is_told_for_what(situation: Situation, code: str, says: str) -> None:
    refused = availability.not_ready_in_time(MODEL, situation, 60)
    assert (refused.status, refused.code) == (503, code)
    assert "after 60 s" in refused.message
    assert says in refused.message
    assert refused.retry_after_s is not None


def test_bodies_wait_in_bounded_room() -> None:
    availability.check_waiting_room(MODEL, 10, 90, 100)
    refused = _refusal(lambda: availability.check_waiting_room(MODEL, 11, 90, 100))
    assert (refused.status, refused.retry_after_s is not None) == (503, True)
    assert "100" in refused.message
