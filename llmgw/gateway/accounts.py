"""What this process's requests used, by key, model and minute: counted in memory, written down every few
seconds.

Counting is all that a request pays, and nothing here fails one. A thread of its own writes; what cannot be
written is kept and added later. Each lot has a number, and the highest number that was added is kept with
this process's row: so a lot whose answer was lost on the way is added once, however often it is tried.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

from llmgw.gateway.database import DatabaseThread
from llmgw.gateway.journal import Journal
from llmgw.gateway.passage import Passage
from nodes.tallies import LEFT, OK, OTHER, Tally
from nodes.usage import MINUTE_S, Place, add_lot

log = logging.getLogger(__name__)

PLACES_AT_ONCE = 10_000
"""Keys, models and endpoints told apart between two writes; the rest are counted without key and endpoint."""
ENDED_AT_ONCE = 64
"""Requests that are counted together: counting is cheap while it is in the processor's caches, and
one by one it never would be."""
LOTS_KEPT = 120
"""Minutes told apart while the database is away; later ones are counted to the last of them."""

_CODE = re.compile(r"[A-Za-z0-9_.-]{1,60}")


@dataclass(slots=True)
class _Lot:
    """What was counted around a moment of the database's clock. One that was tried is never added to."""

    at_s: float
    number: int
    counted: dict[Place, Tally] = field(default_factory=dict)
    was_tried: bool = False


class Accounts:
    """Counts what has ended, and writes it between `start` and `stop`.

    `clock_s` tells the database's clock, None while that is unknown. `gateway` is this process's row. The
    journal is given a line of each.
    """

    def __init__(
        self,
        gateway: uuid.UUID,
        clock_s: Callable[[], float | None],
        *,
        flush_s: float = 5.0,
        journal: Journal | None = None,
        add: Callable[[uuid.UUID, int, float, Mapping[Place, Tally]], None] = add_lot,
        places_at_once: int = PLACES_AT_ONCE,
        lots_kept: int = LOTS_KEPT,
    ) -> None:
        self._gateway, self._clock_s, self._flush_s, self._add = gateway, clock_s, flush_s, add
        self._journal, self._places_at_once, self._lots_kept = journal, places_at_once, lots_kept
        self._ended: list[Passage] = []
        self._tallies: dict[Place, Tally] = {}
        self._lots: deque[_Lot] = deque()
        self._number = 0
        self._thread = DatabaseThread("accounts")
        self._task: asyncio.Task[None] | None = None
        self._is_failing = False

    @property
    def lines_dropped(self) -> int:
        """Of the access log."""
        return 0 if self._journal is None else self._journal.dropped

    async def start(self) -> None:
        if self._journal is not None:
            self._journal.start()
        self._task = asyncio.create_task(self._keep_writing())

    async def stop(self) -> None:
        """Ends with a last write."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self.write()
        lost = self._counts_left()
        if lost:
            log.error("The database is away, and what %d requests used is lost with this process.", lost)
        await self._thread.stop()
        if self._journal is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._journal.stop)

    def close(self, passage: Passage) -> None:
        """The one word that a request has ended; its passage is not changed any more. Its key is one that was
        found good, empty before; its model is the catalog's name, empty where none was meant."""
        if passage.ended_at_s is None:
            passage.ended_at_s = monotonic()
        self._ended.append(passage)
        if len(self._ended) >= ENDED_AT_ONCE:
            self._count()
        if self._journal is not None:
            self._journal.note(passage)

    @property
    def _counted(self) -> dict[Place, Tally]:
        """What was not gathered yet."""
        self._count()
        return self._tallies

    def _count(self) -> None:
        ended, self._ended = self._ended, []
        for passage in ended:
            self._count_one(passage)

    def _count_one(self, passage: Passage) -> None:
        outcome = passage.outcome
        place = (passage.key, passage.model, passage.endpoint, outcome)
        tally = self._tallies.get(place)
        if tally is None:
            if len(self._tallies) >= self._places_at_once:
                place = ("", passage.model, "", outcome)
            tally = self._tallies.setdefault(place, Tally())
        tally.requests += 1
        tally.prompt_tokens += passage.prompt_tokens
        tally.cached_tokens += passage.cached_tokens
        tally.completion_tokens += passage.completion_tokens
        if outcome == LEFT:
            tally.left += 1
        elif outcome != OK:
            tally.errors += 1
            tally.count_code(passage.code if _CODE.fullmatch(passage.code) else OTHER)
        if passage.is_streamed:
            tally.observe("ttft", passage.ttft_s)
            tally.observe("tpot", passage.tpot_s)
        tally.observe("queue", passage.queued_s)
        tally.observe("duration", passage.duration_s)
        if passage.held_s:
            tally.observe("hold", passage.held_s)

    async def write(self) -> None:
        """Writes what there is; what cannot be written stays for the next time."""
        self._gather()
        while self._lots:
            lot = self._lots[0]
            lot.was_tried = True
            try:
                await self._thread.run(partial(self._add, self._gateway, lot.number, lot.at_s, lot.counted))
            except Exception as error:  # whatever it is, no request is to feel it
                if not self._is_failing:
                    log.error("Usage cannot be written, and is kept: %s", error)
                self._is_failing = True
                return
            self._lots.popleft()
            if self._is_failing:
                log.warning("Usage is written again.")
            self._is_failing = False

    async def _keep_writing(self) -> None:
        while True:
            await asyncio.sleep(self._flush_s)
            await self.write()

    def _gather(self) -> None:
        """What was counted becomes a lot, or part of the last one, where that has not been tried."""
        at_s, counted = self._clock_s(), self._counted
        if not counted or at_s is None:
            return
        self._tallies = {}
        last = self._lots[-1] if self._lots and not self._lots[-1].was_tried else None
        is_same = last is not None and (
            last.at_s // MINUTE_S == at_s // MINUTE_S or len(self._lots) >= self._lots_kept
        )
        if last is None or not is_same:
            self._number += 1
            last = _Lot(at_s, self._number)
            self._lots.append(last)
        for place, tally in counted.items():
            last.counted.setdefault(place, Tally()).add(tally)

    def _counts_left(self) -> int:
        """Requests that are not written."""
        counted: list[Mapping[Place, Tally]] = [self._counted, *(lot.counted for lot in self._lots)]
        return sum(tally.requests for each in counted for tally in each.values())
