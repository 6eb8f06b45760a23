"""A stream's chunks put together again: what the engine would have said, had it been asked for a plain
answer.

Texts are joined, lists grow, numbers and names are the last that came; nothing is added up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_SAID_ONCE = frozenset({"role", "id", "type", "name"})
"""Texts that come whole, even where they come again with every piece."""


class NotAnswered(Exception):
    """The chunks make no answer. The text finishes "the replica ..."."""


class Assembly:
    """Of a chat or of a completion, with all its choices."""

    def __init__(self) -> None:
        self._top: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    def feed(self, events: bytes) -> None:
        """Whole events. Raises NotAnswered for those that are no chunks."""
        for line in events.splitlines():
            if line.startswith(b"data:") and (text := line[5:].strip()) != b"[DONE]":
                try:
                    self._add(json.loads(text))
                except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
                    raise NotAnswered("sent a stream of something else") from None

    def whole(self) -> dict[str, Any]:
        choices = [self._choices[index] for index in sorted(self._choices)]
        if not choices or any(choice.get("finish_reason") is None for choice in choices):
            raise NotAnswered("ended its answer unfinished")
        return {"choices": [_settled(choice) for choice in choices], **self._top}

    def _add(self, chunk: Mapping[str, Any]) -> None:
        for key, value in chunk.items():
            if key == "choices":
                for part in value:
                    self._add_choice(part)
            elif key == "object":
                self._top[key] = str(value).removesuffix(".chunk")
            elif value is not None or key not in self._top:
                self._top[key] = value

    def _add_choice(self, part: Mapping[str, Any]) -> None:
        choice = self._choices.setdefault(part["index"], {"index": part["index"]})
        for key, value in part.items():
            if key == "delta":
                _join(choice.setdefault("message", {}), value)
            elif key in ("text", "logprobs"):
                _join(choice, {key: value})
            elif value is not None or key not in choice:
                choice[key] = value


def _join(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        before = into.get(key)
        if value is None or before is None:
            into[key] = before if value is None else _begun(key, value)
        elif key == "tool_calls":
            _join_calls(before, value)
        elif isinstance(value, dict) and isinstance(before, dict):
            _join(before, value)
        elif isinstance(value, str) and isinstance(before, str) and key not in _SAID_ONCE:
            into[key] = before + value
        elif isinstance(value, list) and isinstance(before, list):
            before += value
        elif key not in _SAID_ONCE:
            into[key] = value


def _begun(key: str, value: Any) -> Any:
    if key != "tool_calls":
        return value
    calls: list[dict[str, Any]] = []
    _join_calls(calls, value)
    return calls


def _join_calls(calls: list[dict[str, Any]], pieces: list[dict[str, Any]]) -> None:
    """Pieces say by their index which call they belong to."""
    for piece in pieces:
        index = piece["index"]
        call = next((call for call in calls if call["index"] == index), None)
        if call is None:
            calls.append(dict(piece))
        else:
            _join(call, {key: value for key, value in piece.items() if key != "index"})


def _settled(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice.get("message")
    if message is None:
        return choice
    calls = message.get("tool_calls")
    if calls:
        ordered = sorted(calls, key=lambda call: int(call["index"]))
        message["tool_calls"] = [
            {key: value for key, value in call.items() if key != "index"} for call in ordered
        ]
    if not message.get("content"):
        message["content"] = None if calls else ""
    message.setdefault("role", "assistant")
    return choice
