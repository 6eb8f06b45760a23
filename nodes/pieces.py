"""How replicas and nodes look on the admin's pages, the catalog's included."""

from __future__ import annotations

from django.utils.html import format_html_join
from django.utils.safestring import SafeString

from catalog.pieces import badge
from nodes.models import Node, Replica
from nodes.placement import Freshness
from nodes.showing import freshness_of, staleness_of

_STATE_LOOKS = {
    Replica.State.READY: "good",
    Replica.State.FETCHING: "busy",
    Replica.State.STARTING: "busy",
    Replica.State.DRAINING: "busy",
    Replica.State.FAILED: "bad",
    Replica.State.LOST: "bad",
}
_FRESHNESS_LOOKS = {Freshness.FRESH: "good", Freshness.SUSPECT: "warn", Freshness.LOST: "bad"}


def replica_badge(replica: Replica) -> SafeString:
    return badge(replica.state, _STATE_LOOKS.get(Replica.State(replica.state), ""))


def stale_badge(replica: Replica) -> SafeString | str:
    """Amber where a restart would change what runs, grey where it would not, nothing without a difference."""
    found = staleness_of(replica)
    if not found.word:
        return ""
    look = "warn" if found.restart_needed else ""
    return format_html_join(" ", "{}", ((badge(word, look),) for word in found.word.split(", ")))


def freshness_badge(node: Node) -> SafeString:
    found = freshness_of(node)
    return badge(found, _FRESHNESS_LOOKS.get(found, ""))
