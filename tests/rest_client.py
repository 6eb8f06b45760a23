"""A script with a key, as the tests of /api/ play it."""

from __future__ import annotations

import json
from typing import Any

from django.contrib.auth.models import User
from django.test import Client

from catalog.actions import mint_key


class Api:
    """Answers with the status and what the body holds; `ask` with the whole answer."""

    def __init__(self, user: User, scope: str = "manage", **key: Any) -> None:
        self.client = Client()
        self.key, self.text = mint_key("script", user=user, scope=scope, by="alice", door="command", **key)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        content = body if isinstance(body, (bytes, str)) else json.dumps(body) if body is not None else ""
        return self.client.generic(
            method,
            f"/api/{path}",
            content,
            content_type=headers.pop("content_type", "application/json"),
            headers={"Authorization": f"Bearer {self.text}"} | headers,
        )

    def __call__(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        answer = self.ask(method, path, body, **headers)
        return answer.status_code, json.loads(answer.content) if answer.content else None


def sentence(answer: tuple[int, Any]) -> tuple[int, str]:
    """The status and the first sentence of a refusal."""
    status, body = answer
    assert set(body["errors"][0]) >= {"field", "code", "sentence"}
    return status, body["errors"][0]["sentence"]


def field(answer: tuple[int, Any]) -> tuple[int, str, str]:
    """The status, the field and the code of a refusal."""
    status, body = answer
    return status, body["errors"][0]["field"], body["errors"][0]["code"]
