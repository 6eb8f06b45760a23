"""How much was used in the last minute, and when there will be room again.

A window slides over a minute: what was used in the minute that the clock is in, and the part of the one
before that the window still covers, as if that had been spread evenly. Two numbers a counter, and no burst at
the turn of a minute. What is over a limit already is remembered and waited for.
"""

from __future__ import annotations

import math

from llmgw.gateway.admission import Refused

MINUTE_S = 60.0


class Windows:
    """Counters by name, of one process: those of the minute in which was added last, and of the one before.
    So a name that is quiet is forgotten in the minute after next, without being looked for. Of what is added,
    `now_s` never goes back."""

    def __init__(self) -> None:
        self._minute = 0
        self._before: dict[str, float] = {}
        self._counters: dict[str, float] = {}

    def add(self, name: str, amount: float, now_s: float) -> None:
        minute = int(now_s // MINUTE_S)
        if minute != self._minute:
            self._before = self._counters if minute == self._minute + 1 else {}
            self._minute, self._counters = minute, {}
        self._counters[name] = self._counters.get(name, 0.0) + amount

    def wait_s(self, name: str, amount: float, limit: float, now_s: float) -> float:
        """Until this amount is within the limit: 0 where it is now, endless where it never can be."""
        before, current = self._at(name, int(now_s // MINUTE_S))
        return wait_s(before, current, now_s % MINUTE_S, amount, limit)

    def _at(self, name: str, minute: int) -> tuple[float, float]:
        if minute == self._minute:
            return self._before.get(name, 0.0), self._counters.get(name, 0.0)
        return (self._counters.get(name, 0.0) if minute == self._minute + 1 else 0.0), 0.0


def wait_s(before: float, current: float, passed_s: float, amount: float, limit: float) -> float:
    """As `Windows.wait_s`, of a counter that is elsewhere: what was used in the minute before, and in this
    one, of which so much has passed."""
    if amount > limit:
        return math.inf
    left = limit - amount - current
    if left >= 0:
        return max(0.0, _fall_s(before, left) - passed_s)
    return MINUTE_S - passed_s + _fall_s(current, limit - amount)


def _fall_s(amount: float, limit: float) -> float:
    """When an amount of the minute before has slid out of the window but for the limit."""
    return MINUTE_S * max(0.0, 1 - limit / amount) if amount > 0 else 0.0


def share(limit: int, processes: int) -> int:
    """What one of several processes may give out of a limit by itself. Nobody is shut out: below one for
    each, each has one."""
    return max(1, limit // max(1, processes))


# --- refusals -----------------------------------------------------------------------------------------------


def over_limit(whose: str, what: str, limit: int, own: int, wait_s: float) -> Refused:
    """`whose` begins the sentence, as in "The key llmgw_..."; `what` is counted, as in "tokens a minute";
    `own` of them are this process's."""
    retry_after_s = max(1, math.ceil(min(wait_s, 2 * MINUTE_S)))
    what += f", {own} of them through this process," if own != limit else ""
    return Refused(
        429,
        "rate_limit_exceeded",
        f"{whose} may have {limit} {what} and has them: try again in {retry_after_s} s, or ask an operator "
        "for more.",
        retry_after_s=retry_after_s,
    )


def larger_than_limit(whose: str, limit: int, tokens: int) -> Refused:
    return Refused(
        400,
        "larger_than_limit",
        f"{whose} may have {limit} tokens a minute, and this prompt alone has at least {tokens}: shorten it, "
        "or ask an operator for more.",
        param="messages",
    )
