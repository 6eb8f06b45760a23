"""What a step of a bench asks, and when: arrivals of a Poisson process, lengths drawn from a distribution or
from the rows of a dataset.

An arrival is due when its clock says so, however the ones before it fare: nothing waits for an answer. Chance
comes as an argument, a function of numbers from 0 up to 1, so that a seed gives the same step again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from catalog.reading import CatalogError, Fault

Chance = Callable[[], float]

LOGNORMAL, FIXED, UNIFORM = "lognormal", "fixed", "uniform"
DISTRIBUTIONS = (LOGNORMAL, FIXED, UNIFORM)
ROWS_LIMIT = 100_000
LONGEST_TOKENS = 1_000_000
_NORMAL = NormalDist()
_TINY = 1e-12


@dataclass(frozen=True, slots=True)
class Row:
    """One of a dataset. Without messages a prompt of so many tokens is made up."""

    prompt_tokens: int
    output_tokens: int
    messages: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of prompts and of answers: their means, and `spread`, the standard deviation as a part of the
    mean (of `uniform`, how far it reaches to either side). With rows, one of them is drawn instead."""

    distribution: str = LOGNORMAL
    prompt_tokens: int = 256
    output_tokens: int = 128
    spread: float = 0.5
    rows: tuple[Row, ...] = ()

    def draw(self, chance: Chance) -> Row:
        if self.rows:
            return self.rows[int(chance() * len(self.rows))]
        return Row(self._length(self.prompt_tokens, chance), self._length(self.output_tokens, chance))

    def _length(self, mean: int, chance: Chance) -> int:
        drawn = float(mean)
        if self.distribution == LOGNORMAL and self.spread:
            sigma = math.sqrt(math.log1p(self.spread**2))
            level = min(max(chance(), _TINY), 1 - _TINY)
            drawn = mean * math.exp(sigma * _NORMAL.inv_cdf(level) - sigma**2 / 2)
        elif self.distribution == UNIFORM:
            drawn = mean * (1 + self.spread * (2 * chance() - 1))
        return min(max(round(drawn), 1), LONGEST_TOKENS)


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that is due so many seconds after the step began. `number` tells it from all others of the
    run."""

    number: int
    due_s: float
    row: Row


def arrivals(rate: float, lasting_s: float, lengths: Lengths, chance: Chance, *, first: int = 0) -> list[Ask]:
    """Those of one step, in order: `rate` a second on average, each gap drawn anew."""
    return list(_arrivals(rate, lasting_s, lengths, chance, first))


def _arrivals(rate: float, lasting_s: float, lengths: Lengths, chance: Chance, first: int) -> Iterator[Ask]:
    due_s, number = 0.0, first
    while True:
        due_s -= math.log(1 - chance()) / rate
        if due_s >= lasting_s:
            return
        yield Ask(number, due_s, lengths.draw(chance))
        number += 1


def read_rows(lines: Iterable[str], name: str) -> tuple[Row, ...]:
    """A dataset: a line of JSON each, `{"prompt_tokens": 120, "output_tokens": 40}` or `{"messages": [...],
    "output_tokens": 40}`. Raises CatalogError, whose sentence names the file and the line."""
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if len(rows) >= ROWS_LIMIT:
            raise _unreadable(f"The dataset {name} has more than {ROWS_LIMIT} rows; give a shorter one.")
        try:
            rows.append(_row(json.loads(line)))
        except (ValueError, RecursionError) as fault:
            why = str(fault) if isinstance(fault, _BadRow) else "it is no JSON"
            raise _unreadable(
                f"Line {number} of the dataset {name} cannot be used: {why}; give each line as "
                '{"prompt_tokens": 120, "output_tokens": 40} or {"messages": [...], "output_tokens": 40}.'
            ) from None
    if not rows:
        raise _unreadable(f"The dataset {name} has no rows; give one line of JSON for each request.")
    return tuple(rows)


class _BadRow(ValueError):
    pass


def _row(raw: object) -> Row:
    if not isinstance(raw, Mapping):
        raise _BadRow("it is no JSON object")
    output_tokens = _tokens(raw, "output_tokens")
    messages = raw.get("messages")
    if messages is None:
        return Row(_tokens(raw, "prompt_tokens"), output_tokens)
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise _BadRow("its messages are no list of maps that have a role and content")
    return Row(0, output_tokens, tuple(messages))


def _is_message(raw: object) -> bool:
    return isinstance(raw, Mapping) and isinstance(raw.get("role"), str) and "content" in raw


def _tokens(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LONGEST_TOKENS:
        raise _BadRow(f"its {key} is no whole number from 1 to {LONGEST_TOKENS}")
    return value


def _unreadable(sentence: str) -> CatalogError:
    return CatalogError([Fault("", "", "dataset", "unreadable", sentence)])
