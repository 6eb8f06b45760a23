"""What is wrong at this moment, as the tables have it: troubles by kind, in a fixed number of queries.

A sentence holds nothing that changes while the trouble is the same (no age, no count of seconds), so that who
has been told of it has been told all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db.models import F, Q, QuerySet
from django.db.models.functions import Now

from catalog.models import Key
from catalog.reading import quote
from catalog.showing import KEY_STATES
from nodes import lease, notices, retry
from nodes.checks import Verdict
from nodes.models import EngineCheck, Node, Replica, Roll, Unplaced
from nodes.overview.models import count_models
from nodes.placement import Freshness
from nodes.protocol import CAPACITY, CONFIGURATION, DISK
from nodes.showing import acting, freshness_of, with_age

KEY_EXPIRES_WITHIN = timedelta(days=7)
DISK_LOW_PART = 0.05
RECONCILER = "reconciler"


@dataclass(frozen=True, slots=True)
class Found:
    """One trouble: what it is about, and what is wrong in one sentence."""

    subject: str
    sentence: str


def find(kind: str) -> dict[str, Found]:
    """Those of this kind, by subject."""
    return {each.subject[:300]: each for each in _FINDERS[kind]()}


def _lost_nodes() -> Iterator[Found]:
    for node in with_age(Node.objects.only("name", "seen_at", "problem"), "seen_at"):
        if freshness_of(node) is Freshness.LOST:
            yield Found(node.name, node.problem or f"The agent of {node.name} does not answer.")


def crash_loops() -> dict[tuple[str, str], str]:
    """By model and profile: the last reason. Those that failed so often lately that others go first."""
    lately = Replica.objects.filter(
        state=Replica.State.FAILED,
        wanted=Replica.Wanted.RUN,
        model__isnull=False,
        state_since__gt=Now() - retry.SLOW_WINDOW,
    ).exclude(failure_kind=CONFIGURATION)  # one waits for an edit, and is unplaced until then
    rows = with_age(lately, "state_since").order_by("state_since").select_related("model")
    brief: Counter[tuple[str, str]] = Counter()
    slow: Counter[tuple[str, str]] = Counter()
    reasons: dict[tuple[str, str], str] = {}
    for row in rows.defer("model__source_facts"):
        of = (row.model.name if row.model else row.model_name, row.profile_name)
        reasons[of] = row.reason
        if row.failure_kind in (CAPACITY, DISK):
            slow[of] += 1
        elif row.age < retry.WINDOW:  # type: ignore[attr-defined]  # annotated
            brief[of] += 1
    return {
        of: reason
        for of, reason in reasons.items()
        if brief[of] >= retry.CRASH_LOOP or slow[of] >= retry.SLOW_LOOP
    }


def _crash_loops() -> Iterator[Found]:
    for (model, profile), reason in crash_loops().items():
        of = f"{model}/{profile}"
        yield Found(of, f"Replicas of {of} keep failing. The last one: {reason}")


def _unplaced() -> Iterator[Found]:
    for want in Unplaced.objects.select_related("model"):
        yield Found(want.model.name, want.why)


def _stale() -> Iterator[Found]:
    for model in count_models().stale:
        yield Found(
            model.name,
            f"Replicas of {model.name} run as the catalog was before; roll them (manage.py roll "
            f"{quote(model.name)}), or take the edit back.",
        )


def _halted_rolls() -> Iterator[Found]:
    for roll in Roll.objects.exclude(halted="").select_related("model"):
        yield Found(roll.model.name, roll.halted)


def disk_of(report: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """How large the disk for a node's weights is and what of it is free, as its agent last reported."""
    found = (report.get("disk_total_bytes"), report.get("disk_free_bytes"))
    total, free = (each if isinstance(each, int) and each >= 0 else None for each in found)
    return total, free


def _low_disks() -> Iterator[Found]:
    for node in with_age(Node.objects.only("name", "seen_at", "report"), "seen_at"):
        total, free = disk_of(node.report)
        is_low = bool(total) and free is not None and free < DISK_LOW_PART * (total or 0)
        if is_low and freshness_of(node) is not Freshness.LOST:
            yield Found(
                node.name,
                f"Less than {DISK_LOW_PART:.0%} of the disk for weights on {node.name} is free; remove some "
                f"(manage.py weights tells which there are), or give it more room.",
            )


def expiring_keys(within: timedelta) -> QuerySet[Key]:
    """Live ones, the soonest first, apart from those that were made for a short while, and those that pages
    renew by themselves."""
    is_lasting = Q(expires_at__gt=F("created_at") + 2 * KEY_EXPIRES_WITHIN, is_playground=False)
    soon = Key.objects.filter(KEY_STATES["live"], is_lasting, expires_at__lt=Now() + within)
    return soon.order_by("expires_at")


def _expiring_keys() -> Iterator[Found]:
    for key in expiring_keys(KEY_EXPIRES_WITHIN):
        yield Found(
            key.pk,
            f"The API key {quote(key.name)} ({key.pk}) expires at {key.expires_at:%Y-%m-%d %H:%M} UTC; make "
            f"another before then.",
        )


def _failed_checks() -> Iterator[Found]:
    """Of profiles as they are now: what was found of one that has changed since is no trouble any more."""
    standing = EngineCheck.objects.filter(model__profiles__fingerprint=F("fingerprint"))
    for check in standing.select_related("model"):
        failed = [each["check"] for each in check.findings if each.get("verdict") == Verdict.FAILED]
        if failed:
            of, engine = f"{check.model.name}/{check.profile_name}", f"{check.engine} {check.engine_version}"
            yield Found(
                of,
                f"The engine check of {of} on {engine.strip()} found what is claimed and does not work: "
                f"{', '.join(failed)}; the model's page tells more.",
            )


def _paused() -> Iterator[Found]:
    if says := acting().paused_says:
        yield Found(RECONCILER, f"{says[:1].upper()}{says[1:]}.")


def _alarm() -> Iterator[Found]:
    if alarm := acting().alarm:
        yield Found(RECONCILER, alarm)


def _silence() -> Iterator[Found]:
    if acting().unwatched_says:
        yield Found(RECONCILER, "No pass is made; see to it that workers run, and read what they log.")


def _outranked() -> Iterator[Found]:
    told = Replica.objects.exclude(state__in=Replica.OVER).filter(reason__contains=lease.OUTRANK_COMMAND)
    for replica in told[:1]:
        yield Found(RECONCILER, replica.reason)


_FINDERS: Mapping[str, Callable[[], Iterator[Found]]] = {
    notices.NODE_LOST: _lost_nodes,
    notices.CRASH_LOOP: _crash_loops,
    notices.UNPLACED: _unplaced,
    notices.STALE: _stale,
    notices.ROLL_HALTED: _halted_rolls,
    notices.DISK_LOW: _low_disks,
    notices.KEY_EXPIRING: _expiring_keys,
    notices.ENGINE_CHECK: _failed_checks,
    notices.PAUSED: _paused,
    notices.ALARM: _alarm,
    notices.SILENT: _silence,
    notices.OUTRANKED: _outranked,
}
