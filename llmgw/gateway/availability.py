"""Whether a model can be asked now, why not, and what those hear who ask all the same or have waited in vain.

What was found out is handed in; nothing here waits.
"""

from __future__ import annotations

from dataclasses import dataclass

from catalog.reading import quote
from llmgw.gateway.admission import RETRY_LOADING_S, ModelEntry, Refused

READY, LOADING, ON_DEMAND, OFF, UNAVAILABLE = "ready", "loading", "on_demand", "off", "unavailable"


@dataclass(frozen=True, slots=True)
class Loading:
    """How far the first replica of a model is. `progress` is a part of 1; None is not known."""

    state: str
    node: str = ""
    progress: float | None = None
    eta_seconds: int | None = None

    def as_dict(self) -> dict[str, object]:
        return {
            "state": self.state,
            "node": self.node,
            "progress": self.progress,
            "eta_seconds": self.eta_seconds,
        }

    def __str__(self) -> str:
        return self.state if self.progress is None else f"{self.state} {self.progress:.0%}"


@dataclass(frozen=True, slots=True)
class Situation:
    """What stands between a model and its first ready replica: replicas on their way (state and reason of
    each), how far the first of them is, and why none could be placed; `needs_edit` when that will not change
    by waiting.
    """

    on_the_way: tuple[tuple[str, str], ...] = ()
    unplaced: str = ""
    needs_edit: bool = False
    loading: Loading | None = None

    @property
    def is_stuck(self) -> bool:
        """Whether nothing is on its way, since no replica found a place."""
        return bool(self.unplaced) and not self.on_the_way


@dataclass(frozen=True, slots=True)
class Standing:
    """A model's status, and the reason why it is not ready."""

    status: str
    reason: str = ""


def standing(model: ModelEntry, situation: Situation, *, is_ready: bool) -> Standing:
    if is_ready:
        return Standing(READY)
    if model.is_off:
        return Standing(OFF, "it is configured to be off (max 0)")
    if situation.on_the_way:
        state, reason = situation.on_the_way[0]
        return Standing(LOADING, f"{state}: {reason}" if reason else state)
    if situation.unplaced:
        return Standing(UNAVAILABLE, situation.unplaced)
    if model.is_on_demand:
        return Standing(ON_DEMAND, "it is loaded when asked for")
    return Standing(LOADING, "its replicas are about to be placed")


def loading_of(situation: Situation) -> Loading:
    """What a waiting client is told of: the state is "pending" while nothing has begun."""
    return situation.loading or Loading("pending")


# --- refusals -----------------------------------------------------------------------------------------------


def check_is_on(model: ModelEntry) -> None:
    if model.is_off:
        raise Refused(
            503,
            OFF,
            f"The model {quote(model.name)} is off: it is configured with max 0. An operator can raise it.",
            param="model",
        )


def check_can_be_ready(model: ModelEntry, situation: Situation) -> None:
    """Waiting does not help a model whose replicas fail because of what an operator wrote."""
    if situation.needs_edit and not situation.on_the_way:
        raise Refused(
            503,
            UNAVAILABLE,
            f"The model {quote(model.name)} cannot run until an operator edits it: {situation.unplaced}",
            param="model",
            retry_after_s=RETRY_LOADING_S,
        )


def not_ready_in_time(model: ModelEntry, situation: Situation, waited_s: float) -> Refused:
    now = standing(model, situation, is_ready=False)
    waits_for = now.reason if now.status != ON_DEMAND else "its load has not begun"
    return Refused(
        503,
        now.status if now.status in (LOADING, UNAVAILABLE) else LOADING,
        f"The model {quote(model.name)} is not ready after {waited_s:.0f} s: {waits_for}. Try again.",
        param="model",
        retry_after_s=RETRY_LOADING_S,
        loading=loading_of(situation).as_dict(),
    )


def check_waiting_room(model: ModelEntry, size: int, waiting: int, limit: int) -> None:
    """Whether a body of this size may wait for the model beside those that wait in this process already, all
    in bytes."""
    if waiting + size > limit:
        raise Refused(
            503,
            "too_many_waiting",
            f"The model {quote(model.name)} is loading, and the requests that wait hold {limit} bytes, all "
            "that they may: try again.",
            param="model",
            retry_after_s=RETRY_LOADING_S,
        )


def too_many_waiting(model: ModelEntry, limit: int) -> Refused:
    return Refused(
        503,
        "too_many_waiting",
        f"The model {quote(model.name)} is loading and {limit} requests wait for it already: try again.",
        param="model",
        retry_after_s=RETRY_LOADING_S,
    )
