"""What the web server runs: /v1/ goes to the gateway, what watches it to its probes, the rest to Django.

`uvicorn llmgw.asgi:application`, or `llmgw.asgi:gateway` where the gateway runs alone, without the admin and
/api/. The gateway lives from the server's start-up to its shutdown.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "llmgw.settings")
django: Any = get_asgi_application()

# Only now: they use models, which are there once Django is.
from django.conf import settings  # noqa: E402
from django.http.request import split_domain_port, validate_host  # noqa: E402

from llmgw.draining import Draining  # noqa: E402
from llmgw.exchange import Exchange, exchange_of  # noqa: E402
from llmgw.gateway.app import GatewayApp, Message, Receive, Scope, Send  # noqa: E402
from llmgw.gateway.bodies import Bodies  # noqa: E402
from llmgw.gateway.patience import Patience  # noqa: E402
from llmgw.gateway.probes import PATHS, Probes  # noqa: E402
from llmgw.wire import DIRECT  # noqa: E402
from nodes.tasks import wake  # noqa: E402

App = Callable[[Scope, Receive, Send], Awaitable[None]]

_gateway: GatewayApp | None = None
_probes: Probes | None = None
_NEW_OBJECTS = 10_000
"""After so many, the young ones are looked through for garbage. Python's own 700 are a few requests'."""
_draining = Draining()


def _is_host_allowed(host: str) -> bool:
    """The hosts that Django answers to are the gateway's, too."""
    domain, _ = split_domain_port(host)
    return validate_host(domain, settings.ALLOWED_HOSTS)


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    await _serve(scope, receive, send, rest=_bounded)


async def gateway(scope: Scope, receive: Receive, send: Send) -> None:
    await _serve(scope, receive, send, rest=_nothing_else)


async def _serve(scope: Scope, receive: Receive, send: Send, *, rest: App) -> None:
    if scope["type"] == "lifespan":
        await _live(scope, receive, send)
        return
    if scope["type"] != "http":
        await django(scope, receive, send)
        return
    if _gateway is not None and scope["path"].startswith("/v1/"):
        exchange = exchange_of(scope)
        if _draining.has_begun:
            send, exchange = _closing(send), None
        await _gateway(scope, receive, send, exchange)
        return
    if _draining.has_begun:
        send = _closing(send)
    if _probes is not None and scope["path"] in PATHS:
        await _probes(scope, receive, send)
    else:
        await rest(scope, receive, send)


def _answer(exchange: Exchange) -> Awaitable[None]:
    """What is under /v1/ and has nothing out of the ordinary."""
    assert _gateway is not None, "the server has started"
    if _draining.has_begun:
        exchange.keep_alive = False
    return _gateway.answer(exchange)


def _closing(send: Send) -> Send:
    """The answer is the last of its connection."""

    async def told(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        await send(message)

    return told


async def _nothing_else(scope: Scope, receive: Receive, send: Send) -> None:
    await _refuse(send, 404, "not_here", "This address serves /v1/ alone; the admin and /api/ are elsewhere.")


async def _refuse(send: Send, status: int, code: str, sentence: str, *headers: tuple[bytes, bytes]) -> None:
    body = json.dumps({"errors": [{"field": "", "code": code, "sentence": sentence}]}).encode()
    told = [(b"content-type", b"application/json"), *headers]
    await send({"type": "http.response.start", "status": status, "headers": told})
    await send({"type": "http.response.body", "body": body})


async def _bounded(scope: Scope, receive: Receive, send: Send) -> None:
    """Django keeps a whole body, on disk if need be, before any view may refuse it, and waits for it without
    end: so its bytes are counted here, and its time."""
    limit, arrived, is_whole, is_late = settings.LLMGW_MAX_BODY_BYTES, 0, False, False
    until_s = asyncio.get_running_loop().time() + settings.LLMGW_BODY_S

    async def bounded() -> Message:
        nonlocal arrived, is_whole, is_late
        if is_whole:  # and who asks waits for the client to leave
            return await receive()
        try:
            async with asyncio.timeout_at(until_s):
                message = await receive()
        except TimeoutError:
            is_late = True
            return {"type": "http.disconnect"}
        arrived += len(message.get("body", b""))
        is_whole = not message.get("more_body", False)
        return message if arrived <= limit else {"type": "http.disconnect"}

    claimed = dict(scope["headers"]).get(b"content-length", b"0")
    if not claimed.isdigit() or int(claimed) <= limit:
        await django(scope, bounded, send)
        if is_late:
            sentence = f"The request did not arrive within {settings.LLMGW_BODY_S:.0f} s: send it again."
            await _refuse(send, 408, "too_slow", sentence, (b"connection", b"close"))
        if is_late or arrived <= limit:
            return
    sentence = f"The request is larger than the {limit} bytes that this server takes; send less."
    await _refuse(send, 413, "too_large", sentence, (b"connection", b"close"))


def make_gateway() -> GatewayApp:
    """As the settings say, for the loop that runs now."""
    return GatewayApp(
        pepper=settings.LLMGW_KEY_PEPPER,
        cluster_keys=settings.LLMGW_CLUSTER_KEYS,
        wake=wake,
        patience=Patience(
            hold_s=settings.LLMGW_HOLD_S,
            connect_s=settings.LLMGW_CONNECT_S,
            first_byte_s=settings.LLMGW_FIRST_BYTE_S,
            idle_s=settings.LLMGW_IDLE_S,
            stall_s=settings.LLMGW_STALL_S,
            grace_s=settings.LLMGW_GRACE_S,
            comment_s=settings.LLMGW_COMMENT_S,
        ),
        bodies=Bodies(
            max_body_bytes=settings.LLMGW_MAX_BODY_BYTES,
            max_held_bytes=settings.LLMGW_MAX_HELD_BYTES,
            body_s=settings.LLMGW_BODY_S,
        ),
        media_hosts=settings.LLMGW_MEDIA_HOSTS,
        redis_url=settings.REDIS_URL,
        poll_s=settings.LLMGW_TABLE_POLL_S,
        is_plain_http_allowed=settings.LLMGW_PLAIN_HTTP,
        is_host_allowed=_is_host_allowed,
        access_log="" if settings.LLMGW_ACCESS_LOG == "off" else settings.LLMGW_ACCESS_LOG,
        flush_s=settings.LLMGW_USAGE_FLUSH_S,
    )


def _leave_alone_what_stays() -> None:
    """Where the process is the server's own. A collection of garbage that walks through all that Django has
    made holds up every answer for a tenth of a second, now and again."""
    if threading.current_thread() is threading.main_thread():
        gc.collect()
        gc.freeze()
        gc.set_threshold(_NEW_OBJECTS)


async def _live(scope: Scope, receive: Receive, send: Send) -> None:
    global _gateway, _probes
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            _gateway = make_gateway()
            await _gateway.start()
            _probes = Probes(_gateway, is_draining=lambda: _draining.has_begun)
            _draining.listen(settings.LLMGW_LINGER_S)
            _leave_alone_what_stays()
            scope.get("state", {})[DIRECT] = _answer
            await send({"type": "lifespan.startup.complete"})
        elif message["type"] == "lifespan.shutdown":
            if _gateway is not None and _probes is not None:
                await _probes.stop()
                await _gateway.stop()
                _gateway = _probes = None
            await send({"type": "lifespan.shutdown.complete"})
            return
