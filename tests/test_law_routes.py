"""Deny by default: every route of control plane, gateway and agent wants a credential, short list apart."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver

from llmgw import asgi
from llmgw.gateway.probes import PATHS, Probes
from llmgw.gateway.surface import ENDPOINTS
from nodes.agent.app import Agent

OPEN = {"/healthz", "/readyz", "/admin/login/"}
"""Static files beside these: they are served before any route, and they hold nothing of anybody. Who balances
loads asks /readyz, and learns whether to send more."""

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
SAMPLES = {
    "int": "1",
    "str": "x",
    "slug": "x",
    "path": "x",
    "uuid": "6f2c1f0e-58f5-4b6c-8d0c-1f6a3a2b9c11",
}


def _paths(resolver: URLResolver, before: str = "/") -> Iterator[str]:
    for pattern in resolver.url_patterns:
        path = before + _sample(str(pattern.pattern))
        if isinstance(pattern, URLResolver):
            yield from _paths(pattern, path)
        elif isinstance(pattern, URLPattern):
            yield path


def _sample(pattern: str) -> str:
    """A path that the pattern matches: `<int:pk>/`, or a regular expression as the admin's last one is."""
    path = re.sub(r"<(?:(\w+):)?\w+>", lambda found: SAMPLES[found[1] or "str"], pattern)
    path = re.sub(r"\(\?P?<?\w*>?[^)]*\)", "x", path).removesuffix(r"\Z")
    return path.strip("^$").replace("/?", "/")


CONTROL_PLANE = sorted(set(_paths(get_resolver())) - OPEN)


def test_the_walk_finds_the_doors() -> None:
    assert {
        "/admin/",
        "/admin/catalog/model/",
        "/admin/nodes/replica/",
        "/api/models/",
        "/api/keys/x/",
        "/api/replicas/",
        "/api/schema/",
    } <= {*CONTROL_PLANE}


@pytest.mark.django_db
@pytest.mark.one_database
@pytest.mark.parametrize("path", CONTROL_PLANE)
def test_the_control_plane_wants_to_know_who_asks(path: str) -> None:
    client = Client()
    for method in METHODS:
        answer = client.generic(method, path, b"{}", content_type="application/json")
        if answer.status_code == 302:
            assert answer.headers["Location"].startswith(("/admin/login/", "/admin/")), f"{method} {path}"
        else:
            assert answer.status_code in (401, 403), f"{method} {path} answered {answer.status_code}"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer llmgw_aaaaaaaa_" + "a" * 38},
        {"Authorization": "Basic YWRtaW46YWRtaW4="},
    ],
    ids=["no key", "an empty key", "a key with a wrong checksum", "a password"],
)
@pytest.mark.parametrize(
    "path", [*ENDPOINTS, "/v1/models", "/v1/models/x", "/v1/", "/v1/metrics", "/v1/../x", *PATHS]
)
async def test_the_gateway_wants_a_key(path: str, headers: dict[str, str]) -> None:
    gateway = asgi.make_gateway()
    app = Probes(gateway, is_draining=lambda: False) if path in PATHS else gateway
    for method in METHODS:
        status = await _status(app, method, path, headers)
        assert status == 401 or path in OPEN, method


async def _status(app: asgi.App, method: str, path: str, headers: dict[str, str]) -> int:
    scope = {
        "type": "http",
        "scheme": "http",
        "method": method,
        "path": path,
        "query_string": b"",
        "headers": [
            (b"host", b"localhost"),
            *((name.lower().encode(), value.encode()) for name, value in headers.items()),
        ],
    }
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    status: int = sent[0]["status"]
    return status


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer "}, {"Authorization": "Bearer another"}, {"Authorization": "token"}],
    ids=["no token", "an empty token", "a wrong token", "the token without its scheme"],
)
async def test_the_agent_wants_its_token(headers: dict[str, str]) -> None:
    # Nothing is behind its doors: whoever got in would be answered 500.
    nothing: Any = None
    app = Agent(nothing, nothing, token="token").app()
    routes = [(route.method, route.resource.canonical) for route in app.router.routes() if route.resource]
    assert ("PUT", "/v1/replicas/{id}") in routes
    async with TestClient(TestServer(app)) as client:
        for method, path in [*routes, ("GET", "/"), ("POST", "/v1/state"), ("GET", "/healthz")]:
            answer = await client.request(method, path.replace("{id}", SAMPLES["uuid"]), headers=headers)
            assert answer.status == 401, f"{method} {path}"
