"""How fast the reconciler decides: placements a second into an empty cluster, and a pass with nothing to do.

`python -m tests.bench.plan`. Pure Python on one core: no database, no agent, no socket.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from random import Random
from typing import Any

from catalog.spec import ModelSpec
from nodes.buckets import Plan
from nodes.placement import Node
from nodes.plan import plan
from nodes.protocol import READY, EngineReport, GpuReport, StateReport
from nodes.snapshot import Demand, Model, Rank, Replica, Snapshot

NODES, GPUS_PER_NODE = 1_000, 8
CLASSES = ("h100-80g", "a100-80g", "l40s-48g", "l4-24g")
REPLICAS_PER_MODEL, NODES_PER_MODEL = 8, 2  # so 500 models want 4,000 replicas of a thousand nodes
SHAPES = {1: 60, 2: 25, 4: 10, 8: 5}  # GPUs of a replica, of a hundred models
SIZES = (100, 200, 500, 1_000, 2_000)
NOW = datetime(2030, 1, 1, tzinfo=UTC)
ROUNDS = 3  # of which the fastest counts: the others met a neighbour


def empty_cluster(nodes: int) -> Snapshot:
    """Nodes of four classes in turn, and as many models as fill 95 of a hundred GPUs."""
    chance = Random(nodes)
    count = nodes // NODES_PER_MODEL
    shapes = [tp for tp, share in SHAPES.items() for _ in range(share)]
    models = []
    for number in range(count):
        # Each class has the same mix, in an order of its own.
        if number % (len(CLASSES) * len(shapes)) == 0:
            mixes = [chance.sample(shapes, len(shapes)) for _ in CLASSES]
        which = number % len(CLASSES)
        tp = mixes[which][number // len(CLASSES) % len(shapes)]
        models.append(Model(number, _spec(number, CLASSES[which], tp), demand=Demand(NOW, in_flight=1)))
    return Snapshot(
        NOW,
        tuple(_node(number) for number in range(nodes)),
        tuple(models),
        answered=frozenset(range(nodes)),
        watching_since=NOW - timedelta(hours=1),
    )


def filled(snapshot: Snapshot, decision: Plan) -> Snapshot:
    """The same once everything that was started is ready."""
    replicas = tuple(
        Replica(
            id=f"replica-{number:06d}",
            model=start.model,
            launch=start.launch,
            ranks=tuple(
                Rank(place.node, rank, place.gpus, READY, running=1, waiting=0)
                for rank, place in enumerate(start.places)
            ),
            created_at=NOW - timedelta(hours=1),
            state_since=NOW - timedelta(minutes=50),
            state=READY,
            fingerprint=start.launch.fingerprint,
        )
        for number, start in enumerate(decision.start)
    )
    # What found no seat is not wanted either, so that the steady plan is one without anything to do.
    placed: dict[int, int] = {}
    for start in decision.start:
        placed[start.model] = placed.get(start.model, 0) + 1
    models = tuple(
        replace(
            model,
            spec=replace(
                model.spec,
                scaling=replace(model.spec.scaling, min=placed.get(model.id, 0), max=REPLICAS_PER_MODEL),
            ),
        )
        for model in snapshot.models
    )
    return replace(snapshot, models=models, replicas=replicas)


def measure(nodes: int) -> dict[str, Any]:
    cluster = empty_cluster(nodes)
    cold_s, decision = _fastest(lambda: plan(cluster))
    steady = filled(cluster, decision)
    steady_s, nothing = _fastest(lambda: plan(steady))
    assert not nothing.acts, "a plan for a cluster in which nothing is to do"
    return {
        "nodes": nodes,
        "models": len(cluster.models),
        "placed": len(decision.start),
        "unplaced": sum(each.missing for each in decision.blocked),
        "cold_ms": round(cold_s * 1_000, 1),
        "steady_ms": round(steady_s * 1_000, 1),
        "cold_placements_per_s": round(len(decision.start) / cold_s),
    }


def calibration_s() -> float:
    """A fixed piece of work of the same kind, so that numbers of two machines can be compared."""

    def work() -> int:
        shelves: dict[int, list[tuple[str, int]]] = {}
        for number in range(200_000):
            digest = hashlib.sha256(str(number).encode()).hexdigest() if number % 50 == 0 else "node"
            shelves.setdefault(number % 97, []).append((digest, number))
        return sum(len(sorted(shelf)) for shelf in shelves.values())

    return _fastest(work)[0]


def _fastest(work: Callable[[], Any]) -> tuple[float, Any]:
    best, result = float("inf"), None
    for _ in range(ROUNDS):
        gc.collect()
        began = time.perf_counter()
        result = work()
        best = min(best, time.perf_counter() - began)
    return best, result


def _spec(number: int, gpu_class: str, tp: int) -> ModelSpec:
    return ModelSpec.load(
        {
            "name": f"model-{number:05d}",
            "source": f"org/model-{number:05d}",
            "profiles": [
                {"name": "default", "gpu_class": gpu_class, "tp": tp, "min_memory_gb": 16, "min_disk_gb": 100}
            ],
            "scaling": {"min": REPLICAS_PER_MODEL, "max": REPLICAS_PER_MODEL},
        }
    )


def _node(number: int) -> Node:
    name = f"gpu-{number:05d}"
    gpu_class = CLASSES[number % len(CLASSES)]
    report = StateReport(
        "cluster",
        name,
        gpus=tuple(
            GpuReport(f"GPU-{name}-{index}", index, gpu_class=gpu_class, memory_mib=81_920, foreign_mib=0)
            for index in range(GPUS_PER_NODE)
        ),
        engines=(EngineReport("vllm", "0.32.0"), EngineReport("llamacpp")),
        labels={"zone": "a"},
        memory_total_mib=2 << 20,
        memory_free_mib=1 << 20,
        disk_free_bytes=10**13,
    )
    return Node(number, name, report=report)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.plan", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    parser.add_argument("--nodes", type=int, action="append", help=f"instead of {SIZES}")
    options = parser.parse_args(words)
    rows = [measure(nodes) for nodes in options.nodes or SIZES]
    head = _head(rows)
    found = {
        "calibration_s": round(calibration_s(), 4),
        "cold_placements_per_s": head["cold_placements_per_s"],
        "steady_plan_ms": head["steady_ms"],
        "scaling": rows,
    }
    if options.json:
        print(json.dumps(found, indent=2))
        return
    _print_table(found)


def _head(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The size whose numbers are told first."""
    return next((row for row in rows if row["nodes"] == NODES), rows[-1])


def _print_table(found: dict[str, Any]) -> None:
    head = _head(found["scaling"])
    print(f"calibration {found['calibration_s']} s; {head['nodes']} nodes: ", end="")
    print(f"{head['cold_placements_per_s']} placements a second, steady plan {head['steady_ms']} ms")
    print(f"{'nodes':>8}{'models':>8}{'placed':>8}{'unplaced':>10}{'cold ms':>10}{'steady ms':>11}")
    for row in found["scaling"]:
        print(
            f"{row['nodes']:>8}{row['models']:>8}{row['placed']:>8}{row['unplaced']:>10}"
            f"{row['cold_ms']:>10}{row['steady_ms']:>11}"
        )


if __name__ == "__main__":
    main()
