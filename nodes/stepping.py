"""One run of a bench, from its warm-up to what it found: step after step, as the search says.

Whoever runs it is told how far it is twice a second, and may end it then. A step ends early where nothing
that may still come changes its verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from catalog.durations import SECOND
from catalog.reading import quote
from nodes.bench.asks import Ask, Lengths, Row, arrivals
from nodes.bench.figures import GONE_RUN, Figures, Times, is_gone, is_lost, told_s
from nodes.bench.options import CONFIRMING, LARGEST_SAMPLE, Options
from nodes.bench.prompts import Prompts
from nodes.bench.search import Search
from nodes.generator import Generator, Volley
from nodes.jobs import JobFailed, JobStopped, Report
from nodes.models import Job

REPORT_S = 0.5
WARM_REQUESTS = 3  # at least
SHORTEST_RAMP_S, RAMP_TIMES = 1.0, 1.5
"""Before a step counts, its load has come for as long as a request takes, and half as long again."""
DRAIN_S, DRAIN_TIMES = 30.0, 4


class Run:
    """One run, from its warm-up to what it found."""

    def __init__(
        self,
        job: Job,
        report: Report,
        options: Options,
        rows: Sequence[Row],
        generator: Generator,
        model: str,
        head: Mapping[str, Any],
    ) -> None:
        self._job, self._report, self._options, self._head = job, report, options, head
        self._generator = generator
        assert job.model is not None
        self._promise = options.promise(job.model.spec.slo)
        drawn = options.lengths()
        self._lengths = Lengths(
            drawn.distribution, drawn.prompt_tokens, drawn.output_tokens, drawn.spread, tuple(rows)
        )
        self._prompts = Prompts(model, str(job.pk), options.shared_prefix)
        self._search: Search = options.search()
        self._steps: list[dict[str, Any]] = []
        self._asked = 0
        self._took_s = 0.0
        self._part = 0.0
        self._say = "warming up"

    def run(self) -> Mapping[str, Any]:
        self._warm_up()
        while (rate := self._search.next_rate()) is not None:
            self._step(rate, is_confirming=self._search.is_settled)
            self._part = max(self._part, self._search.part_done)
        return self._result()

    def _warm_up(self) -> None:
        lasting_s = self._options.warmup / SECOND
        count = min(max(WARM_REQUESTS, round(self._options.start_rate * lasting_s)), LARGEST_SAMPLE)
        chance = Random(f"{self._options.seed}:warm-up").random  # noqa: S311 -- to be had again
        asks = [Ask(each, each * lasting_s / count, self._lengths.draw(chance)) for each in range(count)]
        self._asked = count
        volley = self._generator.begin(asks, self._prompts.body)
        self._await(volley, lasting_s, since_s=0.0, planned=count, is_judged=False)
        took = Times.of(each.took_s for each in volley.outcomes if not each.problem)
        if not took.count:
            problem = volley.outcomes[-1].problem if volley.outcomes else "it did not answer in time"
            raise JobFailed(
                f"No request of the warm-up was answered ({problem}); manage.py why {self._job.model_name} "
                "tells how its replicas are."
            )
        self._took_s = took.p50_s or 0.0

    def _step(self, rate: float, *, is_confirming: bool) -> None:
        lasting_s = self._options.step_s(rate) * (CONFIRMING if is_confirming else 1)
        ramp_s = min(max(SHORTEST_RAMP_S, RAMP_TIMES * self._took_s), lasting_s)
        number = len(self._steps) + 1
        self._say = f"{'confirming' if is_confirming else f'step {number}:'} {rate:.3g} requests/s"
        chance = Random(f"{self._options.seed}:{number}").random  # noqa: S311 -- to be had again
        asks = arrivals(rate, ramp_s + lasting_s, self._lengths, chance, first=self._asked)
        self._asked += len(asks)
        planned = sum(each.due_s >= ramp_s for each in asks)
        volley = self._generator.begin(asks, self._prompts.body)
        waits_s = self._await(volley, ramp_s + lasting_s, since_s=ramp_s, planned=planned)
        figures = Figures.of(
            rate,
            volley.outcomes,
            since_s=ramp_s,
            until_s=ramp_s + lasting_s
            if waits_s is None
            else max(min(volley.now_s, ramp_s + lasting_s), ramp_s),
            open_dues_s=volley.open_dues_s(),
            waits_s=waits_s or (),
            is_cut=waits_s is not None,
        )
        why = figures.misses(self._promise)
        if not why:
            self._took_s = figures.took.p50_s or self._took_s
        told = {
            "holds": not why,
            "why": why,
            "is_cut": figures.is_cut,
            "is_confirming": is_confirming,
            "was_late": figures.was_late,
        }
        self._steps.append(figures.as_dict() | told)
        self._search = self._search.told(rate, holds=not why)

    def _await(
        self, volley: Volley, lasting_s: float, *, since_s: float, planned: int, is_judged: bool = True
    ) -> list[float] | None:
        """Until all of it is over, or nothing that may still come changes the verdict: then how long those
        have waited for a first token that have none."""
        deadline_s = lasting_s + max(DRAIN_S, DRAIN_TIMES * self._took_s)
        while not volley.wait(REPORT_S):
            self._tell(volley)
            if is_judged:
                self._end_if_gone(volley)
            now_s, waiting = volley.now_s, volley.waiting_dues_s()
            is_hopeless = is_judged and is_lost(
                list(volley.outcomes), waiting, now_s, since_s=since_s, planned=planned, promise=self._promise
            )
            if is_hopeless or now_s > deadline_s:
                volley.cut()
                volley.wait(REPORT_S)
                return [now_s - due_s for due_s in waiting if due_s >= since_s]
        if is_judged:
            self._end_if_gone(volley)
        return None

    def _tell(self, volley: Volley) -> None:
        seen = volley.outcomes[-1_000:]
        ttft = Times.of(each.ttft_s for each in seen).as_dict()
        tpot = Times.of(each.tpot_s for each in seen if each.tpot_s is not None).as_dict()
        progress = {
            "part": round(self._part, 3),
            "say": self._say,
            "answered": len(volley.outcomes),
            "open": len(volley.open_dues_s()),
            "failed": sum(bool(each.problem) for each in seen),
            "ttft_p50_ms": ttft["p50_ms"],
            "ttft_p99_ms": ttft["p99_ms"],
            "tpot_p99_ms": tpot["p99_ms"],
            "held": self._search.held,
        }
        if not self._report(progress):
            raise JobStopped(self._result())

    def _end_if_gone(self, volley: Volley) -> None:
        problems = [each.problem for each in volley.outcomes[-GONE_RUN:]]
        if not is_gone(problems):
            return
        found = self._result()
        whose = f"The replica {self._head['replica'][:8]}" if self._head["replica"] else "The gateway"
        raise JobFailed(
            f"{whose} answers no more ({problems[-1]}), so the bench ended {self._say}; "
            f"manage.py why {self._job.model_name} tells what became of it.",
            found,
        )

    def _result(self) -> dict[str, Any]:
        held = self._search.held
        return {
            **self._head,
            "rate": None if held is None else round(held, 4),
            "is_limit": held is not None and self._search.failed is not None,
            "is_confirmed": self._search.is_confirmed,
            "says": self._verdict(),
            "steps": self._steps,
        }

    def _verdict(self) -> str:
        name, held = quote(self._job.model_name), self._search.held
        said = [
            f"{kind} p99 within {told_s(limit_s)}"
            for kind, limit_s in (("TTFT", self._promise.ttft_s), ("TPOT", self._promise.tpot_s))
            if limit_s
        ]
        promise = " and ".join(said)
        if self._search.next_rate() is not None:
            seen = f"up to {held:.3g} requests a second held" if held else "nothing had held yet"
            return f"It ended early, and {seen} ({promise})."
        if held is None:
            return f"{name} does not hold {promise} even at {self._search.floor:g} requests a second."
        if self._search.failed is None:
            return (
                f"{name} holds {promise} at {held:.3g} requests a second, the most that was tried; raise "
                "max_rate to find where it ends."
            )
        late = any(each["was_late"] for each in self._steps if not each["holds"])
        more = (
            " The machine that asked was late itself, so it may hold more; ask from another." if late else ""
        )
        return f"{name} holds {promise} up to {held:.3g} requests a second.{more}"
