"""A cluster in the database with 30 days of samples, and the time that its pages take. For
`tests.bench.pages`, which sets Django up first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import islice
from typing import Any

from django.contrib.auth.models import User
from django.db import connection
from django.db.models.functions import Now
from django.test import Client, override_settings
from django.test.utils import CaptureQueriesContext

from catalog.models import Model, database_now
from nodes.models import Node, Replica, Sample, Traffic
from nodes.sampling import CLUSTER, DAY_S, HOUR_S, MINUTE_S, MODEL, NODE, Packed, floor, pack
from nodes.tallies import Tally
from nodes.usage import KEEP_TRAFFIC
from tests.bench.whole_pass import fill

ROUNDS = 5
DAYS = 30
BATCH = 2_000
_NOBODY = "http://127.0.0.1:9"
_STEADY = {"gpus": 8, "gpu_total_mib": 655_360, "host_total_mib": 1_048_576, "nodes": 1, "nodes_fresh": 1}
_MOVING = ("gpus_used", "gpu_mib", "host_mib", "running", "waiting", "ready", "coming", "lost", "missing")


def measure(nodes: int, *, days: int = DAYS, rounds: int = ROUNDS) -> dict[str, Any]:
    """In the database of this process, which is empty at first. The fastest of so many rounds counts: others
    met a neighbour. cpu_ms is of this process alone, without its database's where that is another."""
    replicas = fill(nodes, _NOBODY)
    Node.objects.update(seen_at=Now())
    now = database_now()
    remember(now, days)
    client = Client()
    client.force_login(User.objects.create_superuser("bench"))
    with override_settings(ALLOWED_HOSTS=["testserver"]):
        pages = {path: _took(client, path, rounds) for path in _paths()}
    return {"nodes": nodes, "replicas": replicas, "samples": Sample.objects.count(), "pages": pages}


def _paths() -> Iterator[str]:
    model, node = Model.objects.order_by("pk")[0], Node.objects.order_by("pk")[0]
    replica = Replica.objects.order_by("pk")[0]
    yield from ("/admin/", "/api/overview", "/admin/catalog/model/", "/admin/nodes/node/")
    yield f"/admin/catalog/model/{model.pk}/change/"
    yield f"/admin/nodes/node/{node.pk}/change/"
    yield f"/admin/nodes/replica/{replica.pk}/change/"
    for span in ("1h", "24h", "30d"):
        for subject in ("/api/series", f"/api/models/{model.name}/series", f"/api/nodes/{node.name}/series"):
            yield f"{subject}?span={span}"


def _took(client: Client, path: str, rounds: int) -> dict[str, Any]:
    took_s = []
    for _ in range(rounds):
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        answer = client.get(path)
        took_s.append((time.perf_counter() - began_s, time.process_time() - began_cpu_s))
        assert answer.status_code == 200, f"{path}: {answer.status_code}"
    with CaptureQueriesContext(connection) as captured:
        client.get(path)
    ms, cpu_ms = (round(min(each) * 1_000, 1) for each in zip(*took_s, strict=True))
    return {"ms": ms, "cpu_ms": cpu_ms, "queries": len(captured), "kb": round(len(answer.content) / 1_000, 1)}


# --- what was sampled -----------------------------------------------------------------------------


def remember(now: datetime, days: int = DAYS) -> None:
    """Samples of every node and model, and the traffic of every model, for so many days. One subject's rows
    are made here, and copied to the others where they are."""
    _create(Sample, _samples(now, days))
    _create(Traffic, _traffic(now, days))
    with connection.cursor() as cursor:
        for kind, table in ((NODE, "nodes_node"), (MODEL, "catalog_model")):
            cursor.execute(
                "INSERT INTO nodes_sample (kind, subject, step_s, begins_at, lines, is_rolled) "
                "SELECT %s, named.name, step_s, begins_at, lines, is_rolled "
                f"FROM nodes_sample CROSS JOIN {table} named WHERE kind = %s",
                [kind, CLUSTER],
            )
        columns = "step_s, begins_at, requests, errors, prompt_tokens, cached_tokens, completion_tokens"
        cursor.execute(
            f'INSERT INTO nodes_traffic (model, "left", times, {columns}) '
            f'SELECT named.name, "left", times, {columns} '
            "FROM nodes_traffic CROSS JOIN catalog_model named WHERE model = ''"
        )


def _create(table: Any, rows: Iterator[Any]) -> None:
    while batch := list(islice(rows, BATCH)):
        table.objects.bulk_create(batch)


def _samples(now: datetime, days: int) -> Iterator[Sample]:
    for step_s, row_s, count in ((MINUTE_S, HOUR_S, min(49, 24 * days)), (HOUR_S, DAY_S, days + 1)):
        places = row_s // step_s
        for back in range(count):
            begins_at = floor(now, row_s) - timedelta(seconds=row_s * back)
            there = min(places, int((now - begins_at).total_seconds()) // step_s)
            lines: dict[str, Packed] = {name: pack([value] * there) for name, value in _STEADY.items()}
            for place, name in enumerate(_MOVING):
                lines[name] = pack(round(8 + 6 * math.sin(back + at / 9 + place)) for at in range(there))
            is_rolled = step_s == MINUTE_S and back > 0
            yield Sample(kind=CLUSTER, step_s=step_s, begins_at=begins_at, lines=lines, is_rolled=is_rolled)


def _traffic(now: datetime, days: int) -> Iterator[Traffic]:
    for step_s, keep in KEEP_TRAFFIC.items():
        for back in range(int(min(keep, timedelta(days=days)).total_seconds()) // step_s):
            begins_at = floor(now, step_s) - timedelta(seconds=step_s * back)
            told = _tally(back, step_s).as_dict()
            del told["codes"]
            yield Traffic(step_s=step_s, begins_at=begins_at, **told)


def _tally(back: int, step_s: int) -> Tally:
    tally = Tally()
    busy = 1 + math.sin(back / 12)
    tally.requests = int(step_s * busy)
    tally.errors, tally.left = tally.requests // 200, tally.requests // 500
    tally.prompt_tokens, tally.completion_tokens = tally.requests * 900, tally.requests * 210
    tally.cached_tokens = int(tally.prompt_tokens * (0.4 + 0.2 * math.sin(back / 30)))
    for each in range(40):
        tally.observe("ttft", 0.08 * (1 + busy) * (1 + each / 10))
        tally.observe("tpot", 0.011 * (1 + each / 30))
        tally.observe("queue", 0.002 * (1 + each * busy))
    return tally
