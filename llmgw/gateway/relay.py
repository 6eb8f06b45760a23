"""Serving one request: have a replica, send the request to it, and try another where that helps.

Until something of an engine's answer has been passed on, a failure costs another try: at another replica, at
the same one once it is back, or at another model that may stand in. After that it becomes an error that the
client sees. All of it within one budget of tries and time, and what was counted is given back in every
outcome.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from time import monotonic

import msgspec

from llmgw.gateway import answers, needs, surface
from llmgw.gateway.admission import ModelEntry, Refused
from llmgw.gateway.breaker import Breaker, Outcome
from llmgw.gateway.call import Call
from llmgw.gateway.client import Client
from llmgw.gateway.delivery import Delivery, Elsewhere, away
from llmgw.gateway.demand import DemandBook
from llmgw.gateway.fallbacks import fallbacks_of
from llmgw.gateway.holding import Held, Holding
from llmgw.gateway.limits import Limiter
from llmgw.gateway.passage import Passage
from llmgw.gateway.patience import Patience, Watch
from llmgw.gateway.routing import Choice, Chooser, Target
from llmgw.gateway.streams import dialect_of
from llmgw.gateway.table import LiveTable, ReplicaEntry
from llmgw.gateway.upstream import EngineAway, Upstream

log = logging.getLogger(__name__)

TRIES_OF_MODEL, TRIES = 2, 4
"""How often an engine is handed the same request: of one model, and together with its fallbacks."""
_NONE: Mapping[str, Target] = {}
TRYING_S = 30.0
"""No other try is begun after so long, waiting for replicas left out."""


class Budget(msgspec.Struct):
    """Of one request."""

    begun_s: float
    tries_left: int = TRIES

    def allows_another(self, now_s: float, held_s: float) -> bool:
        return self.tries_left > 0 and now_s - self.begun_s - held_s < TRYING_S


class Relay:
    def __init__(
        self,
        table: LiveTable,
        demand: DemandBook,
        upstream: Upstream,
        limits: Limiter,
        patience: Patience,
        *,
        room_bytes: int,
    ) -> None:
        self._table, self._demand, self._upstream, self._patience = table, demand, upstream, patience
        self._limits = limits
        self._holding = Holding(
            table,
            demand,
            grace_s=patience.grace_s,
            comment_s=patience.comment_s,
            room_bytes=room_bytes,
        )
        self._in_flight: dict[str, int] = {}
        self._chooser, self._breaker = Chooser(), Breaker()
        self._replicas = table.current.replicas

    async def serve(self, call: Call, client: Client, watch: Watch) -> None:
        """Answers the client, or raises Refused while nothing of an answer has been said to it."""
        budget = Budget(monotonic())
        client.watched_by(watch)
        try:
            if call.wants_stream:
                client.keep_company(dialect_of(call.endpoint), self._patience.comment_s)
            try:
                await self._serve_by(call, client, watch, budget, may_wait=True)
            except Refused as refused:
                if refused.status < 500 or not await self._fall_back(call, client, watch, budget):
                    _is_answered_by(call.passage, call.model)
                    raise
        finally:
            client.close()

    async def _fall_back(self, call: Call, client: Client, watch: Watch, budget: Budget) -> bool:
        """Whether another model answered, within its own limits."""
        for model in self._stand_ins(call):
            if not budget.allows_another(monotonic(), call.passage.held_s):
                return False
            with contextlib.suppress(Refused):
                lease = await self._limits.take(None, model, call.needs.prompt.least)
                log.warning("Model %s stands in for %s", model.name, call.model.name)
                try:
                    _is_answered_by(call.passage, model)
                    await self._serve_by(call.of(model), client, watch, budget, may_wait=False)
                finally:
                    lease.give_back(call.passage.prompt_tokens + call.passage.completion_tokens)
                return True
        return False

    def _stand_ins(self, call: Call) -> Iterator[ModelEntry]:
        """Nobody waits for one that is not ready."""
        table = self._table.current

        def may_serve(model: ModelEntry) -> bool:
            targets = table.targets_of(model)
            return bool(targets) and needs.fits(model, targets, call.needs, call.key)

        return fallbacks_of(call.model, table.find, may_serve)

    async def _serve_by(
        self, call: Call, client: Client, watch: Watch, budget: Budget, *, may_wait: bool
    ) -> None:
        passage, patience = call.passage, self._patience.of(call.model.timeouts)
        tries, cause = 0, ""
        tried: dict[str, Target] = {}
        choice = self._choose(call)
        while True:
            if choice is None:
                if not may_wait:
                    raise answers.misrouted(call.model.name)
                held = Held(
                    call,
                    client,
                    watch,
                    patience.hold_s,
                    budget.begun_s + patience.hold_s,
                    has_stand_in=lambda: any(True for _ in self._stand_ins(call)),
                    cause=cause,
                )
                choice = await self._holding.wait(held, lambda: self._choose(call, tried))
            try:
                return await self._try(call, choice, client, watch, patience)
            except Elsewhere as failure:
                refused = failure.refused
                if str(failure) != cause:  # who waits for one to come back tells of it once
                    log.warning("Replica %s of %s %s", choice.target.replica, call.model.name, failure)
                    cause = str(failure)
                if failure.outcome is Outcome.ABSENT:
                    refused = answers.still_away(call.model.name, cause, monotonic() - budget.begun_s)
                else:
                    tried[choice.target.replica] = choice.target
                    tries += 1
                    budget.tries_left -= 1
                has_more = tries < TRIES_OF_MODEL and budget.allows_another(monotonic(), passage.held_s)
                if failure.is_final or not has_more:
                    raise refused from None
                choice = await self._another(call, choice, failure, tried, may_wait=may_wait)

    async def _another(
        self, call: Call, choice: Choice, failure: Elsewhere, tried: Mapping[str, Target], *, may_wait: bool
    ) -> Choice | None:
        """Where to go after a failure; None is to wait until there is somewhere. Raises what the client is
        told where neither would help."""
        if failure.is_misrouted:
            await self._table.refresh()
        if (other := self._choose(call, tried)) is not None:
            return other
        if failure.is_repeatable or failure.refused.status == 503:  # it may be about to leave, or gone
            await self._table.refresh()
            if (other := self._choose(call, tried)) is not None:
                return other
        if may_wait and (failure.outcome is Outcome.ABSENT or not self._still_there(tried)):
            return None  # what is absent may be back in a moment, and was handed nothing
        if failure.is_repeatable:
            return choice
        raise failure.refused from None

    def _choose(self, call: Call, tried: Mapping[str, Target] = _NONE) -> Choice | None:
        table, model, marks = self._table.current, call.model, self._breaker.marks
        if table.replicas is not self._replicas:
            self._notice(table.replicas)
        there: Sequence[Target] = table.targets.get(model.id, ())
        targets = there
        if there and not table.reaches[model.id].holds(call.needs):
            targets = needs.fitting(model, there, call.needs)
            if not targets:
                raise surface.unspoken(call.endpoint, model.name, {target.engine for target in there})
        choice = self._chooser.choose(
            model,
            self._breaker.routable(targets, monotonic()) if marks else targets,
            self._in_flight,
            call.prompt,
            without=self._still_there(tried) if tried else (),
        )
        if choice is not None and marks:
            self._breaker.ask(choice.target.replica)
        return choice

    def _notice(self, replicas: Mapping[str, ReplicaEntry]) -> None:
        """One that was started anew has its name alone in common with what it was."""
        before, self._replicas = self._replicas, replicas
        gone = [name for name, was in before.items() if replicas.get(name) != was]
        self._chooser.forget(gone)
        self._breaker.forget(gone)

    def _still_there(self, tried: Mapping[str, Target]) -> list[str]:
        """Those of them that are still what they were when they were tried."""
        replicas = self._table.current.replicas
        return [
            name
            for name, target in tried.items()
            if (entry := replicas.get(name)) is not None
            and (entry.target.origin, entry.target.key) == (target.origin, target.key)
            and entry.target.certificate == target.certificate
        ]

    async def _try(
        self, call: Call, choice: Choice, client: Client, watch: Watch, patience: Patience
    ) -> None:
        """One request to one engine, from its first byte to its last. Raises Elsewhere or Refused while
        nothing of its answer has been passed on."""
        target, passage, model = choice.target, call.passage, call.model
        outcome, is_gone = Outcome.NEUTRAL, False
        passage.replica, passage.route = target.replica, choice.route
        passage.attempts += 1
        passage.sent_at_s, passage.first_byte_at_s = monotonic(), None
        endpoint = call.needs.endpoint
        delivery = Delivery(call, target, client, first_byte_s=patience.first_byte_s, idle_s=patience.idle_s)
        in_flight, replica = self._in_flight, target.replica
        in_flight[replica] = in_flight.get(replica, 0) + 1
        self._demand.begin_serving(model.id)
        try:
            answer = await self._upstream.ask(
                target,
                endpoint.path_on(target.engine) or endpoint.path,
                call.body_for(target),
                call.headers,
                watch,
                connect_s=patience.connect_s,
                first_byte_s=patience.first_byte_s,
            )
            try:
                outcome = await delivery.deliver(answer)
                is_gone = outcome is Outcome.FAILED
            finally:
                if not answer.is_whole:
                    answer.close()
        except EngineAway as error:
            failure = away(model.name, error)
            outcome, is_gone = failure.outcome, True
            raise failure from error
        except Elsewhere as failure:
            outcome, is_gone = failure.outcome, failure.is_repeatable
            raise
        except Refused as refused:  # by an engine that is well, or busy
            outcome = Outcome.NEUTRAL if refused.status == 429 else Outcome.FINE
            raise
        finally:
            self._demand.end_serving(model.id)
            in_flight[replica] -= 1
            if not in_flight[replica]:
                del in_flight[replica]
            if is_gone:  # the reconciler will know in a moment, instead of at its next pass
                self._demand.ask_to_look()
            if outcome is not Outcome.FINE or self._breaker.marks:
                there = self._table.current.targets_of(model)
                self._breaker.tell(replica, outcome, monotonic(), there)


def _is_answered_by(passage: Passage, model: ModelEntry) -> None:
    passage.model, passage.model_id, passage.is_simulated = model.name, model.id, model.is_simulated
