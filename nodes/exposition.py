"""Numbers in Prometheus's text form: written, and read back.

The agent runs from a bare install, so this needs no library. A family is written whether or not it has
samples: whoever asks which metrics there are is told of all of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
GAUGE, COUNTER, HISTOGRAM, SUMMARY = "gauge", "counter", "histogram", "summary"

Labels = Mapping[str, str]

_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? ([0-9.eE+-]+|[+-]?Inf|NaN)(?: -?[0-9]+)?")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)",?')
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n"}


@dataclass(frozen=True, slots=True)
class Sample:
    """One line: the name with what it ends in, its labels and its value."""

    name: str
    labels: Labels
    value: float


@dataclass(slots=True)
class Family:
    """One metric: its kind, what it says (one line), and its samples. A counter's name ends in `_total`."""

    name: str
    kind: str
    says: str
    samples: list[Sample] = field(default_factory=list)

    def add(self, value: float | None, /, ending: str = "", **labels: str) -> None:
        """A sample; what is unknown makes none."""
        if value is not None:
            self.samples.append(Sample(self.name + ending, labels, value))


@dataclass(frozen=True, slots=True)
class Distribution:
    """What a histogram has counted: how many were at most as large as each bound, their sum and number."""

    below: Sequence[tuple[str, float]]
    total: float
    count: float


def written(families: Iterable[Family]) -> str:
    return "".join(f"{line}\n" for family in families for line in _lines(family))


def _lines(family: Family) -> Iterator[str]:
    yield f"# HELP {family.name} {family.says}"
    yield f"# TYPE {family.name} {family.kind}"
    for sample in family.samples:
        labels = ",".join(f'{name}="{_escaped(value)}"' for name, value in sample.labels.items())
        braced = f"{{{labels}}}" if labels else ""
        yield f"{sample.name}{braced} {_number(sample.value)}"


def _escaped(text: str) -> str:
    # Halves of surrogate pairs are in no UTF-8.
    whole = text.encode("utf-8", "backslashreplace").decode()
    return "".join(_ESCAPES.get(character, character) for character in whole)


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if math.isnan(value):
        return "NaN"
    return str(int(value)) if float(value).is_integer() and abs(value) < 2**53 else repr(float(value))


def is_told_by(text: str, names: re.Pattern[str]) -> bool:
    """Whether each line is of this form, and of a metric that is called so."""
    for line in text.split("\n"):
        words = line.split(" ", 3)
        if line.startswith("# "):
            name = words[2] if words[1] in ("HELP", "TYPE") and len(words) == 4 else ""
        else:
            match = _SAMPLE.fullmatch(line)
            name = match[1] if match else ""
        if line and not names.match(name):
            return False
    return True


def read_samples(text: str, names: frozenset[str] | None = None) -> Iterator[Sample]:
    """The samples in a text, those of `names` alone where they are given. What is none is passed over."""
    for line in text.split("\n"):
        if names is not None and line.partition("{")[0].partition(" ")[0] not in names:
            continue
        match = _SAMPLE.fullmatch(line)
        if match is None:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        yield Sample(match[1], dict(_LABEL.findall(match[2] or "")), value)
