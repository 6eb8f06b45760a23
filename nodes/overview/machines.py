"""Nodes and their GPUs, counted. What a node reported is read again only when it differs."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from datetime import datetime, timedelta

from django.conf import settings
from django.db.models import TextField
from django.db.models.functions import Cast

from nodes.agents import report_from
from nodes.kept import Kept
from nodes.models import Claim, Node, Orphan
from nodes.overview.value import Gpus, Nodes
from nodes.placement import Freshness, freshness
from nodes.showing import GpuUse, use_of


def _gpus_of_report(text: str) -> tuple[tuple[str, str, GpuUse], ...]:
    """Id, class, and what each device would be if nobody held it."""
    report = report_from(json.loads(text))
    return tuple((gpu.id, gpu.gpu_class, use_of(gpu)) for gpu in report.gpus) if report else ()


_reports = Kept(_gpus_of_report)


def count_nodes(now: datetime) -> tuple[Nodes, tuple[Gpus, ...]]:
    rows = Node.objects.annotate(told=Cast("report", TextField())).values_list(
        "pk", "seen_at", "is_cordoned", "is_draining", "told"
    )
    held: dict[int, set[str]] = defaultdict(set)
    for node, gpu in Claim.objects.values_list("node_id", "gpu"):
        held[node].add(gpu)
    for node, gpus in Orphan.objects.values_list("node_id", "gpus"):
        held[node].update(gpus)
    count: Counter[str] = Counter()
    by_class: dict[str, Counter[str]] = defaultdict(Counter)
    for node, seen_at, is_cordoned, is_draining, told in rows:
        found = freshness(
            now - seen_at if seen_at else None,
            timedelta.max,
            suspect_after_s=settings.LLMGW_SUSPECT_AFTER_S,
            lost_after_s=settings.LLMGW_LOST_AFTER_S,
        )
        count[found] += 1
        count["cordoned"] += is_cordoned
        count["draining"] += is_draining
        takes = not is_cordoned and found in (Freshness.FRESH, Freshness.SUSPECT)
        counted_as = _COUNTED_AS if takes else _COUNTED_AS | {GpuUse.FREE: "closed"}
        holds = held[node]
        for gpu, gpu_class, use in _reports.get(node, told):
            of_class = by_class[gpu_class]
            of_class["total"] += 1
            of_class["used" if gpu in holds else counted_as[use]] += 1
    _reports.keep_only({row[0] for row in rows})
    return Nodes(**count), tuple(Gpus(name, **by_class[name]) for name in sorted(by_class))


_COUNTED_AS = {GpuUse.FREE: "free", GpuUse.FOREIGN: "foreign", GpuUse.SICK: "unhealthy"}
