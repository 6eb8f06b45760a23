"""What the web server runs: /v1/ goes to the gateway, everything else to Django.

`uvicorn llmgw.asgi:application`. The gateway lives from the server's start-up to its shutdown.
"""

from __future__ import annotations

import json
import os
from typing import Any

from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "llmgw.settings")
django: Any = get_asgi_application()

# Only now: they use models, which are there once Django is.
from django.conf import settings  # noqa: E402
from django.http.request import split_domain_port, validate_host  # noqa: E402

from llmgw.gateway.app import GatewayApp, Message, Receive, Scope, Send  # noqa: E402
from nodes.tasks import wake  # noqa: E402

_gateway: GatewayApp | None = None


def _is_host_allowed(host: str) -> bool:
    """The hosts that Django answers to are the gateway's, too."""
    domain, _ = split_domain_port(host)
    return validate_host(domain, settings.ALLOWED_HOSTS)


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        await _live(receive, send)
    elif _gateway is not None and scope["type"] == "http" and scope["path"].startswith("/v1/"):
        await _gateway(scope, receive, send)
    elif scope["type"] == "http":
        await _bounded(scope, receive, send)
    else:
        await django(scope, receive, send)


async def _bounded(scope: Scope, receive: Receive, send: Send) -> None:
    """Django keeps a whole body, on disk if need be, before any view may refuse it: so it is counted here."""
    limit, arrived = settings.LLMGW_MAX_BODY_BYTES, 0

    async def counted() -> Message:
        nonlocal arrived
        message = await receive()
        arrived += len(message.get("body", b""))
        return message if arrived <= limit else {"type": "http.disconnect"}

    claimed = dict(scope["headers"]).get(b"content-length", b"0")
    if not claimed.isdigit() or int(claimed) <= limit:
        await django(scope, counted, send)
        if arrived <= limit:
            return
    sentence = f"The request is larger than the {limit} bytes that this server takes; send less."
    body = json.dumps({"errors": [{"field": "", "code": "too_large", "sentence": sentence}]}).encode()
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 413, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _live(receive: Receive, send: Send) -> None:
    global _gateway
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            # Made here, because it belongs to the loop that runs now.
            _gateway = GatewayApp(
                pepper=settings.LLMGW_KEY_PEPPER,
                cluster_keys=settings.LLMGW_CLUSTER_KEYS,
                wake=wake,
                hold_s=settings.LLMGW_HOLD_S,
                stall_s=settings.LLMGW_STALL_S,
                max_body_bytes=settings.LLMGW_MAX_BODY_BYTES,
                poll_s=settings.LLMGW_TABLE_POLL_S,
                is_plain_http_allowed=settings.LLMGW_PLAIN_HTTP,
                is_host_allowed=_is_host_allowed,
            )
            await _gateway.start()
            await send({"type": "lifespan.startup.complete"})
        elif message["type"] == "lifespan.shutdown":
            if _gateway is not None:
                await _gateway.stop()
                _gateway = None
            await send({"type": "lifespan.shutdown.complete"})
            return
