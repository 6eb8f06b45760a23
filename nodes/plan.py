"""What the reconciler will do next, and why: a pure decision over a snapshot of everything it may know.

`plan` compares what is wanted with what there is and fills named buckets (`nodes/buckets.py`). It reads no
clock and touches nothing. A running replica is left alone when its profile or model is edited; loss of
contact is unknown, not dead; what cannot be done now is blocked, with its sentence.
"""

from __future__ import annotations

from functools import partial

from nodes import adoption, moving, scaling
from nodes.buckets import Plan
from nodes.draft import Draft
from nodes.snapshot import Snapshot
from nodes.starting import Starter


def plan(snapshot: Snapshot) -> Plan:
    """What brings what there is closer to what is wanted. The order of the rows does not matter."""
    draft = Draft(snapshot)
    starter = Starter(draft)
    adoption.adopt_strangers(draft)
    adoption.take_as_lost(draft)
    adoption.end_what_was_removed(draft)
    draft.muster()
    for crew in draft.in_order():
        moving.relieve(draft, crew)
        moving.conclude(draft, crew)
        scaling.trim(draft, crew)
    for crew in draft.in_order():
        moving.empty_nodes(draft, crew, starter)
        low = scaling.wanted(draft, crew)
        if (missing := low - len(crew.units)) > 0:
            starter.fill(crew, missing, partial(scaling.why_started, draft, crew, low))
    # What is wanted has its room by now; the rest is for what would be better so.
    for crew in draft.in_order():
        moving.roll(draft, crew, starter)
        if scaling.is_pressed(draft, crew):
            why = f"requests have waited for {scaling.PRESSED_FOR.seconds} s with {len(crew.units)} running"
            starter.fill(crew, 1, partial(str, why), may_evict=False)
    return draft.finish()
