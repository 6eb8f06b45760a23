"""What an engine's answer to a bench says: where its tokens are, what it used, and why it is none."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

TOKEN = b'"finish_reason"'  # every chunk has it that has a choice, and no other


def _events(text: bytes) -> Iterator[Mapping[str, Any]]:
    for event in text.split(b"\n\n"):
        if event.startswith(b"data: {"):
            with contextlib.suppress(ValueError, RecursionError):
                yield json.loads(event[len(b"data: ") :])


def has_token(event: bytes) -> bool:
    """Whether something is said in it: engines begin with a chunk that only names the role."""
    if TOKEN not in event:
        return False
    for raw in _events(event):
        choices = raw.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if isinstance(choice, Mapping):
            delta = choice.get("delta")
            said = delta if isinstance(delta, Mapping) else choice
            if any(
                said.get(key) for key in ("content", "reasoning_content", "reasoning", "tool_calls", "text")
            ):
                return True
    return False


def usage_of(text: bytes) -> Mapping[str, Any]:
    for raw in reversed(list(_events(text))):
        if isinstance(usage := raw.get("usage"), Mapping):
            return usage
    return {}


def message_of(text: bytes) -> str:
    """What an error says, where it is one of OpenAI's shape."""
    try:
        error = json.loads(text)["error"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return ""
    said = error.get("message") if isinstance(error, Mapping) else error
    return said if isinstance(said, str) else ""


def count(usage: object, key: str) -> int:
    value = usage.get(key) if isinstance(usage, Mapping) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
