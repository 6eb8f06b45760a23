"""A change of a model that is looked at before it is saved: what the page shows of it."""

from __future__ import annotations

from typing import Any

from catalog.actions import Outcome
from catalog.history import changes
from catalog.models import Event
from catalog.pieces import sentence
from nodes.outlook import preview_change
from nodes.pieces import consequences_shown


class Foretold(Exception):
    """The law has judged what was typed, and nothing is saved: it was only to be looked at. `name`: what the
    model is called now."""

    def __init__(self, name: str, outcome: Outcome) -> None:
        self.name, self.outcome = name, outcome
        super().__init__(name)


def foretold(trial: Foretold, *, sees_env: bool) -> dict[str, Any]:
    """For the page's template."""
    outcome = trial.outcome
    would_be = Event(verb="edit", detail=dict(outcome.changes))
    return {
        "foretold": consequences_shown(preview_change(trial.name, outcome.trial, outcome.finding)),
        "foretold_changes": changes(would_be, sees_env=sees_env) if outcome.changes else "",
        "foretold_is_nothing": outcome.model.pk is not None and not outcome.changes,
        "foretold_warnings": [sentence(each) for each in outcome.warnings],
    }
