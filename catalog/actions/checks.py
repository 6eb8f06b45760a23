"""Sources asked about again, by a person ("check now") or in passing by the loop.

Asking changes what is known and never what is wanted: nothing that runs is touched, and the model's revision
stays. Only a person who pins another commit changes what the next launch fetches.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.db import transaction
from django.db.models import Exists, F, OuterRef, Q, QuerySet
from django.db.models.functions import Now

from catalog.actions.events import record
from catalog.actions.models import Outcome, change, find_model, warnings_of
from catalog.actions.sources import AfterChange, AskPaths, check_source, renewed_columns, source_columns
from catalog.models import Model, Profile
from catalog.reading import CatalogError, Fault, quote
from catalog.rows import whole_models
from catalog.source import Finding, about, parse_source

LOOP = "loop"
RETRY_S = 600  # what nobody has ever answered is asked again sooner


def check_model(
    name: str,
    *,
    by: str,
    why: str = "",
    door: str,
    pin: bool = False,
    ask_paths: AskPaths,
    after_change: AfterChange,
) -> Outcome:
    """Ask about the model's source now, and record what was found; a refusal is a finding, too.

    With `pin` launches take the commit that the source is at now, and replicas of another one become stale.
    Raises CatalogError where there is no such model, somebody changed it meanwhile, or nothing can be pinned.
    """
    seen = find_model(name)
    spec = seen.spec
    pinned = "" if pin else seen.source_revision
    finding = check_source(spec, ask_paths=ask_paths, fresh=True, pinned=pinned)
    commit = str(finding.facts.get("commit", ""))
    if pin and (finding.is_refused or not commit):
        raise CatalogError([_unpinnable(seen, finding)])
    told: dict[str, Any] = {"subject_key": seen.pk, "by": by, "door": door, "why": why}
    if pin and commit != seen.source_revision:
        with change(spec, after_change, seen) as revision:
            columns = source_columns(finding, by, was_skipped=False)
            _write(_as_seen(seen), seen, columns | {"revision": revision, "changed_at": Now()})
            detail = _detail(finding, source_revision=(seen.source_revision, commit))
            record("pin", "model", seen.name, revision=revision, detail=detail, **told)
    else:
        with transaction.atomic():
            _write(_as_seen(seen), seen, renewed_columns(seen, finding))
            record("check", "model", seen.name, detail=_detail(finding, **_moves(seen, finding)), **told)
            transaction.on_commit(after_change, robust=True)
    row = whole_models().get(pk=seen.pk)
    return Outcome(row, finding, warnings_of(spec, finding, row.source_facts, seen))


def recheck_sources(limit: int, older_than_s: float, *, ask_paths: AskPaths) -> int:
    """Ask again about at most so many sources whose check is older than that, the oldest first, and say how
    many were. Two at once never ask about the same one. A hub that does not answer is left alone for now."""
    asked = 0
    due = _due(older_than_s)
    oldest_first = due.order_by(F("source_asked_at").asc(nulls_first=True), "pk")
    for pk in list(oldest_first.values_list("pk", flat=True)[:limit]):
        if not due.filter(pk=pk).update(source_asked_at=Now()):
            continue  # another has just asked about it, or it is gone
        seen = whole_models().filter(pk=pk).first()
        if seen is None:
            continue
        finding = check_source(seen.spec, ask_paths=ask_paths, fresh=True, pinned=seen.source_revision)
        moves = _moves(seen, finding)
        with transaction.atomic():
            # A person who edited or checked it meanwhile knows better.
            still = _as_seen(seen).filter(source_asked_at__lte=seen.source_asked_at)
            is_recorded = still.update(**renewed_columns(seen, finding))
            if is_recorded and moves:
                detail = _detail(finding, **moves)
                record("check", "model", seen.name, subject_key=seen.pk, by="", door=LOOP, detail=detail)
        asked += is_recorded
        if not finding.is_answered and not seen.source.startswith("/"):
            break
    return asked


def _due(older_than_s: float) -> QuerySet[Model]:
    reads_weights = Exists(Profile.objects.filter(model=OuterRef("pk")).exclude(engine="sim"))
    never_answered = Q(source_checked_at=None, source_asked_at__lt=Now() - timedelta(seconds=RETRY_S))
    is_old = Q(source_asked_at__lt=Now() - timedelta(seconds=older_than_s))
    return Model.objects.filter(reads_weights, Q(source_asked_at=None) | never_answered | is_old)


def _as_seen(seen: Model) -> QuerySet[Model]:
    return Model.objects.filter(pk=seen.pk, revision=seen.revision)


def _write(rows: QuerySet[Model], seen: Model, columns: dict[str, Any]) -> None:
    if not rows.update(**columns):
        says = "was changed by somebody else while its source was asked about; check it again"
        raise CatalogError([Fault(seen.name, "", "", "conflict", f"model {quote(seen.name)} {says}")])


def _moves(seen: Model, finding: Finding) -> dict[str, tuple[str, str]]:
    """What the answer changes of the state that is shown, as (was, now)."""
    is_moved = finding.is_answered and finding.level != seen.source_state
    return {"source_state": (seen.source_state, finding.level)} if is_moved else {}


def _detail(finding: Finding, **moves: tuple[str, str]) -> dict[str, Any]:
    return {
        "changed": [{"field": field, "was": was, "now": now} for field, (was, now) in moves.items()],
        "source_check": {"level": finding.level, "code": finding.code, "sentence": finding.sentence},
    }


def _unpinnable(seen: Model, finding: Finding) -> Fault:
    sentence = finding.sentence
    if not finding.is_refused and finding.is_answered and finding.code != "simulated":
        on = about(seen.spec, parse_source(seen.source))
        sentence = f"{on} has no commit that could be pinned; check it without pinning"
    return Fault(seen.name, "", "source", finding.code, sentence)
