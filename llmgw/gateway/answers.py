"""What an engine's answer may turn into on its way to the client.

Bytes go through as they came, except the model's name, which is the one the client used, and errors, which
take one shape. A stream leaves in whole events, so that one that is cut can still end with an error a client
understands.
"""

from __future__ import annotations

import json
import re
from typing import Any

from catalog.reading import quote
from llmgw.gateway.admission import RETRY_SOON_S, Refused

ERROR_TEXT_LIMIT = 2_000
EVENT_LIMIT_BYTES = 8 * 1024 * 1024
"""An event larger than this is no event: the engine, or what answers in its place, is not sending a
stream."""


class Echo:
    """Writes the name that the client used where the engine wrote the one it serves under.

    A scan for `"model":"<name>"`: inside a JSON text the quotes would be escaped, so the bytes mean what they
    seem to. What may be the beginning of a match is kept back until more arrives.
    """

    def __init__(self, served: str, wanted: str) -> None:
        self._spellings = [
            item.encode() for item in {json.dumps(served, ensure_ascii=False), json.dumps(served)}
        ]
        names = b"|".join(re.escape(item) for item in self._spellings)
        self._pattern = re.compile(rb'("model"\s*:\s*)(?:' + names + rb")")
        self._new = rb"\g<1>" + json.dumps(wanted).encode().replace(b"\\", rb"\\")
        self._kept = b""

    def feed(self, data: bytes) -> bytes:
        data = self._pattern.sub(self._new, self._kept + data)
        end = self._whole(data)
        self._kept = data[end:]
        return data[:end]

    def finish(self) -> bytes:
        kept, self._kept = self._kept, b""
        return kept

    def _whole(self, data: bytes) -> int:
        """How much of this cannot become part of a match, whatever comes next."""
        begun = data.rfind(b'"model"')
        if begun >= 0 and (tail := _BEGUN.fullmatch(data, begun)) is not None:
            name = tail[1]
            if name is None or any(item.startswith(name) for item in self._spellings):
                return begun
        for size in range(min(len(b'"model'), len(data)), 0, -1):
            if data.endswith(b'"model'[:size]):
                return len(data) - size
        return len(data)


_BEGUN = re.compile(rb'"model"\s*(?::\s*(.*))?', re.DOTALL)


class NotAStream(Exception):
    """The bytes are no server-sent events."""


class EventStream:
    """Server-sent events, cut from the bytes an engine sends: whole ones go out, the rest waits.

    `is_done` after `data: [DONE]`; `has_error` after an error event, which ends a stream as well.
    """

    def __init__(self) -> None:
        self._rest = b""
        self.is_done = self.has_error = False

    def feed(self, data: bytes) -> bytes:
        """The events that are whole now. Raises NotAStream where no end of an event is in sight."""
        data = self._rest + data
        end = max((at + len(blank) for blank in _BLANK_LINES if (at := data.rfind(blank)) >= 0), default=0)
        events, self._rest = data[:end], data[end:]
        if len(self._rest) > EVENT_LIMIT_BYTES:
            raise NotAStream("an event without end")
        # The cheap look first; only a match at a line's beginning is not part of what the model says.
        if b"[DONE]" in events and _DONE.search(events):
            self.is_done = True
        if b'"error"' in events and _ERROR.search(events):
            self.has_error = True
        return events

    def finish(self) -> bytes:
        """After the engine's last byte: a final `[DONE]` that lacks its empty line still counts."""
        rest, self._rest = self._rest, b""
        if not _DONE.fullmatch(rest.strip()):
            return b""
        self.is_done = True
        return b"data: [DONE]\n\n"


_BLANK_LINES = (b"\n\n", b"\r\n\r\n")
_DONE = re.compile(rb"^data:\s*\[DONE\]", re.MULTILINE)
_ERROR = re.compile(rb'^data:\s*\{\s*"error"\s*:', re.MULTILINE)


def error_event(refused: Refused) -> bytes:
    return b"data: " + json.dumps(refused.as_dict(), separators=(",", ":")).encode() + b"\n\n"


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
    return Refused(
        status,
        code if isinstance(code, str) else "engine_error",
        message[:ERROR_TEXT_LIMIT],
        kind=kind if isinstance(kind, str) else "",
        param=param if isinstance(param, str) else None,
        retry_after_s=RETRY_SOON_S if status in (429, 502, 503, 504) else None,
    )


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


def is_an_answer(body: bytes) -> bool:
    """Whether a plain 200 carries a JSON object: an empty or broken-off body is a failure, whatever its
    status."""
    return body.lstrip()[:1] == b"{" and body.rstrip()[-1:] == b"}"


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
