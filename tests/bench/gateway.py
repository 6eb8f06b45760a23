"""What the gateway adds to a request and to each chunk of a stream, and what other proxies add in its place.

`python -m tests.bench.gateway --peers nginx,sglang-router,litellm`. One process on one core, with keys,
routing by prefix, accounting and metrics on, in front of eight engines that cost next to nothing and share
another core with the clients. Each number is the median of several passes, in each of which all have their
turn. CPU a request and a chunk are the firmest; those of time are of a machine that is otherwise quiet, or
they say little.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import operator
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import psutil

from tests.bench.load import request_of
from tests.bench.peers import PEERS, Absent, Proxy
from tests.bench.served import ROOT, Hosted, filled, on_core, running, serving
from tests.bench.stub_engine import MODEL
from tests.services import free_port
from tests.waiting import wait_until

SECONDS = 5.0
PASSES = 3
ENGINES = 8
CONNECTIONS = 64
WARM_UP = 4 * CONNECTIONS
"""Requests, however long they take: the first of some proxies take seconds."""
STREAMS = 200
PROMPT_BYTES = 256 * 1024
LASTING, LEAVING = 100_000, 10_000

IDLE_PART, IDLE_EVERY_S = 0.06, 0.5  # of one core, over so long

OURS = "llmgw"
COLUMNS = {
    "req_per_s": "req/s",
    "cpu_us_per_request": "CPU us/req",
    "added_p50_us": "added p50, us",
    "added_p99_us": "added p99, us",
    "added_256k_p50_ms": "256 KB: added p50, ms",
    "paced_ttfc_p50_ms": "first chunk p50, ms",
    "cpu_us_per_chunk": "CPU us/chunk",
    "rss_mib": "MiB",
}
LIMITS: Mapping[str, tuple[str, float]] = {
    "req_per_s": ("at least", 5_000),
    "cpu_us_per_request": ("below", 60),
    "cpu_us_per_chunk": ("below", 25),
    "added_p50_us": ("below", 200),
    "added_256k_p50_ms": ("below", 2),
    "growth_mib": ("below", 10),
    "req_per_s_of_litellm": ("at least", 100),
    "req_per_s_of_sglang_router": ("at least", 0.8),
    "ttfc_of_sglang_router": ("at most", 1.3),
}
"""The last ones are told where the peer was measured, too."""
_OF_PEERS = {
    "req_per_s_of_litellm": ("req_per_s", "litellm"),
    "req_per_s_of_sglang_router": ("req_per_s", "sglang-router"),
    "ttfc_of_sglang_router": ("paced_ttfc_p50_ms", "sglang-router"),
}


class Failed(Exception):
    """Requests were not answered: how fast that went is not worth telling."""


class Bench:
    """The clients, and what they cost the proxy."""

    def __init__(self, seconds: float, streams: int, cores: tuple[int, ...]) -> None:
        self.seconds, self.streams = seconds, streams
        self.proxy_core = cores[-1] if len(cores) > 1 else None
        self.other_core = cores[0] if len(cores) > 1 else None

    def load(self, url: str, key: str, what: str, connections: int, **more: float) -> dict[str, float]:
        words = [url, key, MODEL, what, "--connections", str(connections)]
        for name, value in ({"seconds": self.seconds} | more).items():
            words += [f"--{name.replace('_', '-')}", str(value)]
        printed = subprocess.run(
            on_core(self.other_core, [sys.executable, "-m", "tests.bench.load", *words]),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            check=True,
        )
        saw: dict[str, float] = json.loads(printed.stdout)
        if not saw["requests"] > 0 == saw["failed"]:
            raise Failed(f"{saw['failed']:.0f} of {saw['requests']:.0f} {what} failed at {url}.")
        return saw

    def throughput(self, proxy: Proxy) -> tuple[float, float]:
        """Requests a second, and the proxy's CPU seconds for each."""
        before_s = cpu_s(proxy.pid)
        if (wrk := shutil.which("wrk")) is not None:
            answered, took_s = self._wrk(wrk, proxy)
        else:
            saw = self.load(proxy.url, proxy.key, "requests", CONNECTIONS)
            answered, took_s = saw["requests"], saw["seconds"]
        return answered / took_s, (cpu_s(proxy.pid) - before_s) / answered

    def _wrk(self, wrk: str, proxy: Proxy) -> tuple[float, float]:
        """A client in C, where there is one: ours would be the slower end of some."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": "@@@@@@: How are you?"}]}
        request = request_of(proxy.key, body).decode().replace("\r\n", "\\r\\n").replace("'", "\\'")
        program = f"""
            local number, before, after = 0, string.match('{request}', '(.*)@@@@@@(.*)')
            request = function()
                number = number + 1
                return string.format('%s%06d%s', before, number, after)
            end
            done = function(summary)
                local errors = summary.errors
                local failed = errors.connect + errors.read + errors.write + errors.status + errors.timeout
                io.write(string.format('\\n%d %d %d\\n', summary.requests, summary.duration, failed))
            end
        """
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder, "post.lua")
            script.write_text(program)
            command = [
                wrk,
                "-t",
                "1",
                "-c",
                str(CONNECTIONS),
                "-d",
                f"{max(1, round(self.seconds))}s",
                "--timeout",
                "60s",
            ]
            printed = subprocess.run(
                on_core(self.other_core, [*command, "-s", str(script), proxy.url]),
                stdout=subprocess.PIPE,
                check=True,
                text=True,
            )
        answered, took_us, failed = map(int, printed.stdout.split("\n")[-2].split())
        if not answered > 0 == failed:
            raise Failed(f"{failed} of {answered} requests failed at {proxy.url}.")
        return answered, took_us / 1e6

    def one_pass(self, proxy: Proxy, direct: Mapping[str, float]) -> dict[str, float]:
        self.load(proxy.url, proxy.key, "requests", CONNECTIONS, seconds=60, limit=WARM_UP)
        per_s, cpu = self.throughput(proxy)
        until_idle(proxy.pid)
        quiet = self.latency(proxy.url, proxy.key)
        until_idle(proxy.pid)
        before_s = cpu_s(proxy.pid)
        paced = self.load(proxy.url, proxy.key, "streams", self.streams)
        per_chunk = (cpu_s(proxy.pid) - before_s) / paced["chunks"]
        return {
            "req_per_s": per_s,
            "cpu_us_per_request": cpu * 1e6,
            "added_p50_us": (quiet["p50_ms"] - direct["p50_ms"]) * 1e3,
            "added_p99_us": (quiet["p99_ms"] - direct["p99_ms"]) * 1e3,
            "added_256k_p50_ms": quiet["large_p50_ms"] - direct["large_p50_ms"],
            "paced_ttfc_p50_ms": paced["first_p50_ms"],
            "cpu_us_per_chunk": per_chunk * 1e6,
            "rss_mib": rss_mib(proxy.pid),
        }

    def growth_mib(self, proxy: Proxy, lasting: int, leaving: int) -> float:
        """What it keeps by design, it has by now: a tenth of all is for getting there."""
        self.load(proxy.url, proxy.key, "requests", CONNECTIONS, seconds=3_600, limit=lasting // 10)
        settled = rss_mib(proxy.pid)
        self.load(proxy.url, proxy.key, "requests", CONNECTIONS, seconds=3_600, limit=lasting)
        self.load(proxy.url, proxy.key, "leave", CONNECTIONS, seconds=3_600, limit=leaving)
        return rss_mib(proxy.pid) - settled

    def latency(self, url: str, key: str) -> dict[str, float]:
        """Of one request at a time."""
        small = self.load(url, key, "requests", 1)
        large = self.load(url, key, "requests", 1, prompt_bytes=PROMPT_BYTES, limit=300)
        return small | {"large_p50_ms": large["p50_ms"]}


def _family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def cpu_s(pid: int) -> float:
    """Used so far by a process and those it started."""
    return sum(sum(each.cpu_times()[:2]) for each in _family(pid))


def until_idle(pid: int) -> None:
    """A slow proxy is long at work for clients that have left: what comes next would wait behind that."""
    used_s = -math.inf

    def is_idle() -> bool:
        nonlocal used_s
        before_s, used_s = used_s, cpu_s(pid)
        return used_s - before_s < IDLE_PART * IDLE_EVERY_S

    wait_until(is_idle, "the proxy to come to rest", timeout_s=120, every_s=IDLE_EVERY_S)


def rss_mib(pid: int) -> float:
    return float(sum(each.memory_info().rss for each in _family(pid)) / 2**20)


@contextlib.contextmanager
def engines(core: int | None) -> Iterator[list[int]]:
    """The ports that they listen on."""
    ports = [free_port() for _ in range(ENGINES)]
    command = [sys.executable, "-m", "tests.bench.stub_engine", *map(str, ports)]
    with tempfile.TemporaryFile() as log, running(command, core=core, log=log):
        wait_until(lambda: os.pread(log.fileno(), 100, 0) == b"listening\n", "the engines to listen")
        yield ports


@contextlib.contextmanager
def ours(ports: Sequence[int], core: int | None) -> Iterator[Proxy]:
    with filled([Hosted(MODEL, "prefix", ports)]) as catalog, serving(catalog, core=core) as served:
        yield Proxy(OURS, served.url, served.key, served.pid)


def measure(
    bench: Bench, peers: Sequence[str], passes: int = 1, lasting: int = 0, leaving: int = 0
) -> dict[str, Any]:
    """Only one runs at a time, and each pass is of all of them: what the machine does meanwhile, it does to
    all alike."""
    starters: dict[str, Callable[[Sequence[int], int | None], AbstractContextManager[Proxy]]] = {OURS: ours}
    starters |= {peer: PEERS[peer] for peer in peers}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in starters}
    absent: dict[str, str] = {}
    growth_mib = None
    with engines(bench.other_core) as ports:
        for number in range(passes):
            direct = bench.latency(f"http://127.0.0.1:{ports[0]}", "none")
            for name in [name for name in starters if name not in absent]:
                with ExitStack() as stack:
                    try:
                        proxy = stack.enter_context(starters[name](ports, bench.proxy_core))
                        found[name].append(bench.one_pass(proxy, direct))
                        if name == OURS and lasting and number == passes - 1:
                            growth_mib = bench.growth_mib(proxy, lasting, leaving)
                    except (Absent, Failed) as why:
                        if name == OURS:
                            raise
                        absent[name] = str(why)
    rows = {name: medians(some) for name, some in found.items() if name not in absent}
    ours_alone = dict(rows[OURS])
    if growth_mib is not None:
        rows[OURS]["growth_mib"] = ours_alone["growth_mib"] = growth_mib
    for name, (column, peer) in _OF_PEERS.items():
        if peer in rows:
            ours_alone[name] = rows[OURS][column] / rows[peer][column]
    return {"passes": passes, "rows": rows, "verdicts": verdicts(ours_alone), "absent": absent}


def medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


_MEETS = {"at least": operator.ge, "at most": operator.le, "below": operator.lt}


def verdicts(row: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """Of the limits that something was measured for."""
    found = {}
    for name, (kind, limit) in LIMITS.items():
        if name in row:
            is_met = _MEETS[kind](row[name], limit)
            found[name] = {"value": row[name], "limit": f"{kind} {limit:g}", "met": is_met}
    return found


def _print_table(found: dict[str, Any]) -> None:
    print("| proxy | " + " | ".join(COLUMNS.values()) + " |")
    print("|---" * (len(COLUMNS) + 1) + "|")
    for name, row in found["rows"].items():
        print(f"| {name} | " + " | ".join(_short(row[column]) for column in COLUMNS) + " |")
    for name, verdict in found["verdicts"].items():
        print(f"{name}: {_short(verdict['value'])} ({verdict['limit']}: {'yes' if verdict['met'] else 'NO'})")
    for why in found["absent"].values():
        print(f"Not measured: {why}")


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gateway", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    parser.add_argument("--peers", default="", metavar="NAME,...", help=f"among {', '.join(PEERS)}")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each measurement of a row")
    parser.add_argument("--passes", type=int, default=PASSES, help="of which the medians are told")
    parser.add_argument("--streams", type=int, default=STREAMS, help="that are read at once")
    parser.add_argument("--lasting", type=int, default=LASTING, help="requests after which memory is flat")
    parser.add_argument("--leaving", type=int, default=LEAVING, help="clients that leave on top of those")
    options = parser.parse_args(words)
    peers = [name for name in options.peers.split(",") if name]
    if unknown := [name for name in peers if name not in PEERS]:
        parser.error(f"{unknown[0]!r} is no peer; there are {', '.join(PEERS)}.")
    bench = Bench(options.seconds, options.streams, tuple(sorted(os.sched_getaffinity(0))))
    found = measure(bench, peers, options.passes, options.lasting, options.leaving)
    print(json.dumps(found, indent=2)) if options.json else _print_table(found)


if __name__ == "__main__":
    main()
