"""The far side of the wire: a node's agent that runs nothing, speaks the protocol, and misbehaves on request.

It is a real HTTP server in a thread. Tests say what its node has and what becomes of its ranks; it keeps all
requests, so that they can also say what nobody asked of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from nodes.actions import register_node
from nodes.agent.figures import families
from nodes.exposition import written
from nodes.protocol import (
    CLOCK_HEADER,
    CLUSTER_HEADER,
    DRAINING,
    FENCE_HEADER,
    GENERATION_HEADER,
    INSTANCE_HEADER,
    READY,
    STOPPED,
    Assignment,
    EngineReport,
    GpuReport,
    RankReport,
    StateReport,
    WeightsOrder,
    WeightsReport,
    read,
    to_json,
)


def gpus(count: int, gpu_class: str = "sim") -> tuple[GpuReport, ...]:
    return tuple(GpuReport(f"GPU-{gpu_class}-{index}", index, gpu_class=gpu_class) for index in range(count))


@dataclass
class FakeAgent:
    """`requests` are (method, path) in order. `hangs_up`: how many commands end in a closed connection."""

    cluster: str = ""
    node: str = ""
    token: str = ""
    gpus: tuple[GpuReport, ...] = field(default_factory=lambda: gpus(2))
    engines: tuple[str, ...] = ("sim",)
    fabric: str = ""
    runs_gangs: bool = False
    boot_id: str = ""
    instance: str = ""
    follows: tuple[str, ...] = ()
    paths: dict[str, dict[str, Any]] = field(default_factory=dict)
    first_state: str = READY
    hangs_up: int = 0
    refuses: tuple[int, str, str] | None = None
    state_body: bytes | None = None
    state_etag: bytes = b""
    metrics: str = ""
    lies_in_answers: bool = False
    state_delay_s: float = 0.0
    is_deaf: bool = False
    is_deaf_to_commands: bool = False
    stops_slowly: bool = False
    before_state: Callable[[], None] | None = None
    before_command: Callable[[], None] | None = None
    holdings: tuple[WeightsReport, ...] = ()
    weights_orders: list[WeightsOrder] = field(default_factory=list)
    clock: str = ""
    ranks: dict[str, RankReport] = field(default_factory=dict)
    assignments: dict[str, Assignment] = field(default_factory=dict)
    tombstones: set[str] = field(default_factory=set)
    requests: list[tuple[str, str]] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    fence: int = 0
    address: str = ""

    def serve(self, node: Any, identity: dict[str, Any]) -> None:
        """Be the agent of this node."""
        self.node, self.cluster, self.token = str(node.uuid), identity["cluster"], identity["token"]

    def become(self, replica: object, state: str, **columns: Any) -> None:
        self.ranks[str(replica)] = dataclasses.replace(self.ranks[str(replica)], state=state, **columns)

    def commands(self) -> list[tuple[str, str]]:
        return [request for request in self.requests if request[0] in ("PUT", "DELETE")]

    def report(self) -> StateReport:
        return StateReport(
            cluster=self.cluster,
            node=self.node,
            gpus=self.gpus,
            engines=tuple(EngineReport(name) for name in self.engines),
            fabric=self.fabric,
            runs_gangs=self.runs_gangs,
            boot_id=self.boot_id,
            instance=self.instance,
            follows=self.follows,
            holdings=self.holdings,
            ranks=tuple(self.ranks.values()),
        )

    # --- the server

    @web.middleware
    async def _note(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        self.requests.append((request.method, request.path))
        is_command = request.method in ("PUT", "DELETE")
        if self.is_deaf or (is_command and (self.hangs_up or self.is_deaf_to_commands)):
            self.hangs_up = max(0, self.hangs_up - 1)
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            response: web.StreamResponse = _refusal(401, "unauthorized", "This needs the node's token.")
        elif request.headers.get(INSTANCE_HEADER, self.instance) != self.instance:
            response = _refusal(409, "instance", "Another agent of this node was looked at.")
        elif self.before_command and is_command:
            await asyncio.to_thread(self.before_command)
            response = await handler(request)
        elif self.refuses and is_command:
            response = _refusal(*self.refuses)
        else:
            response = await handler(request)
        self.statuses.append(response.status)
        return response

    async def _fetch_weights(self, request: web.Request) -> web.Response:
        self.weights_orders.append(read(WeightsOrder, await request.json()))
        return web.json_response({}, status=202)

    async def _remove_weights(self, request: web.Request) -> web.Response:
        assert request.headers[CLUSTER_HEADER] == self.cluster
        found = next((each for each in self.holdings if each.key == request.match_info["key"]), None)
        if found is None or found.is_used:
            return _refusal(409, "weights", "These are used here.")
        self.holdings = tuple(each for each in self.holdings if each is not found)
        return web.json_response({})

    async def _state(self, request: web.Request) -> web.Response:
        self.clock = request.headers.get(CLOCK_HEADER, "")
        await asyncio.sleep(self.state_delay_s)
        if self.before_state:
            await asyncio.to_thread(self.before_state)
        if self.state_etag:  # as no library would send it
            body = json.dumps(to_json(self.report())).encode()
            head = b"HTTP/1.1 200 OK\r\nETag: %b\r\nContent-Length: %d\r\n\r\n" % (self.state_etag, len(body))
            assert request.transport is not None
            request.transport.write(head + body)
            request.transport.close()
            return web.Response()
        if self.state_body is not None:
            return web.Response(body=self.state_body, content_type="application/json")
        raw = to_json(self.report())
        ageless = [
            {key: item for key, item in rank.items() if key != "age_s"} for rank in raw.get("ranks", ())
        ]
        etag = f'"{hashlib.sha256(json.dumps({**raw, "ranks": ageless}).encode()).hexdigest()[:16]}"'
        if request.headers.get("If-None-Match") == etag:
            return web.Response(status=304, headers={"ETag": etag})
        return web.json_response(raw, headers={"ETag": etag})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics or written(families(self.report(), [])))

    async def _put(self, request: web.Request) -> web.Response:
        assignment = read(Assignment, await request.json())
        if assignment.fence < self.fence:
            says = f"The command is older ({assignment.fence}) than one obeyed here ({self.fence})."
            return _refusal(409, "fence", says)
        if assignment.replica in self.tombstones:
            return _refusal(410, "deleted", "This replica was stopped here.")
        self.fence = assignment.fence
        self.assignments[assignment.replica] = assignment
        known = self.ranks.get(assignment.replica)
        if known is None or known.generation < assignment.generation:
            self.ranks[assignment.replica] = RankReport(
                assignment.replica,
                assignment.generation,
                assignment.rank,
                self.first_state,
                port=18000 + len(self.assignments),
                pid=4000 + len(self.assignments),
                gpus=tuple(assignment.gpus),
                launch=assignment.launch,
                meeting=f"127.0.0.1:{19000 + len(self.assignments)}" if self._is_met(assignment) else "",
            )
        answer = to_json(self.ranks[assignment.replica])
        return web.json_response(answer | {"generation": 2**40} if self.lies_in_answers else answer)

    @staticmethod
    def _is_met(assignment: Assignment) -> bool:
        return assignment.rank == 0 and assignment.launch.profile.get("nodes", 1) > 1

    async def _delete(self, request: web.Request) -> web.Response:
        replica = request.match_info["id"]
        assert request.headers[GENERATION_HEADER]
        self.fence = max(self.fence, int(request.headers[FENCE_HEADER]))
        self.tombstones.add(replica)
        if replica not in self.ranks:
            return _refusal(404, "unknown", "No such replica runs here.")
        if self.stops_slowly:
            self.become(replica, DRAINING)
        else:
            self.become(replica, STOPPED, port=None, pid=None)
        return web.json_response(to_json(self.ranks[replica]))

    async def _log(self, request: web.Request) -> web.Response:
        if request.match_info["id"] not in self.ranks:
            return _refusal(404, "unknown", "No such replica runs here.")
        return web.Response(text=f"the last {request.query['tail']} lines")

    async def _paths(self, request: web.Request) -> web.Response:
        asked = (await request.json())["paths"]
        return web.json_response(
            {"paths": [{"path": path, "exists": False} | self.paths.get(path, {}) for path in asked]}
        )

    @contextlib.contextmanager
    def running(self) -> Iterator[FakeAgent]:
        app = web.Application(middlewares=[self._note])
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/state", self._state)
        app.router.add_put("/v1/replicas/{id}", self._put)
        app.router.add_delete("/v1/replicas/{id}", self._delete)
        app.router.add_get("/v1/replicas/{id}/log", self._log)
        app.router.add_post("/v1/paths", self._paths)
        app.router.add_post("/v1/weights", self._fetch_weights)
        app.router.add_delete("/v1/weights/{key}", self._remove_weights)
        loop = asyncio.new_event_loop()
        runner = web.AppRunner(app, shutdown_timeout=0.1)

        async def start() -> None:
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()

        loop.run_until_complete(start())
        self.address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(5)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(5)
            loop.close()


def joining(stack: contextlib.ExitStack) -> Callable[..., FakeAgent]:
    """Makes agents that serve until the stack unwinds, each of a node that it registers."""

    def join(name: str = "node-a", **has: Any) -> FakeAgent:
        agent = stack.enter_context(FakeAgent(**has).running())
        agent.serve(*register_node(name, agent.address, by="ann", door="command"))
        return agent

    return join


def _refusal(status: int, code: str, sentence: str) -> web.Response:
    return web.json_response({"error": {"code": code, "sentence": sentence}}, status=status)
