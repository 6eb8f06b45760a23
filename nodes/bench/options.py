"""What a bench is told: how the load is made, how long each step lasts, and what has to hold.

Read from JSON for every door; whatever cannot be is a sentence, and what is left out has a value that suits
a chat.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from catalog.durations import MINUTE, SECOND, format_duration
from catalog.parts import Slo
from catalog.reading import CatalogError, Fault, Reader, quote
from nodes.bench.asks import DISTRIBUTIONS, LOGNORMAL, LONGEST_TOKENS, Lengths
from nodes.bench.figures import Promise
from nodes.bench.search import Search

DIRECTLY, GATEWAY = "replica", "gateway"
WAYS = (DIRECTLY, GATEWAY)

SMALLEST_SAMPLE = 100  # requests: below it there is no 99th percentile to speak of
LARGEST_SAMPLE = 100_000  # requests: more of them tell nothing more, and are all in memory until it is over
STRETCH = 4  # a step of a slow model lasts this many times longer to get them, and no more
CONFIRMING = 3  # times as long lasts the step that confirms what was found
LOWEST_RATE, HIGHEST_RATE = 0.01, 5_000
SHORTEST_STEP, LONGEST_STEP = SECOND, 10 * MINUTE

KEYS = (
    *("through", "distribution", "prompt_tokens", "output_tokens", "spread", "shared_prefix", "seed"),
    *("start_rate", "max_rate", "step", "warmup", "precision", "ttft_p99", "tpot_p99", "dataset"),
)


@dataclass(frozen=True, slots=True)
class Options:
    """Rates are requests a second, durations nanoseconds. `ttft_p99` and `tpot_p99` of 0: the model's own.
    `dataset` is a name to tell runs apart by; its rows are in none of this."""

    through: str = DIRECTLY
    distribution: str = LOGNORMAL
    prompt_tokens: int = 256
    output_tokens: int = 128
    spread: float = 0.5
    shared_prefix: float = 0.0
    seed: int = 1
    start_rate: float = 1.0
    max_rate: float = 1_000.0
    step: int = 20 * SECOND
    warmup: int = 5 * SECOND
    precision: float = 0.05
    ttft_p99: int = 0
    tpot_p99: int = 0
    dataset: str = ""

    @classmethod
    def load(cls, raw: object) -> Options:
        """Raises CatalogError with all that cannot be."""
        faults: list[Fault] = []
        reader = Reader(raw, faults, subject="the bench", model="")
        reader.refuse_unknown_keys(KEYS)
        given: dict[str, Any] = {}
        for key in ("through", "distribution", "dataset"):
            if reader.has(key):
                given[key] = reader.name(key)
        for key in ("prompt_tokens", "output_tokens", "seed"):
            if reader.has(key):
                given[key] = reader.integer(key, negative_allowed=False)
        for key, highest in (
            ("spread", 5),
            ("shared_prefix", 1),
            ("start_rate", HIGHEST_RATE),
            ("max_rate", HIGHEST_RATE),
            ("precision", 1),
        ):
            if reader.has(key):
                given[key] = reader.number(key, highest=highest)
        for key in ("step", "warmup", "ttft_p99", "tpot_p99"):
            if reader.has(key):
                given[key] = reader.duration(key)
        options = cls(**{key: value for key, value in given.items() if key not in reader.bad})
        options._judge(reader)
        if faults:
            raise CatalogError(faults)
        return options

    def _judge(self, reader: Reader) -> None:
        for key, choices in (("through", WAYS), ("distribution", DISTRIBUTIONS)):
            if getattr(self, key) not in choices:
                known = " or ".join(choices)
                says = f"{key} {quote(getattr(self, key))} is not known; choose {known}"
                reader.refuse(key, "unknown_choice", says)
        for key in ("prompt_tokens", "output_tokens"):
            if not 1 <= getattr(self, key) <= LONGEST_TOKENS:
                reader.refuse(key, "range", f"{key} must be from 1 to {LONGEST_TOKENS}")
        for key in ("start_rate", "max_rate"):
            if not LOWEST_RATE <= getattr(self, key) <= HIGHEST_RATE:
                says = f"{key} must be from {LOWEST_RATE} to {HIGHEST_RATE} requests a second"
                reader.refuse(key, "range", says)
        if self.start_rate > self.max_rate >= LOWEST_RATE:
            says = f"start_rate {self.start_rate:g} is above max_rate {self.max_rate:g}; give a lower one"
            reader.refuse("start_rate", "range", says)
        if self.distribution == "uniform" and self.spread > 1:
            reader.refuse(
                "spread", "range", "spread is above 1, and uniform lengths would be below 0; give less"
            )
        if not 0.01 <= self.precision <= 0.5:
            reader.refuse("precision", "range", "precision must be from 0.01 to 0.5")
        for key in ("step", "warmup"):
            if not SHORTEST_STEP <= getattr(self, key) <= LONGEST_STEP:
                shortest, longest = format_duration(SHORTEST_STEP), format_duration(LONGEST_STEP)
                reader.refuse(key, "range", f"{key} must last from {shortest} to {longest}")

    def as_dict(self) -> dict[str, Any]:
        """JSON, which `load` reads back; durations as people write them."""
        told = {key: getattr(self, key) for key in KEYS}
        for key in ("step", "warmup", "ttft_p99", "tpot_p99"):
            told[key] = format_duration(told[key])
        return {key: value for key, value in told.items() if value not in ("", "0s")}

    def lengths(self) -> Lengths:
        return Lengths(self.distribution, self.prompt_tokens, self.output_tokens, self.spread)

    def promise(self, slo: Slo) -> Promise:
        """What has to hold: what was asked for here, else what the model promises."""
        return Promise((self.ttft_p99 or slo.ttft_p99) / SECOND, (self.tpot_p99 or slo.tpot_p99) / SECOND)

    def search(self) -> Search:
        return Search(self.start_rate, LOWEST_RATE, self.max_rate, precision=self.precision)

    def step_s(self, rate: float) -> float:
        """How long a step is measured: long enough for a 99th percentile, within bounds."""
        step_s = self.step / SECOND
        return min(max(step_s, SMALLEST_SAMPLE / rate), step_s * STRETCH, LARGEST_SAMPLE / rate)


def load_of(kept: Mapping[str, Any]) -> Options:
    """Of a row that was judged when it was asked for."""
    return Options.load({key: value for key, value in kept.items() if key in KEYS})
