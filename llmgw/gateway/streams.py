"""What a stream of events turns into on its way to the client.

It leaves in whole events, so that one that is cut can still end with an error that a client understands.
Nothing is parsed on the way: a scan finds the few bytes that matter, and what stands in a JSON text has its
quotes escaped and so cannot be taken for them. An error ends a stream, whatever the engine says after it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from llmgw.gateway.admission import Refused
from llmgw.gateway.answers import NO_TOKENS, Tokens, tokens_of
from llmgw.gateway.surface import ANTHROPIC, Endpoint, error_body

EVENT_LIMIT_BYTES = 8 * 1024 * 1024
"""An event larger than this is no event: the engine, or what answers in its place, is not sending a
stream."""

CONTENT_TYPE = "text/event-stream"


@dataclass(frozen=True, slots=True)
class Dialect:
    """How an endpoint's streams end, well or badly. `end` is looked for where one of `end_signs` is seen, and
    `error` where one of `error_signs` is."""

    end_signs: tuple[bytes, ...]
    end: re.Pattern[bytes]
    error: re.Pattern[bytes]
    shape: str
    error_signs: tuple[bytes, ...] = (b'"error"',)
    names_errors: bool = False
    """Whether an error's event carries its name in a line of its own."""

    def error_event(self, refused: Refused) -> bytes:
        name = b"event: error\n" if self.names_errors else b""
        body = json.dumps(error_body(refused, self.shape), separators=(",", ":"))
        return name + b"data: " + body.encode() + b"\n\n"


_ERROR = rb'data:[ \t]*\{\s*"error"\s*:\s*[{"]|data:[ \t]*\{\s*"(?:object|type)"\s*:\s*"error"'


def _at_line(pattern: bytes) -> re.Pattern[bytes]:
    return re.compile(rb"^(?:" + pattern + rb")", re.MULTILINE)


_CHAT = Dialect((b"[DONE]",), _at_line(rb"data:\s*\[DONE\]"), _at_line(_ERROR), "openai")
_RESPONSES = Dialect(
    (b"response.completed", b"response.incomplete"),
    _at_line(rb"event:\s*response\.(?:completed|incomplete)\b"),
    _at_line(_ERROR + rb"|event:\s*(?:error|response\.failed)\b"),
    "openai",
    error_signs=(b'"error"', b"response.failed"),
    names_errors=True,
)
_MESSAGES = Dialect(
    (b"message_stop",),
    _at_line(rb"event:\s*message_stop\b"),
    _at_line(_ERROR + rb"|event:\s*error\b"),
    ANTHROPIC,
    names_errors=True,
)


def dialect_of(endpoint: Endpoint) -> Dialect:
    if endpoint.shape == ANTHROPIC:
        return _MESSAGES
    return _RESPONSES if endpoint.path == "/v1/responses" else _CHAT


class NotAStream(Exception):
    """The bytes are no server-sent events."""


class EventStream:
    """Server-sent events, cut from the bytes that an engine sends: whole ones go out, the rest waits.

    `has_content` once there was an event that says anything; `is_done` after the last word; `error` is the
    engine's own, which is kept back like all that follows it. With `hides_usage` an event that has usage and
    nothing else is kept back as well.
    """

    def __init__(self, dialect: Dialect = _CHAT, *, hides_usage: bool = False) -> None:
        self._dialect, self._hides_usage = dialect, hides_usage
        self._signs = (*_COUNTS, *dialect.error_signs, *dialect.end_signs)
        self._rest = b""
        self._is_plain = False
        self._first_usage = self._last_usage = b""
        self.has_content = self.is_done = False
        self.error: bytes | None = None

    def feed(self, data: bytes) -> bytes:
        """The events that are whole now. Raises NotAStream where no end of an event is in sight."""
        if self._rest:
            data, self._rest = self._rest + data, b""
        if not data.endswith(b"\n\n"):
            end = max(
                (at + len(blank) for blank in _BLANK_LINES if (at := data.rfind(blank)) >= 0), default=0
            )
            data, self._rest = data[:end], data[end:]
            if len(self._rest) > EVENT_LIMIT_BYTES:
                raise NotAStream("an event without end")
        if _has_any(self._dialect.error_signs, data):
            data = self._until_error(data)
        if _has_usage(data):
            data = self._without_usage(data)
        if not self.has_content and _CONTENT.search(data):
            self.has_content = True
        if _has_any(self._dialect.end_signs, data) and self._dialect.end.search(data):
            self.is_done = True
        self._is_plain = self.has_content and not (self._rest or self.is_done or self.error is not None)
        return data

    def lets_pass(self, data: bytes) -> bool:
        """Whether `feed` would give back these bytes as they are and learn nothing from them: whole events of
        a stream that has begun and goes on. It may say no to some of those, and to comments it does."""
        if not self._is_plain or not data.endswith(b"\n\n") or data.startswith(b":"):
            return False
        find = data.find
        for sign in self._signs:
            if find(sign) >= 0 and (sign not in _COUNTS or _has_usage(data)):
                return False
        return True

    def finish(self) -> bytes:
        """After the engine's last byte: a last word that lacks its empty line still counts."""
        rest, self._rest = self._rest.strip(), b""
        if not self._dialect.end.match(rest):
            return b""
        self.is_done = True
        return rest + b"\n\n"

    def tokens(self) -> Tokens:
        """As the engine counted them. What came last counts; of a count that came only once, that."""
        first, last = self._first_usage, self._last_usage
        if not last:
            return NO_TOKENS
        tokens = tokens_of(payload(last))
        return tokens if first is last else tokens_of(payload(first)).or_else(tokens)

    def _until_error(self, data: bytes) -> bytes:
        if not self._dialect.error.search(data):
            return data
        good: list[bytes] = []
        for event in _events(data):
            if self._dialect.error.search(event):
                self.error = event
                break
            good.append(event)
        self._rest = b""
        return b"".join(good)

    def _without_usage(self, data: bytes) -> bytes:
        kept: list[bytes] = []
        for event in _events(data):
            if _has_usage(event):
                self._first_usage, self._last_usage = self._first_usage or event, event
                if self._hides_usage and _NO_CHOICES.search(event):
                    continue
            kept.append(event)
        return b"".join(kept)


_BLANK_LINES = (b"\n\n", b"\r\n\r\n")
_EVENT = re.compile(rb".*?(?:\r\n\r\n|\n\n)", re.DOTALL)
_COUNTS = (b'"usage"', b'"timings"')
_OPENS = re.compile(rb"\s*:\s*\{")
_NO_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*\]')
_CONTENT = _at_line(rb"data:(?!\s*\[DONE\])\s*\S")


def _has_usage(data: bytes) -> bool:
    """Or timings; many an engine has `"usage": null` in every event."""
    for sign in _COUNTS:
        at = data.find(sign)
        while at >= 0:
            if _OPENS.match(data, at + len(sign)):
                return True
            at = data.find(sign, at + len(sign))
    return False


def _has_any(signs: Iterable[bytes], data: bytes) -> bool:
    # By `find`: `in` takes twice as long, as it tries the sign as a number first; and a generator takes
    # longer than both.
    for sign in signs:  # noqa: SIM110
        if data.find(sign) >= 0:
            return True
    return False


def _events(data: bytes) -> Sequence[bytes]:
    """Of data that ends with one."""
    if data.find(b"\r\n\r\n") >= 0:
        return _EVENT.findall(data)
    return [event + b"\n\n" for event in data.split(b"\n\n")[:-1]]


def payload(event: bytes) -> dict[str, Any]:
    """What an event says; nothing where that is no JSON object."""
    if event.startswith(b"data:") and event.find(b"\n") == len(event) - 2:  # one line, as nearly always
        text = event[5:]
    else:
        text = b"".join(line[5:].strip() for line in event.splitlines() if line.startswith(b"data:"))
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


class Echo:
    """Writes the name that the client used where the engine wrote the one it serves under.

    A scan for `"model":"<name>"`, in whole events or a whole answer.
    """

    def __init__(self, served: str, wanted: str) -> None:
        spellings = {json.dumps(served, ensure_ascii=False), json.dumps(served)}
        names = b"|".join(re.escape(item.encode()) for item in spellings)
        self._pattern = re.compile(rb'("model"\s*:\s*)(?:' + names + rb")")
        self._new = rb"\g<1>" + json.dumps(wanted).encode().replace(b"\\", rb"\\")

    def __call__(self, data: bytes) -> bytes:
        return self._pattern.sub(self._new, data)


def comment(words: str) -> bytes:
    """What a client's parser passes over, and what tells everything on the way that the answer lives."""
    return b": " + " ".join(words.split()).encode() + b"\n\n"


_MODEL = re.compile(rb'"model"\s*:\s*("(?:[^"\\]|\\.)*")')


def model_named_in(data: bytes) -> str | None:
    """The first name of a model in these bytes, which is the one that the engine answers as."""
    found = _MODEL.search(data)
    if found is None:
        return None
    try:
        name = found[1][1:-1].decode()
        # Nearly always it stands for itself.
        return name if name.isprintable() and "\\" not in name else str(json.loads(found[1]))
    except ValueError:
        return None
