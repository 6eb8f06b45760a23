"""What a client asks for, and the body that each engine is sent for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache

import msgspec

from llmgw.gateway.admission import KeyEntry, ModelEntry
from llmgw.gateway.needs import Needs
from llmgw.gateway.passage import Passage
from llmgw.gateway.routing import Prompt, Target
from llmgw.gateway.streams import Echo
from llmgw.gateway.surface import CHAT, COMPLETION, LLAMACPP, VLLM, Endpoint

_CANNOT_CANCEL = frozenset({LLAMACPP})
"""Engines that compute a plain answer to its end, whether or not its client has left: they are asked for a
stream instead."""
_COUNTS_UNASKED = frozenset({LLAMACPP})
"""Engines that end a stream with its timings, which have the tokens in them; asked for usage, they move those
to a chunk that the client did not ask for."""
_echo = lru_cache(maxsize=1024)(Echo)
_SALTED = ("/v1/chat/completions", "/v1/completions", "/v1/responses")


class Call(msgspec.Struct, frozen=True, gc=False):
    """`fields` is the body's top level; `headers` are those that reach an engine. `model` is the one that is
    to answer: another than `name` names, where it is a fallback."""

    name: str
    model: ModelEntry
    key: KeyEntry
    needs: Needs
    fields: Mapping[str, msgspec.Raw]
    body: bytes
    headers: Mapping[str, str]
    passage: Passage
    prompt: Prompt
    wants_stream: bool
    wants_usage: bool

    @property
    def endpoint(self) -> Endpoint:
        return self.needs.endpoint

    def of(self, model: ModelEntry) -> Call:
        return msgspec.structs.replace(self, model=model)

    def is_gathered_from(self, target: Target) -> bool:
        """Whether the engine is asked for a stream that becomes a plain answer here."""
        return not self.wants_stream and target.engine in _CANNOT_CANCEL and self.endpoint.can_stream

    def hides_usage_of(self, target: Target) -> bool:
        """Whether usage is asked of the engine though the client did not."""
        if not self.wants_stream or self.wants_usage or target.engine in _COUNTS_UNASKED:
            return False
        return self._is_completion()

    def body_for(self, target: Target) -> bytes:
        """As it came, but for what must be different."""
        new: dict[str, object] = {}
        if target.served_name != self.name:
            new["model"] = target.served_name
        if self.wants_stream:
            if self.hides_usage_of(target):
                options = msgspec.json.decode(self.fields.get("stream_options", b"null")) or {}
                if isinstance(options, dict):  # anything else is the engine's to refuse
                    new["stream_options"] = {**options, "include_usage": True}
        elif self.is_gathered_from(target):
            new["stream"] = True
            if self._is_completion():
                new["stream_options"] = {"include_usage": True}
        if target.engine == VLLM and self.endpoint.path in _SALTED and self._has_salt():
            # One text of two, so that no client can guess itself into what another scope has cached.
            own = msgspec.json.decode(self.fields.get("cache_salt", b"null"))
            new["cache_salt"] = json.dumps([self.key.cache_scope, own])
        return msgspec.json.encode({**self.fields, **new}) if new else self.body

    def echo_for(self, target: Target) -> Echo | None:
        return None if target.served_name == self.name else _echo(target.served_name, self.name)

    def _is_completion(self) -> bool:
        return self.endpoint.kind in (CHAT, COMPLETION)

    def _has_salt(self) -> bool:
        return bool(self.key.cache_scope) or "cache_salt" in self.fields
