"""Whether the agent that answers for a node is the one that was heard before, or goes on from where it was.

One that was cloned, or was brought back from an old copy, has its node's identity and token, and knows
nothing of what the other was told since. So each agent tells who it is and after whom it came.
"""

from __future__ import annotations

from datetime import timedelta
from enum import Enum, auto

from nodes.protocol import StateReport


class Instance(Enum):
    """OWN: the node's agent. SECOND: another beside it, or in its place, while it was heard a moment ago.
    RESTORED: one that does not know of the last, which has been silent for so long that it is gone."""

    OWN = auto()
    SECOND = auto()
    RESTORED = auto()


def instance_of(
    told: StateReport, known: StateReport | None, silent_for: timedelta | None, *, lost_after_s: float
) -> Instance:
    """known: what the node's agent said last. silent_for: since then, None where that is not known."""
    if known is None or not known.instance or not told.instance:  # of another version, or with a full disk
        return Instance.OWN
    has_lost_its_state = not told.follows and told.boot_id == known.boot_id
    if told.instance == known.instance or known.instance in told.follows or has_lost_its_state:
        return Instance.OWN
    if silent_for is None or silent_for >= timedelta(seconds=lost_after_s):
        return Instance.RESTORED
    return Instance.SECOND


def second_says(name: str, address: str) -> str:
    return (
        f"Two agents answer for {name} at {address}, and one of them does not know what the other was told, "
        f"as one that was cloned or that started from an old copy of its state; it is not listened to. End "
        f"it, or add its machine as a node of its own."
    )


def restored_says(name: str) -> str:
    return (
        f"The agent of {name} does not know of the one that was heard there last: it goes on from an old "
        f"copy of its state, or on another machine; what it has forgotten is told to it again."
    )
