"""Stands in front of vllm's routes, inside its own process: without the replica's key only /health answers.

vllm itself asks for its key under /v1 and few other paths, and leaves routes open that generate, such as
/invocations. It is given this class as a middleware, imports it from this checkout, and so needs nothing of
the agent's but this file.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

OPEN = frozenset({"/health"})
_JSON = [(b"content-type", b"application/json")]


class Guard:
    """An ASGI middleware. Without a key in the environment nobody has the right one."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._wanted = f"Bearer {os.environ.get('VLLM_API_KEY', '')}".encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope.get("path") in OPEN or self._is_known(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 401, "headers": _JSON})
            await send({"type": "http.response.body", "body": b'{"error":"Unauthorized"}'})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _is_known(self, scope: Message) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(self._wanted) > len(b"Bearer ") and hmac.compare_digest(b"\n".join(given), self._wanted)
