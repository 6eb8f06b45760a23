"""A stream's chunks put together again: what the engine would have said, had it been asked for a plain
answer.

Texts are joined, lists grow, numbers and names are the last that came; nothing is added up.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from llmgw.gateway.surface import ANTHROPIC, CHAT, COMPLETION, Endpoint

_SAID_ONCE = frozenset({"role", "id", "type", "name"})
"""Texts that come whole, even where they come again with every piece."""


class NotAnswered(Exception):
    """The chunks make no answer. The text finishes "the replica ..."."""


class Assembly(ABC):
    """Of one answer. Raises NotAnswered for what is no part of one."""

    def feed(self, events: bytes) -> None:
        """Whole events."""
        try:
            for line in events.splitlines():
                if line.startswith(b"data:") and (text := line[5:].strip()) != b"[DONE]":
                    self._add(json.loads(text))
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            raise NotAnswered("sent a stream of something else") from None

    def whole(self) -> dict[str, Any]:
        if not self._has_ended():
            raise NotAnswered("ended its answer unfinished")
        return self._settled()

    @abstractmethod
    def _add(self, said: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def _has_ended(self) -> bool: ...

    @abstractmethod
    def _settled(self) -> dict[str, Any]: ...


def assembly_of(endpoint: Endpoint) -> Assembly:
    if endpoint.kind in (CHAT, COMPLETION):
        return _Choices()
    return _Message() if endpoint.shape == ANTHROPIC else _Response()


# --- messages and responses ---------------------------------------------------------------------------------


class _Message(Assembly):
    """As Anthropic's clients are told it: blocks that begin, grow, and end."""

    def __init__(self) -> None:
        self._message: dict[str, Any] = {}
        self._blocks: dict[int, dict[str, Any]] = {}
        self._inputs: dict[int, str] = {}

    def _add(self, said: Mapping[str, Any]) -> None:
        match said["type"]:
            case "message_start":
                self._message = dict(said["message"])
            case "content_block_start":
                block = self._blocks[said["index"]] = dict(said["content_block"])
                if block["type"] == "tool_use":
                    block.setdefault("input", {})
            case "content_block_delta":
                self._grow(said["index"], said["delta"])
            case "message_delta":
                usage = {**self._message.get("usage", {}), **said.get("usage", {})}
                self._message |= {**said["delta"], "usage": usage}

    def _grow(self, index: int, delta: Mapping[str, Any]) -> None:
        block = self._blocks[index]
        for key, value in delta.items():
            if key == "partial_json":
                self._inputs[index] = self._inputs.get(index, "") + value
            elif key == "citation":
                block["citations"] = [*(block.get("citations") or []), value]
            elif key != "type":  # a text: what is said, thought, or signed
                block[key] = block.get(key, "") + value

    def _has_ended(self) -> bool:
        return self._message.get("stop_reason") is not None

    def _settled(self) -> dict[str, Any]:
        for index, text in self._inputs.items():
            self._blocks[index]["input"] = _input_of(text)
        return {**self._message, "content": [self._blocks[index] for index in sorted(self._blocks)]}


def _input_of(text: str) -> Any:
    """Where an answer reaches its greatest length in the middle of it, llama.cpp says nothing of it."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {}


class _Response(Assembly):
    """The last event has all of it."""

    def __init__(self) -> None:
        self._response: dict[str, Any] = {}

    def _add(self, said: Mapping[str, Any]) -> None:
        if said["type"] in ("response.completed", "response.incomplete"):
            self._response = dict(said["response"])

    def _has_ended(self) -> bool:
        return bool(self._response)

    def _settled(self) -> dict[str, Any]:
        return self._response


# --- chats and completions ----------------------------------------------------------------------------------


class _Choices(Assembly):
    def __init__(self) -> None:
        self._top: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    def _add(self, said: Mapping[str, Any]) -> None:
        for key, value in said.items():
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

    def _has_ended(self) -> bool:
        finishes = [choice.get("finish_reason") for choice in self._choices.values()]
        return bool(finishes) and None not in finishes

    def _settled(self) -> dict[str, Any]:
        choices = [_plain(self._choices[index]) for index in sorted(self._choices)]
        return {"choices": choices, **self._top}


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


def _plain(choice: dict[str, Any]) -> dict[str, Any]:
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
