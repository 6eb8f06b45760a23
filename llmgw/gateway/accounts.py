"""What this process's requests used, by key, model and minute: counted in memory, written down every few
seconds.

Counting is all that a request pays, and nothing here fails one. A thread of its own writes; what cannot be
written is kept and added later. Each lot has a number, and a process's number is written with it: so a lot
whose answer was lost on the way is added once, however often it is tried.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from time import monotonic

from llmgw.gateway.passage import Passage
from nodes.usage import LEFT, OK, OTHER, Tally

PLACES_AT_ONCE = 10_000
"""Keys, models and endpoints told apart between two writes; the rest are counted without their key."""

_CODE = re.compile(r"[A-Za-z0-9_.-]{1,60}")

Place = tuple[str, str, str, str]
"""Key, model, endpoint, outcome."""


class Accounts:
    """Counts what has ended, between `start` and `stop`."""

    def __init__(self) -> None:
        self._counted: dict[Place, Tally] = {}

    async def start(self) -> None:
        """Begins to write what is counted."""

    async def stop(self) -> None:
        """Writes what is left."""

    @property
    def counted(self) -> Mapping[Place, Tally]:
        """What no lot holds yet."""
        return self._counted

    def close(self, passage: Passage) -> None:
        """The one word that a request has ended. Its key is one that was found good; its model is empty
        where none of the catalog's was asked for."""
        if passage.ended_at_s is None:
            passage.ended_at_s = monotonic()
        outcome = passage.outcome
        place = (passage.key, passage.model, passage.endpoint, outcome)
        tally = self._counted.get(place)
        if tally is None:
            if len(self._counted) >= PLACES_AT_ONCE:
                place = ("", passage.model, "", outcome)
            tally = self._counted.setdefault(place, Tally())
        tally.requests += 1
        tally.prompt_tokens += passage.prompt_tokens
        tally.cached_tokens += passage.cached_tokens
        tally.completion_tokens += passage.completion_tokens
        if outcome == LEFT:
            tally.left += 1
        elif outcome != OK:
            tally.errors += 1
            tally.count_code(passage.code if _CODE.fullmatch(passage.code) else OTHER)
        tally.observe("ttft", passage.ttft_s)
        tally.observe("tpot", passage.tpot_s)
        tally.observe("queue", passage.queued_s)
        tally.observe("duration", passage.duration_s)
        if passage.held_s:
            tally.observe("hold", passage.held_s)
