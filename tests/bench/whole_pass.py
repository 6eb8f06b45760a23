"""A cluster in the database and its agents on the wire, and the time that a pass takes which finds nothing to
do. For `tests.bench.passes`, which sets Django up first.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

from django.db import connection
from django.test.utils import CaptureQueriesContext

from catalog.models import Model, Name, Profile
from nodes.models import Claim, Node, Rank, Replica
from nodes.plan import plan
from nodes.protocol import READY, to_json
from nodes.reconcile import run_pass
from tests.bench import plan as planned

ROUNDS = 5  # of which the fastest counts: the others met a neighbour
ETAG = '"as before"'


def measure(nodes: int) -> dict[str, Any]:
    """In the database of this process, which is empty at first."""
    with agents() as address:
        replicas = fill(nodes, address)
        assert run_pass("bench") is not None, "the first pass ran"
        took_s = []
        for _ in range(ROUNDS):
            began_s = time.perf_counter()
            report = run_pass("bench")
            took_s.append(time.perf_counter() - began_s)
            assert report is not None
            assert not report.has_changed, "nothing was to do"
            assert not report.told
        queries = min(_queries_of_a_pass(), _queries_of_a_pass())  # once a minute, a pass writes samples
    return {"nodes": nodes, "replicas": replicas, "pass_s": round(min(took_s), 3), "queries": queries}


def _queries_of_a_pass() -> int:
    with CaptureQueriesContext(connection) as captured:
        run_pass("bench")
    return len(captured)


def fill(nodes: int, address: str) -> int:
    """The cluster of the plan's bench, all of it placed and ready; how many replicas that is."""
    cluster = planned.empty_cluster(nodes)
    decision = plan(cluster)
    placed: dict[int, int] = {}
    for start in decision.start:
        placed[start.model] = placed.get(start.model, 0) + 1
    node_rows = Node.objects.bulk_create(
        Node(name=node.name, address=address, report=to_json(node.report), etag=ETAG)
        for node in cluster.nodes
    )
    by_number = {node.id: row for node, row in zip(cluster.nodes, node_rows, strict=True)}
    models = {}
    for model in cluster.models:
        count = placed.get(model.id, 0)
        row = Model(name=model.spec.name, source=model.spec.source, scaling_min=count, scaling_max=count)
        models[model.id] = row
    Model.objects.bulk_create(models.values())
    Name.objects.bulk_create(Name(name=row.name, model=row, is_canonical=True) for row in models.values())
    profiles = {}
    for model in cluster.models:
        (profile,) = model.spec.profiles
        values = profile.as_dict()
        values["startup_timeout_ns"] = values.pop("startup_timeout")
        profiles[model.id] = Profile(model=models[model.id], fingerprint=profile.fingerprint(), **values)
    Profile.objects.bulk_create(profiles.values())
    replicas = [
        Replica(
            id=UUID(int=number + 1),
            model=models[start.model],
            profile=profiles[start.model],
            launch=to_json(start.launch),
            fingerprint=start.launch.fingerprint,
            state=READY,
        )
        for number, start in enumerate(decision.start)
    ]
    Replica.objects.bulk_create(replicas)
    pairs = [
        (Rank(replica=replica, node=by_number[place.node], state=READY, running=1, waiting=0), place.gpus)
        for replica, start in zip(replicas, decision.start, strict=True)
        for place in start.places
    ]
    Rank.objects.bulk_create(rank for rank, _ in pairs)
    Claim.objects.bulk_create(
        Claim(rank=rank, node_id=rank.node_id, gpu=gpu) for rank, gpus in pairs for gpu in gpus
    )
    return len(replicas)


class _Unchanged(asyncio.Protocol):
    """An agent whose state is as before."""

    ANSWER = f"HTTP/1.1 304 Not Modified\r\nETag: {ETAG}\r\n\r\n".encode()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.heard = transport, b""

    def data_received(self, data: bytes) -> None:
        self.heard += data
        if self.heard.endswith(b"\r\n\r\n"):
            self.heard = b""
            self.transport.write(self.ANSWER)


@contextmanager
def agents() -> Iterator[str]:
    """Where all of them answer."""
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(loop.create_server(_Unchanged, "127.0.0.1", 0, backlog=1_024))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(server.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)
        loop.close()
