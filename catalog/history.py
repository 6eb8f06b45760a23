"""What was done to a row, as people read it: when, who, through which door, why, what changed field by field.

Reads events and writes none. What of an environment is shown is for the caller to say.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from datetime import datetime
from typing import Any

from django.db.models import Q, QuerySet
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from catalog.differences import listed
from catalog.hiding import hide_all
from catalog.models import Event
from catalog.pieces import as_json, difference_table, said, sentence, table
from catalog.typed import span_words

_TOLD = ("changed", "profiles_changed", "profiles_added", "profiles_removed", "profiles_order")
_QUIET = ("recorded", "found", "simulated")  # what an edit's source check found, and nobody need know


def events_of(kind: str, key: str, subject: str) -> QuerySet[Event]:
    """A row's events, newest first, whatever it was called then. The oldest know its name alone."""
    by_name = Q(subject_key="", subject=subject)
    return Event.objects.filter(Q(subject_key=key) | by_name if key else by_name, kind=kind)


def summary(event: Event) -> str:
    """Which fields changed, in one line."""
    detail = event.detail
    parts = [str(each["field"]) for each in detail.get("changed", ())]
    for name, found in detail.get("profiles_changed", {}).items():
        parts.append(f"profile {name}: " + ", ".join(str(each["field"]) for each in found))
    parts += [f"profile {name} added" for name in detail.get("profiles_added", ())]
    parts += [f"profile {name} removed" for name in detail.get("profiles_removed", ())]
    parts += ["order of profiles"] if detail.get("profiles_order") else []
    return sentence("; ".join(parts))


def changes(event: Event, *, sees_env: bool) -> SafeString | str:
    """Field by field; what was added or removed whole folds out."""
    detail = hide_all(event.detail, sees_env=sees_env)
    parts: list[SafeString] = []
    if rows := listed(detail):
        parts.append(difference_table(map(asdict, rows)))
    if "model" in detail:
        parts.append(_folded("the whole model", detail["model"]))
    check = detail.get("source_check") or {}
    if check.get("sentence") and (event.verb in ("check", "pin") or check.get("code") not in _QUIET):
        parts.append(said(check["sentence"]))
    others = {key: value for key, value in detail.items() if key not in (*_TOLD, "model", "source_check")}
    if others:
        parts.append(_folded("more", others))
    return format_html_join("", "{}", ((part,) for part in parts)) or "-"


def _folded(summary_: str, value: Any) -> SafeString:
    return format_html("<details><summary>{}</summary>{}</details>", summary_, as_json(value))


def history_table(events: Iterable[Event], *, now: datetime, sees_env: bool) -> SafeString:
    """`now` is the database's."""
    rows = [
        (
            _when(event.at, now),
            event.by or "llmgw",
            event.door,
            str(event),
            event.why,
            changes(event, sees_env=sees_env),
        )
        for event in events
    ]
    looks = ("brief", "", "brief", "", "", "")
    return table(("when", "who", "through", "did", "why", "what changed"), rows, looks)


def _when(at: datetime, now: datetime) -> SafeString:
    age = f"{span_words((now - at).total_seconds())} ago"
    written = f"{at:%Y-%m-%d %H:%M:%S}"
    return format_html('<time datetime="{}">{}</time>{}', at.isoformat(), age, said(written))
