"""What routing by prefix is worth: the time to the first token, against turns and against the least loaded.

`python -m tests.bench.routing`. Eight real sim engines, each a process whose cache holds a part of what is
asked for, behind a real gateway. A sim's first token takes as long as the part of the prompt that it does not
hold. Requests come by chance, the same ones at the same moments for each way of routing; a part of each
prompt is shared by all requests of its group. A sim has room for all that comes here at once, and so its
slowest first token takes the same whichever way is gone: what a p99 has beyond that is the machine's doing,
and the medians of several passes are told, each with requests of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import aiohttp

from tests.agent_process import ask
from tests.bench.served import (
    Filled,
    Hosted,
    Served,
    clean_environment,
    filled,
    is_answering,
    running,
    serving,
)
from tests.services import free_port
from tests.waiting import wait_until

WAYS = ("round-robin", "least-loaded", "prefix")
REPLICAS = 8
REQUESTS = 600
SHARES = (0, 25, 75)
RATE_PER_S = 25.0

GROUPS = 64
PROMPT_CHARACTERS = 4_096
TOKENS = 16
# 1024 blocks of 64 characters are 16 prompts; what the groups share at 75 % alone is three times as much.
SIM = ["--ttft", "800ms", "--tpot", "20ms", "--kv-blocks", "1024", "--max-num-seqs", "32"]
_TOKEN = re.compile(rb'"content": ?"[^"]')
PASSES = 3
WARM_UP_PART = 0.3  # the first requests of a run fill the caches, and are not counted

LIMITS = {
    "mean at 75 %, of round-robin's": 0.4,
    "mean at 0 %, of least-loaded's": 1.05,
    "p99 at the worst share, of the better other's": 1.05,  # no worse, as far as a run can tell
}


@dataclass(frozen=True, slots=True)
class Request:
    at_s: float
    messages: list[dict[str, str]]


def traffic(share: int, count: int, rate_per_s: float, turn: int = 0) -> list[Request]:
    """`share`: how many of a hundred characters of each prompt are those of its group. Each turn has its
    own."""
    random, at_s, requests = Random(100 * turn + share), 0.0, []
    shared = PROMPT_CHARACTERS * share // 100
    groups = [_text(random, shared) for _ in range(GROUPS)]
    for _ in range(count):
        at_s += random.expovariate(rate_per_s)
        opening, own = random.choice(groups), _text(random, PROMPT_CHARACTERS - shared)
        messages = [{"role": "system", "content": opening}] if opening else []
        requests.append(Request(at_s, [*messages, {"role": "user", "content": own}]))
    return requests


def _text(random: Random, characters: int) -> str:
    return "".join(random.choices("abcdefghijklmnopqrstuvwxyz ", k=characters))


@contextmanager
def sims(hosted: Hosted, catalog: Filled) -> Iterator[None]:
    """One at each of a model's ports."""
    with ExitStack() as stack:
        log = stack.enter_context(tempfile.TemporaryFile())
        for port in hosted.ports:
            command = [sys.executable, "-m", "nodes.agent.sim", "--model", hosted.name, "--port", str(port)]
            environment = clean_environment(VLLM_API_KEY=catalog.replica_keys[port])
            stack.enter_context(running([*command, *SIM], env=environment, log=log))
        for port in hosted.ports:
            wait_until(
                lambda port=port: is_answering(f"http://127.0.0.1:{port}/health"),  # type: ignore[misc]
                "the sim engines to listen",
                timeout_s=60,
            )
        yield


async def first_tokens(served: Served, model: str, requests: Sequence[Request]) -> list[float]:
    """The seconds from each request to its first token, in the order of the requests."""
    headers = {"Authorization": f"Bearer {served.key}"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(served.url, headers=headers, connector=connector) as session:
        begin_s = time.monotonic()
        return await asyncio.gather(*(_first_token(session, model, each, begin_s) for each in requests))


async def _first_token(session: aiohttp.ClientSession, model: str, request: Request, begin_s: float) -> float:
    """Reads the answer to its end, as clients do."""
    await asyncio.sleep(begin_s + request.at_s - time.monotonic())
    body = {"model": model, "messages": request.messages, "max_tokens": TOKENS, "stream": True}
    asked_s, first_s = time.monotonic(), None
    async with session.post("/v1/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if first_s is None and _TOKEN.search(line):
                first_s = time.monotonic()
    assert first_s is not None, "an answer without a token"
    return first_s - asked_s


def cached_part(ports: Sequence[int], before: tuple[float, float] = (0, 0)) -> tuple[float, float]:
    """Tokens found in caches, and tokens looked for, since `before`."""
    texts = [ask(f"http://127.0.0.1:{port}/metrics").body.decode() for port in ports]

    def total(name: str) -> float:
        found = (re.search(rf"^vllm:{name}\{{.*?\}} (\S+)$", text, re.MULTILINE) for text in texts)
        return sum(float(match[1]) for match in found if match)

    return total("prefix_cache_hits_total") - before[0], total("prefix_cache_queries_total") - before[1]


def measure(
    ways: Sequence[str], shares: Sequence[int], replicas: int, count: int, rate_per_s: float, turn: int = 0
) -> list[dict[str, Any]]:
    """A row for each share and way."""
    rows = []
    models = [Hosted(way, way, [free_port() for _ in range(replicas)]) for way in ways]
    with filled(models) as catalog, serving(catalog) as served:
        for model in models:
            with sims(model, catalog):
                for share in shares:
                    before = cached_part(model.ports)
                    requests = traffic(share, count, rate_per_s, turn)
                    took_s = asyncio.run(first_tokens(served, model.name, requests))
                    counted = sorted(took_s[int(len(took_s) * WARM_UP_PART) :])
                    found, looked_for = cached_part(model.ports, before)
                    rows.append(
                        {
                            "share": share,
                            "way": model.routing,
                            "mean_ttft_ms": statistics.fmean(counted) * 1_000,
                            "p99_ttft_ms": counted[int(len(counted) * 0.99)] * 1_000,
                            "cached": found / looked_for,
                        }
                    )
    return sorted(rows, key=lambda row: (row["share"], ways.index(row["way"])))


def medians(passes: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Of rows that are in the same order in each pass."""
    numbers = ("mean_ttft_ms", "p99_ttft_ms", "cached")
    return [
        same[0] | {name: statistics.median(row[name] for row in same) for name in numbers}
        for same in zip(*passes, strict=True)
    ]


def verdicts(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The limits, and what was found of them, as ratios."""
    at = {(row["share"], row["way"]): row for row in rows}
    shares = sorted({row["share"] for row in rows})

    def ratio(share: int, other: str) -> float:
        return float(at[share, "prefix"]["mean_ttft_ms"] / at[share, other]["mean_ttft_ms"])

    tails = [
        at[share, "prefix"]["p99_ttft_ms"] / min(at[share, way]["p99_ttft_ms"] for way in WAYS[:2])
        for share in shares
    ]
    values = (ratio(75, "round-robin"), ratio(0, "least-loaded"), max(tails))
    return {
        name: {"value": value, "limit": limit, "met": value <= limit}
        for (name, limit), value in zip(LIMITS.items(), values, strict=True)
    }


def _print_table(found: dict[str, Any]) -> None:
    print("| shared | routing | mean TTFT, ms | p99 TTFT, ms | prompt tokens found in a cache |")
    print("|---|---|---|---|---|")
    for row in found["rows"]:
        print(
            f"| {row['share']} % | {row['way']} | {row['mean_ttft_ms']:.0f} | {row['p99_ttft_ms']:.0f} "
            f"| {row['cached']:.0%} |"
        )
    for name, verdict in found["verdicts"].items():
        answer = "yes" if verdict["met"] else "NO"
        print(f"{name}: {verdict['value']:.2f} (at most {verdict['limit']}: {answer})")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.routing", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="in each of the nine runs of a pass")
    parser.add_argument("--rate", type=float, default=RATE_PER_S, help="requests a second")
    parser.add_argument("--passes", type=int, default=PASSES, help="of which the medians are told")
    options = parser.parse_args(words)
    rows = medians(
        [
            measure(WAYS, SHARES, REPLICAS, options.requests, options.rate, turn)
            for turn in range(options.passes)
        ]
    )
    found = {"passes": options.passes, "rows": rows, "verdicts": verdicts(rows)}
    print(json.dumps(found, indent=2)) if options.json else _print_table(found)


if __name__ == "__main__":
    main()
