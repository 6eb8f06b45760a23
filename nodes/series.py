"""What plots show: how a model, a node or the whole cluster did over a span, for every door.

A span is told in at most a few hundred values that are evenly apart and end with the last whole step. null:
nothing is known. The same few queries answer, however long it ran and however many others there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from catalog.reading import CatalogError, Fault, quote
from nodes import samples, usage
from nodes.reckoning import SEES_ALL
from nodes.sampling import (
    CLUSTER,
    HOUR_S,
    MINUTE_S,
    MODEL,
    NODE,
    SPANS,
    Span,
    Subject,
    Value,
    begin,
    fold,
)
from nodes.tallies import Tally

USUAL_SPAN = "1h"
KEPT_BACK = "What requests came to is shown to whoever may see what all keys used."
GIB = 1024  # MiB


@dataclass(frozen=True, slots=True)
class Line:
    """One of a plot's lines, and its values in the plot's unit."""

    name: str
    label: str
    values: Sequence[Value]


@dataclass(frozen=True, slots=True)
class Plot:
    """Lines that are looked at together. `unit` is of all of them."""

    name: str
    title: str
    unit: str
    lines: tuple[Line, ...]

    @property
    def is_empty(self) -> bool:
        return all(value is None for line in self.lines for value in line.values)


@dataclass(frozen=True, slots=True)
class Series:
    """The plots of one subject. note: why some are not here, a sentence; "" when all are."""

    subject: Subject
    span: Span
    begins_at: datetime
    plots: tuple[Plot, ...]
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        kind, name = self.subject
        return {
            "kind": kind,
            "name": name,
            "span": self.span.name,
            "begins_at": self.begins_at.isoformat(),
            "step_s": self.span.step_s,
            "count": self.span.count,
            "note": self.note,
            "plots": [
                {
                    "name": plot.name,
                    "title": plot.title,
                    "unit": plot.unit,
                    "lines": [
                        {"name": line.name, "label": line.label, "values": list(line.values)}
                        for line in plot.lines
                    ],
                }
                for plot in self.plots
            ],
        }


def span_of(text: str) -> Span:
    """Raises CatalogError for one that is not kept."""
    if text not in SPANS:
        says = f"span cannot be {quote(text)}; it is one of {', '.join(SPANS)}"
        raise CatalogError([Fault("", "", "span", "unknown_choice", says)])
    return SPANS[text]


def series_of_model(name: str, span: Span, now: datetime, user: Any = None) -> Series:
    """For this user; for a shell, where one may see everything, without. Two queries."""
    return _series((MODEL, name), span, now, _OF_MODEL, sees_traffic=_sees_all(user))


def series_of_cluster(span: Span, now: datetime, user: Any = None) -> Series:
    """As of a model."""
    return _series((CLUSTER, ""), span, now, _OF_CLUSTER, sees_traffic=_sees_all(user))


def series_of_node(name: str, span: Span, now: datetime) -> Series:
    """Which requests went to which node is not kept. One query."""
    begins_at = begin(span, now)
    return Series((NODE, name), span, begins_at, _sampled((NODE, name), span, begins_at, _OF_NODE))


def _sees_all(user: Any) -> bool:
    return user is None or bool(user.has_perm(SEES_ALL))


def _series(
    subject: Subject, span: Span, now: datetime, sampled: Iterable[_Sampled], *, sees_traffic: bool
) -> Series:
    begins_at = begin(span, now)
    plots = _sampled(subject, span, begins_at, sampled)
    if not sees_traffic:
        return Series(subject, span, begins_at, plots, KEPT_BACK)
    return Series(subject, span, begins_at, _of_traffic(subject[1], span, begins_at) + plots)


# --- what was sampled -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Sampled:
    """A plot of what is measured, each under its label. divisor: of a measured value, for the unit."""

    name: str
    title: str
    unit: str
    lines: Mapping[str, str]
    divisor: int = 1


_REPLICAS = _Sampled(
    "replicas",
    "Replicas",
    "replicas",
    {"ready": "ready", "coming": "coming", "leaving": "leaving", "lost": "lost", "missing": "no room for"},
)
_LOAD = _Sampled("load", "In engines", "requests", {"running": "running", "waiting": "waiting"})
_GPUS = _Sampled("gpus", "GPUs", "GPUs", {"gpus_used": "held by replicas", "gpus": "there are"})
_GPU_MEMORY = _Sampled(
    "gpu_memory", "GPU memory", "GiB", {"gpu_mib": "used", "gpu_total_mib": "there is"}, GIB
)
_HOST_MEMORY = _Sampled(
    "host_memory", "Host memory", "GiB", {"host_mib": "used", "host_total_mib": "there is"}, GIB
)
_NODES = _Sampled("nodes", "Nodes", "nodes", {"nodes_fresh": "answer", "nodes": "there are"})
_OF_MODEL = (
    _REPLICAS,
    _LOAD,
    _Sampled("gpus", "GPUs", "GPUs", {"gpus_used": "held"}),
    _Sampled("gpu_memory", "GPU memory", "GiB", {"gpu_mib": "used on its GPUs"}, GIB),
)
_OF_NODE = (_LOAD, _GPUS, _GPU_MEMORY, _HOST_MEMORY)
_OF_CLUSTER = (_REPLICAS, _LOAD, _GPUS, _GPU_MEMORY, _HOST_MEMORY, _NODES)


def _sampled(
    subject: Subject, span: Span, begins_at: datetime, wanted: Iterable[_Sampled]
) -> tuple[Plot, ...]:
    kept_s = MINUTE_S if span.step_s < HOUR_S else HOUR_S
    times = span.step_s // kept_s
    found = samples.lines(subject, kept_s, begins_at, span.count * times)
    unknown: list[Value] = [None] * span.count

    def line(measured: str, divisor: int) -> Sequence[Value]:
        values = fold(found[measured], times) if measured in found else unknown
        return values if divisor == 1 else [_parted(value, divisor) for value in values]

    return tuple(
        Plot(
            each.name,
            each.title,
            each.unit,
            tuple(Line(name, label, line(name, each.divisor)) for name, label in each.lines.items()),
        )
        for each in wanted
    )


# --- what requests came to ------------------------------------------------------------------------


def _of_traffic(model: str, span: Span, begins_at: datetime) -> tuple[Plot, ...]:
    step = timedelta(seconds=span.step_s)
    tallies = [Tally() for _ in range(span.count)]
    for at, tally in usage.traffic(model, span.step_s, begins_at, begins_at + step * span.count):
        tallies[(at - begins_at) // step] = tally

    def rate(name: str) -> list[Value]:
        return [_parted(getattr(tally, name), span.step_s) for tally in tallies]

    def quantile(time: str, part: float) -> list[Value]:
        return [_ms(tally.quantile(time, part)) for tally in tallies]

    def p50_and_p99(time: str, word: str = "") -> tuple[Line, ...]:
        return tuple(
            Line(f"{time}_{name}", f"{word} {name}".strip(), quantile(time, part))
            for name, part in (("p50", 0.5), ("p99", 0.99))
        )

    def rates(lines: Mapping[str, str]) -> tuple[Line, ...]:
        return tuple(Line(name, label, rate(name)) for name, label in lines.items())

    hit = [_percent(tally.cached_tokens, tally.prompt_tokens) for tally in tallies]
    return (
        Plot(
            "requests",
            "Requests",
            "requests/s",
            rates({"requests": "all", "errors": "refused or failed", "left": "left by clients"}),
        ),
        Plot("ttft", "Time to the first token", "ms", p50_and_p99("ttft")),
        Plot("tpot", "Time between tokens", "ms", p50_and_p99("tpot")),
        Plot(
            "tokens",
            "Tokens",
            "tokens/s",
            rates({"completion_tokens": "output", "prompt_tokens": "prompt", "cached_tokens": "cached"}),
        ),
        Plot("waits", "Waits", "ms", p50_and_p99("queue", "in line") + p50_and_p99("hold", "for a replica")),
        Plot("prefixes", "Prefix hits", "% of prompt tokens", (Line("prefix_hits", "cached", hit),)),
    )


def _parted(value: Value, divisor: int) -> Value:
    if value is None:
        return None
    return _short(value / divisor)


def _percent(part: int, whole: int) -> Value:
    return _short(100 * part / whole) if whole else None


def _ms(seconds: float | None) -> Value:
    return None if seconds is None else _short(seconds * 1000)


def _short(value: float) -> Value:
    """Four digits are more than a plot shows."""
    found = float(f"{value:.4g}")
    return int(found) if found == int(found) else found
