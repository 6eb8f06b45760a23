"""One request's way through the gateway: what each part of it learned, gathered in one place.

The door makes it, every part writes what it alone knows, and what is counted, logged and told in the answer's
headers is read from here once the request has ended. Moments are monotonic seconds, None where it never came
to that.
"""

from __future__ import annotations

from dataclasses import dataclass

from nodes.tallies import FAILED, LEFT, OK, REFUSED


@dataclass(slots=True)
class Passage:
    """`asked_as` is the model's name as the client wrote it, `model` the one that answered, which is another
    where a fallback did. `route` says how the replica was chosen. Tokens are the engine's own count."""

    request_id: str
    begun_at_s: float
    endpoint: str = ""
    key: str = ""
    asked_as: str = ""
    model: str = ""
    model_id: int = 0
    is_simulated: bool = False
    is_streamed: bool = False
    replica: str = ""
    route: str = ""
    attempts: int = 0
    held_s: float = 0.0
    """How long it waited for a replica to be there."""
    sent_at_s: float | None = None
    """When the last attempt's request had gone to its engine."""
    first_byte_at_s: float | None = None
    """When the first piece of the answer that carries content came from the engine."""
    ended_at_s: float | None = None
    status: int = 0
    """What the client was told; 499 when it left before it was told anything."""
    code: str = ""
    """Why it failed, as in the error that the client saw; empty after a success."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    @property
    def ttft_s(self) -> float | None:
        """To the first token, as the client saw it; of streams alone, since a plain answer comes whole."""
        if not self.is_streamed or self.first_byte_at_s is None:
            return None
        return max(self.first_byte_at_s - self.begun_at_s, 0.0)

    @property
    def tpot_s(self) -> float | None:
        """Between two tokens of a stream, on the average."""
        if not self.is_streamed or self.first_byte_at_s is None or self.ended_at_s is None:
            return None
        gaps = self.completion_tokens - 1
        return max(self.ended_at_s - self.first_byte_at_s, 0.0) / gaps if gaps > 0 else None

    @property
    def queued_s(self) -> float | None:
        """Before its engine had it, and not for want of a replica: in lines for limits and connections."""
        return None if self.sent_at_s is None else max(self.sent_at_s - self.begun_at_s - self.held_s, 0.0)

    @property
    def duration_s(self) -> float | None:
        return None if self.ended_at_s is None else max(self.ended_at_s - self.begun_at_s, 0.0)

    @property
    def outcome(self) -> str:
        """One of `tallies.OUTCOMES`. A stream that broke off had been answered 200, and has a code."""
        if self.status in (0, 499):
            return LEFT
        if self.status >= 400:
            return REFUSED if self.status < 500 else FAILED
        return FAILED if self.code else OK
