"""Nodes as every door shows them: whether they answer, what they have, and who holds each of their GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any
from uuid import UUID

from django.conf import settings
from django.db.models import Exists, OuterRef, Prefetch, Q, QuerySet

from nodes.agents import last_report
from nodes.models import Claim, Node, Rank, Replica
from nodes.placement import FOREIGN_LIMIT_MIB, Freshness, freshness
from nodes.protocol import GpuReport, to_json
from nodes.showing.ages import seconds, with_age


class GpuUse(StrEnum):
    """What a device is to placement, in a word."""

    FREE = "free"
    REPLICA = "replica"
    ORPHAN = "orphan"
    FOREIGN = "foreign"
    SICK = "sick"


@dataclass(frozen=True, slots=True)
class ShownGpu:
    """A device as reported, its use, and what it is taken by in words; empty: it is free.

    replica: the id of the replica that holds it, None where none does.
    """

    gpu: GpuReport
    use: GpuUse
    taken_by: str
    replica: UUID | None = None


def nodes() -> QuerySet[Node]:
    """All nodes, with what runs there and who holds their GPUs. Four queries."""
    holds = Exists(Claim.objects.filter(rank=OuterRef("pk")))
    ranks = Rank.objects.filter(~Q(replica__state__in=Replica.OVER) | holds).select_related("replica")
    ranks = ranks.defer("command", "attempts")  # long, and of no interest to a node
    return with_age(Node.objects.all(), "seen_at").prefetch_related(
        Prefetch("ranks", ranks), "claims", "orphans"
    )


def freshness_of(node: Node) -> Freshness:
    """Of a row of `nodes()`, as if it had been asked all along."""
    return freshness(
        node.age,  # type: ignore[attr-defined]  # annotated
        timedelta.max,
        suspect_after_s=settings.LLMGW_SUSPECT_AFTER_S,
        lost_after_s=settings.LLMGW_LOST_AFTER_S,
    )


def gpus_of(node: Node) -> list[ShownGpu]:
    """Of a row of `nodes()`, as its agent last reported them, and who holds them by the record."""
    report = last_report(node)
    orphans = {
        gpu: f"orphan {str(orphan.replica)[:8]}" for orphan in node.orphans.all() for gpu in orphan.gpus
    }
    by_rank = {rank.pk: rank.replica for rank in node.ranks.all()}
    claims = {claim.gpu: by_rank.get(claim.rank_id) for claim in node.claims.all()}
    found = []
    for gpu in report.gpus if report else ():
        if holder := claims.get(gpu.id):
            found.append(ShownGpu(gpu, GpuUse.REPLICA, str(holder), holder.pk))
        elif gpu.id in orphans:
            found.append(ShownGpu(gpu, GpuUse.ORPHAN, orphans[gpu.id]))
        else:
            found.append(ShownGpu(gpu, *_other_use(gpu)))
    return found


def use_of(gpu: GpuReport) -> GpuUse:
    """Of a device that neither a replica nor an orphan holds."""
    if not gpu.is_healthy:
        return GpuUse.SICK
    return GpuUse.FOREIGN if (gpu.foreign_mib or 0) > FOREIGN_LIMIT_MIB else GpuUse.FREE


def _other_use(gpu: GpuReport) -> tuple[GpuUse, str]:
    use = use_of(gpu)
    if use is GpuUse.SICK:
        return use, "nothing: it is not healthy" + (f" ({gpu.sickness})" if gpu.sickness else "")
    return use, f"something else on the node ({gpu.foreign_mib} MiB)" if use is GpuUse.FOREIGN else ""


def running_on(node: Node) -> list[Replica]:
    """Of a row of `nodes()`: the replicas with a rank there that are not over."""
    return [rank.replica for rank in node.ranks.all() if rank.replica.state not in Replica.OVER]


def kept_free_words(node: Node, left: int) -> str:
    """Whether operators keep things off it, and how much is to leave yet; empty: they do not."""
    if node.is_draining:
        return f"draining, {left} left" if left else "drained"
    return "cordoned" if node.is_cordoned else ""


def node_as_dict(node: Node) -> dict[str, Any]:
    """A row of `nodes()` as REST and `--json` tell it."""
    report = last_report(node)
    gpus = gpus_of(node)
    return {
        "name": node.name,
        "uuid": str(node.uuid),
        "address": node.address,
        "certificate": node.certificate,
        "state": freshness_of(node),
        "seen_at": node.seen_at and node.seen_at.isoformat(),
        "age_s": seconds(node.age),  # type: ignore[attr-defined]  # annotated
        "problem": node.problem,
        "cordoned": node.is_cordoned,
        "draining": node.is_draining,
        "cordoned_by": node.cordoned_by,
        "cordoned_why": node.cordoned_why,
        "gpus_total": len(gpus),
        "gpus_free": sum(not each.taken_by for each in gpus),
        "gpus": [{**to_json(each.gpu), "use": each.use, "taken_by": each.taken_by} for each in gpus],
        "replicas": [str(replica.pk) for replica in running_on(node)],
        "engines": [to_json(engine) for engine in report.engines] if report else [],
        "labels": dict(report.labels) if report else {},
        "engine_tls": report.engine_tls if report else None,
        "fabric": report.fabric if report else "",
        "memory_total_mib": report.memory_total_mib if report else None,
        "memory_free_mib": report.memory_free_mib if report else None,
        "cpu_model": report.cpu_model if report else "",
        "cpu_cores": report.cpu_cores if report else None,
        "disk_total_bytes": report.disk_total_bytes if report else None,
        "disk_free_bytes": report.disk_free_bytes if report else None,
        "room_bytes": report.room_bytes if report else None,
        "agent_version": report.agent_version if report else "",
    }
