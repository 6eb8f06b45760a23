"""Which replicas are left out for a while, because they fail.

Five errors in a row eject a replica for 30 s, and for longer each time it happens again; after that one
request at a time tries it, until one comes through. The last one of a model is never ejected. One where
nobody listens, or somebody else does, is left out for a second even then: whoever has no other waits, and
asks again. State of one process; moments are handed in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from llmgw.gateway.routing import Target

ERRORS = 5
EJECTED_S, LONGEST_S = 30.0, 300.0
ABSENT_S = 1.0
FORGIVEN_S = 300.0
"""Without an error for so long, the next ejection is short again."""


class Outcome(Enum):
    """What a try says of its replica. NEUTRAL: nothing, as when it is busy or its client left. ABSENT: nobody
    listens there. STRANGE: somebody else does, which is no error of the replica's."""

    FINE = auto()
    FAILED = auto()
    NEUTRAL = auto()
    ABSENT = auto()
    STRANGE = auto()


@dataclass(slots=True)
class Mark:
    """`out_until_s` is None unless it is ejected; past that moment it waits for a probe to come through."""

    errors: int = 0
    ejections: int = 0
    failed_at_s: float = float("-inf")
    out_until_s: float | None = None
    is_probed: bool = False
    absent_until_s: float = float("-inf")


class Breaker:
    """`marks` is empty while all is well, and whoever sees that need not ask or tell."""

    def __init__(self) -> None:
        self.marks: dict[str, Mark] = {}

    def routable(self, targets: Sequence[Target], now_s: float) -> Sequence[Target]:
        """Those that a request may go to, in the order given. Empty only where nobody listens at any."""
        if not self.marks:
            return targets
        present = [target for target in targets if not self._is_absent(target.replica, now_s)]
        return [target for target in present if self._is_in(target.replica, now_s)] or present

    def ask(self, replica: str) -> None:
        """A request goes to it: the one probe, where it has been ejected."""
        mark = self.marks.get(replica)
        if mark is not None and mark.out_until_s is not None:
            mark.is_probed = True

    def tell(self, replica: str, outcome: Outcome, now_s: float, there: Iterable[Target]) -> None:
        """`there` are all replicas that serve the same model."""
        mark = self.marks.get(replica)
        if outcome is Outcome.FINE:
            if mark is not None:
                self._forgive(replica, mark, now_s)
            return
        if outcome is Outcome.NEUTRAL:
            if mark is not None:
                mark.is_probed = False
            return
        if mark is None:
            mark = self.marks[replica] = Mark()
        if outcome in (Outcome.ABSENT, Outcome.STRANGE):
            mark.absent_until_s = now_s + ABSENT_S
        if outcome is Outcome.STRANGE:
            mark.is_probed = False
            return
        if now_s - mark.failed_at_s > FORGIVEN_S:
            mark.ejections = 0
        mark.errors += 1
        mark.failed_at_s = now_s
        has_failed_its_probe = mark.is_probed
        mark.is_probed = False
        if mark.out_until_s is not None and now_s < mark.out_until_s:
            return  # begun before it was ejected
        if has_failed_its_probe or (
            mark.errors >= ERRORS
            and any(other.replica != replica and self._is_in(other.replica, now_s) for other in there)
        ):
            mark.ejections += 1
            mark.out_until_s = now_s + min(EJECTED_S * mark.ejections, LONGEST_S)

    def forget(self, replicas: Iterable[str]) -> None:
        """They are gone, or will come back as new."""
        for replica in replicas:
            self.marks.pop(replica, None)

    def _forgive(self, replica: str, mark: Mark, now_s: float) -> None:
        if not mark.ejections or now_s - mark.failed_at_s > FORGIVEN_S:
            del self.marks[replica]
            return
        mark.errors, mark.out_until_s, mark.is_probed = 0, None, False
        mark.absent_until_s = float("-inf")

    def _is_absent(self, replica: str, now_s: float) -> bool:
        mark = self.marks.get(replica)
        return mark is not None and now_s < mark.absent_until_s

    def _is_in(self, replica: str, now_s: float) -> bool:
        mark = self.marks.get(replica)
        if mark is None or mark.out_until_s is None:
            return True
        return now_s >= mark.out_until_s and not mark.is_probed
