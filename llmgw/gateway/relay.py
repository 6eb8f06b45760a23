"""Serving one request: wait for a replica, send the request to one, pass its answer on, try another where
that helps.

Nothing is said to the client before an engine has said something worth passing on; until then a failure costs
a second try at another replica, and after that it becomes an error the client sees. Counts are given back in
every outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

import msgspec

from llmgw.gateway import admission, answers
from llmgw.gateway.admission import ModelEntry, Refused
from llmgw.gateway.demand import DemandBook
from llmgw.gateway.routing import NO_PROMPT, Chooser, Prompt, Target
from llmgw.gateway.table import LiveTable
from llmgw.gateway.upstream import Answer, EngineAway, Upstream

log = logging.getLogger(__name__)

ATTEMPTS = 2
WAITING_LIMIT = 256
"""Requests that wait for one model, in this process; each holds its body in memory."""
ANSWER_LIMIT_BYTES = 64 * 1024 * 1024
ERROR_LIMIT_BYTES = 64 * 1024

_COMMON_HEADERS = [(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]


class ClientStalled(Exception):
    """The client has stopped reading: what it was sent waits in front of it, and nothing more is taken."""


class Client:
    """The answering side of one request: a status once, then bytes. Raises ClientStalled where they are not
    taken within `stall_s`: an engine's slot is not held for one who does not listen."""

    def __init__(
        self, send: Callable[[MutableMapping[str, Any]], Awaitable[None]], *, stall_s: float
    ) -> None:
        self._send = send
        self._stall_s = stall_s
        self.has_begun = False

    async def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.has_begun = True
        await self._hand_over(
            {"type": "http.response.start", "status": status, "headers": [*_COMMON_HEADERS, *headers]}
        )

    async def write(self, data: bytes, *, is_last: bool = False) -> None:
        await self._hand_over({"type": "http.response.body", "body": data, "more_body": not is_last})

    async def answer(self, body: bytes, status: int = 200, *headers: tuple[bytes, bytes]) -> None:
        length = (b"content-length", str(len(body)).encode())
        await self.begin(status, [(b"content-type", b"application/json"), length, *headers])
        await self.write(body, is_last=True)

    async def answer_json(self, value: object) -> None:
        await self.answer(msgspec.json.encode(value))

    async def refuse(self, refused: Refused) -> None:
        body = msgspec.json.encode(refused.as_dict())
        await self.answer(body, refused.status, *refused.headers())

    async def _hand_over(self, message: MutableMapping[str, Any]) -> None:
        """Waits while the server's buffer for this client is full."""
        try:
            async with asyncio.timeout(self._stall_s):
                await self._send(message)
        except TimeoutError:
            raise ClientStalled from None


@dataclass(frozen=True, slots=True)
class Call:
    """What a client asks for. `fields` is the body's top level; `headers` are those that reach an engine."""

    name: str
    model: ModelEntry
    path: str
    fields: Mapping[str, msgspec.Raw]
    body: bytes
    headers: Mapping[str, str]
    prompt: Prompt = NO_PROMPT

    def body_for(self, target: Target) -> bytes:
        if target.served_name == self.name:
            return self.body
        return msgspec.json.encode({**self.fields, "model": target.served_name})

    def echo_for(self, target: Target) -> answers.Echo | None:
        return None if target.served_name == self.name else answers.Echo(target.served_name, self.name)


class Elsewhere(Exception):
    """This replica did not answer and nothing was passed on: another may.

    The text finishes "the replica ..." in our own words, for the log; `refused` is for the client, when there
    is no other replica. `is_repeatable`: a new connection to the same one is worth a try.
    """

    def __init__(self, cause: str, refused: Refused, *, is_repeatable: bool = False) -> None:
        super().__init__(cause)
        self.refused, self.is_repeatable = refused, is_repeatable

    @classmethod
    def away(cls, model: str, cause: str, *, is_repeatable: bool = False) -> Elsewhere:
        return cls(cause, answers.unreachable(model, cause), is_repeatable=is_repeatable)


class Relay:
    def __init__(self, table: LiveTable, demand: DemandBook, upstream: Upstream, *, hold_s: float) -> None:
        self._table, self._demand, self._upstream = table, demand, upstream
        self._hold_s = hold_s
        self._in_flight: Counter[str] = Counter()
        self._chooser = Chooser()
        self._replicas = table.current.replicas

    async def serve(self, call: Call, client: Client) -> None:
        """Answers the client, or raises Refused while nothing has been said to it."""
        target = self._pick(call) or await self._wait_for_replica(call)
        tried: set[str] = set()
        for attempt in range(1, ATTEMPTS + 1):
            tried.add(target.replica)
            try:
                with self._taken(call.model, target):
                    return await self._attempt(call, target, client)
            except Elsewhere as failure:
                log.warning("Replica %s of %s %s", target.replica, call.model.name, failure)
                other = self._pick(call, without=tried) if attempt < ATTEMPTS else None
                if other is None and (attempt == ATTEMPTS or not failure.is_repeatable):
                    raise failure.refused from None
                target = other or target
        raise AssertionError("the last attempt answers or raises")

    def _pick(self, call: Call, without: Collection[str] = ()) -> Target | None:
        table = self._table.current
        if table.replicas is not self._replicas:
            before, self._replicas = self._replicas, table.replicas
            # One that was started anew has its name alone in common with what it was.
            self._chooser.forget([name for name, was in before.items() if table.replicas.get(name) != was])
        choice = self._chooser.choose(
            call.model, table.targets_of(call.model), self._in_flight, call.prompt, without=without
        )
        return None if choice is None else choice.target

    @contextlib.contextmanager
    def _taken(self, model: ModelEntry, target: Target) -> Iterator[None]:
        self._in_flight[target.replica] += 1
        try:
            with self._demand.is_served(model.id):
                yield
        finally:
            self._in_flight[target.replica] -= 1
            if not self._in_flight[target.replica]:
                del self._in_flight[target.replica]

    async def _wait_for_replica(self, call: Call) -> Target:
        """The first that becomes ready within the hold; the load goes on when the client does not."""
        admission.check_is_on(call.model)
        if self._demand.waiting_for(call.model.id) >= WAITING_LIMIT:
            raise admission.too_many_waiting(call.model, WAITING_LIMIT)
        deadline_s = monotonic() + self._hold_s
        with self._demand.waits(call.model.id):
            while True:
                changed, table = self._table.changed(), self._table.current
                model = table.models.get(call.model.id)
                if model is None:
                    if call.name in table.names:  # of one that was added anew under the same name
                        raise admission.replaced(call.name)
                    raise admission.unknown_model(call.name, table.names)
                if (target := self._pick(call)) is not None:
                    return target
                admission.check_is_on(model)
                admission.check_can_be_ready(model, table.situation_of(model))
                left_s = deadline_s - monotonic()
                if left_s <= 0:
                    raise admission.not_ready_in_time(model, table.situation_of(model), self._hold_s)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), left_s)

    async def _attempt(self, call: Call, target: Target, client: Client) -> None:
        try:
            answer = await self._upstream.ask(target, call.path, call.body_for(target), call.headers)
        except EngineAway as away:
            raise Elsewhere.away(call.model.name, str(away), is_repeatable=away.was_dropped) from away
        try:
            if answer.status != 200:
                await self._refuse_as_engine_did(call, answer)
            elif answer.content_type == "text/event-stream":
                await self._pass_stream_on(call, target, answer, client)
            else:
                await self._pass_on(call, target, answer, client)
        finally:
            answer.close()

    async def _pass_on(self, call: Call, target: Target, answer: Answer, client: Client) -> None:
        """A plain answer is passed on when it is whole, so that one that breaks off is never taken for
        one."""
        try:
            body = await answer.read(ANSWER_LIMIT_BYTES)
        except EngineAway as away:
            raise Elsewhere.away(call.model.name, str(away)) from away
        if body is None:
            raise answers.too_large(call.model.name, ANSWER_LIMIT_BYTES)
        if not answers.is_an_answer(body):
            raise Elsewhere("answered with what is no JSON object", answers.unreadable(call.model.name))
        echo = call.echo_for(target)
        await client.answer(body if echo is None else echo.feed(body) + echo.finish())

    async def _pass_stream_on(self, call: Call, target: Target, answer: Answer, client: Client) -> None:
        stream, echo = answers.EventStream(), call.echo_for(target)
        cause = "closed the connection"
        try:
            async for piece in answer.pieces():
                events = stream.feed(piece)
                if events:
                    if not client.has_begun:
                        await client.begin(200, [(b"content-type", b"text/event-stream; charset=utf-8")])
                    await client.write(events if echo is None else echo.feed(events) + echo.finish())
        except EngineAway as away:
            cause = str(away)
        except answers.NotAStream:
            cause = "sent something that is not a stream of events"
        if not client.has_begun:
            raise Elsewhere.away(call.model.name, cause)
        rest = stream.finish()
        if not (stream.is_done or stream.has_error):
            log.warning(
                "Replica %s of %s %s in the middle of a stream", target.replica, call.model.name, cause
            )
            rest = answers.error_event(answers.cut_short(call.model.name, cause))
        await client.write(rest, is_last=True)

    async def _refuse_as_engine_did(self, call: Call, answer: Answer) -> None:
        try:
            body = await answer.read(ERROR_LIMIT_BYTES) or b""
        except EngineAway as away:
            raise Elsewhere.away(call.model.name, str(away)) from away
        if answers.lacks_path(answer.status, body):
            raise answers.path_not_served(call.model.name, call.path)
        if answers.is_another_model(answer.status, body):
            await self._table.refresh()
            cause = f"does not know its key or its model (status {answer.status})"
            raise Elsewhere(cause, answers.misrouted(call.model.name))
        refused = answers.engine_error(answer.status, body, call.model.name)
        if answer.status in (502, 503, 504):
            raise Elsewhere(f"answered {answer.status}", refused)
        raise refused
