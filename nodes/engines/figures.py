"""What engines tell of themselves in numbers, under one set of names whichever engine it is.

Ranks of one engine count apart (`engine="0"`, `tp_rank="1"`): counts are added up, and of ratios the mean is
told. What an engine does not tell has no sample, as 0 would be a lie.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from nodes.engines.adapter import Adapter
from nodes.exposition import COUNTER, GAUGE, HISTOGRAM, Distribution, read_samples

BOUNDS_LIMIT = 100  # of one histogram; engines have about thirty
_ENDINGS = ("_bucket", "_sum", "_count")


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    kind: str
    says: str


FIGURES = (
    Figure("running", GAUGE, "Requests that the engine works on."),
    Figure("waiting", GAUGE, "Requests that wait in the engine."),
    Figure("kv_cache_usage_ratio", GAUGE, "Used part of the KV cache, from 0 to 1."),
    Figure("prompt_tokens_total", COUNTER, "Tokens of prompts, those that were cached included."),
    Figure("cached_tokens_total", COUNTER, "Tokens of prompts that the engine had in its cache."),
    Figure("generation_tokens_total", COUNTER, "Tokens that the engine has generated."),
    Figure("preemptions_total", COUNTER, "Requests that had to give way to others, and begin again."),
    Figure("time_to_first_token_seconds", HISTOGRAM, "To the first token, as the engine counts."),
    Figure("inter_token_latency_seconds", HISTOGRAM, "Between two tokens, as the engine counts."),
    Figure("queue_seconds", HISTOGRAM, "Waited in the engine."),
)


def figures_of(told: str, adapter: Adapter) -> dict[str, float | Distribution]:
    """By the names in FIGURES, from what the engine answers on its metrics path."""
    wanted = {"running": (adapter.running,), "waiting": (adapter.waiting,), **adapter.figures}
    plain: dict[str, list[float]] = defaultdict(list)
    buckets: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    names = {name for theirs in wanted.values() for name in theirs}
    names |= {name + ending for name in names for ending in _ENDINGS}
    for sample in read_samples(told, frozenset(names)):
        if sample.name.endswith("_bucket"):
            buckets[sample.name.removesuffix("_bucket")][sample.labels.get("le", "")] += sample.value
        else:
            plain[sample.name].append(sample.value)
    found: dict[str, float | Distribution] = {}
    for figure in FIGURES:
        theirs = wanted.get(figure.name, ())
        if figure.kind == HISTOGRAM:
            for name in theirs:
                if histogram := _histogram(name, buckets, plain):
                    found[figure.name] = histogram
        elif any(name in plain for name in theirs):
            values = [value for name in theirs for value in plain[name]]
            is_ratio = figure.name.endswith("_ratio")
            found[figure.name] = sum(values) / len(values) if is_ratio else sum(values)
    return found


def _histogram(
    name: str, buckets: dict[str, dict[str, float]], plain: dict[str, list[float]]
) -> Distribution | None:
    below = buckets.get(name, {})
    if "+Inf" not in below or len(below) > BOUNDS_LIMIT or not all(map(_is_bound, below)):
        return None
    ordered = sorted(below.items(), key=lambda pair: float(pair[0]))
    return Distribution(ordered, sum(plain[f"{name}_sum"]), below["+Inf"])


def _is_bound(text: str) -> bool:
    try:
        return not math.isnan(float(text))
    except ValueError:
        return False
