"""What every door shows of weights: what is on which node, how far it is, and which models need it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from django.db.models import QuerySet

from catalog.models import Model
from nodes.models import Weights
from nodes.progress import left_s, progress_words, size_words
from nodes.sharing import hub_source


def weights() -> QuerySet[Weights]:
    """All of them, with their nodes. One query."""
    return Weights.objects.select_related("node")


def needing(rows: Iterable[Weights]) -> Mapping[int, tuple[str, ...]]:
    """By row: the models whose source it is, at their commit or where they have none yet. Two queries."""
    by_repo: dict[str, list[tuple[str, str]]] = {}
    for model in Model.objects.prefetch_related("names"):
        if source := hub_source(model.source):
            by_repo.setdefault(source.repo, []).append((model.name, model.source_revision))
    return {
        row.pk: tuple(
            sorted(name for name, revision in by_repo.get(row.repo, ()) if revision in ("", row.revision))
        )
        for row in rows
    }


def state_words(row: Weights) -> str:
    """Its state, and how far it is where it is not whole."""
    if row.state == Weights.State.HELD or row.total_bytes is None:
        return f"{row.state}, {size_words(row.size_bytes)}"
    return f"{row.state}, {progress_words(row.size_bytes, row.total_bytes, row.bytes_per_s)}"


def weights_as_dict(row: Weights, needed_by: Iterable[str]) -> dict[str, Any]:
    """As REST and `--json` tell it."""
    return {
        "id": row.pk,
        "node": row.node.name,
        "repo": row.repo,
        "revision": row.revision,
        "state": row.state,
        "size_bytes": row.size_bytes,
        "total_bytes": row.total_bytes,
        "bytes_per_s": row.bytes_per_s,
        "left_s": left_s(row.size_bytes, row.total_bytes, row.bytes_per_s),
        "in_use": row.is_used,
        "needed_by": list(needed_by),
        "reason": row.reason,
    }
