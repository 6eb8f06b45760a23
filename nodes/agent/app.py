"""The agent's door: HTTP with one token on every route.

Nothing is read of a request before its token is known to be right, and no more than a bounded body after it.
Every refusal is {"error": {"code": ..., "sentence": ...}}.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from aiohttp import web

from catalog.durations import HOUR, SECOND, parse_duration
from nodes.agent.clock import now_s
from nodes.agent.figures import families
from nodes.agent.host import Host
from nodes.agent.judging import Refusal
from nodes.agent.logs import Follower
from nodes.agent.paths import look_at
from nodes.agent.ranks import Ranks
from nodes.agent.report import node_report
from nodes.agent.state import is_uuid
from nodes.agent.weights.sources import FetchError
from nodes.agent.weights.store import StoreError
from nodes.exposition import CONTENT_TYPE, written
from nodes.protocol import (
    CLOCK_HEADER,
    CLUSTER_HEADER,
    FENCE_HEADER,
    GENERATION_HEADER,
    INSTANCE_HEADER,
    Assignment,
    ProtocolError,
    StateReport,
    WeightsOrder,
    read,
    to_json,
)
from nodes.tickets import opens

log = logging.getLogger("llmgw.agent")

BODY_LIMIT_BYTES = 1024 * 1024
BODY_TIMEOUT_S = 10
PATHS_LIMIT = 100
TAIL_LINES_LIMIT = 5000
TAIL_BYTES_LIMIT = 1024 * 1024
FOLLOWERS_LIMIT = 16
READERS_LIMIT = 16  # other nodes that read weights at the same time
FOLLOW_POLL_S = 0.25
LONGEST_FOLLOW_S = 3600.0  # who wants more asks again
LONGEST_DRAIN_NS = HOUR
COUNT_LIMIT = 10**9

# What changes all the time without meaning much makes no new report of it: each number counts in steps.
_STEPS = {
    "memory_free_mib": 1024,
    "disk_free_bytes": 4 << 30,
    "room_bytes": 4 << 30,
    "used_mib": 512,
    "foreign_mib": 64,
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Agent:
    def __init__(self, host: Host, ranks: Ranks, *, token: str) -> None:
        self._host, self.ranks, self._token = host, ranks, token
        self._followers = self._readers = 0
        self._time: tuple[int, float] | None = None  # of the control plane, and when it was told

    def app(self) -> web.Application:
        app = web.Application(client_max_size=BODY_LIMIT_BYTES, middlewares=[self._guard])
        app.add_routes(
            [
                web.get("/metrics", self.metrics),
                web.get("/v1/state", self.state),
                web.put("/v1/replicas/{id}", self.assign),
                web.delete("/v1/replicas/{id}", self.release),
                web.get("/v1/replicas/{id}/log", self.log),
                web.post("/v1/paths", self.paths),
                web.post("/v1/weights", self.fetch_weights),
                web.delete("/v1/weights/{key}", self.remove_weights),
                web.get("/v1/weights/{key}", self.weights),
                web.get("/v1/weights/{key}/{file:.+}", self.weights_file),
            ]
        )
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The token, before a route is even looked up; and every error in one form."""
        given = request.headers.getall("Authorization", [])
        wanted = f"Bearer {self._token}".encode()
        is_known = hmac.compare_digest("\n".join(given).encode("utf-8", "replace"), wanted)
        if not is_known and not self._has_ticket(request, given):
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

    def _has_ticket(self, request: web.Request, given: Sequence[str]) -> bool:
        """Of another node, for the weights that it asks for."""
        is_for_peers = request.match_info.handler in (self.weights, self.weights_file)
        if not is_for_peers or len(given) != 1 or self._time is None:
            return False
        told_s, at_s = self._time
        ticket, key = given[0].removeprefix("Bearer "), request.match_info["key"]
        return opens(ticket, token=self._token, key=key, now_s=told_s + now_s() - at_s)

    # --- routes

    async def state(self, request: web.Request) -> web.Response:
        if request.headers.get(CLOCK_HEADER):
            self._time = (_number(request, CLOCK_HEADER), now_s())
        report = to_json(await self._report())
        meaning = json.dumps(_meaning(report), sort_keys=True)
        etag = f'"{hashlib.sha256(meaning.encode()).hexdigest()[:32]}"'
        if request.headers.get("If-None-Match") == etag:
            return web.Response(status=304, headers={"ETag": etag})
        return _json(report, headers={"ETag": etag})

    async def metrics(self, request: web.Request) -> web.Response:
        """For Prometheus; the control plane asks for it with this node's token."""
        told = written(families(await self._report(), self.ranks.alive()))
        return web.Response(body=told.encode("utf-8"), headers={**_CAREFUL, "Content-Type": CONTENT_TYPE})

    async def assign(self, request: web.Request) -> web.Response:
        replica = _replica(request)
        self._judge_instance(request)
        try:
            assignment = read(Assignment, await _body(request))
        except ProtocolError as fault:
            raise Refusal(400, "malformed", f"The assignment cannot be read: {fault}.") from None
        if assignment.replica != replica:
            raise Refusal(400, "malformed", "The assignment is for another replica than its address.")
        return _json(to_json(self.ranks.assign(assignment)))

    async def release(self, request: web.Request) -> web.Response:
        self._judge_instance(request)
        report = self.ranks.release(
            _replica(request),
            cluster=request.headers.get(CLUSTER_HEADER, ""),
            fence=_number(request, FENCE_HEADER),
            generation=_number(request, GENERATION_HEADER),
            drain_s=_drain_s(request.query.get("drain", "0s")),
        )
        return _json(to_json(report))

    def _judge_instance(self, request: web.Request) -> None:
        """What follows from what another agent of this node said is not for this one."""
        if request.headers.get(INSTANCE_HEADER, self._host.state.instance) != self._host.state.instance:
            sentence = "Another agent of this node was looked at than the one that is told; look again first."
            raise Refusal(409, "instance", sentence)

    async def log(self, request: web.Request) -> web.StreamResponse:
        replica = _replica(request)
        lines = _count(request, "tail", "200", TAIL_LINES_LIMIT)
        attempt = _count(request, "attempt", "1", COUNT_LIMIT) if "attempt" in request.query else None
        is_followed = _count(request, "follow", "0", 1, least=0) == 1
        found = await asyncio.to_thread(self.ranks.follower, replica, attempt)
        if found is None:
            which = "engine" if attempt is None else f"attempt {attempt}"
            sentence = f"No {which} of this replica has written a log on this node."
            raise Refusal(404, "unknown_replica", sentence)
        number, follower = found
        told = await asyncio.to_thread(follower.begin, lines, TAIL_BYTES_LIMIT)
        if is_followed:
            return await self._follow(request, told, follower, lambda: self.ranks.is_writing(replica, number))
        is_over = not self.ranks.is_writing(replica, number)
        told += await asyncio.to_thread(follower.more, is_over=is_over)
        kept = told.splitlines(keepends=True)[-lines:]
        return web.Response(text="".join(kept), content_type="text/plain", headers=_CAREFUL)

    async def _follow(
        self, request: web.Request, told: str, follower: Follower, is_writing: Callable[[], bool]
    ) -> web.StreamResponse:
        """What is there and what is written from now on, until its engine is over or the reader goes."""
        if self._followers >= FOLLOWERS_LIMIT:
            sentence = f"{FOLLOWERS_LIMIT} logs are followed on this node already; end one of these first."
            raise Refusal(429, "followers", sentence)
        self._followers += 1
        try:
            response = web.StreamResponse(headers={**_CAREFUL, "Content-Type": "text/plain; charset=utf-8"})
            await response.prepare(request)
            until_s = now_s() + LONGEST_FOLLOW_S
            with contextlib.suppress(ConnectionError):
                await response.write(told.encode())
                while now_s() < until_s and not _has_left(request):
                    is_over = not is_writing()
                    told = await asyncio.to_thread(follower.more, is_over=is_over)
                    await response.write(told.encode())
                    if not told and is_over:
                        break
                    if not told:
                        await asyncio.sleep(FOLLOW_POLL_S)
                await response.write_eof()
            return response
        finally:
            self._followers -= 1

    async def paths(self, request: web.Request) -> web.Response:
        body = await _body(request)
        paths = body.get("paths")
        if (
            not isinstance(paths, list)
            or len(paths) > PATHS_LIMIT
            or not all(isinstance(each, str) for each in paths)
        ):
            raise Refusal(400, "malformed", f"paths must be a list of at most {PATHS_LIMIT} texts.")
        roots = self._host.configuration.roots
        found = await asyncio.to_thread(lambda: [to_json(look_at(path, roots)) for path in paths])
        return _json({"paths": found})

    async def fetch_weights(self, request: web.Request) -> web.Response:
        try:
            order = read(WeightsOrder, await _body(request))
        except ProtocolError as fault:
            raise Refusal(400, "malformed", f"The order cannot be read: {fault}.") from None
        self._judge_cluster(order.cluster)
        if order.launch.engine not in self._host.engines:
            sentence = f"The engine {order.launch.engine} is not on this node; fetch onto one that has it."
            raise Refusal(422, "engine_absent", sentence)
        try:
            self._host.fetches.fetch_ahead(order)
        except FetchError as error:
            raise Refusal(422, error.cause.cause, error.cause.sentence) from None
        except OSError as error:
            raise Refusal(507, "disk_full", self._host.state.no_room(error)) from None
        return _json({}, 202)

    async def remove_weights(self, request: web.Request) -> web.Response:
        self._judge_cluster(request.headers.get(CLUSTER_HEADER, ""))
        try:
            given_back = await self._host.fetches.remove(request.match_info["key"])
        except StoreError as error:
            raise Refusal(409, "weights", str(error)) from None
        return _json({"given_back_bytes": given_back})

    def _judge_cluster(self, cluster: str) -> None:
        if cluster != self.ranks.cluster:
            sentence = "This node belongs to another cluster; remove it from this one, or join it anew."
            raise Refusal(409, "cluster", sentence)

    async def weights(self, request: web.Request) -> web.Response:
        shared = await asyncio.to_thread(self._host.fetches.shared, request.match_info["key"])
        if shared is None:
            raise Refusal(404, "unknown_weights", "These weights are not on this node; ask another.")
        return _json(to_json(shared))

    async def weights_file(self, request: web.Request) -> web.StreamResponse:
        """By the kernel, from the disk to the wire."""
        if self._readers >= READERS_LIMIT:
            sentence = f"{READERS_LIMIT} files are read from this node already; ask again, or another node."
            raise Refusal(429, "readers", sentence)
        key, name = request.match_info["key"], request.match_info["file"]
        handle = await asyncio.to_thread(self._host.fetches.store.open_file, key, name)
        if handle is None:
            raise Refusal(404, "unknown_weights", "This file is not whole on this node; ask another.")
        self._readers += 1
        try:
            response = web.FileResponse(
                f"/proc/self/fd/{handle}", headers={**_CAREFUL, "Content-Type": "application/octet-stream"}
            )
            await response.prepare(request)
            return response
        finally:
            self._readers -= 1
            os.close(handle)

    async def _report(self) -> StateReport:
        host = self._host
        groups = self.ranks.groups()

        def look() -> StateReport:
            """In a thread: engines are watched here meanwhile."""
            report = node_report(host.configuration, host.devices, host.engines, groups=groups)
            return replace(
                report,
                instance=host.state.instance,
                follows=host.state.follows,
                room_bytes=host.fetches.room_bytes(),
                weights=tuple(host.state.held_weights()),
                holdings=tuple(host.fetches.reports()),
            )

        return replace(await asyncio.to_thread(look), ranks=tuple(self.ranks.reports()))


def _has_left(request: web.Request) -> bool:
    """Whoever reads: writing nothing would not tell."""
    return request.transport is None or request.transport.is_closing()


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


def _count(request: web.Request, name: str, default: str, most: int, *, least: int = 1) -> int:
    text = request.query.get(name, default)
    if not (text.isascii() and text.isdecimal() and len(text) <= 10 and least <= int(text) <= most):
        raise Refusal(400, "malformed", f"{name} must be a whole number from {least} to {most}.")
    return int(text)


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
