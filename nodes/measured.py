"""What benches have found of a model: runs side by side, and what follows for its profiles' weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from catalog.durations import MILLISECOND
from catalog.models import Model
from catalog.parts import Slo
from catalog.typed import span_words
from nodes.bench.options import DIRECTLY
from nodes.bench.weighing import Capacity, Weighing, weigh
from nodes.models import Job, Rank, Replica
from nodes.showing import with_age

SHOWN = 20
WEIGHED = 100  # runs: the last that found a limit
LOAD = ("distribution", "prompt_tokens", "output_tokens", "spread", "shared_prefix", "dataset")
"""What of a run's options makes two comparable."""


def ready_ranks(model: Model) -> list[Rank]:
    """The first rank of each replica that takes requests, in the order in which they were started."""
    return list(
        Rank.objects.filter(
            rank=0,
            port__isnull=False,
            replica__model=model,
            replica__state=Replica.State.READY,
            replica__wanted=Replica.Wanted.RUN,
        )
        .select_related("replica", "node")
        .order_by("replica__created_at", "replica_id")
    )


def runs_of(model_name: str, limit: int = SHOWN) -> list[Job]:
    """The latest benches of the model that are over, the newest first, each with its `age`."""
    found = Job.objects.filter(kind=Job.Kind.BENCH, model_name=model_name).exclude(state__in=Job.LIVE)
    return list(with_age(found, "asked_at")[:limit])


def weighing_of(model: Model, *, runs: int = WEIGHED) -> Weighing:
    """The weights that what was measured directly at replicas of its profiles proposes."""
    limits = Job.objects.filter(
        kind=Job.Kind.BENCH,
        model=model,
        state=Job.State.DONE,
        result__through=DIRECTLY,
        result__is_limit=True,  # others may hold more than was tried
    )
    latest = limits.order_by("-ended_at", "-asked_at")[:runs]
    told = latest.values_list("options", *(f"result__{each}" for each in _OF_RESULT))
    return weigh(model.spec, [_capacity(*each) for each in reversed(told)])


_OF_RESULT = ("profile", "build", "rate", "promise")  # the rest is of each step, and long


def _capacity(
    options: Mapping[str, Any], profile: str, build: str, rate: float, promise: Mapping[str, float]
) -> Capacity:
    return Capacity(
        profile=profile,
        build=build,
        rate=rate,
        promise=(promise["ttft_p99_ms"], promise["tpot_p99_ms"]),
        load=json.dumps({key: options.get(key) for key in LOAD}),
    )


def weighing_as_dict(weighing: Weighing) -> dict[str, Any]:
    return {
        "says": weighing.says,
        "profiles": [
            {
                "profile": each.profile,
                "gpu_class": each.gpu_class,
                "rate": each.rate,
                "was": each.was,
                "weight": each.weight,
            }
            for each in weighing.proposals
        ],
    }


# --- side by side ---------------------------------------------------------------------------------

HEADINGS = (
    *("run", "when", "state", "at", "profile", "gpu", "engine", "held, req/s", "tokens/s"),
    *("TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99"),
)


def run_as_dict(job: Job) -> dict[str, Any]:
    """One line of the comparison: what was measured, on what, and the numbers of the highest load that
    held."""
    result = job.result
    best = best_step(result)
    return {
        "id": str(job.pk),
        "state": job.state,
        "asked_at": job.asked_at.isoformat(),
        "through": result.get("through"),
        "replica": result.get("replica"),
        "profile": result.get("profile"),
        "gpu": job.gpu,
        "engine": f"{job.engine} {job.engine_version}".strip(),
        "fingerprint": job.fingerprint,
        "rate": result.get("rate"),
        "says": result.get("says") or job.problem,
        "promise": result.get("promise"),
        "options": job.options,
        "best": best,
        "steps": result.get("steps", []),
    }


def best_step(result: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The last one that held: what was found, measured for longest."""
    held: Sequence[Mapping[str, Any]] = [each for each in result.get("steps", ()) if each["holds"]]
    return max(held, key=lambda each: (each["rate"], each["measured_s"])) if held else None


def run_line(job: Job) -> tuple[object, ...]:
    """Cells under HEADINGS, of a row of `runs_of`."""
    told = run_as_dict(job)
    best = told["best"] or {}
    place = told["replica"][:8] if told["replica"] else told["through"] or ""
    return (
        told["id"][:8],
        f"{span_words(job.age.total_seconds())} ago",  # type: ignore[attr-defined]  # annotated
        told["state"],
        place,
        told["profile"] or "",
        told["gpu"],
        told["engine"],
        "" if told["rate"] is None else f"{told['rate']:.3g}",
        f"{best['output_tokens_per_s']:.4g}" if best else "",
        *(_ms(best.get(kind, {}).get(level)) for kind in ("ttft", "tpot") for level in ("p50_ms", "p99_ms")),
    )


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.4g} ms"


STEP_HEADINGS = (
    *("req/s", "requests", "failed", "TTFT p50", "TTFT p95", "TTFT p99"),
    *("TPOT p50", "TPOT p95", "TPOT p99", "tokens/s", "verdict"),
)


def step_line(step: Mapping[str, Any]) -> tuple[object, ...]:
    """Cells under STEP_HEADINGS."""
    levels = ("p50_ms", "p95_ms", "p99_ms")
    return (
        f"{step['rate']:.4g}",
        step["requests"],
        step["failed"] or "",
        *(_ms(step[kind][level]) for kind in ("ttft", "tpot") for level in levels),
        f"{step['output_tokens_per_s']:.4g}",
        "holds" if step["holds"] else step["why"],
    )


# --- drawn ----------------------------------------------------------------------------------------

CURVES = 4  # runs; with what is promised, as many lines as are told apart
_PLOTS: tuple[tuple[str, str, str, Callable[[Mapping[str, Any]], float | None]], ...] = (
    ("ttft", "TTFT p99", "ms", lambda step: step["ttft"]["p99_ms"]),
    ("tpot", "TPOT p99", "ms", lambda step: step["tpot"]["p99_ms"]),
    ("tokens", "Output", "tokens/s", lambda step: None if step["is_cut"] else step["output_tokens_per_s"]),
)


def curves_of(model_name: str, slo: Slo) -> dict[str, Any]:
    """Latency against load, a line a run, in the form that plots are drawn from."""
    runs = [job for job in runs_of(model_name) if job.result.get("steps")][:CURVES]
    by_rate = [{step["rate"]: step for step in job.result["steps"]} for job in runs]  # the last of a rate
    rates = sorted({rate for steps in by_rate for rate in steps})
    promised = {"ttft": slo.ttft_p99 / MILLISECOND, "tpot": slo.tpot_p99 / MILLISECOND}
    plots = []
    for name, title, unit, value in _PLOTS:
        lines = [
            {
                "name": str(job.pk),
                "label": _run_words(job),
                "values": [value(steps[rate]) if rate in steps else None for rate in rates],
            }
            for job, steps in zip(runs, by_rate, strict=True)
        ]
        if promised.get(name):
            values = [promised[name]] * len(rates)
            lines.append({"name": "promised", "label": "promised", "values": values})
        plots.append({"name": name, "title": title, "unit": unit, "lines": lines})
    return {"x": {"label": "load", "unit": "requests/s", "values": rates}, "plots": plots}


def _run_words(job: Job) -> str:
    result = job.result
    return f"{str(job.pk)[:8]} {result.get('profile') or result['through']}"
