"""The agent's door: HTTP with one token on every route.

Nothing is read of a request before its token is known to be right, and no more than a bounded body after it.
Every refusal is {"error": {"code": ..., "sentence": ...}}.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from catalog.durations import HOUR, SECOND, parse_duration
from nodes.agent.clock import boot_id
from nodes.agent.gpus import Devices
from nodes.agent.inventory import FoundEngine, disk_free_bytes, host_memory_mib
from nodes.agent.paths import look_at
from nodes.agent.ranks import Ranks, Refusal, is_uuid
from nodes.protocol import (
    CLUSTER_HEADER,
    FENCE_HEADER,
    GENERATION_HEADER,
    Assignment,
    ProtocolError,
    StateReport,
    read,
    to_json,
)

log = logging.getLogger("llmgw.agent")

VERSION = "0.1.0"
BODY_LIMIT_BYTES = 1024 * 1024
BODY_TIMEOUT_S = 10
PATHS_LIMIT = 100
TAIL_LINES_LIMIT = 5000
TAIL_BYTES_LIMIT = 1024 * 1024
LONGEST_DRAIN_NS = HOUR

# What changes all the time without meaning much makes no new report of it: each number counts in steps.
_STEPS = {"memory_free_mib": 1024, "disk_free_bytes": 4 << 30, "used_mib": 512, "foreign_mib": 64}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this agent is, and whom it obeys."""

    cluster: str
    node: str
    name: str
    token: str


class Agent:
    def __init__(
        self,
        identity: Identity,
        ranks: Ranks,
        devices: Devices,
        *,
        engines: dict[str, FoundEngine],
        labels: dict[str, str],
        fabric: str,
    ) -> None:
        self.identity, self.ranks, self.devices = identity, ranks, devices
        self.engines, self.labels, self.fabric = engines, labels, fabric
        self._instance = str(uuid.uuid4())
        self._boot_id = boot_id()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=BODY_LIMIT_BYTES, middlewares=[self._guard])
        app.add_routes(
            [
                web.get("/v1/state", self.state),
                web.put("/v1/replicas/{id}", self.assign),
                web.delete("/v1/replicas/{id}", self.release),
                web.get("/v1/replicas/{id}/log", self.log),
                web.post("/v1/paths", self.paths),
            ]
        )
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The token, before a route is even looked up; and every error in one form."""
        given = request.headers.getall("Authorization", [])
        wanted = f"Bearer {self.identity.token}".encode()
        is_known = hmac.compare_digest("\n".join(given).encode("utf-8", "replace"), wanted)
        if not is_known:
            return _error(
                401, "unauthorised", "This node's agent wants its token as a bearer; send that one."
            )
        if request.headers.get("Content-Encoding"):
            return _error(415, "encoding", "The agent takes no encoded bodies; send it plain.")
        try:
            return await handler(request)
        except Refusal as refusal:
            return _error(refusal.status, refusal.code, refusal.sentence)
        except web.HTTPRequestEntityTooLarge:
            return _error(413, "too_large", f"The body is longer than {BODY_LIMIT_BYTES} bytes; send less.")
        except web.HTTPException as error:
            return _error(
                error.status, "no_route", f"The agent has no {request.method} {request.path[:200]}."
            )
        except Exception:
            log.exception("%s %s broke off.", request.method, request.path)
            return _error(500, "agent_fault", "The agent itself failed; its log tells more.")

    # --- routes

    async def state(self, request: web.Request) -> web.Response:
        report = to_json(await self._report())
        meaning = json.dumps(_meaning(report), sort_keys=True)
        etag = f'"{hashlib.sha256(meaning.encode()).hexdigest()[:32]}"'
        if request.headers.get("If-None-Match") == etag:
            return web.Response(status=304, headers={"ETag": etag})
        return _json(report, headers={"ETag": etag})

    async def assign(self, request: web.Request) -> web.Response:
        replica = _replica(request)
        try:
            assignment = read(Assignment, await _body(request))
        except ProtocolError as fault:
            raise Refusal(400, "malformed", f"The assignment cannot be read: {fault}.") from None
        if assignment.replica != replica:
            raise Refusal(400, "malformed", "The assignment is for another replica than its address.")
        return _json(to_json(self.ranks.assign(assignment)))

    async def release(self, request: web.Request) -> web.Response:
        report = self.ranks.release(
            _replica(request),
            cluster=request.headers.get(CLUSTER_HEADER, ""),
            fence=_number(request, FENCE_HEADER),
            generation=_number(request, GENERATION_HEADER),
            drain_s=_drain_s(request.query.get("drain", "0s")),
        )
        return _json(to_json(report))

    async def log(self, request: web.Request) -> web.Response:
        lines = request.query.get("tail", "200")
        if not lines.isdecimal() or not 1 <= int(lines) <= TAIL_LINES_LIMIT:
            raise Refusal(400, "malformed", f"tail must be a number of lines from 1 to {TAIL_LINES_LIMIT}.")
        words = await asyncio.to_thread(self.ranks.log_words, _replica(request), TAIL_BYTES_LIMIT)
        if words is None:
            raise Refusal(404, "unknown_replica", "No engine of this replica has written a log on this node.")
        kept = words.splitlines(keepends=True)[-int(lines) :]
        return web.Response(text="".join(kept), content_type="text/plain", headers=_CAREFUL)

    async def paths(self, request: web.Request) -> web.Response:
        body = await _body(request)
        paths = body.get("paths")
        if (
            not isinstance(paths, list)
            or len(paths) > PATHS_LIMIT
            or not all(isinstance(each, str) for each in paths)
        ):
            raise Refusal(400, "malformed", f"paths must be a list of at most {PATHS_LIMIT} texts.")
        found = await asyncio.to_thread(lambda: [to_json(look_at(path)) for path in paths])
        return _json({"paths": found})

    async def _report(self) -> StateReport:
        host = self.ranks.host
        groups = {rank.pid for rank in self.ranks.reports() if rank.pid is not None}

        def look() -> tuple[Any, ...]:
            """In a thread: a driver or a network's disk may take its time, and engines are watched here."""
            return (
                self.devices.read(groups),
                host_memory_mib(),
                disk_free_bytes(host.store),
                host.state.held_weights(),
            )

        gpus, (total_mib, free_mib), disk_bytes, weights = await asyncio.to_thread(look)
        return StateReport(
            cluster=self.identity.cluster,
            node=self.identity.node,
            agent_version=VERSION,
            boot_id=self._boot_id,
            instance=self._instance,
            gpus=gpus,
            engines=tuple(engine.report for engine in self.engines.values()),
            labels=self.labels,
            fabric=self.fabric,
            memory_total_mib=total_mib,
            memory_free_mib=free_mib,
            disk_free_bytes=disk_bytes,
            weights=tuple(weights),
            ranks=tuple(self.ranks.reports()),
        )


_CAREFUL = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


def _json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=json.dumps(value).encode(),
        status=status,
        content_type="application/json",
        headers={**_CAREFUL, **(headers or {})},
    )


def _error(status: int, code: str, sentence: str) -> web.Response:
    return _json({"error": {"code": code, "sentence": sentence}}, status)


def _meaning(value: Any, name: str = "") -> Any:
    if isinstance(value, dict):
        return {key: _meaning(item, key) for key, item in value.items() if key != "age_s"}
    if isinstance(value, list):
        return [_meaning(item) for item in value]
    return value // _STEPS[name] if name in _STEPS else value


def _replica(request: web.Request) -> str:
    replica = request.match_info["id"]
    if not is_uuid(replica):
        raise Refusal(400, "malformed", "A replica is named by its UUID in lower case, with dashes.")
    return replica


def _number(request: web.Request, header: str) -> int:
    text = request.headers.get(header, "")
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise Refusal(400, "malformed", f"The header {header} must be a whole number.")
    return int(text)


def _drain_s(text: str) -> float:
    try:
        drain_ns = parse_duration(text)
    except ValueError as error:
        raise Refusal(400, "malformed", f"drain {error}.") from None
    if not 0 <= drain_ns <= LONGEST_DRAIN_NS:
        raise Refusal(400, "malformed", "drain must be a duration from 0s to 1h.")
    return drain_ns / SECOND


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            body = json.loads(await request.read())
    except TimeoutError:
        sentence = f"The body did not arrive within {BODY_TIMEOUT_S} s; send it faster."
        raise Refusal(408, "too_slow", sentence) from None
    except (ValueError, RecursionError):
        raise Refusal(400, "malformed", "The body is not JSON; send a JSON object.") from None
    if not isinstance(body, dict):
        raise Refusal(400, "malformed", "The body is not a JSON object; send one.")
    return body
