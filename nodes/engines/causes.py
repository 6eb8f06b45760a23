"""Why an engine ended: its log's tail, exit code and signal in, one sentence out.

The whole tail is searched: a known line wins over the last one, which engines tend to waste on "exiting". An
exit code says nothing of health (engines exit with 0 after a crash), so no code is read as success.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from nodes.protocol import CAPACITY, CONFIGURATION, NODE, TRANSIENT

LINE_LIMIT = 300  # characters of an engine's own words


@dataclass(frozen=True, slots=True)
class Cause:
    """cause: a code. kind: what would end it, one of FAILURE_KINDS in `nodes/protocol.py`."""

    cause: str
    sentence: str
    kind: str


@dataclass(frozen=True, slots=True)
class _Row:
    cause: str
    engine: str  # empty: any
    pattern: re.Pattern[str]
    sentence: str  # names groups of the pattern
    kind: str


def _row(cause: str, engine: str, pattern: str, sentence: str, kind: str) -> _Row:
    return _Row(cause, engine, re.compile(pattern, re.MULTILINE), sentence, kind)


# In the order in which they are tried.
_ROWS = (
    _row(
        "bind_failed",
        "llamacpp",
        r"couldn't bind HTTP server socket, hostname: (?P<host>\S+), port: (?P<port>\d+)",
        "llama-server cannot listen on {host}:{port}, which is in use or not an address of this node; "
        "another port is tried.",
        TRANSIENT,
    ),
    _row(
        "bad_argument",
        "llamacpp",
        r"^error: invalid argument: (?P<argument>.+)",
        "llama-server does not know the argument {argument}; correct the profile's args for this version.",
        CONFIGURATION,
    ),
    _row(
        "bad_argument",
        "llamacpp",
        r'error while handling argument "(?P<argument>[^"]+)": (?P<why>.*)',
        "llama-server cannot read the value of {argument} ({why}); correct the profile's args.",
        CONFIGURATION,
    ),
    _row(
        "bad_chat_template",
        "llamacpp",
        r"failed to initialize chat template|supplied chat template is not supported",
        "llama-server rejects the chat template; correct --chat-template in the profile's args.",
        CONFIGURATION,
    ),
    _row(
        "unknown_arch",
        "llamacpp",
        r"unknown model architecture: '(?P<arch>[^']+)'",
        "This build of llama-server does not know the architecture {arch}; put a newer one on the node.",
        CONFIGURATION,
    ),
    _row(
        "model_path_missing",
        "llamacpp",
        r"failed to open GGUF file '(?P<path>[^']+)' \((?P<why>[^)]+)\)",
        "llama-server cannot open {path} ({why}); check the model's source on this node.",
        NODE,
    ),
    _row(
        "corrupt_weights",
        "llamacpp",
        r"(?P<why>invalid magic characters|failed to read magic|failed to read key-value pairs"
        r"|data is not within the file bounds)",
        "The weights are no whole GGUF file ({why}); fetch them again or correct the model's source.",
        CONFIGURATION,
    ),
    _row(
        "gpu_oom",
        "llamacpp",
        r"cudaMalloc failed: out of memory|failed to allocate CUDA\d+ buffer|ErrorOutOfDeviceMemory",
        "The GPU's memory does not hold the weights and the context; give a smaller context, fewer parallel "
        "slots or a larger card.",
        CAPACITY,
    ),
    _row(
        "host_oom",
        "llamacpp",
        r"failed to allocate buffer for kv cache|failed to allocate CPU buffer"
        r"|unable to allocate backend buffer",
        "The node's memory does not hold the weights and the context; give a smaller context, fewer parallel "
        "slots or a node with more memory.",
        CAPACITY,
    ),
    _row(
        "port_in_use",
        "sim",
        r"^sim: cannot listen on (?P<address>\S+): (?P<why>.+)",
        "The sim engine cannot listen on {address} ({why}); another port is tried.",
        TRANSIENT,
    ),
    _row(
        "bad_argument",
        "sim",
        r"^sim: error: (?P<why>.+)",
        "The sim engine rejects its arguments ({why}); correct the profile's args.",
        CONFIGURATION,
    ),
    _row(
        "killed",
        "",
        r"^Killed$|oom-kill",
        "The engine was killed, most likely because the node ran out of memory; it is tried again.",
        TRANSIENT,
    ),
    _row(
        "killed",
        "",
        r"Illegal instruction",
        "The engine needs processor instructions that this node lacks; put a build for its processor on it.",
        NODE,
    ),
)

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
_GENERIC = re.compile(
    r"cleaning up before exit|exiting due to|see root cause above|Traceback \(most recent call last\)",
    re.IGNORECASE,
)
_PREFIX = re.compile(
    r"^(?:\(\w+ pid=\d+\) )?(?:(?:INFO|WARNING|ERROR) \d\d-\d\d [\d:]+ \[[^\]]+\] )?"
    r"(?:\d+\.\d\d\.\d{3}\.\d{3} [A-Z] )?"
)


def classify(engine: str, log_tail: str, exit_code: int | None, signal: int | None = None) -> Cause:
    """exit_code, signal: None where they are not known, as of a process that another agent started."""
    for row in _ROWS:
        found = row.pattern.search(log_tail) if row.engine in ("", engine) else None
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
    """The last line that speaks of a failure, else the last one, without what engines put before it."""
    lines = [_bounded(_PREFIX.sub("", line).strip()) for line in log_tail.splitlines()]
    lines = [line for line in lines if line]
    telling = [line for line in lines if _TELLING.search(line) and not _GENERIC.search(line)]
    return (telling or lines or [""])[-1]


def _bounded(text: str) -> str:
    shown = "".join(
        character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text.strip()
    )
    return shown if len(shown) <= LINE_LIMIT else shown[: LINE_LIMIT - 1] + "…"
