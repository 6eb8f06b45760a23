"""Whether the reconciler acts, and what keeps it from it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.conf import settings

from catalog.typed import span_words
from nodes import lease
from nodes.models import Cluster, Held
from nodes.showing.ages import seconds


@dataclass(frozen=True, slots=True)
class Acting:
    """Whether passes act. unwatched: how long none has been made, None where there never was one. alarm: what
    they do not act on, and why. held: how many ends of replicas wait for a person's yes."""

    cluster: Cluster
    unwatched: timedelta | None
    alarm: str = ""
    held: int = 0

    @property
    def obstacles(self) -> tuple[str, ...]:
        """Why nothing is done, or not all: a sentence each."""
        return tuple(filter(None, (self.unwatched_says, self.paused_says, self.alarm)))

    @property
    def paused_says(self) -> str:
        if not self.cluster.is_paused:
            return ""
        why = f" ({self.cluster.paused_why})" if self.cluster.paused_why else ""
        return (
            f"nothing is started or stopped: {self.cluster.paused_by} has paused the reconciler{why}; "
            "manage.py reconcile_resume lets it act again"
        )

    @property
    def unwatched_says(self) -> str:
        """Of a reconciler that is not there."""
        longest_s = max(settings.LLMGW_SUSPECT_AFTER_S, 3 * settings.LLMGW_TICK_S)
        if self.unwatched is None:
            since = "no pass has been made yet"
        elif self.unwatched.total_seconds() <= longest_s:
            return ""
        else:
            since = f"no pass has been made for {span_words(self.unwatched.total_seconds())}"
        return f"{since}; see to it that a worker runs, and one with --beat"

    def as_dict(self) -> dict[str, Any]:
        """As REST and `--json` tell it."""
        return {
            "last_pass_age_s": seconds(self.unwatched),
            "paused": self.cluster.is_paused,
            "paused_by": self.cluster.paused_by,
            "paused_why": self.cluster.paused_why,
            "alarm": self.alarm,
            "held": self.held,
            "obstacles": list(self.obstacles),
        }


def acting() -> Acting:
    """As the last pass left it. Three queries."""
    cluster = Cluster.this()
    return Acting(cluster, lease.unwatched(), cluster.alarm, Held.objects.count())
