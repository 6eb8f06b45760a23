"""What is sampled each minute, and how samples are kept and told: in lines of values that are evenly apart.

A value belongs to its place in a line. To put it there twice, or once more after a crash, changes nothing;
what is coarse is always made anew from what is fine. A place that nothing is known of holds None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from nodes.placement import Freshness
from nodes.protocol import DRAINING, READY
from nodes.snapshot import LOST, Replica, Snapshot

Value = int | float | None
Values = Mapping[str, Value]

MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86_400
LAG_S = 15
"""What a minute was is known so long after it: gateways add what they counted every few seconds."""

CLUSTER, MODEL, NODE = "cluster", "model", "node"
Subject = tuple[str, str]
"""A kind and a name; the cluster has none."""


# --- spans ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Span:
    """So long until now, told in `count` values that are `step_s` apart."""

    name: str
    words: str
    step_s: int
    count: int


SPANS = {
    span.name: span
    for span in (
        Span("1h", "the last hour", MINUTE_S, 60),
        Span("24h", "the last 24 hours", 10 * MINUTE_S, 144),
        Span("30d", "the last 30 days", 3 * HOUR_S, 240),
    )
}


def begin(span: Span, now: datetime) -> datetime:
    """Of a span that ends with the last whole step."""
    ends = floor(now - timedelta(seconds=LAG_S), span.step_s)
    return ends - timedelta(seconds=span.step_s * span.count)


def floor(moment: datetime, step_s: int) -> datetime:
    seconds = int(moment.timestamp())
    return datetime.fromtimestamp(seconds - seconds % step_s, UTC)


def mean(values: Iterable[Value]) -> Value:
    """Of those that are known."""
    known = [value for value in values if value is not None]
    return _brief(sum(known) / len(known)) if known else None


def _brief(value: float) -> int | float:
    found = round(value, 2)
    return int(found) if found == int(found) else found


def fold(values: Sequence[Value], times: int) -> list[Value]:
    """So many neighbours as one: their mean."""
    return [mean(values[at : at + times]) for at in range(0, len(values), times)]


# --- lines ----------------------------------------------------------------------------------------

Packed = list[Value]
"""A value, how many times it stands there, the next value, and so on: most things stay as they are."""


def put(packed: Packed, place: int, value: Value) -> Packed:
    """With the value at its place, whatever was there."""
    count = sum(packed[1::2])  # type: ignore[arg-type]  # every other one is a count
    if count > place:
        values = unpack(packed)
        values[place] = value
        return pack(values)
    found = list(packed)
    if count < place:
        _append(found, None, place - count)
    _append(found, value, 1)
    return found


def pack(values: Iterable[Value]) -> Packed:
    found: Packed = []
    for value in values:
        _append(found, value, 1)
    return found


def unpack(packed: Packed) -> list[Value]:
    values: list[Value] = []
    for value, times in zip(packed[::2], packed[1::2], strict=True):
        values += [value] * int(times or 0)
    return values


def mean_of(packed: Packed) -> Value:
    """Of the values that are known, as `mean`."""
    pairs = zip(packed[::2], packed[1::2], strict=True)
    known = [(value * (times or 0), times or 0) for value, times in pairs if value is not None]
    count = sum(times for _, times in known)
    return _brief(sum(value for value, _ in known) / count) if count else None


def _append(packed: Packed, value: Value, times: int) -> None:
    if packed and packed[-2] == value:
        packed[-1] = (packed[-1] or 0) + times
    else:
        packed += [value, times]


# --- a sample -------------------------------------------------------------------------------------

COMING, LEAVING, MISSING = "coming", "leaving", "missing"
PARTS = (READY, COMING, LEAVING, LOST, MISSING)
"""Of the replicas: what serves, what is on its way there or away, what nobody hears of, and what there is no
room for."""


def sample(snapshot: Snapshot, missing: Mapping[int, int]) -> dict[Subject, dict[str, Value]]:
    """Everything that is measured at this moment, by what it is measured of. `missing`: replicas that could
    not be placed, by model.

    MiB of memory; `gpus_used` are held by replicas; `running` and `waiting` are requests in engines. What a
    node had is not what it has: while it does not answer, nothing is known of it.
    """
    fresh = {node.id: node for node in snapshot.nodes if node.freshness is Freshness.FRESH}
    used_mib = {
        (node.id, gpu.id): gpu.used_mib
        for node in fresh.values()
        for gpu in (node.report.gpus if node.report else ())
    }
    found: dict[Subject, dict[str, Value]] = {}
    by_node: dict[int, list[tuple[str, Value, Value]]] = {}
    held: Counter[int] = Counter()
    for replica in snapshot.replicas:
        for rank in replica.ranks:
            held[rank.node] += len(rank.gpus)
            if rank.rank == 0:
                by_node.setdefault(rank.node, []).append((rank.state, rank.running, rank.waiting))
    for node in snapshot.nodes:
        report = node.report if node.id in fresh else None
        if report is None:
            continue
        engines = [each for each in by_node.get(node.id, ()) if each[0] == READY]
        found[NODE, node.name] = {
            "gpus": len(report.gpus),
            "gpus_used": held[node.id],
            "gpu_mib": _sum(gpu.used_mib for gpu in report.gpus),
            "gpu_total_mib": _sum(gpu.memory_mib for gpu in report.gpus),
            "host_mib": _less(report.memory_total_mib, report.memory_free_mib),
            "host_total_mib": report.memory_total_mib,
            "running": _sum(running for _, running, _ in engines),
            "waiting": _sum(waiting for _, _, waiting in engines),
        }
    by_model: dict[int | None, list[Replica]] = {}
    for replica in snapshot.replicas:
        by_model.setdefault(replica.model, []).append(replica)
    for model in snapshot.models:
        own = by_model.get(model.id, [])
        found[MODEL, model.spec.name] = _of_replicas(own, used_mib, missing.get(model.id, 0))
    nodes = [values for (kind, _), values in found.items() if kind == NODE]
    found[CLUSTER, ""] = {
        **_of_replicas(snapshot.replicas, used_mib, sum(missing.values())),
        **{name: _sum(values[name] for values in nodes) for name in ("gpus", "gpu_mib", "gpu_total_mib")},
        **{name: _sum(values[name] for values in nodes) for name in ("host_mib", "host_total_mib")},
        "nodes": len(snapshot.nodes),
        "nodes_fresh": len(fresh),
    }
    return found


def _of_replicas(
    replicas: Iterable[Replica], used_mib: Mapping[tuple[int, str], int | None], missing: int
) -> dict[str, Value]:
    counted: Counter[str] = Counter()
    gpus: list[tuple[int, str]] = []
    heads = []
    for replica in replicas:
        counted[_PART.get(replica.state, COMING)] += 1
        gpus += [(rank.node, gpu) for rank in replica.ranks for gpu in rank.gpus]
        heads += [rank for rank in replica.ranks if rank.rank == 0 and rank.state == READY]
    return {
        **{part: counted[part] for part in (READY, COMING, LEAVING, LOST)},
        MISSING: missing,
        "gpus_used": len(gpus),
        "gpu_mib": _sum(used_mib.get(gpu) for gpu in gpus),
        "running": _sum(rank.running for rank in heads),
        "waiting": _sum(rank.waiting for rank in heads),
    }


_PART = {READY: READY, DRAINING: LEAVING, LOST: LOST}


def _sum(values: Iterable[Value]) -> Value:
    """Of those that are known; None where there are some and none is."""
    told = list(values)
    known = [value for value in told if value is not None]
    return sum(known) if known or not told else None


def _less(total: int | None, free: int | None) -> int | None:
    return None if total is None or free is None else max(0, total - free)
