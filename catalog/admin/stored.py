"""What is to be said of a model as it is stored: what it will run, what is worth a look, what is proposed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from django.utils.html import format_html_join
from django.utils.safestring import SafeString

from catalog.lint import Lint, lint
from catalog.models import Model
from catalog.pieces import preformatted, said, sentence, table
from catalog.proposals import proposals
from nodes.preview import Preview, preview
from nodes.showing import spec_of

Notes = Mapping[str, Mapping[str, Sequence[str]]]


def notes_of(model: Model) -> Notes:
    """What the source check proposes, by profile (empty: the model itself) and field."""
    notes: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for proposal in proposals(spec_of(model), model.source_facts):
        notes[proposal.profile][proposal.field].append(proposal.sentence)
    return notes


def will_run(model: Model, *, sees_env: bool) -> SafeString:
    """One part a profile, and what concerns all of them."""
    spec = spec_of(model)
    found = lint(spec, model.source_facts)
    parts = []
    for profile in spec.profiles:
        told = preview(spec, profile, model.source_revision)
        rows = [*_told(told, sees_env=sees_env), *_worth_a_look(found, profile.name)]
        parts.append((sentence(profile.name), table(("what", "as saved"), rows)))
    if general := list(_worth_a_look(found, "")):
        parts.append(("The model itself", table(("what", "as saved"), general)))
    return format_html_join("", '<h3 class="run">{}</h3>{}', parts)


def _told(told: Preview, *, sees_env: bool) -> Iterator[tuple[str, Any]]:
    yield "needs", str(told.needs)
    yield "fingerprint", told.fingerprint
    if told.refusal:
        yield "cannot run", said(told.refusal, "problem")
    else:
        yield "command", preformatted(told.command_line, "command")
    if env := told.shown_env(sees_env=sees_env):
        yield (
            "environment",
            preformatted("\n".join(f"{name}={value}" for name, value in env.items()), "command"),
        )
    for remark in told.remarks:
        yield "note", remark


def _worth_a_look(found: Sequence[Lint], profile: str) -> Iterator[tuple[str, Any]]:
    return (("worth a look", each.sentence) for each in found if each.profile == profile)
