"""What needs a person first, for the admin's first page: a reconciler that does not act, wants without a
place, rolls that stopped, nodes out of contact, failed and stale replicas, engines that belong to nobody. And
what is under way on somebody's word.

A fixed number of queries, and a few lines of each kind with the way to the rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from django.db.models.functions import Now
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from catalog.pieces import badge, said, sentence
from catalog.typed import span_words
from nodes.models import Node, Orphan, Replica, Roll, Unplaced
from nodes.pieces import freshness_badge, kept_free_badge
from nodes.placement import Freshness
from nodes.showing import acting, freshness_of, models_with_replicas, nodes, tally, with_age

Line = tuple[SafeString, SafeString, SafeString]  # a badge, a link, and why

HEADINGS = ("state", "what", "why")
LINES_LIMIT = 5  # of each kind
FAILED_WITHIN = timedelta(hours=1)


def needs_a_person(user: Any) -> list[Line]:
    """What this user may see of it, the most urgent first."""
    return _lines(
        user,
        ("nodes.view_cluster", _reconciler, "nodes_cluster", ""),
        ("catalog.view_model", _unplaced, "catalog_model", "?state=short"),
        ("catalog.view_model", _halted, "catalog_model", ""),
        ("nodes.view_node", _silent_nodes, "nodes_node", ""),
        ("nodes.view_replica", _failed, "nodes_replica", f"?shown=over&state__exact={Replica.State.FAILED}"),
        ("catalog.view_model", _stale, "catalog_model", "?state=stale"),
        ("nodes.view_orphan", _orphans, "nodes_orphan", ""),
    )


def under_way(user: Any) -> list[Line]:
    """What people have asked for and is being done."""
    return _lines(
        user,
        ("catalog.view_model", _rolling, "catalog_model", ""),
        ("nodes.view_node", _draining, "nodes_node", ""),
    )


def _lines(user: Any, *kinds: tuple[str, Callable[[], Iterator[Line]], str, str]) -> list[Line]:
    """Each kind: the permission, what finds it, the page that lists all of it, and the query for that."""
    lines: list[Line] = []
    for permission, find, page, query in kinds:
        if user.has_perm(permission):
            found = list(find())
            lines += found[:LINES_LIMIT]
            if len(found) > LINES_LIMIT:
                more = f"{len(found) - LINES_LIMIT} more"
                address = reverse(f"admin:{page}_changelist") + query
                lines.append((badge(more), format_html('<a href="{}">all of them</a>', address), said("")))
    return lines


def _reconciler() -> Iterator[Line]:
    found = acting()
    alarm = f"{found.held} held" if found.held else "alarm"
    for word, look, says in (
        ("nobody looks", "bad", found.unwatched_says),
        (alarm, "bad", found.alarm),
        ("paused", "warn", found.paused_says),
    ):
        if says:
            yield badge(word, look), _link("nodes_cluster_changelist", "reconciler"), said(f"{says}.")


def _unplaced() -> Iterator[Line]:
    for want in Unplaced.objects.select_related("model").order_by("since"):
        link = _link("catalog_model_change", want.model.name, want.model_id)
        yield badge(f"{want.missing} short" if want.missing else "blocked", "bad"), link, said(want.why)


def _halted() -> Iterator[Line]:
    for roll in Roll.objects.select_related("model").exclude(halted="").order_by("asked_at"):
        link = _link("catalog_model_change", roll.model.name, roll.model_id)
        yield badge("roll halted", "bad"), link, said(roll.halted)


def _rolling() -> Iterator[Line]:
    rolls = with_age(Roll.objects.filter(halted=""), "asked_at").select_related("model")
    for roll in rolls.order_by("asked_at"):
        link = _link("catalog_model_change", roll.model.name, roll.model_id)
        age = span_words(roll.age.total_seconds())  # type: ignore[attr-defined]  # annotated
        yield badge("rolling", "busy"), link, said(_by(roll.by, roll.why, f"for {age}"))


def _draining() -> Iterator[Line]:
    for node in nodes().filter(is_draining=True):
        link = _link("nodes_node_change", node.name, node.pk)
        yield kept_free_badge(node), link, said(_by(node.cordoned_by, node.cordoned_why))


def _by(who: str, why: str, for_how_long: str = "") -> str:
    told = " ".join(filter(None, (for_how_long, f"by {who}")))
    return f"{told}: {why}" if why else told


def _silent_nodes() -> Iterator[Line]:
    for node in with_age(Node.objects.all(), "seen_at"):
        freshness = freshness_of(node)
        if freshness in (Freshness.LOST, Freshness.NEVER) or node.problem:
            link = _link("nodes_node_change", node.name, node.pk)
            yield freshness_badge(node), link, said(node.problem or "Its agent does not answer.")


def _failed() -> Iterator[Line]:
    """Lately, and nobody has dealt with it by stopping it or by removing its model: the last one of each
    profile, and how many."""
    failed = Replica.objects.filter(state=Replica.State.FAILED, state_since__gt=Now() - FAILED_WITHIN)
    untouched = failed.exclude(wanted=Replica.Wanted.STOP).exclude(model=None)
    by_profile = defaultdict(list)
    for replica in with_age(untouched, "state_since").order_by("-state_since"):
        by_profile[replica.model_name, replica.profile_name].append(replica)
    for last, *before in by_profile.values():
        word = f"{len(before) + 1} failed" if before else "failed"
        age = span_words(last.age.total_seconds())  # type: ignore[attr-defined]  # annotated
        why = said(f"{age} ago: {last.reason}")
        yield badge(word, "bad"), _link("nodes_replica_change", str(last), last.pk), why


def _stale() -> Iterator[Line]:
    why = said("What runs was started before the catalog changed; the page of the model says how it differs.")
    for model in models_with_replicas():
        if count := tally(model).stale:
            yield badge(f"{count} stale", "warn"), _link("catalog_model_change", model.name, model.pk), why


def _orphans() -> Iterator[Line]:
    for orphan in Orphan.objects.select_related("node").order_by("since"):
        yield badge("orphan", "warn"), _link("nodes_orphan_change", str(orphan), orphan.pk), said(orphan.why)


def _link(page: str, text: str, *args: Any) -> SafeString:
    return format_html('<a href="{}">{}</a>', reverse(f"admin:{page}", args=args), sentence(text))
