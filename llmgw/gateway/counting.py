"""Asking an engine's own tokenizer how many tokens a prompt has.

Only worth it near the limit, and never something to wait for: few are asked at once, briefly, and about
prompts of bounded size. Where no answer comes the engine judges the request itself, as it would have anyway.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import msgspec

from llmgw.gateway.routing import Target
from llmgw.gateway.surface import (
    ANTHROPIC,
    CHAT,
    COMPLETION,
    EMBEDDING,
    LLAMACPP,
    SGLANG,
    VLLM,
    Endpoint,
)
from llmgw.gateway.upstream import Upstream

AT_ONCE_LIMIT = 4
PROMPT_LIMIT_BYTES = 1024 * 1024
ANSWER_LIMIT_BYTES = 16 * 1024 * 1024
PATIENCE_S = 2.0

_CHAT_FIELDS = ("messages", "tools", "tool_choice", "chat_template_kwargs", "reasoning_effort")
_MESSAGES_FIELDS = ("system", "messages", "tools", "tool_choice")
_TEXT_FIELDS = {COMPLETION: "prompt", EMBEDDING: "input"}

Fields = Mapping[str, msgspec.Raw]


class TokenCounter:
    """One process's."""

    def __init__(self, upstream: Upstream, *, patience_s: float = PATIENCE_S) -> None:
        self._upstream, self._patience_s = upstream, patience_s
        self._asking = 0

    async def count(self, target: Target, endpoint: Endpoint, fields: Fields) -> int | None:
        """None where nobody can tell in time."""
        size = sum(len(bytes(fields[name])) for name in endpoint.prompt_fields if name in fields)
        if size > PROMPT_LIMIT_BYTES or self._asking >= AT_ONCE_LIMIT:
            return None
        self._asking += 1
        try:
            return await self._count(target, endpoint, fields)
        finally:
            self._asking -= 1

    async def _count(self, target: Target, endpoint: Endpoint, fields: Fields) -> int | None:
        if target.engine not in (LLAMACPP, SGLANG, VLLM):
            return None
        if endpoint.shape == ANTHROPIC:
            path = endpoint.engines[target.engine].removesuffix("/count_tokens") + "/count_tokens"
            return _number(await self._ask(target, path, _some(fields, _MESSAGES_FIELDS)), "input_tokens")
        if endpoint.kind == CHAT and target.engine == LLAMACPP:
            answer = await self._ask(target, "/apply-template", _some(fields, _CHAT_FIELDS))
            return await self._count_text(target, answer.get("prompt"))
        if endpoint.kind == CHAT:
            return _number(await self._ask(target, "/tokenize", _some(fields, _CHAT_FIELDS)), "count")
        with contextlib.suppress(msgspec.DecodeError, KeyError):
            return await self._count_text(target, msgspec.json.decode(fields[_TEXT_FIELDS[endpoint.kind]]))
        return None

    async def _count_text(self, target: Target, text: object) -> int | None:
        if not isinstance(text, str):
            return None
        if target.engine != LLAMACPP:
            return _number(await self._ask(target, "/tokenize", {"prompt": text}), "count")
        asked = {"content": text, "add_special": True, "parse_special": True}
        tokens = (await self._ask(target, "/tokenize", asked)).get("tokens")
        return len(tokens) if isinstance(tokens, list) else None

    async def _ask(self, target: Target, path: str, asked: Mapping[str, object]) -> dict[str, Any]:
        """Empty where there is no answer of use."""
        body = msgspec.json.encode({**asked, "model": target.served_name})
        told = await self._upstream.ask_briefly(
            target, path, body, patience_s=self._patience_s, limit_bytes=ANSWER_LIMIT_BYTES
        )
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            value = msgspec.json.decode(told)
            return value if isinstance(value, dict) else {}
        return {}


def _some(fields: Fields, names: tuple[str, ...]) -> dict[str, msgspec.Raw]:
    return {name: fields[name] for name in names if name in fields}


def _number(answer: Mapping[str, Any], name: str) -> int | None:
    value = answer.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
