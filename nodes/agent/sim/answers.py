"""What the sim engine says: pure, the same for the same prompt and choice."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

from nodes.agent.sim.asks import TOKEN_CHARACTERS, WORDS, Ask, count_tokens, message_text

EMBEDDING_DIMENSIONS = 64


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice, whole: its pieces are the tokens, the last one cut where a stop text begins."""

    pieces: tuple[str, ...]
    tokens: int
    finish_reason: str
    stop_reason: str | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def compose(ask: Ask, choice: int) -> Answer:
    pieces, finish_reason = _words(ask, choice) if ask.text is None else _told(ask, ask.text)
    if ask.call is not None:
        is_whole = finish_reason == "stop"
        finish_reason = "tool_calls" if is_whole and not ask.call.is_named else finish_reason
        return Answer(pieces, len(pieces), finish_reason)
    if ask.stops:
        text = "".join(pieces)
        found = [(at, stop) for stop in ask.stops if (at := text.find(stop)) >= 0]
        if found:
            at, stop = min(found)
            return Answer(_split(text[:at]), count_tokens(text[: at + len(stop)]), "stop", stop)
    return Answer(pieces, len(pieces), finish_reason)


def _words(ask: Ask, choice: int) -> tuple[tuple[str, ...], str]:
    start = ask.seed + choice
    pieces = tuple(WORDS[(start + index) % len(WORDS)] for index in range(ask.max_tokens))
    return pieces, "stop" if ask.ends_itself else "length"


def _told(ask: Ask, text: str) -> tuple[tuple[str, ...], str]:
    pieces = _split(text)
    return pieces[: ask.max_tokens], "stop" if len(pieces) <= ask.max_tokens else "length"


def _split(text: str) -> tuple[str, ...]:
    return tuple(text[start : start + TOKEN_CHARACTERS] for start in range(0, len(text), TOKEN_CHARACTERS))


def transcript(ask: Ask, answer: Answer) -> str:
    """Prompt and answer, as the next prompt of the same talk begins."""
    return ask.prompt + (message_text("assistant", answer.text) if ask.is_chat else answer.text)


def embed(text: str) -> list[float]:
    """A unit vector that belongs to the text."""
    seed = text.encode("utf-8", "replace")
    parts = range(EMBEDDING_DIMENSIONS // hashlib.sha256().digest_size)
    digest = b"".join(hashlib.sha256(bytes([part]) + seed).digest() for part in parts)
    values = [byte - 127.5 for byte in digest]
    length = math.sqrt(sum(value * value for value in values))
    return [value / length for value in values]
