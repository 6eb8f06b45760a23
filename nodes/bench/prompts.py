"""The bodies of requests, of which no two share more of a prompt than they are meant to.

A word of three letters and its space is one token to most engines, and to sim exactly one.
"""

from __future__ import annotations

import hashlib
import json

from nodes.bench.asks import Ask

_WORDS = (
    "the and for are but not you all any can had her was one our out "
    "day get has him his how man new now old see two way who boy did "
    "its let put say she too use air art bad bag bar bed big bit box "
    "bus buy car cat cup cut dog dry ear eat end eye far few fit fly"
)
WORDS = tuple(_WORDS.split())
_MASK = len(WORDS) - 1


def words(seed: str, count: int) -> str:
    """So many words, others for each seed."""
    return " ".join(WORDS[byte & _MASK] for byte in hashlib.shake_128(seed.encode()).digest(count))


class Prompts:
    """Those of one run. `shared_part` of each made-up prompt, from 0 to 1, begins like all others'; with
    another `salt` all are others, which no engine has in its cache yet."""

    def __init__(self, model: str, salt: str, shared_part: float) -> None:
        self._model, self._salt, self._shared_part = model, salt, shared_part
        self._shared = ""

    def body(self, ask: Ask) -> bytes:
        """A streamed chat that ends after as many tokens as were drawn: engines are asked not to end it
        themselves."""
        messages = ask.row.messages or [{"role": "user", "content": self._text(ask)}]
        return json.dumps(
            {
                "model": self._model,
                "messages": messages,
                "max_tokens": ask.row.output_tokens,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
            separators=(",", ":"),
        ).encode()

    def _text(self, ask: Ask) -> str:
        own = max(1, round(ask.row.prompt_tokens * (1 - self._shared_part)))
        common = ask.row.prompt_tokens - own
        if len(self._shared) < common * 4:
            self._shared = words(self._salt, common)
        text = words(f"{self._salt}:{ask.number}", own)
        return f"{self._shared[: common * 4 - 1]} {text}" if common else text
