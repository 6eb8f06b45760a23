"""What may be done to the catalog, one function each: every door calls these and shows their sentences.

A verb judges, asks about the source before its transaction opens, and then writes rows, the Event and the
revision together. `by` is who did it, `door` where from; `ask_paths` asks the nodes about a path and
`after_change` wakes whoever acts on the catalog, once the change is committed.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from django.conf import settings
from django.contrib.auth.models import User
from django.db import IntegrityError, transaction
from django.db.models.functions import Now

from catalog import hub
from catalog.differences import differences
from catalog.hiding import hide_all
from catalog.keys import ID_BYTES, SECRET_BYTES, KeyText
from catalog.models import Event, Fallback, Key, Model, Name, Revision, Tombstone
from catalog.names import Neighbours, faults_among, faults_of_removal
from catalog.reading import NAME_LIMIT, CatalogError, Fault, quote, shown, storable
from catalog.rows import columns, whole_models, write_fallbacks, write_names, write_profiles
from catalog.source import Finding, HubSource, PathFacts, judge, judge_text
from catalog.spec import Catalog, ModelSpec, warnings

AskPaths = Callable[[str, ModelSpec], Sequence[PathFacts]]
AfterChange = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A change that was made: the row, what is known of its source, and what is allowed but seldom meant."""

    model: Model
    finding: Finding
    warnings: tuple[str, ...]


class SourceRefused(ValueError):
    """The source check said no, and nobody said to save all the same. The text is the sentence found."""

    def __init__(self, finding: Finding) -> None:
        self.finding = finding
        super().__init__(finding)

    @property
    def faults(self) -> tuple[Fault, ...]:
        return (Fault("", "", "source", self.finding.code, self.finding.sentence),)

    def __str__(self) -> str:
        return self.finding.sentence


def record(
    verb: str,
    kind: str,
    subject: str,
    *,
    by: str,
    door: str,
    why: str = "",
    detail: dict[str, Any] | None = None,
) -> None:
    """Write the Event of a change, in the change's own transaction."""
    Event.objects.create(
        verb=verb, kind=kind, subject=subject, by=by, door=door, why=storable(why), detail=detail or {}
    )


# --- models -----------------------------------------------------------------------------------------


def add_model(
    raw: object,
    *,
    by: str,
    why: str = "",
    door: str,
    skip_source_check: bool = False,
    ask_paths: AskPaths,
    after_change: AfterChange,
) -> Outcome:
    """Raises CatalogError or SourceRefused, having saved nothing."""
    wanted = ModelSpec.load(raw)
    _refuse(_faults_beside_others(wanted))
    finding = _checked(wanted, by, ask_paths, skip=skip_source_check)
    with _change(wanted, after_change) as revision:
        _refuse(_faults_beside_others(wanted))
        row = Model.objects.create(
            **columns(wanted), **_source_columns(finding, by, skip_source_check), revision=revision
        )
        Tombstone.objects.filter(name=wanted.name).delete()  # the name is back: nobody need forget it
        write_names(row, wanted)
        write_fallbacks(row, wanted)
        write_profiles(row, wanted)
        detail = _detail(finding, skip_source_check, model=wanted.as_text_dict())
        record("add", "model", wanted.name, by=by, door=door, why=why, detail=detail)
    return Outcome(whole_models().get(pk=row.pk), finding, warnings(wanted))


def edit_model(
    name: str,
    raw: object,
    *,
    by: str,
    why: str = "",
    door: str,
    skip_source_check: bool = False,
    ask_paths: AskPaths,
    after_change: AfterChange,
) -> Outcome:
    """Make the model what `raw` says, whole. Its replicas are left alone: those that differ become stale.

    Profiles are matched by name, and one that stays as it is keeps its row untouched. The source is asked
    about again only when it, or the engines that read it, changed. Where a check was skipped before, another
    is made in passing, and its refusal is recorded without standing in the way of the edit.
    """
    wanted = ModelSpec.load(raw)
    seen = _find(name)
    was = seen.spec
    _refuse(_faults_beside_others(wanted, seen) + _faults_of_lost_names(wanted, seen))
    if _reads_otherwise(was, wanted):
        finding = _checked(wanted, by, ask_paths, skip=skip_source_check)
        source_columns = _source_columns(finding, by, skip_source_check)
    elif seen.source_skipped_by and not skip_source_check:
        finding = check_source(wanted, ask_paths=ask_paths)
        source_columns = _source_columns(finding, seen.source_skipped_by, finding.is_refused)
    else:
        finding, source_columns = _recorded(seen), {}
    with _change(wanted, after_change, seen) as revision:
        _refuse(_faults_beside_others(wanted, seen) + _faults_of_lost_names(wanted, seen))
        changed = Model.objects.filter(pk=seen.pk, revision=seen.revision).update(
            **columns(wanted), **source_columns, revision=revision, changed_at=Now()
        )
        if not changed:
            raise CatalogError([_changed_meanwhile(seen.name)])
        if wanted.name != was.name:
            Tombstone.objects.create(name=was.name, revision=revision)
            Tombstone.objects.filter(name=wanted.name).delete()
        if wanted.fallbacks != was.fallbacks:
            seen.fallbacks.all().delete()
        write_names(seen, wanted)
        if wanted.fallbacks != was.fallbacks:
            write_fallbacks(seen, wanted)
        write_profiles(seen, wanted)
        detail = _detail(finding, skip_source_check, **_changes(was, wanted))
        record("edit", "model", wanted.name, by=by, door=door, why=why, detail=detail)
    return Outcome(whole_models().get(pk=seen.pk), finding, warnings(wanted))


def remove_model(name: str, *, by: str, why: str = "", door: str, after_change: AfterChange) -> None:
    """Raises CatalogError where there is no such model, or another falls back to it."""
    seen = _find(name)
    with _change(None, after_change, seen) as revision:
        _refuse(_faults_of_lost_names(None, seen))
        if Model.objects.filter(pk=seen.pk).delete()[0]:
            Tombstone.objects.create(name=seen.name, revision=revision)
            detail = {"model": hide_all(seen.spec.as_text_dict())}
            record("remove", "model", seen.name, by=by, door=door, why=why, detail=detail)


def read_catalog() -> Catalog:
    """Every model, in the order in which they were added. Four queries."""
    return Catalog([row.spec for row in whole_models()])


def model_as_dict(row: Model) -> dict[str, Any]:
    """The normalised form of a row, with durations as people write them."""
    return row.spec.as_text_dict()


def _find(name: str) -> Model:
    says = "is not in the catalog; check the spelling"
    if name.isprintable():  # what is not could be nobody's name, and no database takes all of it
        row: Model | None = whole_models().filter(name=name).first()
        if row is not None:
            return row
        other = Name.objects.filter(name=name).values_list("model__name", flat=True).first()
        says = f"is an alias; name the model, {quote(other)}" if other else says
    raise CatalogError([Fault(shown(name), "", "name", "unknown", f"model {quote(name)} {says}")])


@contextmanager
def _change(wanted: ModelSpec | None, after_change: AfterChange, seen: Model | None = None) -> Iterator[int]:
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


def _detail(finding: Finding, was_skipped: bool, **what: Any) -> dict[str, Any]:
    source = {
        "level": finding.level,
        "code": finding.code,
        "sentence": finding.sentence,
        "skipped": was_skipped,
    }
    return {**{key: hide_all(value) for key, value in what.items()}, "source_check": source}


def _changes(was: ModelSpec, now: ModelSpec) -> dict[str, Any]:
    """What an edit changed, as its Event keeps it."""
    old, new = was.as_text_dict(), now.as_text_dict()
    old_profiles = {profile["name"]: profile for profile in old.pop("profiles")}
    new_profiles = {profile["name"]: profile for profile in new.pop("profiles")}
    edited = {
        name: [asdict(each) for each in differences(profile, new_profiles[name])]
        for name, profile in old_profiles.items()
        if name in new_profiles and profile != new_profiles[name]
    }
    return {
        "changed": [asdict(each) for each in differences(old, new)],
        "profiles_changed": edited,
        "profiles_added": [name for name in new_profiles if name not in old_profiles],
        "profiles_removed": [name for name in old_profiles if name not in new_profiles],
    }


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


def _faults_of_lost_names(wanted: ModelSpec | None, own: Model | None) -> list[Fault]:
    """Why names that would go cannot: somebody else falls back to them. None: the whole model goes."""
    if own is None:
        return []
    kept = {wanted.name, *wanted.aliases} if wanted else set()
    users = (
        Fallback.objects.filter(name__model=own)
        .exclude(name__in=kept)
        .exclude(model=own)
        .order_by("model_id", "position")
        .values_list("model__name", "name_id")
    )
    return faults_of_removal(own.name, users)


def _changed_meanwhile(name: str) -> Fault:
    sentence = f"model {quote(name)} was changed by somebody else just now; look again, and repeat the edit"
    return Fault(name, "", "", "conflict", sentence)


# --- source check -----------------------------------------------------------------------------------


def check_source(spec: ModelSpec, *, ask_paths: AskPaths) -> Finding:
    """Ask the hub or the nodes whether the source exists, may be read and fits the engines. The one place."""
    target = judge_text(spec)
    if isinstance(target, Finding):
        return target
    if isinstance(target, HubSource):
        facts = hub.ask(
            target,
            endpoint=settings.LLMGW_HUB_ENDPOINT,
            token=settings.HF_TOKEN,
            timeout_s=settings.LLMGW_HUB_TIMEOUT_S,
        )
        return judge(spec, target, facts)
    return judge(spec, target, ask_paths(target.path, spec))


def _checked(wanted: ModelSpec, by: str, ask_paths: AskPaths, *, skip: bool) -> Finding:
    if skip:
        about = f"model {quote(wanted.name)}: source {quote(wanted.source)}"
        return Finding("warn", "skipped", f"{about} was not checked, on the word of {by}")
    finding = check_source(wanted, ask_paths=ask_paths)
    if finding.is_refused:
        raise SourceRefused(finding)
    return finding


def _reads_otherwise(was: ModelSpec, wanted: ModelSpec) -> bool:
    engines, engines_before = ({profile.engine for profile in spec.profiles} for spec in (wanted, was))
    return wanted.source != was.source or engines != engines_before


def _source_columns(finding: Finding, by: str, was_skipped: bool) -> dict[str, Any]:
    was_asked = finding.code != "skipped"
    return {
        "source_state": finding.level if was_asked else Model.Source.UNCHECKED,
        "source_sentence": finding.sentence,
        "source_facts": dict(finding.facts),
        "source_checked_at": Now() if was_asked else None,
        "source_skipped_by": by if was_skipped else "",
        "source_revision": finding.facts.get("commit", ""),
    }


def _recorded(row: Model) -> Finding:
    """The finding of the last check, as the row remembers it."""
    levels = {Model.Source.OK.value: "ok", Model.Source.REFUSE.value: "refuse"}
    level: Any = levels.get(row.source_state, "warn")
    return Finding(level, "recorded", row.source_sentence, row.source_facts)


# --- keys -------------------------------------------------------------------------------------------


def mint_key(name: str, *, user: User, scope: str, by: str, door: str) -> tuple[Key, str]:
    """A new API key and its text, which is not kept: only this answer ever shows it."""
    if not name.strip() or len(name) > NAME_LIMIT or not name.isprintable():
        says = f"a key needs a name of at most {NAME_LIMIT} visible characters, telling what it is for"
        raise CatalogError([Fault("", "", "name", "required", says)])
    text = KeyText.from_bytes(secrets.token_bytes(ID_BYTES), secrets.token_bytes(SECRET_BYTES))
    with transaction.atomic():
        row = Key.objects.create(
            id=text.id,
            name=name,
            user=user,
            scope=Key.Scope(scope),
            digest=text.digest(settings.LLMGW_KEY_PEPPER),
            revision=Revision.advance(),
        )
        record("mint", "key", text.id, by=by, door=door, detail={"name": name, "scope": row.scope})
    return row, text.reveal()


def revoke_key(key_id: str, *, by: str, door: str, why: str = "") -> bool:
    """End a key for good. False where it had ended already, or there is none."""
    with transaction.atomic():
        ended = Key.objects.filter(pk=key_id, revoked_at=None).update(
            revoked_at=Now(), revision=Revision.advance()
        )
        if ended:
            record("revoke", "key", key_id, by=by, door=door, why=why)
    return ended == 1
