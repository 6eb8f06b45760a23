"""The source check, behind every door: asked before anything is saved, and recorded with the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from django.conf import settings
from django.db import connection
from django.db.models.functions import Now

from catalog import hub
from catalog.models import Model
from catalog.pins import is_elsewhere, judge_pinned
from catalog.reading import Fault, quote
from catalog.source import (
    Finding,
    HubFacts,
    HubSource,
    PathFacts,
    judge_hub,
    judge_offline,
    judge_paths,
    judge_text,
    still_says,
)
from catalog.spec import ModelSpec

AskPaths = Callable[[str, ModelSpec], Sequence[PathFacts]]
AfterChange = Callable[[], object]


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


def check_source(spec: ModelSpec, *, ask_paths: AskPaths, fresh: bool = False, pinned: str = "") -> Finding:
    """Ask the hub or the nodes whether the source exists, may be read and fits the engines. The one place.

    `fresh` takes no answer that was given a moment ago. With a `pinned` commit the finding is about that one,
    and tells where the source has moved on to.
    """
    target = judge_text(spec)
    if isinstance(target, Finding):
        return target
    if not isinstance(target, HubSource):
        return judge_paths(spec, target, ask_paths(target.path, spec))
    if settings.LLMGW_OFFLINE:
        return judge_offline(spec, target)
    newest = _ask_hub(target, fresh=fresh)
    if not is_elsewhere(newest, pinned):
        return judge_hub(spec, target, newest)
    kept = _ask_hub(replace(target, revision=pinned), fresh=fresh)
    return judge_pinned(spec, target, pinned, newest, kept)


def _ask_hub(source: HubSource, *, fresh: bool) -> HubFacts:
    if not connection.in_atomic_block:
        # A hub may take its time, and PostgreSQL has a hundred connections for everybody: none waits with us.
        connection.close()
    return hub.ask(
        source,
        endpoint=settings.LLMGW_HUB_ENDPOINT,
        token=settings.HF_TOKEN,
        timeout_s=settings.LLMGW_HUB_TIMEOUT_S,
        young_s=0 if fresh else settings.LLMGW_HUB_CACHE_S,
    )


def checked(wanted: ModelSpec, by: str, ask_paths: AskPaths, *, skip: bool) -> Finding:
    """The finding of what may be saved. Raises SourceRefused."""
    if skip:
        about = f"model {quote(wanted.name)}: source {quote(wanted.source)}"
        return Finding("warn", "skipped", f"{about} was not checked, on the word of {by}")
    finding = check_source(wanted, ask_paths=ask_paths)
    if finding.is_refused:
        raise SourceRefused(finding)
    return finding


def faults_of_skipping(name: str, why: str, *, skip: bool) -> list[Fault]:
    """Whoever saves what nobody has checked says why, whatever door it comes through."""
    if not skip or why.strip():
        return []
    says = "the source check is skipped only for a reason; say why, for the history to keep"
    return [Fault(name, "", "why", "required", f"model {quote(name)}: {says}")]


def reads_otherwise(was: ModelSpec, wanted: ModelSpec) -> bool:
    engines, engines_before = ({profile.engine for profile in spec.profiles} for spec in (wanted, was))
    return wanted.source != was.source or engines != engines_before


def source_columns(finding: Finding, by: str, was_skipped: bool) -> dict[str, Any]:
    """What a model is saved with."""
    was_asked = finding.code != "skipped"
    return {
        "source_state": finding.level if was_asked else Model.Source.UNCHECKED,
        "source_sentence": finding.sentence,
        "source_facts": dict(finding.facts),
        "source_asked_at": Now() if was_asked else None,
        "source_checked_at": Now() if was_asked and finding.is_answered else None,
        "source_skipped_by": by if was_skipped else "",
        "source_revision": finding.facts.get("commit", ""),
    }


def renewed_columns(seen: Model, finding: Finding) -> dict[str, Any]:
    """What asking again changes. What is pinned stays pinned, and without an answer the last one stands."""
    known = seen.source_facts
    if not finding.is_answered:
        last = known.get("last_sentence", seen.source_sentence)
        return {
            "source_sentence": still_says(last, finding),
            "source_facts": known | {"last_sentence": last},
            "source_asked_at": Now(),
        }
    found = dict(finding.facts)
    if "commit" in known and "commit" not in found:  # what launches are pinned to is as large as it was
        passing = ("also", "last_sentence", "newest_commit")
        found = {key: value for key, value in known.items() if key not in passing} | found
    return {
        "source_state": finding.level,
        "source_sentence": finding.sentence,
        "source_facts": found,
        "source_asked_at": Now(),
        "source_checked_at": Now(),
        "source_skipped_by": seen.source_skipped_by if finding.is_refused else "",
        "source_revision": seen.source_revision or ("" if finding.is_refused else found.get("commit", "")),
    }


def recorded(row: Model) -> Finding:
    """The finding of the last check, as the row remembers it."""
    levels = {Model.Source.OK.value: "ok", Model.Source.REFUSE.value: "refuse"}
    level: Any = levels.get(row.source_state, "warn")
    return Finding(level, "recorded", row.source_sentence, row.source_facts)
