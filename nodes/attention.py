"""What needs a person: a reconciler that does not act, wants without a place, rolls that stopped, nodes out
of contact, failed and stale replicas, orphans. And what is under way on somebody's word.

A fixed number of queries, and a few of each kind with the way to the rest. Every door tells it so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta

from django.conf import settings
from django.db.models import Count, F, Q, QuerySet
from django.db.models.functions import Now

from catalog.typed import span_words
from nodes.models import Node, Orphan, Replica, Roll, Unplaced
from nodes.placement import Freshness
from nodes.showing import acting, freshness_of, kept_free_words, with_age

LINES_LIMIT = 5  # of each kind
FAILED_WITHIN = timedelta(hours=1)
_STALE = "What runs was started before the catalog changed; the page of the model says how it differs."

FRESHNESS_LOOKS = {Freshness.FRESH: "good", Freshness.SUSPECT: "warn", Freshness.LOST: "bad"}

May = Callable[[str], bool]
"""Whether somebody has this permission."""


@dataclass(frozen=True, slots=True)
class Matter:
    """word and look are its badge: bad, warn, busy or none. kind and key name the row that it is about, all
    rows of the kind that `query` leaves where key is empty; subject is what people call it."""

    word: str
    look: str
    kind: str
    key: str
    subject: str
    why: str
    query: str = ""


@dataclass(frozen=True, slots=True)
class StaleModel:
    """How many replicas of a model a restart would change."""

    key: int
    name: str
    count: int


def needs_a_person(may: May, stale: Iterable[StaleModel]) -> tuple[Matter, ...]:
    """What whoever asks may see of it, the most urgent first. Ten queries."""
    return _few(
        may,
        ("nodes.view_cluster", lambda: _first(_reconciler()), "reconciler", ""),
        ("catalog.view_model", lambda: _first(_unplaced()), "model", "?state=short"),
        ("catalog.view_model", lambda: _first(_halted()), "model", ""),
        ("nodes.view_node", _silent_nodes, "node", ""),
        (
            "nodes.view_replica",
            lambda: _first(_failed()),
            "replica",
            f"?shown=over&state__exact={Replica.State.FAILED}",
        ),
        ("catalog.view_model", lambda: _first(_stale(stale)), "model", "?state=stale"),
        ("nodes.view_orphan", lambda: _first(_orphans()), "orphan", ""),
    )


def under_way(may: May) -> tuple[Matter, ...]:
    """What people have asked for and is being done. Two queries."""
    return _few(
        may,
        ("catalog.view_model", lambda: _first(_rolling()), "model", ""),
        ("nodes.view_node", lambda: _first(_draining()), "node", ""),
    )


def failed_lately() -> QuerySet[Replica]:
    """What failed, and nobody has dealt with by stopping it, by an edit of its profile or by removing it."""
    failed = Replica.objects.filter(state=Replica.State.FAILED, state_since__gt=Now() - FAILED_WITHIN)
    as_it_is_now = failed.filter(fingerprint=F("profile__fingerprint"), model__isnull=False)
    return as_it_is_now.exclude(wanted=Replica.Wanted.STOP)


@dataclass(frozen=True, slots=True)
class _Found:
    """The first of a kind, and how many there are in all."""

    first: tuple[Matter, ...]
    count: int


def _few(may: May, *kinds: tuple[str, Callable[[], _Found], str, str]) -> tuple[Matter, ...]:
    """Each kind: the permission, what finds it, what its list is of, and the query for all of it there."""
    told: list[Matter] = []
    for permission, find, kind, query in kinds:
        if may(permission):
            found = find()
            told += found.first
            if more := found.count - len(found.first):
                told.append(Matter(f"{more} more", "", kind, "", "all of them", "", query))
    return tuple(told)


def _first(matters: Iterable[Matter]) -> _Found:
    found = tuple(matters)
    return _Found(found[:LINES_LIMIT], len(found))


def _reconciler() -> Iterator[Matter]:
    found = acting()
    alarm = f"{found.held} held" if found.held else "alarm"
    for word, look, says in (
        ("nobody looks", "bad", found.unwatched_says),
        (alarm, "bad", found.alarm),
        ("paused", "warn", found.paused_says),
    ):
        if says:
            yield Matter(word, look, "reconciler", "", "reconciler", f"{says}.")


def _unplaced() -> Iterator[Matter]:
    for want in Unplaced.objects.select_related("model").order_by("since"):
        word = f"{want.missing} short" if want.missing else "blocked"
        yield Matter(word, "bad", "model", str(want.model_id), want.model.name, want.why)


def _halted() -> Iterator[Matter]:
    for roll in Roll.objects.select_related("model").exclude(halted="").order_by("asked_at"):
        yield Matter("roll halted", "bad", "model", str(roll.model_id), roll.model.name, roll.halted)


def _rolling() -> Iterator[Matter]:
    rolls = with_age(Roll.objects.filter(halted=""), "asked_at").select_related("model")
    for roll in rolls.order_by("asked_at"):
        age = span_words(roll.age.total_seconds())  # type: ignore[attr-defined]  # annotated
        why = _by(roll.by, roll.why, f"for {age}")
        yield Matter("rolling", "busy", "model", str(roll.model_id), roll.model.name, why)


def _draining() -> Iterator[Matter]:
    left = Count("ranks__replica", ~Q(ranks__replica__state__in=Replica.OVER), distinct=True)
    for node in Node.objects.filter(is_draining=True).defer("report").annotate(left=left):
        word = kept_free_words(node, node.left)
        yield Matter(word, "warn", "node", str(node.pk), node.name, _by(node.cordoned_by, node.cordoned_why))


def _by(who: str, why: str, for_how_long: str = "") -> str:
    told = " ".join(filter(None, (for_how_long, f"by {who}")))
    return f"{told}: {why}" if why else told


def _silent_nodes() -> _Found:
    """Counted by the database: where a whole network is away, these are all there are."""
    long_ago = Now() - timedelta(seconds=settings.LLMGW_LOST_AFTER_S)
    silent = Node.objects.filter(~Q(problem="") | Q(seen_at=None) | Q(seen_at__lt=long_ago)).defer("report")
    first = tuple(map(_silent, with_age(silent, "seen_at")[:LINES_LIMIT]))
    return _Found(first, silent.count())


def _silent(node: Node) -> Matter:
    found = freshness_of(node)
    why = node.problem or "Its agent does not answer."
    return Matter(found, FRESHNESS_LOOKS.get(found, ""), "node", str(node.pk), node.name, why)


def _failed() -> Iterator[Matter]:
    """The last one of each profile, and how many."""
    by_profile = defaultdict(list)
    for replica in with_age(failed_lately(), "state_since").order_by("-state_since"):
        by_profile[replica.model_name, replica.profile_name].append(replica)
    for last, *before in by_profile.values():
        word = f"{len(before) + 1} failed" if before else "failed"
        age = span_words(last.age.total_seconds())  # type: ignore[attr-defined]  # annotated
        yield Matter(word, "bad", "replica", str(last.pk), str(last), f"{age} ago: {last.reason}")


def _stale(models: Iterable[StaleModel]) -> Iterator[Matter]:
    for model in models:
        yield Matter(f"{model.count} stale", "warn", "model", str(model.key), model.name, _STALE)


def _orphans() -> Iterator[Matter]:
    for orphan in Orphan.objects.select_related("node").order_by("since"):
        yield Matter("orphan", "warn", "orphan", str(orphan.pk), str(orphan), orphan.why)
