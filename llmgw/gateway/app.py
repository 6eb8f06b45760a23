"""The gateway's door: a plain ASGI application that answers /v1/.

Parses, checks the key, and hands a request on; nothing here touches the database or waits for one. A client
that leaves ends its request wherever it stands, which frees the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, MutableMapping, Sequence
from time import monotonic
from typing import Any

import msgspec

from llmgw.gateway import admission
from llmgw.gateway.admission import ModelEntry, Peek, Refused
from llmgw.gateway.demand import DemandBook
from llmgw.gateway.relay import Call, Client, ClientStalled, Relay
from llmgw.gateway.table import LiveTable
from llmgw.gateway.upstream import CLIENT_HEADERS, Upstream
from nodes.protocol import ClusterKey

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

BODY_S = 120.0
"""How long a body may take to arrive."""

PATHS = {
    "/v1/chat/completions": "/v1/chat/completions",
    "/v1/completions": "/v1/completions",
    "/v1/embeddings": "/v1/embeddings",
}
"""What clients may ask for, and the path that engines have for it."""

_FORWARDED = {name.encode() for name in CLIENT_HEADERS}


class GatewayApp:
    """Everything one process needs to serve /v1/, between `start` and `stop`."""

    def __init__(
        self,
        *,
        pepper: bytes,
        cluster_keys: Sequence[ClusterKey],
        wake: Callable[[], object],
        hold_s: float,
        stall_s: float,
        max_body_bytes: int,
        poll_s: float,
        is_plain_http_allowed: bool,
        is_host_allowed: Callable[[str], bool],
    ) -> None:
        self._pepper = pepper
        self._stall_s = stall_s
        self._max_body_bytes = max_body_bytes
        self._is_plain_http_allowed, self._is_host_allowed = is_plain_http_allowed, is_host_allowed
        self.table = LiveTable(cluster_keys, poll_s=poll_s)
        self.demand = DemandBook(self.table, wake=wake)
        self._upstream = Upstream()
        self._relay = Relay(self.table, self.demand, self._upstream, hold_s=hold_s)

    async def start(self) -> None:
        await self._upstream.start()
        await self.table.start()
        await self.demand.start()

    async def stop(self) -> None:
        await self.demand.stop()
        await self.table.stop()
        await self._upstream.stop()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = Client(send, stall_s=self._stall_s)
        try:
            await self._route(scope, receive, client)
        except Refused as refused:
            await client.refuse(refused)
        except ClientGone:
            pass
        except ClientStalled:  # the server ends its connection, as the answer is not complete
            log.warning("A client has read nothing for %.0f s, and its request was ended.", self._stall_s)
        except Exception:
            log.exception("The gateway itself failed.")
            if not client.has_begun:
                await client.refuse(admission.own_fault())

    async def _route(self, scope: Scope, receive: Receive, client: Client) -> None:
        method, path = scope["method"], scope["path"]
        if scope["scheme"] != "https" and not self._is_plain_http_allowed:
            raise admission.https_only()
        admission.check_headers(scope["headers"])
        admission.check_host(scope["headers"], self._is_host_allowed)
        await self._authenticate(scope)
        if path in PATHS:
            if method != "POST":
                raise admission.wrong_method(method, path, "POST")
            await self._complete(scope, receive, client)
        elif path == "/v1/models" or path.startswith("/v1/models/"):
            if method != "GET":
                raise admission.wrong_method(method, path, "GET")
            await self._show_models(path.removeprefix("/v1/models").removeprefix("/"), client)
        else:
            raise admission.unknown_path(path)

    async def _authenticate(self, scope: Scope) -> None:
        key = admission.read_key(admission.credential(scope["headers"]))
        if key.id not in self.table.current.keys:
            await self.table.refresh()  # made a moment ago, perhaps
        table = self.table.current
        admission.check_key(
            key,
            table.keys.get(key.id),
            self._pepper,
            now_s=table.now_s(monotonic()),
            is_table_fresh=self.table.is_fresh(),
        )

    # --- models ---------------------------------------------------------------------------------------------

    async def _show_models(self, name: str, client: Client) -> None:
        if name:
            model = await self._find(name)
            await client.answer_json(self._shown(name, model))
            return
        models = sorted(self.table.current.models.values(), key=lambda model: model.name)
        rows = [self._shown(name, model) for model in models for name in (model.name, *model.aliases)]
        await client.answer_json({"object": "list", "data": rows})

    async def _find(self, name: str) -> ModelEntry:
        if self.table.current.find(name) is None:
            await self.table.refresh()  # added a moment ago, perhaps
        model = self.table.current.find(name)
        if model is None:
            raise admission.unknown_model(name, self.table.current.names)
        return model

    def _shown(self, name: str, model: ModelEntry) -> dict[str, object]:
        table = self.table.current
        standing = admission.standing(
            model, table.situation_of(model), is_ready=bool(table.targets_of(model))
        )
        return {
            "id": name,
            "object": "model",
            "created": model.created_s,
            "owned_by": "llmgw",
            **({} if name == model.name else {"alias_of": model.name}),
            "aliases": list(model.aliases),
            "description": model.description,
            "context_length": model.context_length or None,
            "max_output": model.max_output or None,
            "capabilities": dict(model.capabilities),
            "simulated": model.is_simulated,
            "status": standing.status,
            "reason": standing.reason,
        }

    # --- completions ----------------------------------------------------------------------------------------

    async def _complete(self, scope: Scope, receive: Receive, client: Client) -> None:
        body = await self._read_body(scope["headers"], receive)
        fields = decode(body)
        peek = look_at(fields)
        name = admission.check_body(peek)
        call = Call(
            name=name,
            model=await self._find(name),
            path=PATHS[scope["path"]],
            fields=fields,
            body=body,
            headers=_forwarded(scope["headers"]),
        )
        work = asyncio.create_task(self._relay.serve(call, client))
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
                await asyncio.wait((work,))
        if not work.cancelled():
            work.result()

    async def _read_body(self, headers: Iterable[tuple[bytes, bytes]], receive: Receive) -> bytes:
        """Counted as it arrives; what its length claims is believed only to refuse sooner."""
        limit = self._max_body_bytes
        for name, value in headers:
            if name == b"content-length" and int(value) > limit:
                raise admission.body_too_large(limit)
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    body += message.get("body", b"")
                    if len(body) > limit:
                        raise admission.body_too_large(limit)
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise admission.body_too_slow(BODY_S) from None


class ClientGone(Exception):
    """The client left before its request was whole: there is nobody to answer."""


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _forwarded(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    return {
        name.decode(): value.decode()
        for name, value in headers
        if name in _FORWARDED and value.isascii() and value.decode().isprintable()
    }


# --- looking at a body --------------------------------------------------------------------------------------

Fields = dict[str, msgspec.Raw]
_decoder = msgspec.json.Decoder(Fields)

# Bodies may be large, so they are read in depth only where these bytes say that there may be something to
# see. A key cannot hide behind an escape: one that writes a plain letter begins like the last of these.
_TRACES = (b"_url", b"_embeds", b"\\u00")


def decode(body: bytes) -> Fields:
    """The top level of a JSON object, each value as it came. The whole body is checked to be JSON on the
    way."""
    with _as_malformed():
        body.decode()  # msgspec looks for bad UTF-8 only where it makes texts
        return _decoder.decode(body)


def look_at(fields: Fields) -> Peek:
    parts: set[str] = set()
    urls: list[str] = []
    for name in ("messages", "input", "prompt"):
        raw = fields.get(name)
        if raw is not None and any(trace in bytes(raw) for trace in _TRACES):
            _look_into(_value(raw), parts, urls)
    kwargs = _value(fields.get("chat_template_kwargs"))
    return Peek(
        model=_value(fields.get("model")),
        stream=_value(fields.get("stream")),
        fields=frozenset(fields),
        template_fields=frozenset(kwargs) if isinstance(kwargs, dict) else frozenset(),
        part_fields=frozenset(parts),
        media_urls=tuple(urls),
    )


def _value(raw: msgspec.Raw | None) -> Any:
    if raw is None:
        return None
    with _as_malformed():  # half a character passes as bytes and is no text
        return msgspec.json.decode(raw)


@contextlib.contextmanager
def _as_malformed() -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError:
        raise admission.malformed("it is not UTF-8") from None
    except RecursionError:
        raise admission.malformed("it is nested too deeply") from None
    except msgspec.DecodeError as error:
        raise admission.malformed(str(error)) from None


def _look_into(value: object, parts: set[str], urls: list[str]) -> None:
    """Collects the names of fields and the URLs of media in parts of messages, however nested."""
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, list):
            left += item
        elif isinstance(item, dict):
            parts.update(item)
            for name in admission.MEDIA_FIELDS & item.keys():
                media = item[name]
                url = media.get("url") if isinstance(media, dict) else media
                if isinstance(url, str):
                    urls.append(url)
            left += item.values()
