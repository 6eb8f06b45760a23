"""Keeping a request while its model has no replica that could take it: in a bounded line, up to a bound, and
with a word to its client of what it waits for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from llmgw.gateway import admission, answers, availability, needs
from llmgw.gateway.call import Call
from llmgw.gateway.client import Client
from llmgw.gateway.demand import DemandBook
from llmgw.gateway.patience import Watch
from llmgw.gateway.routing import Choice
from llmgw.gateway.streams import dialect_of
from llmgw.gateway.table import LiveTable

WAITING_LIMIT = 256
"""Requests that wait for one model, in this process; each holds its body in memory."""
LOOK_AGAIN_S = 0.25
"""How often those look again who wait for a replica that the table has and that takes no connection."""


@dataclass(slots=True)
class Held:
    """One request that may have to wait, more than once but not beyond `until_s`. `has_stand_in` tells
    whether another model could answer it now. `cause` finishes "the replica ..." where one is there and does
    not answer."""

    call: Call
    client: Client
    watch: Watch
    hold_s: float
    until_s: float
    has_stand_in: Callable[[], bool]
    cause: str = ""


class Holding:
    """`room_bytes` is for the bodies of all requests that wait in this process."""

    def __init__(
        self, table: LiveTable, demand: DemandBook, *, grace_s: float, comment_s: float, room_bytes: int
    ) -> None:
        self._table, self._demand = table, demand
        self._grace_s, self._comment_s = grace_s, comment_s
        self._room_bytes, self._held_bytes = room_bytes, 0

    async def wait(self, held: Held, choose: Callable[[], Choice | None]) -> Choice:
        """The first choice there is; the load goes on when the client does not. Raises Refused at the end of
        the hold, and as soon as waiting is in vain or would be for room while another model stands ready."""
        call = held.call
        availability.check_is_on(call.model)
        if self._demand.waiting_for(call.model.id) >= WAITING_LIMIT:
            raise availability.too_many_waiting(call.model, WAITING_LIMIT)
        size = len(call.body)
        availability.check_waiting_room(call.model, size, self._held_bytes, self._room_bytes)
        dialect = dialect_of(call.endpoint)
        if call.wants_stream:
            # An early failure keeps its status; after that, comments keep the line open.
            held.client.keep_company(dialect, self._grace_s, lambda: self._words(call))
        begun_s = monotonic()
        self._held_bytes += size
        try:
            with self._demand.waits(call.model.id):
                return await self._wait(held, choose)
        finally:
            self._held_bytes -= size
            call.passage.held_s += monotonic() - begun_s
            if call.wants_stream:
                held.client.keep_company(dialect, self._comment_s)

    async def _wait(self, held: Held, choose: Callable[[], Choice | None]) -> Choice:
        call = held.call
        while True:
            changed, table = self._table.changed(), self._table.current
            model = table.models.get(call.model.id)
            if model is None:
                known = needs.visible_names(call.key, table.names)
                if call.name in known:  # as one that was added anew under the same name
                    raise admission.replaced(call.name)
                raise admission.unknown_model(call.name, known)
            if (choice := choose()) is not None:
                return choice
            availability.check_is_on(model)
            is_there = bool(table.targets_of(model))
            situation = table.situation_of(model)
            if not is_there:
                availability.check_can_be_ready(model, situation)
                if situation.is_stuck and held.has_stand_in():
                    waited_s = held.hold_s - (held.until_s - monotonic())
                    raise availability.not_ready_in_time(model, situation, waited_s)
            left_s = held.until_s - monotonic()
            if left_s <= 0:
                if is_there and held.cause:
                    raise answers.still_away(model.name, held.cause, held.hold_s)
                raise availability.not_ready_in_time(model, situation, held.hold_s)
            try:
                await held.watch.within(min(left_s, LOOK_AGAIN_S) if is_there else left_s, changed.wait())
            except TimeoutError:
                continue

    def _words(self, call: Call) -> str:
        table = self._table.current
        if table.targets_of(call.model):
            return "waiting for a replica"
        return f"loading {availability.loading_of(table.situation_of(call.model))}"
