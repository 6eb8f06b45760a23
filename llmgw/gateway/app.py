"""The gateway's door: a plain ASGI application that answers /v1/.

Parses, checks the key, refuses early what an engine would refuse late, and hands a request on; nothing here
touches the database or waits for one. A client that leaves ends its request wherever it stands, which frees
the engine. What a request took is given back in every outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
from collections.abc import (
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from functools import lru_cache
from time import monotonic
from typing import Any

import msgspec

from llmgw.exchange import Exchange
from llmgw.gateway import admission, availability, bounds, needs, peek, surface
from llmgw.gateway.accounts import Accounts
from llmgw.gateway.admission import UNLIMITED, KeyEntry, ModelEntry, Refused
from llmgw.gateway.bodies import Bodies, ClientGone
from llmgw.gateway.bounds import Peek
from llmgw.gateway.call import Call
from llmgw.gateway.client import Client, ClientStalled
from llmgw.gateway.context import Span
from llmgw.gateway.counting import TokenCounter
from llmgw.gateway.demand import DemandBook
from llmgw.gateway.entrance import Entrance
from llmgw.gateway.journal import Journal
from llmgw.gateway.leaving import Leaving
from llmgw.gateway.limits import Limiter
from llmgw.gateway.needs import Needs
from llmgw.gateway.passage import Passage
from llmgw.gateway.patience import Patience, Watch
from llmgw.gateway.prefixes import chain
from llmgw.gateway.relay import Relay
from llmgw.gateway.routing import NO_PROMPT, PREFIX, SESSION, Prompt
from llmgw.gateway.surface import ENDPOINTS, MODELS_PATH, Endpoint
from llmgw.gateway.table import LiveTable
from llmgw.gateway.upstream import CLIENT_HEADERS, Upstream
from nodes.protocol import ClusterKey

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Pairs = Sequence[tuple[bytes, bytes]]
Headers = Mapping[bytes, bytes]
Way = tuple[str, str, str]
"""A request's scheme, method and path."""

CLIENT_LEFT = 499
"""The status that a client which did not stay for its answer is counted under."""

SESSION_LIMIT = 256
"""Characters of a session's name that bear on routing."""

LEAVING_S = 0.1
"""A request that lasts longer is looked after for its client to leave."""

_FORWARDED = frozenset(name.encode() for name in CLIENT_HEADERS)
_NOTHING: Mapping[str, str] = {}
_numbers = random.Random()  # noqa: S311
"""Of requests: to be told apart, not to be kept from anybody, and so not worth a call of the kernel each."""
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")


class GatewayApp:
    """Everything one process needs to serve /v1/, between `start` and `stop`."""

    def __init__(
        self,
        *,
        pepper: bytes,
        cluster_keys: Sequence[ClusterKey],
        wake: Callable[[], object],
        patience: Patience,
        bodies: Bodies,
        redis_url: str,
        media_hosts: Collection[str],
        poll_s: float,
        is_plain_http_allowed: bool,
        is_host_allowed: Callable[[str], bool],
        access_log: str = "",
        flush_s: float = 5.0,
    ) -> None:
        self._patience, self._shortest_s, self._bodies = patience, patience.shortest_s, bodies
        self._media_hosts = frozenset(host.lower() for host in media_hosts)
        self.table = LiveTable(cluster_keys, poll_s=poll_s)
        self.entrance = Entrance(
            self.table, pepper, is_plain_http_allowed=is_plain_http_allowed, is_host_allowed=is_host_allowed
        )
        self.demand = DemandBook(self.table, wake=wake)
        journal = Journal(access_log, self.table.clock_s) if access_log else None
        self.accounts = Accounts(self.demand.gateway, self.table.clock_s, flush_s=flush_s, journal=journal)
        self._limits = Limiter(redis_url, processes=lambda: self.table.current.gateways)
        self._upstream = Upstream()
        self._tokens = TokenCounter(self._upstream)
        # Those that wait leave room for those that are served.
        room_bytes = bodies.max_held_bytes // 2
        self._relay = Relay(
            self.table, self.demand, self._upstream, self._limits, patience, room_bytes=room_bytes
        )

    @property
    def is_redis_away(self) -> bool:
        return self._limits.is_redis_away

    async def start(self) -> None:
        await self._upstream.start()
        await self.table.start()
        await self.demand.start()
        await self._limits.start()
        await self.accounts.start()

    async def stop(self) -> None:
        await self.accounts.stop()
        await self._limits.stop()
        await self.demand.stop()
        await self.table.stop()
        await self._upstream.stop()

    async def __call__(
        self, scope: Scope, receive: Receive, send: Send, exchange: Exchange | None = None
    ) -> None:
        """As an ASGI application, which is handed the exchange where there is one."""
        way = (scope["scheme"], scope["method"], scope["path"])
        await self._answer(way, scope["headers"], receive, send, exchange)

    def answer(self, exchange: Exchange) -> Coroutine[Any, Any, None]:
        """For a server that knows what an exchange is."""
        receive: Any = exchange.receive
        send: Any = exchange.send
        way = (exchange.scheme, "POST", exchange.path)
        return self._answer(way, exchange.headers, receive, send, exchange)

    async def _answer(
        self, way: Way, headers: Pairs, receive: Receive, send: Send, exchange: Exchange | None
    ) -> None:
        named = dict(headers)
        patience, passage = self._patience, Passage(_request_id(named), monotonic())
        client = Client(
            receive, send, exchange, passage, stall_s=patience.stall_s, comment_s=patience.comment_s
        )
        try:
            try:
                await self._route(way, headers, named, client, passage)
            except Refused as refused:
                await client.refuse(refused)
            except (ClientGone, ClientStalled):
                raise
            except Exception:
                log.exception("The gateway itself failed.")
                await client.refuse(admission.own_fault())
        except ClientGone:
            passage.status, passage.code = CLIENT_LEFT, "client_left"
        except asyncio.CancelledError:  # by a server that stops; it waits for nothing but the task's end
            with contextlib.suppress(ClientStalled):
                await client.refuse(admission.stopping())
        except ClientStalled:  # the server ends its connection, as the answer is not complete
            passage.status, passage.code = CLIENT_LEFT, "client_stalled"
            if exchange is not None:
                exchange.abandon()
            log.warning(
                "A client has read nothing for %.0f s, and its request was ended.", self._patience.stall_s
            )
        finally:
            self.accounts.close(passage)

    def _route(
        self, way: Way, headers: Pairs, named: Headers, client: Client, passage: Passage
    ) -> Awaitable[None]:
        """What answers it, or lets it in first."""
        scheme, _, path = way
        endpoint = ENDPOINTS.get(path)
        if endpoint is not None:
            passage.endpoint, client.shape = endpoint.path, endpoint.shape
        key = self.entrance.known(scheme, named) if len(named) == len(headers) else None
        if key is None:
            return self._let_in(way, headers, named, client, passage)
        return self._pass_to(way, key, named, client, passage)

    async def _let_in(
        self, way: Way, headers: Pairs, named: Headers, client: Client, passage: Passage
    ) -> None:
        key = await self.entrance.let_in(way[0], headers)
        await self._pass_to(way, key, named, client, passage)

    def _pass_to(
        self, way: Way, key: KeyEntry, named: Headers, client: Client, passage: Passage
    ) -> Awaitable[None]:
        _, method, path = way
        passage.key = key.id
        endpoint = ENDPOINTS.get(path)
        if endpoint is not None:
            if method != "POST":
                raise admission.wrong_method(method, path, "POST")
            return self._complete(endpoint, key, named, client, passage)
        if path == MODELS_PATH or path.startswith(f"{MODELS_PATH}/"):
            passage.endpoint = MODELS_PATH
            if method != "GET":
                raise admission.wrong_method(method, path, "GET")
            return self._show_models(path[len(MODELS_PATH) + 1 :], key, client)
        raise surface.unknown_path(path)

    # --- models ---------------------------------------------------------------------------------------------

    async def _show_models(self, name: str, key: KeyEntry, client: Client) -> None:
        if name:
            model = await self._find(name, key)
            await client.answer_json(self._shown(name, model))
            return
        opened = sorted(self._opened(key), key=lambda model: model.name)
        rows = [self._shown(name, model) for model in opened for name in (model.name, *model.aliases)]
        await client.answer_json({"object": "list", "data": rows})

    def _opened(self, key: KeyEntry) -> Iterator[ModelEntry]:
        return (model for model in self.table.current.models.values() if needs.opens(key, model))

    async def _find(self, name: str, key: KeyEntry) -> ModelEntry:
        """A model that the key does not open is none: it is looked for as long, and missed in the same
        words."""
        if (model := self._opened_as(name, key)) is None:
            await self.table.refresh()  # added a moment ago, perhaps
            model = self._opened_as(name, key)
        if model is None:
            raise admission.unknown_model(name, needs.visible_names(key, self.table.current.names))
        return model

    def _opened_as(self, name: str, key: KeyEntry) -> ModelEntry | None:
        model = self.table.current.find(name)
        return model if model is not None and needs.opens(key, model) else None

    def _shown(self, name: str, model: ModelEntry) -> dict[str, object]:
        table = self.table.current
        targets = table.targets_of(model)
        standing = availability.standing(model, table.situation_of(model), is_ready=bool(targets))
        return {
            "id": name,
            "object": "model",
            "created": model.created_s,
            "owned_by": "llmgw",
            **({} if name == model.name else {"alias_of": model.name}),
            "aliases": list(model.aliases),
            "description": model.description,
            "context_length": table.reach_of(model).context_length or None,
            "max_output": model.max_output or None,
            "capabilities": dict(model.capabilities),
            "simulated": model.is_simulated,
            "status": standing.status,
            "reason": standing.reason,
        }

    # --- completions ----------------------------------------------------------------------------------------

    async def _complete(
        self, endpoint: Endpoint, key: KeyEntry, headers: Headers, client: Client, passage: Passage
    ) -> None:
        exchange, body, lease = client.exchange, b"", None
        watch = _watch_of(exchange, self._shortest_s)
        try:
            if exchange is not None and (whole := exchange.take_body()) is not None:
                body = self._bodies.take(whole)
            else:
                body = await self._bodies.read(headers.get(b"content-length"), client.receive, watch)
            # Everything that can be refused before a replica is looked for:
            fields = peek.decode(body)
            seen = peek.look_at(fields)
            name = bounds.check_body(seen, self._media_hosts)
            passage.asked_as, passage.is_streamed = name, seen.stream is True
            model = self._opened_as(name, key) or await self._find(name, key)
            call = self._call_of(endpoint, key, model, headers, seen, fields, body, passage)
            if not self.table.current.reach_of(model).is_plain(model, call.needs):
                call = await self._bounded(call)
            if model.limits is not UNLIMITED or key.limits is not UNLIMITED:  # which few are
                lease = await self._limits.take(key, model, call.needs.prompt.least)
            await self._serve(call, client, watch)
        finally:
            if lease is not None:
                lease.give_back(passage.prompt_tokens + passage.completion_tokens)
            self._bodies.give_back(len(body))
            if exchange is None:
                watch.close()

    def _call_of(
        self,
        endpoint: Endpoint,
        key: KeyEntry,
        model: ModelEntry,
        headers: Headers,
        seen: Peek,
        fields: peek.Fields,
        body: bytes,
        passage: Passage,
    ) -> Call:
        passage.model, passage.model_id, passage.is_simulated = model.name, model.id, model.is_simulated
        return Call(
            passage.asked_as,
            model,
            key,
            peek.needs_of(endpoint, fields, seen),
            fields,
            body,
            _forwarded(headers),
            passage,
            self._prompt_of(endpoint, key, model, fields, headers),
            wants_stream=passage.is_streamed,
            wants_usage=passage.is_streamed and peek.wants_usage(fields),
        )

    async def _bounded(self, call: Call) -> Call:
        """Where the model may not take it as it is: refused, or within what the operator allows."""
        needs.check_model(call.model, call.needs, self._opened(call.key))
        wanted, fields = await self._within_context(call.model, call.needs, call.fields)
        body = call.body if fields is call.fields else peek.encode(fields)
        return msgspec.structs.replace(call, needs=wanted, fields=fields, body=body)

    async def _within_context(
        self, model: ModelEntry, wanted: Needs, fields: Mapping[str, msgspec.Raw]
    ) -> tuple[Needs, Mapping[str, msgspec.Raw]]:
        """The same request, and its fields with the answer bounded where the operator or the client did. A
        tokenizer is asked only where size alone cannot tell."""
        endpoint, asked = wanted.endpoint, wanted.output_tokens or None
        if not endpoint.output_fields and not endpoint.capability:
            return wanted, fields
        output = needs.allowed_output(model, asked)
        if output != asked:
            wanted = wanted._replace(output_tokens=output or 0)
        table = self.table.current
        context_length = table.reach_of(model).context_length
        is_sure = needs.check_context(model, context_length, wanted.prompt, wanted.room_for_output)
        has_room = asked is not None or needs.has_room_for_most(model, context_length, wanted.prompt)
        if not (is_sure and has_room) and wanted.prompt.most is not None:
            able = needs.fitting(model, table.targets_of(model), wanted)
            counted = await self._tokens.count(able[0], endpoint, fields) if able else None
            if counted is not None:
                wanted = wanted._replace(prompt=Span.counted(counted))
                needs.check_context(model, context_length, wanted.prompt, wanted.room_for_output)
        if asked is None and endpoint.output_fields:
            output = needs.default_output(model, context_length, wanted.prompt)
        if output is None or output == asked:
            return wanted, fields
        return wanted._replace(output_tokens=output), peek.with_output(endpoint, fields, output)

    def _prompt_of(
        self, endpoint: Endpoint, key: KeyEntry, model: ModelEntry, fields: peek.Fields, headers: Headers
    ) -> Prompt:
        """Computed where the choice will ask for it: chains cost, and one replica is no choice."""
        profile = model.routing_profile
        if profile == SESSION:
            session = headers.get(b"x-session-id", b"")
            return Prompt(session=session.decode("latin-1")[:SESSION_LIMIT])
        if (profile and profile != PREFIX) or len(self.table.current.targets_of(model)) < 2:
            return NO_PROMPT
        parts = [memoryview(raw) for name in endpoint.prompt_fields if (raw := fields.get(name)) is not None]
        return Prompt.of_chain(chain(_salt(model.id, key.cache_scope), parts))

    async def _serve(self, call: Call, client: Client, watch: Watch) -> None:
        """Until it is answered, or its client has left."""
        leaving, exchange = Leaving(watch.task), client.exchange
        if exchange is None:
            watch.call_later(LEAVING_S, lambda: leaving.look_out(client.receive))
        elif exchange.disconnected:
            raise ClientGone
        else:
            exchange.watch_for_leaving(leaving.leave)
        try:
            await self._relay.serve(call, client, watch)
        except asyncio.CancelledError:
            leaving.check()
            raise
        finally:
            leaving.end()
            if exchange is not None:
                exchange.stop_watching()


def _watch_of(exchange: Exchange | None, shortest_s: float) -> Watch:
    """The connection's own, where one task answers all of it."""
    if exchange is None:
        return Watch(shortest_s)
    if not isinstance(exchange.kept, Watch):
        exchange.kept = Watch(shortest_s)
    return exchange.kept


@lru_cache(maxsize=1024)
def _salt(model: int, cache_scope: str) -> bytes:
    return b"%d:%b" % (model, cache_scope.encode())


def _request_id(headers: Headers) -> str:
    """The client's own where it is harmless."""
    own = headers.get(b"x-request-id")
    if own is not None and _REQUEST_ID.fullmatch(own):
        return own.decode()
    return f"req_{_numbers.getrandbits(96):024x}"


def _forwarded(headers: Headers) -> Mapping[str, str]:
    if _FORWARDED.isdisjoint(headers):
        return _NOTHING
    return {
        name.decode(): value.decode()
        for name, value in headers.items()
        if name in _FORWARDED and value.isascii() and value.decode().isprintable()
    }
