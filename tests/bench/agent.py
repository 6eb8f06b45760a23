"""What a node's agent costs, and how fast it starts an engine.

`python -m tests.bench.agent`. A real agent on this machine, with sim engines on made-up cards. CPU is the
agent's own; what it spends on watching its engines meanwhile is not counted as a report's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.agent_process import AgentProcess, assignment

REPLICAS = 16
REPORTS = 200
STARTS = 5
IDLE_S = 10.0
LIMITS = {
    "state report, CPU": (5.0, "ms"),
    "PUT to ready": (1500.0, "ms"),
    "idle, memory": (80.0, "MB"),
    "idle, CPU": (1.0, "%"),
}


def measure(folder: Path, replicas: int, idle_s: float) -> dict[str, float]:
    with AgentProcess(folder, "--sim-gpus", f"{replicas}:sim") as agent:
        process = psutil.Process(agent.pid)
        idle_share = _share(process, idle_s)
        found = {"idle, memory": process.memory_info().rss / 1e6, "idle, CPU": idle_share * 100}
        found["PUT to ready"] = statistics.median(_start_ms(agent) for _ in range(STARTS))
        for gpu in range(replicas):
            agent.put(assignment(gpus=[f"sim-{gpu}"]))
        for rank in agent.state()["ranks"]:
            if rank["state"] != "stopped":
                agent.wait_for(rank["replica"], "ready", timeout_s=120)
        found["state report, CPU"] = _report_ms(agent, process, idle_s)
        found["watching, CPU"] = _share(process, idle_s) * 100
    return found


def _start_ms(agent: AgentProcess) -> float:
    wanted = assignment()
    began_s = time.perf_counter()
    agent.put(wanted)
    agent.wait_for(wanted["replica"], "ready")
    took_ms = (time.perf_counter() - began_s) * 1000
    agent.delete(wanted["replica"])
    agent.wait_for(wanted["replica"], "stopped")
    return took_ms


def _report_ms(agent: AgentProcess, process: psutil.Process, idle_s: float) -> float:
    """Of one that says that nothing has changed, which takes as much as any other but for its bytes."""
    watching = _share(process, idle_s)
    etag = agent.ask("GET", "/v1/state").headers["ETag"]
    before_s, began_s = _cpu_s(process), time.perf_counter()
    answers = [agent.ask("GET", "/v1/state", headers={"If-None-Match": etag}) for _ in range(REPORTS)]
    spent_s = _cpu_s(process) - before_s - watching * (time.perf_counter() - began_s)
    unchanged = sum(answer.status == 304 for answer in answers)
    assert unchanged >= REPORTS * 0.9, f"only {unchanged} of {REPORTS} answers were 304"
    return spent_s / REPORTS * 1000


def _share(process: psutil.Process, for_s: float) -> float:
    """Of one processor, while nobody asks anything."""
    before_s, began_s = _cpu_s(process), time.perf_counter()
    time.sleep(for_s)
    return (_cpu_s(process) - before_s) / (time.perf_counter() - began_s)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _print_table(found: dict[str, Any]) -> None:
    print(f"an agent, with {found['replicas']} replicas where it has any")
    for what, value in found["numbers"].items():
        limit, unit = LIMITS.get(what, (None, "%"))
        bound = f"(below {limit:g} {unit})" if limit is not None else ""
        print(f"  {what:<24}{value:>9.2f} {unit:<3}{bound}")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.agent", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    parser.add_argument("--replicas", type=int, default=REPLICAS)
    parser.add_argument("--idle", type=float, default=IDLE_S, metavar="SECONDS")
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="llmgw-bench-") as folder:
        numbers = measure(Path(folder), options.replicas, options.idle)
    found = {"replicas": options.replicas, "numbers": numbers, "limits": {k: v[0] for k, v in LIMITS.items()}}
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        _print_table(found)


if __name__ == "__main__":
    main()
