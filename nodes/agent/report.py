"""What the node says of itself, without its ranks."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping

from nodes.agent.clock import boot_id
from nodes.agent.configuration import Configuration
from nodes.agent.gpus import Devices
from nodes.agent.inventory import FoundEngine, cpu, disk_bytes, host_memory_mib
from nodes.protocol import StateReport

VERSION = "0.1.0"


_cpu = functools.cache(cpu)  # reading it takes longer than all the rest of a report


def node_report(
    configuration: Configuration,
    devices: Devices,
    engines: Mapping[str, FoundEngine],
    *,
    groups: Collection[int] = (),
) -> StateReport:
    """groups: process groups that are known to be ours. A driver or a network's disk may take its time."""
    total_mib, free_mib = host_memory_mib()
    cpu_model, cpu_cores = _cpu()
    disk_total, disk_free = disk_bytes(configuration.store)
    return StateReport(
        cluster=configuration.identity.cluster,
        node=configuration.identity.node,
        agent_version=VERSION,
        boot_id=boot_id(),
        gpus=devices.read(groups),
        engines=tuple(engine.report for engine in engines.values()),
        labels=configuration.labels,
        fabric=configuration.fabric,
        runs_gangs=configuration.runs_gangs,
        engine_tls=configuration.engine_tls,
        memory_total_mib=total_mib,
        memory_free_mib=free_mib,
        cpu_model=cpu_model,
        cpu_cores=cpu_cores,
        disk_total_bytes=disk_total,
        disk_free_bytes=disk_free,
    )
