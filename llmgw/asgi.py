"""What the web server runs: /v1/ goes to the gateway, everything else to Django.

`uvicorn llmgw.asgi:application`. The gateway lives from the server's start-up to its shutdown.
"""

from __future__ import annotations

import os
from typing import Any

from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "llmgw.settings")
django: Any = get_asgi_application()

# Only now: they use models, which are there once Django is.
from django.conf import settings  # noqa: E402

from llmgw.gateway.app import GatewayApp, Receive, Scope, Send  # noqa: E402
from nodes.tasks import wake  # noqa: E402

_gateway: GatewayApp | None = None


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        await _live(receive, send)
    elif _gateway is not None and scope["type"] == "http" and scope["path"].startswith("/v1/"):
        await _gateway(scope, receive, send)
    else:
        await django(scope, receive, send)


async def _live(receive: Receive, send: Send) -> None:
    global _gateway
    while True:
        message = await receive()
        if message["type"] == "lifespan.startup":
            # Made here, because it belongs to the loop that runs now.
            _gateway = GatewayApp(
                pepper=settings.LLMGW_KEY_PEPPER,
                cluster_key=settings.LLMGW_CLUSTER_KEYS[0],
                wake=wake,
                hold_s=settings.LLMGW_HOLD_S,
                max_body_bytes=settings.LLMGW_MAX_BODY_BYTES,
                poll_s=settings.LLMGW_TABLE_POLL_S,
                is_plain_http_allowed=settings.LLMGW_PLAIN_HTTP,
            )
            await _gateway.start()
            await send({"type": "lifespan.startup.complete"})
        elif message["type"] == "lifespan.shutdown":
            if _gateway is not None:
                await _gateway.stop()
                _gateway = None
            await send({"type": "lifespan.shutdown.complete"})
            return
