"""Why an engine ended: its log's tail, exit code and signal in, one sentence out.

The whole tail is searched: a known line wins over the last one, which engines tend to waste on "exiting". An
exit code says nothing of health (engines exit with 0 after a crash), so no code is read as success.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from nodes.engines.symptoms import SYMPTOMS
from nodes.protocol import NODE, TRANSIENT

LINE_LIMIT = 300  # characters of an engine's own words


@dataclass(frozen=True, slots=True)
class Cause:
    """cause: a code. kind: what would end it, one of FAILURE_KINDS in `nodes/protocol.py`."""

    cause: str
    sentence: str
    kind: str


_SIGILL, _SIGKILL = 4, 9
_SIGNALS = {
    1: "SIGHUP",
    2: "SIGINT",
    _SIGILL: "SIGILL",
    6: "SIGABRT",
    7: "SIGBUS",
    8: "SIGFPE",
    _SIGKILL: "SIGKILL",
    11: "SIGSEGV",
    15: "SIGTERM",
}

_TELLING = re.compile(r"\w*(?:error|exception|fail|fatal|cannot|can't|unable|abort|refus)\w*", re.IGNORECASE)
_RAISED = re.compile(r"[\w.]*(?:Error|Exception): \S")
_GENERIC = re.compile(
    r"cleaning up before exit|exiting due to|see root cause above|Traceback \(most recent call last\)",
    re.IGNORECASE,
)
_PREFIX = re.compile(
    r"^(?:\(\w+ pid=\d+\) )?(?:(?:INFO|WARNING|ERROR) \d\d-\d\d [\d:]+ \[[^\]]+\] )?"
    r"(?:\d+\.\d\d\.\d{3}\.\d{3} [A-Z] )?"
)

# The sim engine can fail in another's words, and says whose they are.
_SPEAKS_AS = re.compile(r"^sim: speaks as (?P<engine>\w+) did$", re.MULTILINE)


def classify(engine: str, log_tail: str, exit_code: int | None, signal: int | None = None) -> Cause:
    """exit_code, signal: None where they are not known, as of a process that another agent started."""
    if engine == "sim" and (other := _SPEAKS_AS.search(log_tail)):
        engine = other["engine"]
    for row in SYMPTOMS:
        found = row.pattern.search(log_tail) if not row.engines or engine in row.engines else None
        if found is not None:
            told = {name: _bounded(text or "") for name, text in found.groupdict().items()}
            return Cause(row.cause, row.sentence.format(**told), row.kind)
    line = telling_line(log_tail)
    said = f'having last said "{line}"' if line else "without a word in its log"
    if signal == _SIGILL:
        sentence = "The engine needs processor instructions that this node lacks; put another build on it."
        return Cause("killed", sentence, NODE)
    if signal is not None:
        by = _SIGNALS.get(signal, f"signal {signal}")
        why = " (by hand, or because the node ran out of memory)" if signal == _SIGKILL else ""
        return Cause("killed", f"The engine was ended by {by}{why}, {said}; it is tried again.", TRANSIENT)
    ending = "with a code that nobody saw" if exit_code is None else f"with code {exit_code}"
    return Cause("unknown", f"The engine exited {ending}, {said}; its log tells more.", TRANSIENT)


def telling_line(log_tail: str) -> str:
    """The last line that names an exception, else that speaks of a failure, else the last one, without what
    engines put before it."""
    lines = [_bounded(_PREFIX.sub("", line).strip()) for line in log_tail.splitlines()]
    lines = [line for line in lines if line]
    told = [line for line in lines if not _GENERIC.search(line)]
    raised = [line for line in told if _RAISED.match(line)]
    telling = [line for line in told if _TELLING.search(line)]
    return (raised or telling or lines or [""])[-1]


def _bounded(text: str) -> str:
    shown = "".join(
        character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text.strip()
    )
    return shown if len(shown) <= LINE_LIMIT else shown[: LINE_LIMIT - 1] + "…"
