"""An engine's answer to one request, whole or streamed, as one value. What cannot be read is left out: it is
for the judges to say that it is missing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

ERROR_LIMIT = 300


@dataclass(frozen=True, slots=True)
class Call:
    """Of a tool. arguments: as the engine wrote them."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Reply:
    """status: 0 where no answer came, and then trouble finishes "the engine ..."; error: its own words of a
    refusal. thought: what a reasoning model thinks ahead of its text. pieces: how many a stream had with
    something in them; is_closed: it ended in [DONE]. Counts of tokens are None where they are not told."""

    status: int = 0
    trouble: str = ""
    error: str = ""
    model: str = ""
    text: str = ""
    thought: str = ""
    finish: str = ""
    calls: tuple[Call, ...] = ()
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    pieces: int = 0
    is_closed: bool = False
    names: tuple[str, ...] = ()
    vectors: tuple[tuple[float, ...], ...] = ()
    first_s: float | None = None

    @property
    def is_answered(self) -> bool:
        return self.status == 200 and not self.error

    @property
    def words(self) -> str:
        """All that the model said."""
        return self.thought + self.text

    @property
    def refusal(self) -> str:
        """Finishes "it ..." of an answer that is none."""
        if not self.status:
            return self.trouble
        if self.error:
            return f"answered with status {self.status}: {self.error}"
        return f"answered with status {self.status}"


def read_reply(status: int, body: bytes) -> Reply:
    """Of a whole body."""
    try:
        told = json.loads(body)
    except (ValueError, RecursionError):
        return Reply(status=status, error="" if status == 200 else _cut(body.decode("utf-8", "replace")))
    if not isinstance(told, Mapping):
        return Reply(status=status)
    if error := _error(told):
        return Reply(status=status, error=error)
    choice = _first(told.get("choices"))
    message = _map(choice.get("message"))
    data = [_map(each) for each in _list(told.get("data"))]
    reply = Reply(
        status=status,
        model=_text(told.get("model")),
        text=_text(message.get("content")),
        thought=_thought(message),
        finish=_text(choice.get("finish_reason")),
        calls=tuple(
            Call(_text(function.get("name")), _text(function.get("arguments")))
            for function in (_map(_map(each).get("function")) for each in _list(message.get("tool_calls")))
        ),
        names=tuple(_text(each.get("id")) for each in data if "id" in each),
        vectors=tuple(_vector(each["embedding"]) for each in data if "embedding" in each),
    )
    return _with_usage(reply, told.get("usage"))


def read_stream(status: int, lines: Iterable[str]) -> Reply:
    """Of the lines of an event stream, put together as a client does."""
    reply, calls = Reply(status=status), dict[int, Call]()
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            reply = replace(reply, is_closed=True)
            continue
        try:
            told = _map(json.loads(data))
        except (ValueError, RecursionError):
            reply = replace(reply, error="a piece of its stream is no JSON")
            continue
        if error := _error(told):
            reply = replace(reply, error=error)
        choice = _first(told.get("choices"))
        delta = _map(choice.get("delta"))
        parts = _list(delta.get("tool_calls"))
        for part in map(_map, parts):
            index = _count(part.get("index")) or 0
            function, known = _map(part.get("function")), calls.get(index, Call("", ""))
            calls[index] = Call(
                known.name + _text(function.get("name")), known.arguments + _text(function.get("arguments"))
            )
        said, thought = _text(delta.get("content")), _thought(delta)
        reply = replace(
            reply,
            model=reply.model or _text(told.get("model")),
            text=reply.text + said,
            thought=reply.thought + thought,
            finish=_text(choice.get("finish_reason")) or reply.finish,
            pieces=reply.pieces + bool(said or thought or parts),
        )
        reply = _with_usage(reply, told.get("usage"))
    return replace(reply, calls=tuple(calls[index] for index in sorted(calls)))


def _with_usage(reply: Reply, usage: object) -> Reply:
    told = _map(usage)
    if not told:
        return reply
    return replace(
        reply,
        prompt_tokens=_count(told.get("prompt_tokens")),
        completion_tokens=_count(told.get("completion_tokens")),
        cached_tokens=_count(_map(told.get("prompt_tokens_details")).get("cached_tokens")),
    )


def _error(told: Mapping[str, Any]) -> str:
    """In any of the engines' shapes."""
    error = told.get("error")
    if isinstance(error, Mapping):
        return _cut(_text(error.get("message")) or json.dumps(error))
    if error:
        return _cut(str(error))
    return _cut(_text(told.get("message"))) if told.get("object") == "error" else ""


def _thought(message: Mapping[str, Any]) -> str:
    return _text(message.get("reasoning_content")) or _text(message.get("reasoning"))


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= ERROR_LIMIT else text[: ERROR_LIMIT - 1] + "…"


def _first(value: object) -> Mapping[str, Any]:
    items = _list(value)
    return _map(items[0]) if items else {}


def _map(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> Sequence[Any]:
    return value if isinstance(value, list) else []


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _vector(value: object) -> tuple[float, ...]:
    return tuple(
        float(each) for each in _list(value) if isinstance(each, int | float) and not isinstance(each, bool)
    )
