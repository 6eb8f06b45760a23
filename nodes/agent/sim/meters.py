"""The sim engine's batch, its pace and its counters, told under vllm's names."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field

from nodes.agent.sim.options import Options

# vllm's own bounds.
TTFT_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
PREFILL_STEP_S = 0.1
TPOT_BUCKETS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)


class Pace:
    """When the tokens of one answer are due. One that is late is told together with the next."""

    def __init__(self, tokens: int, *, ttft_s: float, tpot_s: float) -> None:
        self.tokens, self.tpot_s = tokens, tpot_s
        self.first_s = time.monotonic() + ttft_s

    async def due_after(self, told: int) -> int:
        """How many are due, once more than `told` are."""
        wait_s = self.first_s + told * self.tpot_s - time.monotonic()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        if self.tpot_s <= 0:
            return self.tokens
        late_s = time.monotonic() - self.first_s
        return min(self.tokens, max(told + 1, int(late_s / self.tpot_s) + 1))


class QueueFull(Exception):
    """No slot is free, and as many wait for one as may."""


class Slots:
    """A batch of limited size with a queue, first come first served. queue_size: None is without limit."""

    def __init__(self, size: int, queue_size: int | None = None) -> None:
        self.size, self.queue_size = size, queue_size
        self.running = 0
        self._queue: deque[asyncio.Future[None]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Raises QueueFull."""
        await self._take()
        try:
            yield
        finally:
            self._give()

    async def _take(self) -> None:
        if self.running < self.size:
            self.running += 1
            return
        if self.queue_size is not None and self.waiting >= self.queue_size:
            raise QueueFull
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn in self._queue:
                self._queue.remove(turn)
            elif not turn.cancelled():  # it was given the slot while its client left
                self._give()
            raise

    def _give(self) -> None:
        while self._queue:
            turn = self._queue.popleft()
            if not turn.done():
                turn.set_result(None)  # the slot changes hands
                return
        self.running -= 1


class Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * len(bounds)
        self.total = 0
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.total += times
        self.sum += value * times
        for index, bound in enumerate(self.bounds):
            if value <= bound:
                self.counts[index] += times
                return

    def lines(self, name: str, label: str) -> list[str]:
        lines, below = [f"# TYPE {name} histogram"], 0
        for bound, count in zip(self.bounds, self.counts, strict=True):
            below += count
            lines.append(f'{name}_bucket{{le="{bound}",{label}}} {float(below)}')
        lines.append(f'{name}_bucket{{le="+Inf",{label}}} {float(self.total)}')
        lines += [f"{name}_count{{{label}}} {float(self.total)}", f"{name}_sum{{{label}}} {self.sum}"]
        return lines


class Steps:
    """How many the engine has made: one for each round of tokens, several while a prefill goes on."""

    def __init__(self) -> None:
        self._made = 0
        self._prefills: list[float] = []

    @property
    def made(self) -> int:
        now_s = time.monotonic()
        return self._made + sum(int((now_s - began_s) / PREFILL_STEP_S) for began_s in self._prefills)

    def add(self) -> None:
        self._made += 1

    @contextlib.contextmanager
    def of_prefill(self) -> Iterator[None]:
        began_s = time.monotonic()
        self._prefills.append(began_s)
        try:
            yield
        finally:
            self._prefills.remove(began_s)
            self._made += int((time.monotonic() - began_s) / PREFILL_STEP_S)


@dataclass(slots=True)
class Counts:
    prompt_tokens: int = 0
    queried_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    turned_away: int = 0
    steps: Steps = field(default_factory=Steps)
    blocks_in_use: int = 0
    finished: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0})
    ttft: Histogram = field(default_factory=lambda: Histogram(TTFT_BUCKETS_S))
    tpot: Histogram = field(default_factory=lambda: Histogram(TPOT_BUCKETS_S))

    def finish(self, reason: str) -> None:
        """vllm counts a tool's call as a stop."""
        self.finished["stop" if reason == "tool_calls" else reason] += 1

    def exposition(self, options: Options, slots: Slots) -> str:
        """Everything in Prometheus' text form."""
        label = f'engine="0",model_name="{_escaped(options.model)}"'
        config = (
            f'block_size="{options.block_size}",enable_prefix_caching="{options.is_caching}",'
            f'num_gpu_blocks="{options.kv_blocks}"'
        )
        metrics: tuple[tuple[str, str, str, float], ...] = (
            ("gauge", "num_requests_running", "", slots.running),
            ("gauge", "num_requests_waiting", "", slots.waiting),
            ("gauge", "kv_cache_usage_perc", "", min(1.0, self.blocks_in_use / options.kv_blocks)),
            ("gauge", "cache_config_info", config, 1),
            ("counter", "prefix_cache_queries_total", "", self.queried_tokens),
            ("counter", "prefix_cache_hits_total", "", self.cached_tokens),
            ("counter", "prompt_tokens_total", "", self.prompt_tokens),
            ("counter", "prompt_tokens_cached_total", "", self.cached_tokens),
            ("counter", "generation_tokens_total", "", self.generation_tokens),
            ("counter", "iteration_tokens_total_count", "", self.steps.made),
            ("counter", "admission_rejections_total", 'reason="max_num_queued_reqs"', self.turned_away),
            *(
                ("counter", "request_success_total", f'finished_reason="{reason}"', count)
                for reason, count in self.finished.items()
            ),
        )
        lines: list[str] = []
        for kind, name, more, value in metrics:
            if (head := f"# TYPE vllm:{name} {kind}") not in lines:
                lines.append(head)
            lines.append(f"vllm:{name}{{{label}{',' if more else ''}{more}}} {float(value)}")
        lines += self.ttft.lines("vllm:time_to_first_token_seconds", label)
        lines += self.tpot.lines("vllm:inter_token_latency_seconds", label)
        return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
