"""What an engine's answer, or its "no", means: errors take one shape, and tokens are the engine's count.

Nothing of an engine's text is believed to be what it should be: it may be another program that answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from catalog.reading import quote
from llmgw.gateway.admission import RETRY_LOADING_S, RETRY_SOON_S, Refused

ERROR_TEXT_LIMIT = 2_000


class Tokens(NamedTuple):
    """What a request cost. None where the engine did not say."""

    prompt: int | None = None
    cached: int | None = None
    completion: int | None = None

    def or_else(self, newer: Tokens) -> Tokens:
        """What the newer one says, and this one where that is silent."""
        return Tokens(
            self.prompt if newer.prompt is None else newer.prompt,
            self.cached if newer.cached is None else newer.cached,
            self.completion if newer.completion is None else newer.completion,
        )


NO_TOKENS = Tokens()


def tokens_of(answer: Mapping[str, Any]) -> Tokens:
    """From an answer or a chunk of one, in OpenAI's words (chat, completions, embeddings, responses), in
    Anthropic's, or in llama.cpp's timings; the last two leave the cached ones out of the prompt's."""
    usage = answer.get("usage")
    for outer in ("message", "response"):
        if usage is None and isinstance(inner := answer.get(outer), dict):
            usage = inner.get("usage")
    if not isinstance(usage, dict):
        return _timed(answer.get("timings"))
    prompt = _count(usage, "prompt_tokens", "input_tokens")
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    cached = _count(details, "cached_tokens") if isinstance(details, dict) else None
    if (read := _count(usage, "cache_read_input_tokens")) is not None:
        cached = read
        if prompt is not None:
            prompt += read + (_count(usage, "cache_creation_input_tokens") or 0)
    return Tokens(prompt, cached, _count(usage, "completion_tokens", "output_tokens"))


def _timed(timings: object) -> Tokens:
    if not isinstance(timings, dict):
        return NO_TOKENS
    computed, cached = _count(timings, "prompt_n"), _count(timings, "cache_n")
    prompt = None if computed is None else computed + (cached or 0)
    return Tokens(prompt, cached, _count(timings, "predicted_n"))


def _count(of: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = of.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**62:
            return value
    return None


# --- an engine that says no ---------------------------------------------------------------------------------


def is_another_model(status: int, body: bytes) -> bool:
    """Whether this answer comes from an engine that does not know our key or our model: the table led us
    wrong."""
    return status in (401, 403) or (status == 404 and not lacks_path(status, body))


def lacks_path(status: int, body: bytes) -> bool:
    """Whether the engine is the right one and does not serve this path (vllm's and llama.cpp's words)."""
    if status != 404:
        return False
    error = _parsed(body)
    return error.get("detail") == "Not Found" or _message(error) in ("File Not Found", "Not Found")


_NOT_ITS_FAULT = re.compile(
    r"(?:image|audio|video) input is not supported|exceeds? the available context size|Context size has been "
    r"exceeded|failed to parse (?:grammar|messages|tools)|does not support (?:tools|embeddings)",
    re.IGNORECASE,
)


_NO_ROOM = re.compile(
    r"exceeds? the available context size|Context size has been exceeded|maximum context length (?:is|of) \d|"
    r"longer than the model's context length|greater than max_model_len"
)
"""What llama.cpp, vllm and sglang say of a request that does not fit."""


def is_clients_fault(status: int, body: bytes) -> bool:
    """Whether an engine that is well says 5xx of a request that no engine could answer (llama.cpp does)."""
    return status == 501 or (status == 500 and _NOT_ITS_FAULT.search(_message(_parsed(body))) is not None)


def is_leaving(status: int, body: bytes) -> bool:
    """Whether the engine takes nothing new because it ends: vllm says 500 while it drains."""
    return status == 500 and "after shutdown" in _message(_parsed(body))


def path_not_served(model: str, path: str) -> Refused:
    return Refused(
        400,
        "unsupported_endpoint",
        f"The model {quote(model)} does not serve {path}, because its engine does not: use another model.",
        param="model",
    )


def engine_error(status: int, body: bytes, model: str) -> Refused:
    """The engine's own error with its status, in our shape; one that cannot be read becomes a 502."""
    error = _parsed(body)
    message = _message(error)
    if not message or not 400 <= status < 600:
        return unreadable(model)
    detail = error["error"] if isinstance(error.get("error"), dict) else error
    code, kind, param = (detail.get(name) for name in ("code", "type", "param"))
    if _NO_ROOM.search(message):
        code = "context_length_exceeded"  # as it is called where the gateway sees it first
    is_worth_another = status == 429 or (status >= 500 and not is_clients_fault(status, body))
    return Refused(
        status,
        code if isinstance(code, str) else "engine_error",
        message[:ERROR_TEXT_LIMIT],
        kind=kind if isinstance(kind, str) else "",
        param=param if isinstance(param, str) else None,
        retry_after_s=RETRY_SOON_S if is_worth_another else None,
    )


def status_in(error: Mapping[str, Any]) -> int:
    """The status that an error within a stream would have had before it."""
    inner = error.get("error")
    code = inner.get("code") if isinstance(inner, dict) else error.get("code")
    return code if isinstance(code, int) and 400 <= code < 600 else 500


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _message(error: dict[str, Any]) -> str:
    """From `{"error": {"message": ...}}`, `{"error": "..."}` or `{"message": ...}`."""
    inner = error.get("error", error)
    message = inner.get("message") if isinstance(inner, dict) else inner
    return message if isinstance(message, str) else ""


def unreadable(model: str) -> Refused:
    return Refused(
        502,
        "engine_unreadable",
        f"The engine of the model {quote(model)} answered with what cannot be passed on: try again.",
        retry_after_s=RETRY_SOON_S,
    )


def too_large(model: str, limit_bytes: int) -> Refused:
    return Refused(
        502,
        "answer_too_large",
        f"The answer of the model {quote(model)} is larger than {limit_bytes} bytes: ask for less at once.",
    )


def unreachable(model: str, cause: str) -> Refused:
    """`cause` finishes "the replica ...", such as "refused the connection"."""
    return Refused(
        502,
        "engine_unreachable",
        f"The model {quote(model)} could not answer, because its replica {cause}: try again.",
        retry_after_s=RETRY_SOON_S,
    )


def still_away(model: str, cause: str, waited_s: float) -> Refused:
    """`cause` finishes "the replica ..."."""
    return Refused(
        503,
        "unavailable",
        f"The model {quote(model)} is not there after {waited_s:.0f} s, because its replica {cause}: try "
        "again.",
        param="model",
        retry_after_s=RETRY_LOADING_S,
    )


def misrouted(model: str) -> Refused:
    return Refused(
        503,
        "replica_moved",
        f"The model {quote(model)} is changing replicas at this moment: try again.",
        retry_after_s=RETRY_SOON_S,
    )


def cut_short(model: str, cause: str) -> Refused:
    return Refused(
        502,
        "stream_cut",
        f"The answer of the model {quote(model)} ends unfinished, because its replica {cause}: ask again.",
    )
