"""Whether an engine lives, judged by progress: its process runs, it answers, and its requests move on.

Busy is not dead: a long prefill counts as progress, since every engine counts the steps it makes of one. Time
counts only while the engine is looked at, so an agent that slept or was stopped judges nobody by its own gap.
Pure: fed with one look after the other.
"""

from __future__ import annotations

from nodes.agent.probes import Load

SAID_AFTER_S = 4.0  # of silence: worth a word, and no judgement yet
LONGEST_LOOK_S = 6.0  # that one look may count for
MUTE_FACTOR = 4  # counts are told between two batches, and one batch may take long


class Liveness:
    """Of one engine, since the agent began to look at it. stuck_after_s: the grace."""

    def __init__(self, stuck_after_s: float) -> None:
        self._stuck_after_s = stuck_after_s
        self._silent_s = 0.0  # without an answer to a health check
        self._mute_s = 0.0  # without its counts, once it has told them
        self._flat_s = 0.0  # with requests, and none of them moving
        self._told: Load | None = None

    def look(self, *, is_healthy: bool, load: Load, elapsed_s: float) -> None:
        """elapsed_s: since the look before."""
        elapsed_s = min(elapsed_s, LONGEST_LOOK_S)
        self._silent_s = 0.0 if is_healthy else self._silent_s + elapsed_s
        if load.running is None:
            self._mute_s += elapsed_s if self._told else 0.0
            return
        before, self._told, self._mute_s = self._told, load, 0.0
        is_flat = before is not None and load.tells_progress and load.progress == before.progress
        self._flat_s = self._flat_s + elapsed_s if is_flat and load.requests else 0.0

    @property
    def note(self) -> str:
        """What is worth saying while nothing is judged."""
        if self._silent_s >= SAID_AFTER_S:
            return f"its process runs, but has not answered health checks for {self._silent_s:.0f} s"
        if self._flat_s >= SAID_AFTER_S:
            return f"{self._requests} and has moved none of them on for {self._flat_s:.0f} s"
        return ""

    @property
    def verdict(self) -> str:
        """The sentence of one that is stuck; empty while it lives."""
        if self._silent_s >= self._stuck_after_s:
            return self._sentence(f"The engine has not answered health checks for {self._silent_s:.0f} s")
        if self._flat_s >= self._stuck_after_s:
            return self._sentence(
                f"The engine {self._requests} and has moved none of them on for {self._flat_s:.0f} s"
            )
        if self._mute_s >= self._stuck_after_s * MUTE_FACTOR:
            return self._sentence(f"The engine has not told its counts for {self._mute_s:.0f} s")
        return ""

    @property
    def _requests(self) -> str:
        count = self._told.requests if self._told else 0
        return "has 1 request" if count == 1 else f"has {count} requests"

    @staticmethod
    def _sentence(what: str) -> str:
        return f"{what}, though its process runs; it was ended, and another is started."
