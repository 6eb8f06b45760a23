"""A whole catalog at once: judged together, checked side by side, and written in one transaction, or not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from django.db import connections

from catalog.actions.models import change, changes, checked_detail
from catalog.actions.sources import (
    AfterChange,
    AskPaths,
    SourceRefused,
    checked,
    faults_of_skipping,
    reads_otherwise,
    recorded,
    source_columns,
)
from catalog.hiding import hide_all
from catalog.importing import Import, ImportRefused, PlacedFault, plan_import
from catalog.lint import lint
from catalog.models import Event, Model
from catalog.names import warnings_of_circle
from catalog.reading import CatalogError, Fault, storable
from catalog.rows import Writing, whole_models, write_models
from catalog.source import Answer, Finding, HubSource, judge_text, judge_unasked
from catalog.spec import ModelSpec

CHECKS_AT_ONCE = 8


class SourcesRefused(ImportRefused):
    """Source checks said no, and nobody said to save all the same."""


@dataclass(frozen=True, slots=True)
class Changed:
    """A model that the file has otherwise than the catalog. `detail` is as in an edit's Event: no secrets, as
    `now` may have."""

    name: str
    detail: Mapping[str, Any]
    now: ModelSpec = field(repr=False)


@dataclass(frozen=True, slots=True)
class Imported:
    """What a file makes of the catalog. `kept` are models that it does not name and that stay; `findings` are
    of the sources that were checked for it, by model; `sweeps` is why it may not pass without a second word.
    """

    added: tuple[ModelSpec, ...]
    changed: tuple[Changed, ...]
    removed: tuple[str, ...]
    kept: tuple[str, ...]
    unchanged: int
    findings: Mapping[str, Finding]
    warnings: tuple[str, ...]
    sweeps: Fault | None

    @property
    def changes_anything(self) -> bool:
        return bool(self.added or self.changed or self.removed)

    @property
    def wanted(self) -> Iterator[tuple[str, ModelSpec | None, Finding | None]]:
        """What changes: a name, the model as the file has it (None: removed), and what was found of it."""
        for model in (*self.added, *(each.now for each in self.changed)):
            yield model.name, model, self.findings.get(model.name)
        for name in self.removed:
            yield name, None, None


def import_catalog(
    raws: Sequence[object],
    *,
    prune: bool,
    is_trial: bool,
    is_sure: bool = False,
    by: str,
    why: str = "",
    door: str,
    file: str = "",
    skip_source_check: bool = False,
    ask_paths: AskPaths,
    before_change: Callable[[Imported], object] | None = None,
    after_change: AfterChange,
) -> Imported:
    """Make the catalog what the models in `raws` say. Others stay as they are, unless `prune` removes them.

    Sources are asked about where a model is new or reads otherwise than before. `before_change` is shown what
    would change, once it is known that it may; what it raises prevents it. `is_trial` ends there. Taking
    away more than a third of the catalog wants `is_sure`. Raises ImportRefused or SourcesRefused with every
    reason, or a CatalogError, having changed nothing.
    """
    seen = list(whole_models())
    plan = plan_import(raws, [row.spec for row in seen], is_whole=prune)
    findings = _findings(plan, by, why, ask_paths, skip=skip_source_check)
    imported = _imported(plan, seen, findings)
    if before_change:
        before_change(imported)
    if is_trial or not imported.changes_anything:
        return imported
    if plan.sweeps and not is_sure:
        raise CatalogError([plan.sweeps])
    with change(None, after_change) as revision:
        if dict(Model.objects.values_list("pk", "revision")) != {row.pk: row.revision for row in seen}:
            seen = list(whole_models())
            if plan_import(raws, [row.spec for row in seen], is_whole=prune) != plan:
                raise CatalogError([_CHANGED_MEANWHILE])
        _write(plan, seen, findings, revision, by=by, why=why, door=door, file=file, skip=skip_source_check)
    return imported


_CHANGED_MEANWHILE = Fault(
    *("", "", "", "conflict"),
    "the catalog was changed by somebody else just now; look again, and repeat the import",
)


def _imported(plan: Import, stored: Sequence[Model], findings: Mapping[str, Finding]) -> Imported:
    written = (*plan.added, *(edit.now for edit in plan.changed))
    warned = [finding.sentence for finding in findings.values() if finding.level == "warn"]
    facts = {row.name: row.source_facts for row in stored}  # those of a new check count instead
    facts |= {name: finding.facts for name, finding in findings.items()}
    for model in written:
        warned += [each.sentence for each in lint(model, facts[model.name])]
    circling = [model.name for model in written if model.name in plan.circling]
    warned += [warning for name in circling for warning in warnings_of_circle(name, plan.circling)]
    return Imported(
        added=plan.added,
        changed=tuple(
            Changed(edit.now.name, hide_all(changes(edit.was, edit.now), sees_env=True), edit.now)
            for edit in plan.changed
        ),
        removed=tuple(model.name for model in plan.removed),
        kept=tuple(model.name for model in plan.kept),
        unchanged=plan.unchanged,
        findings=findings,
        warnings=tuple(warned),
        sweeps=plan.sweeps,
    )


def _findings(plan: Import, by: str, why: str, ask_paths: AskPaths, *, skip: bool) -> dict[str, Finding]:
    """By model, of those whose source is to be asked about. Raises SourcesRefused with all refusals. A hub
    that does not answer is not waited for again and again."""
    edited = [edit.now for edit in plan.changed if reads_otherwise(edit.was, edit.now)]
    models = [*plan.added, *edited]
    for model in models[:1]:
        if faults := faults_of_skipping(model.name, why, skip=skip):
            raise ImportRefused([PlacedFault(fault, plan.number_of[model.name]) for fault in faults])

    is_silent = threading.Event()

    def check(model: ModelSpec) -> Finding:
        target = judge_text(model)
        if is_silent.is_set() and isinstance(target, HubSource):
            return judge_unasked(model, target)
        try:
            return checked(model, by, ask_paths, skip=skip)
        except SourceRefused as no:
            if no.finding.code == Answer.UNREACHABLE:
                is_silent.set()
            return no.finding
        finally:
            connections.close_all()  # this thread's own, if asking opened one

    with ThreadPoolExecutor(CHECKS_AT_ONCE, thread_name_prefix="source-check") as threads:
        findings = dict(zip([model.name for model in models], threads.map(check, models), strict=True))
    refused = [
        PlacedFault(Fault(name, "", "source", finding.code, finding.sentence), plan.number_of[name])
        for name, finding in findings.items()
        if finding.is_refused
    ]
    if refused:
        raise SourcesRefused(refused)
    return findings


def _write(
    plan: Import,
    stored: Sequence[Model],
    findings: Mapping[str, Finding],
    revision: int,
    *,
    by: str,
    why: str,
    door: str,
    file: str,
    skip: bool,
) -> None:
    row_of = {row.name: row for row in stored}
    checks = {name: source_columns(finding, by, skip) for name, finding in findings.items()}
    removed = [row_of[model.name] for model in plan.removed]
    gone = [(row.pk, model) for row, model in zip(removed, plan.removed, strict=True)]
    writings = [
        *(Writing(model, checks=checks[model.name]) for model in plan.added),
        *(
            Writing(edit.now, row_of[edit.now.name], edit.was, checks.get(edit.now.name, {}))
            for edit in plan.changed
        ),
    ]
    rows = write_models(writings, removed, revision)
    told = {"by": by, "why": storable(why), "door": door, "kind": "model", "revision": revision}

    def event(verb: str, name: str, pk: int, detail: Mapping[str, Any]) -> Event:
        of_file = {"file": storable(file)} if file else {}
        return Event(verb=verb, subject=name, subject_key=str(pk), detail={**detail, **of_file}, **told)

    events = []
    for writing, row in zip(writings, rows, strict=True):
        wanted, was = writing.wanted, writing.was
        what = changes(was, wanted) if was else {"model": wanted.as_text_dict()}
        finding = findings.get(wanted.name) or recorded(row_of[wanted.name])
        detail = checked_detail(finding, skip, **what)
        events.append(event("edit" if was else "add", wanted.name, row.pk, detail))
    for pk, model in gone:
        detail = {"model": hide_all(model.as_text_dict(), sees_env=True)}
        events.append(event("remove", model.name, pk, detail))
    Event.objects.bulk_create(events)
