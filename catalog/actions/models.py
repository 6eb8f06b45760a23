"""Models: added, edited, patched and removed, each judged by the one law first."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Required, TypedDict, Unpack

from django.db import IntegrityError, transaction
from django.db.models.functions import Now

from catalog.actions.events import ChangedSince, record
from catalog.actions.sources import (
    AfterChange,
    AskPaths,
    check_source,
    checked,
    faults_of_skipping,
    reads_otherwise,
    recorded,
    source_columns,
)
from catalog.differences import model_differences
from catalog.hiding import hide_all, unhide_model
from catalog.lint import lint
from catalog.models import Fallback, Model, Name, Revision, Tombstone
from catalog.names import (
    Neighbours,
    faults_among,
    faults_of_removal,
    removed_meanwhile,
    warnings_of_circle,
)
from catalog.patching import patched
from catalog.reading import CatalogError, Fault, quote, shown, storable
from catalog.rows import (
    columns,
    leave_keys,
    whole_models,
    write_fallbacks,
    write_names,
    write_profiles,
)
from catalog.source import Finding
from catalog.spec import Catalog, ModelSpec


@dataclass(frozen=True, slots=True)
class Outcome:
    """A change: the row as it is now, and what is known of its source.

    warnings: what was just found of the source and is not good, and what is allowed but seldom meant.
    changes: what an edit changed, as its Event has it; empty where nothing did. trial: what the model would
    be, where nothing was saved; of one that is not there yet the row is not saved either.
    """

    model: Model
    finding: Finding
    warnings: tuple[str, ...]
    changes: Mapping[str, Any] = field(default_factory=dict, hash=False)
    trial: ModelSpec | None = None


class HowToEdit(TypedDict, total=False):
    """What an edit is told beside what the model shall be."""

    expected: int | None  # the revision at which the caller read the model
    is_trial: bool  # judge all of it, ask about the source, and save nothing
    by: Required[str]
    why: str
    door: Required[str]
    skip_source_check: bool
    ask_paths: Required[AskPaths]
    after_change: Required[AfterChange]


def add_model(
    raw: object,
    *,
    is_trial: bool = False,
    by: str,
    why: str = "",
    door: str,
    skip_source_check: bool = False,
    ask_paths: AskPaths,
    after_change: AfterChange,
) -> Outcome:
    """One more model, as `raw` says. Raises CatalogError or SourceRefused, having saved nothing; nor does a
    trial."""
    wanted = ModelSpec.load(unhide_model(raw, None))
    skipping = faults_of_skipping(wanted.name, why, skip=skip_source_check)
    _refuse(_faults_beside_others(wanted) + skipping)
    finding = checked(wanted, by, ask_paths, skip=skip_source_check)
    warned = warnings_of(wanted, finding, finding.facts)
    if is_trial:
        return Outcome(Model(**columns(wanted)), finding, warned, trial=wanted)
    with change(wanted, after_change) as revision:
        _refuse(_faults_beside_others(wanted))
        row = Model.objects.create(
            **columns(wanted), **source_columns(finding, by, skip_source_check), revision=revision
        )
        Tombstone.objects.filter(name=wanted.name).delete()  # the name is back: nobody need forget it
        write_names(row, wanted)
        write_fallbacks(row, wanted)
        write_profiles(row, wanted)
        detail = checked_detail(finding, skip_source_check, model=wanted.as_text_dict())
        _record("add", row, wanted.name, revision, by=by, door=door, why=why, detail=detail)
    return Outcome(whole_models().get(pk=row.pk), finding, warned)


def edit_model(name: str, raw: object, **how: Unpack[HowToEdit]) -> Outcome:
    """Make the model what `raw` says, whole. Its replicas are left alone: those that differ become stale.

    Profiles are matched by name, and one that stays as it is keeps its row untouched. The source is asked
    about again only when it, or the engines that read it, changed. Where a check was skipped before, another
    is made in passing, and its refusal is recorded without standing in the way of the edit. Scaling alone is
    changed without asking about anything, and whatever else the law has against the model today. An edit that
    changes nothing is no event.

    Raises CatalogError, SourceRefused or, where the model is not at the revision that was `expected`,
    ChangedSince; nothing was saved then.
    """
    return _edit(name, lambda was: raw, **how)


def patch_model(name: str, patch: object, **how: Unpack[HowToEdit]) -> Outcome:
    """`edit_model` with some fields alone, as a JSON merge patch; what is not sent stays as it is.

    Raises what `edit_model` raises.
    """
    return _edit(name, lambda was: patched(was, patch), **how)


def remove_model(
    name: str,
    *,
    expected: int | None = None,
    is_trial: bool = False,
    by: str,
    why: str = "",
    door: str,
    after_change: AfterChange,
) -> None:
    """Take a model out of the catalog; its replicas drain. A trial judges, and removes nothing.

    Raises CatalogError where there is no such model, another falls back to it or somebody else is changing
    it; and ChangedSince where it is not at the revision that was `expected`.
    """
    seen = find_model(name)
    _refuse_if_changed(seen, expected)
    if is_trial:
        _refuse(_faults_of_lost_names(None, seen))
        return
    with change(None, after_change, seen) as revision:
        _refuse(_faults_of_lost_names(None, seen))
        leave_keys([seen.pk], revision)
        removed, _ = Model.objects.filter(pk=seen.pk, revision=seen.revision).delete()
        if not removed:
            _refuse_overtaken(seen, expected)
        Tombstone.objects.create(name=seen.name, revision=revision)
        detail = {"model": hide_all(seen.spec.as_text_dict(), sees_env=True)}
        _record("remove", seen, seen.name, revision, by=by, door=door, why=why, detail=detail)


def remove_models(
    names: Sequence[str], *, by: str, why: str = "", door: str, after_change: AfterChange
) -> None:
    """Take several models out at once, as those have to go that fall back to one another. All of them, or
    none: raises CatalogError where one is not there, or another that stays falls back to it."""
    with change(None, after_change) as revision:
        rows = [find_model(name) for name in names]
        pks = [row.pk for row in rows]
        _refuse([fault for row in rows for fault in _faults_of_lost_names(None, row, beside=pks)])
        leave_keys(pks, revision)
        Model.objects.filter(pk__in=pks).delete()
        for row in rows:
            Tombstone.objects.create(name=row.name, revision=revision)
            detail = {"model": hide_all(row.spec.as_text_dict(), sees_env=True)}
            _record("remove", row, row.name, revision, by=by, door=door, why=why, detail=detail)


def read_catalog() -> Catalog:
    """Every model, in the order in which they were added. Four queries."""
    return Catalog([row.spec for row in whole_models()])


def find_model(name: str) -> Model:
    """By its canonical name. Raises CatalogError."""
    says = "is not in the catalog; check the spelling"
    if name == storable(name):  # what is not could be nobody's name, and no database would look for it
        row: Model | None = whole_models().filter(name=name).first()
        if row is not None:
            return row
        other = Name.objects.filter(name=name).values_list("model__name", flat=True).first()
        says = f"is an alias; name the model, {quote(other)}" if other else says
    raise CatalogError([Fault(shown(name), "", "name", "unknown", f"model {quote(name)} {says}")])


@contextmanager
def change(wanted: ModelSpec | None, after_change: AfterChange, seen: Model | None = None) -> Iterator[int]:
    """The transaction of one change, which holds the revision from its start: changes come one after another,
    and what the law finds inside stays true until the commit."""
    try:
        with transaction.atomic():
            yield Revision.advance()
            # Committed is committed: a broker that is down must not make it look like a failure.
            transaction.on_commit(after_change, robust=True)
    except IntegrityError:
        # A constraint refused what the law did not see. What came in between, the law can name now.
        _refuse(_faults_beside_others(wanted, seen) if wanted else _faults_of_lost_names(None, seen))
        raise


def _edit(
    name: str,
    raw_from: Callable[[ModelSpec], object],
    *,
    expected: int | None = None,
    is_trial: bool = False,
    by: str,
    why: str = "",
    door: str,
    skip_source_check: bool = False,
    ask_paths: AskPaths,
    after_change: AfterChange,
) -> Outcome:
    seen = find_model(name)
    _refuse_if_changed(seen, expected)
    was = seen.spec
    wanted = ModelSpec.load_edit(unhide_model(raw_from(was), was), was)
    is_scaling_alone = replace(wanted, scaling=was.scaling) == was
    if not is_scaling_alone:
        skipping = faults_of_skipping(wanted.name, why, skip=skip_source_check)
        _refuse(_faults_beside_others(wanted, seen) + _faults_of_lost_names(wanted, seen) + skipping)
    checks: dict[str, Any]
    finding, checks = recorded(seen), {}
    if not is_scaling_alone:
        finding, checks = _checked_for_edit(seen, wanted, by, ask_paths, skip=skip_source_check)
    found = changes(was, wanted)
    outcome = Outcome(
        seen, finding, warnings_of(wanted, finding, finding.facts, seen), hide_all(found, sees_env=True)
    )
    if is_trial:
        return replace(outcome, trial=wanted)
    if not found and not checks:
        return outcome
    with change(wanted, after_change, seen) as revision:
        if not is_scaling_alone:
            _refuse(_faults_beside_others(wanted, seen) + _faults_of_lost_names(wanted, seen))
        changed = Model.objects.filter(pk=seen.pk, revision=seen.revision).update(
            **columns(wanted), **checks, revision=revision, changed_at=Now()
        )
        if not changed:
            _refuse_overtaken(seen, expected)
        _rewrite(seen, was, wanted, revision)
        detail = checked_detail(finding, skip_source_check, **found)
        _record("edit", seen, wanted.name, revision, by=by, door=door, why=why, detail=detail)
    return replace(outcome, model=whole_models().get(pk=seen.pk))


def _checked_for_edit(
    seen: Model, wanted: ModelSpec, by: str, ask_paths: AskPaths, *, skip: bool
) -> tuple[Finding, dict[str, Any]]:
    """What is known of the source, and the columns of a check if one was made. Raises SourceRefused."""
    if reads_otherwise(seen.spec, wanted):
        finding = checked(wanted, by, ask_paths, skip=skip)
        return finding, source_columns(finding, by, skip)
    if seen.source_skipped_by and not skip:
        finding = check_source(wanted, ask_paths=ask_paths)
        return finding, source_columns(finding, seen.source_skipped_by, finding.is_refused)
    return recorded(seen), {}


def _rewrite(row: Model, was: ModelSpec, wanted: ModelSpec, revision: int) -> None:
    """All rows of a model but its own."""
    is_diverted = wanted.fallbacks != was.fallbacks
    if wanted.name != was.name:
        Tombstone.objects.create(name=was.name, revision=revision)
        Tombstone.objects.filter(name=wanted.name).delete()
    if is_diverted:
        row.fallbacks.all().delete()  # before the names that they point to
    write_names(row, wanted)
    if is_diverted:
        write_fallbacks(row, wanted)
    write_profiles(row, wanted)


def _record(verb: str, row: Model, name: str, revision: int, **told: Any) -> None:
    record(verb, "model", name, subject_key=row.pk, revision=revision, **told)


def _refuse_if_changed(seen: Model, expected: int | None) -> None:
    if expected is not None and expected != seen.revision:
        raise ChangedSince("model", seen.name, seen.pk, expected)


def _refuse_overtaken(seen: Model, expected: int | None) -> NoReturn:
    """Within the change's transaction: the row is no longer as this verb has seen it."""
    if not Model.objects.filter(pk=seen.pk).exists():
        raise CatalogError([removed_meanwhile(seen.name)])
    if expected is not None:
        raise ChangedSince("model", seen.name, seen.pk, expected)
    sentence = (
        f"model {quote(seen.name)} was changed by somebody else just now; look again, and repeat the change"
    )
    raise CatalogError([Fault(seen.name, "", "", "conflict", sentence)])


def checked_detail(finding: Finding, was_skipped: bool, **what: Any) -> dict[str, Any]:
    """The detail of an Event whose change a source check let through, secrets hidden."""
    source = {
        "level": finding.level,
        "code": finding.code,
        "sentence": finding.sentence,
        "skipped": was_skipped,
    }
    return {**hide_all(what, sees_env=True), "source_check": source}


def changes(was: ModelSpec, now: ModelSpec) -> dict[str, Any]:
    """What an edit changed, as its Event keeps it. Empty: nothing."""
    return model_differences(was.as_text_dict(), now.as_text_dict())


# --- the law, beside the rows -----------------------------------------------------------------------


def _refuse(faults: Sequence[Fault]) -> None:
    if faults:
        raise CatalogError(faults)


def _faults_beside_others(wanted: ModelSpec, own: Model | None = None) -> list[Fault]:
    """What the names in the database have against the model. Reads those alone that it mentions."""
    mentioned = {wanted.name, *wanted.aliases, *wanted.fallbacks}
    rows = Name.objects.filter(name__in=mentioned).exclude(model=own).select_related("model")
    names = frozenset(row.name for row in rows if row.is_canonical)
    aliases = {row.name: row.model.name for row in rows if not row.is_canonical}
    return faults_among([wanted], Neighbours(names, aliases))


def _faults_of_lost_names(
    wanted: ModelSpec | None, own: Model | None, *, beside: Collection[int] = ()
) -> list[Fault]:
    """Why names that would go cannot: somebody else falls back to them. None: the whole model goes, and so do
    those `beside` it."""
    if own is None:
        return []
    kept = {wanted.name, *wanted.aliases} if wanted else set()
    users = (
        Fallback.objects.filter(name__model=own)
        .exclude(name__in=kept)
        .exclude(model__in=[own.pk, *beside])
        .order_by("model_id", "position")
        .values_list("model__name", "name_id")
    )
    return faults_of_removal(own.name, users)


def warnings_of(
    wanted: ModelSpec, finding: Finding, facts: Mapping[str, Any], own: Model | None = None
) -> tuple[str, ...]:
    """What was just found of the source and is not good, and what is allowed and seldom meant, of the model
    alone and beside the others. `facts` are what is known of the source by now."""
    is_news = finding.level != "ok" and finding.code != "recorded"
    alone = tuple(each.sentence for each in lint(wanted, facts))
    return (finding.sentence,) * is_news + alone + _warnings_of_circle(wanted, own)


def _warnings_of_circle(wanted: ModelSpec, own: Model | None) -> tuple[str, ...]:
    if not wanted.fallbacks:
        return ()
    named = dict(Name.objects.filter(name__in=wanted.fallbacks).values_list("name", "model__name"))
    before = own.name if own else wanted.name
    rows = Fallback.objects.exclude(model=own).order_by("model_id", "position")
    falls_back_to = {wanted.name: [named[name] for name in wanted.fallbacks if name in named]}
    for user, name in rows.values_list("model__name", "name__model__name"):
        falls_back_to.setdefault(user, []).append(wanted.name if name == before else name)
    return warnings_of_circle(wanted.name, falls_back_to)
