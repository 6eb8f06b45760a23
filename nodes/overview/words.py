"""An overview in words, which are the same through every door."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from nodes.models import Replica
from nodes.overview.value import Gpus, Models, Nodes, Overview, Replicas, Traffic
from nodes.reckoning import lasted


@dataclass(frozen=True, slots=True)
class Part:
    """Some of what a fact counts, such as "3 lost". look: of its badge; query: by which a list shows them."""

    words: str
    look: str = ""
    query: str = ""


@dataclass(frozen=True, slots=True)
class Fact:
    """A line for people. kind: whose list tells more, empty where none does."""

    name: str
    kind: str
    parts: tuple[Part, ...]

    @property
    def words(self) -> str:
        return ", ".join(part.words for part in self.parts)


def facts_of(seen: Overview) -> tuple[Fact, ...]:
    """In words, what is 0 left out."""
    return tuple(_facts(seen))


def overview_as_dict(seen: Overview) -> dict[str, Any]:
    """As REST and `--json` tell it."""
    return asdict(seen) | {"facts": [{"name": fact.name, "words": fact.words} for fact in facts_of(seen)]}


def _facts(seen: Overview) -> Iterator[Fact]:
    if seen.nodes is not None:
        yield Fact("nodes", "node", tuple(_of_nodes(seen.nodes)) or (Part("none"),))
    for each in seen.gpus or ():
        yield Fact(f"GPUs {each.gpu_class}", "node", tuple(_of_gpus(each)))
    if seen.models is not None:
        yield Fact("models", "model", tuple(_of_models(seen.models)) or (Part("none"),))
    if seen.replicas is not None:
        yield Fact("replicas", "replica", tuple(_of_replicas(seen.replicas)) or (Part("none"),))
    if seen.traffic is not None:
        yield Fact("last hour", "usage", tuple(_of_traffic(seen.traffic)))


def _of_nodes(nodes: Nodes) -> Iterator[Part]:
    if nodes.fresh:
        yield Part(f"{nodes.fresh} fresh", "good")
    if nodes.suspect:
        yield Part(f"{nodes.suspect} suspect", "warn")
    if nodes.lost:
        yield Part(f"{nodes.lost} lost", "bad")
    if nodes.never:
        yield Part(f"{nodes.never} never heard from")
    if nodes.cordoned > nodes.draining:
        yield Part(f"{nodes.cordoned - nodes.draining} cordoned", "warn", "?takes=nothing-new")
    if nodes.draining:
        yield Part(f"{nodes.draining} draining", "warn", "?takes=leaving")


def _of_gpus(gpus: Gpus) -> Iterator[Part]:
    yield Part(f"{gpus.used} of {gpus.total} in use", "busy" if gpus.used else "")
    if gpus.free:
        yield Part(f"{gpus.free} free", "good")
    if gpus.closed:
        yield Part(f"{gpus.closed} free on nodes that take nothing", "warn")
    if gpus.foreign:
        yield Part(f"{gpus.foreign} used by something else", "warn")
    if gpus.unhealthy:
        yield Part(f"{gpus.unhealthy} not healthy", "bad")


def _of_models(models: Models) -> Iterator[Part]:
    if models.ready:
        yield Part(f"{models.ready} ready", "good")
    if models.loading:
        yield Part(f"{models.loading} loading", "busy", "?state=short")
    if models.failing:
        yield Part(f"{models.failing} failing", "bad", "?state=short")
    if models.asleep:
        yield Part(f"{models.asleep} asleep until asked for", "", "?scaling=on-demand")
    if models.off:
        yield Part(f"{models.off} off", "", "?scaling=off")


def _of_replicas(replicas: Replicas) -> Iterator[Part]:
    if replicas.ready:
        yield Part(f"{replicas.ready} ready", "good", f"?state__exact={Replica.State.READY}")
    if replicas.starting:
        yield Part(f"{replicas.starting} on the way", "busy")
    if replicas.draining:
        yield Part(f"{replicas.draining} leaving", "busy")
    if replicas.lost:
        yield Part(f"{replicas.lost} lost", "bad", f"?state__exact={Replica.State.LOST}")
    if replicas.stale:
        yield Part(f"{replicas.stale} stale", "warn", "?shown=stale")
    if replicas.mild:
        yield Part(f"{replicas.mild} stale, no restart needed", "", "?shown=stale")


def _of_traffic(traffic: Traffic) -> Iterator[Part]:
    if not traffic.requests:
        yield Part("no requests")
        return
    yield Part(f"{_rate(traffic.requests_per_s)} requests/s")
    if traffic.errors:
        yield Part(f"{traffic.errors / traffic.requests:.2%} errors", "warn")
    if traffic.ttft_p50_s is not None:
        yield Part(f"TTFT p50 {lasted(traffic.ttft_p50_s)}")
        yield Part(f"TTFT p99 {lasted(traffic.ttft_p99_s)}")
    yield Part(f"{_rate(traffic.tokens_per_s)} tokens/s")


def _rate(per_s: float) -> str:
    """Such as `1,240`, `2.5`, `under 0.01`."""
    if per_s >= 100 or not per_s:
        return f"{per_s:,.0f}"
    return f"{per_s:.2g}" if per_s >= 0.01 else "under 0.01"
