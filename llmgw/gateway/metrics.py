"""What Prometheus is told: figures of all gateways together, from the rows that they write.

So one scrape of any process tells the sum, on however many machines they run, and it goes on counting when
one of them ends. (prometheus_client's own way for several processes is a folder on one machine, and costs a
request more than counting it does.) Labels are the catalog's names, endpoints from a table and outcomes; no
key is among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from django.conf import settings
from django.db.models import Count, Sum
from django.db.models.functions import Now
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from catalog.models import Model
from nodes.models import Demand, Gateway, Replica
from nodes.tallies import BOUNDS_S, OUTCOMES, TIMES, Histogram, Tally
from nodes.usage import ever

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TOKENS = ("prompt_tokens", "cached_tokens", "completion_tokens")
_SAY = {
    "ttft": ("llmgw_time_to_first_token_seconds", "To the first token of a stream, as its client saw it."),
    "tpot": ("llmgw_time_per_output_token_seconds", "Between two tokens of a stream, on the average."),
    "queue": ("llmgw_queue_seconds", "From a request's beginning until its engine had it, hold apart."),
    "hold": ("llmgw_hold_seconds", "Waited for a replica to be there, of those that waited."),
    "duration": ("llmgw_request_duration_seconds", "From a request's beginning to its end."),
}


@dataclass(frozen=True, slots=True)
class Figures:
    """As the database has them. `totals` by model, endpoint and outcome; `busy` is (in flight, waiting)."""

    totals: tuple[tuple[str, str, str, Tally], ...] = ()
    busy: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    replicas: Mapping[tuple[str, str], int] = field(default_factory=dict)
    gateways: int = 0


@dataclass(frozen=True, slots=True)
class Own:
    """What this process alone knows. `table_age_s` is None before it has read the table."""

    is_database_there: bool
    table_age_s: float | None
    lines_dropped: int


def read_figures() -> Figures:
    """Four queries, whatever there is."""
    lately = timedelta(seconds=settings.LLMGW_SUSPECT_AFTER_S)
    alive = Gateway.objects.filter(stopped_at=None, heartbeat_at__gte=Now() - lately)
    busy = Demand.objects.filter(gateway__in=alive).values("model__name")
    # A model that nobody asks for is idle, not missing: else its last figure would stand in a plot for ever.
    names = dict.fromkeys(Model.objects.order_by("name").values_list("name", flat=True), (0, 0))
    told = busy.annotate(flying=Sum("in_flight"), held=Sum("waiting")).values_list(
        "model__name", "flying", "held"
    )
    states = Replica.objects.exclude(state__in=Replica.OVER).exclude(model=None)
    counted = states.values("model__name", "state").annotate(n=Count("pk"))
    return Figures(
        totals=tuple(ever()),
        busy=names | {name: (flying, held) for name, flying, held in told},
        replicas={(row["model__name"], row["state"]): row["n"] for row in counted},
        gateways=alive.count(),
    )


def render(figures: Figures, own: Own) -> bytes:
    return generate_latest(_Told(figures, own))


class _Told(Collector):
    def __init__(self, figures: Figures, own: Own) -> None:
        self._figures, self._own = figures, own

    def collect(self) -> Iterator[Metric]:
        yield from self._counters()
        yield from self._histograms()
        yield from self._gauges()

    def _counters(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "llmgw_requests",
            "Requests that ended. 499: left by their client; a stream that broke off is a 5xx.",
            labels=("model", "endpoint", "code"),
        )
        errors = CounterMetricFamily(
            "llmgw_errors", "Requests that were refused or failed, by reason.", labels=("model", "reason")
        )
        by_reason: dict[tuple[str, str], int] = {}
        for model, endpoint, outcome, tally in self._figures.totals:
            assert outcome in OUTCOMES
            requests.add_metric((model, endpoint, outcome), tally.requests)
            for reason, times in tally.codes.items():
                by_reason[model, reason] = by_reason.get((model, reason), 0) + times
        for labels, times in by_reason.items():
            errors.add_metric(labels, times)
        yield requests
        yield errors
        for name in _TOKENS:
            tokens = CounterMetricFamily(
                f"llmgw_{name}",
                f"{name.capitalize().replace('_', ' ')}, as engines count.",
                labels=("model",),
            )
            for model, tally in self._by_model().items():
                tokens.add_metric((model,), getattr(tally, name))
            yield tokens

    def _histograms(self) -> Iterator[Metric]:
        for time in TIMES:
            name, says = _SAY[time]
            family = HistogramMetricFamily(name, says, labels=("model",))
            for model, tally in self._by_model().items():
                found = tally.times.get(time)
                if found is not None:
                    family.add_metric((model,), list(_buckets(found)), found.total_s)
            yield family

    def _gauges(self) -> Iterator[Metric]:
        in_flight = GaugeMetricFamily("llmgw_in_flight", "Requests that replicas work on.", labels=("model",))
        waiting = GaugeMetricFamily(
            "llmgw_waiting", "Requests that wait for their model to load.", labels=("model",)
        )
        for model, (flying, held) in self._figures.busy.items():
            in_flight.add_metric((model,), flying)
            waiting.add_metric((model,), held)
        replicas = GaugeMetricFamily("llmgw_replicas", "Replicas, by state.", labels=("model", "state"))
        for labels, count in self._figures.replicas.items():
            replicas.add_metric(labels, count)
        yield from (in_flight, waiting, replicas)
        yield GaugeMetricFamily("llmgw_gateways", "Gateway processes that are alive.", self._figures.gateways)
        yield GaugeMetricFamily(
            "llmgw_database_up", "Whether this process could ask the database.", self._own.is_database_there
        )
        age_s = self._own.table_age_s
        yield GaugeMetricFamily(
            "llmgw_table_age_seconds",
            "How old this process's routing table is.",
            float("inf") if age_s is None else age_s,
        )
        yield CounterMetricFamily(
            "llmgw_access_log_dropped_lines",
            "Lines of this process's access log that could not be written.",
            self._own.lines_dropped,
        )

    def _by_model(self) -> dict[str, Tally]:
        found: dict[str, Tally] = {}
        for model, _, _, tally in self._figures.totals:
            found.setdefault(model, Tally()).add(tally)
        return found


def _buckets(histogram: Histogram) -> Iterable[tuple[str, float]]:
    """Every second bound, which is fine enough for a plot."""
    below = 0
    for place, count in enumerate(histogram.counts):
        below += count
        if place == len(BOUNDS_S):
            yield "+Inf", below
        elif not place % 2:
            yield str(BOUNDS_S[place]), below
