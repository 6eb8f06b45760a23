"""What the agent tells Prometheus: the host, its cards, its ranks, and each engine's numbers under one name.

Engines are not asked for it: what they said last, a second or two ago, is told. Labels are names of the
catalog and ids that this node has few of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from nodes.agent.rank import Rank
from nodes.engines import ENGINES
from nodes.engines.figures import FIGURES, figures_of
from nodes.exposition import GAUGE, Distribution, Family
from nodes.protocol import HELD, StateReport

MIB = 1 << 20
PREFIX = "llmgw_engine_"


def families(report: StateReport, ranks: Sequence[Rank]) -> list[Family]:
    """ranks: those that are not over."""
    return [*_host(report), *_gpus(report), *_ranks(ranks), *_engines(ranks)]


def _host(report: StateReport) -> Iterator[Family]:
    info = Family("llmgw_agent_info", GAUGE, "1, with the agent's version.")
    info.add(1, version=report.agent_version)
    yield info
    held = [each.size_bytes for each in report.holdings if each.state == HELD]
    for name, says, value in (
        ("llmgw_host_cpu_cores", "Cores that engines may use.", report.cpu_cores),
        ("llmgw_host_memory_bytes", "Memory of the host.", _bytes(report.memory_total_mib)),
        ("llmgw_host_memory_free_bytes", "Memory of it that is free.", _bytes(report.memory_free_mib)),
        ("llmgw_host_disk_bytes", "The disk that weights are on.", report.disk_total_bytes),
        ("llmgw_host_disk_free_bytes", "What is free of it.", report.disk_free_bytes),
        ("llmgw_host_weights_bytes", "Weights in the node's store that are whole.", sum(held)),
    ):
        family = Family(name, GAUGE, says)
        family.add(value)
        yield family


def _gpus(report: StateReport) -> Iterator[Family]:
    healthy = Family("llmgw_gpu_healthy", GAUGE, "Whether the card is fit for use.")
    memory = Family("llmgw_gpu_memory_bytes", GAUGE, "Memory of the card.")
    used = Family("llmgw_gpu_memory_used_bytes", GAUGE, "Memory of it that is in use, by whomever.")
    foreign = Family("llmgw_gpu_memory_foreign_bytes", GAUGE, "What is no engine's of this agent.")
    for gpu in report.gpus:
        labels = {"gpu": gpu.id, "index": str(gpu.index), "gpu_class": gpu.gpu_class}
        healthy.add(gpu.is_healthy, **labels)
        memory.add(_bytes(gpu.memory_mib), **labels)
        used.add(_bytes(gpu.used_mib), **labels)
        foreign.add(_bytes(gpu.foreign_mib), **labels)
    yield from (healthy, memory, used, foreign)


def _ranks(ranks: Iterable[Rank]) -> Iterator[Family]:
    state = Family("llmgw_rank_state", GAUGE, "1, with the state of the part of a replica that is here.")
    attempts = Family("llmgw_rank_attempts", GAUGE, "Processes that were started for it.")
    for rank in ranks:
        labels = _labels_of(rank)
        state.add(1, **labels, state=rank.record.state)
        attempts.add(rank.record.attempt or 0, **labels)
    yield from (state, attempts)


def _engines(ranks: Iterable[Rank]) -> Iterator[Family]:
    up = Family(f"{PREFIX}up", GAUGE, "Whether the engine told its numbers when it was last asked.")
    told = {each.name: Family(PREFIX + each.name, each.kind, each.says) for each in FIGURES}
    for rank in ranks:
        if rank.record.assignment.rank != 0 or rank.launch.engine not in ENGINES:
            continue  # it has no door, or none that is known here
        labels = {**_labels_of(rank), "engine": rank.launch.engine}
        up.add(bool(rank.load.told), **labels)
        for name, value in figures_of(rank.load.told, ENGINES[rank.launch.engine]).items():
            family = told[name]
            if not isinstance(value, Distribution):
                family.add(value, **labels)
                continue
            for bound, count in value.below:
                family.add(count, "_bucket", **labels, le=bound)
            family.add(value.total, "_sum", **labels)
            family.add(value.count, "_count", **labels)
    yield from (up, *told.values())


def _labels_of(rank: Rank) -> dict[str, str]:
    assignment = rank.record.assignment
    return {
        "model": rank.launch.model,
        "profile": str(rank.launch.profile.get("name", "")),
        "replica": assignment.replica,
        "rank": str(assignment.rank),
    }


def _bytes(mib: int | None) -> int | None:
    return None if mib is None else mib * MIB
