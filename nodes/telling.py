"""How doors tell a plan, why a model does not run as wanted, and what a change would bring about: as the JSON
of REST and `--json`, and as rows of a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from nodes.agenda import BUCKETS, Item
from nodes.consequences import Consequences
from nodes.outlook import Outlook
from nodes.placement import agreeing
from nodes.showing import differences_as_dicts
from nodes.why import Why

ITEM_HEADINGS = ("what", "of", "where", "why")
ROOM = "has room"


def item_row(item: Item) -> tuple[str, str, str, str]:
    """What would be done, to what, where and why."""
    what = f"{item.missing} short" if item.missing else item.bucket
    return what, _subject(item), _place(item), item.why


def _subject(item: Item) -> str:
    name = "/".join(filter(None, (item.model, item.profile)))
    return f"{name} {item.replica[:8]}".strip()


def _place(item: Item) -> str:
    count = len(item.gpus)
    gpus = f" ({count} {'GPU' if count == 1 else 'GPUs'})" if count else ""
    return ", ".join(item.nodes) + gpus


def item_as_dict(item: Item) -> dict[str, Any]:
    return {
        "bucket": item.bucket,
        "model": item.model,
        "profile": item.profile,
        "replica": item.replica or None,
        "replaces": item.replaces or None,
        "nodes": list(item.nodes),
        "gpus": list(item.gpus),
        "missing": item.missing,
        "why": item.why,
    }


def outlook_as_dict(outlook: Outlook) -> dict[str, Any]:
    return outlook.acting.as_dict() | {
        "at": outlook.snapshot.now.isoformat(),
        "acts": outlook.plan.acts,
        "counts": {bucket: sum(item.bucket == bucket for item in outlook.items) for bucket in BUCKETS},
        "items": [item_as_dict(item) for item in outlook.items],
    }


def why_rows(why: Why) -> Iterable[tuple[str, str, str]]:
    """Profile, node, and what it says."""
    for profile, by_node in why.reasons.items():
        for node, reason in sorted(by_node.items()):
            yield profile, node, agreeing(reason, 1) or ROOM


def why_as_dict(why: Why) -> dict[str, Any]:
    return {
        "model": why.model,
        "as_wanted": why.is_as_wanted,
        "says": why.says,
        "amiss": list(why.amiss),
        "notes": list(why.notes),
        "ready": why.ready,
        "wanted": why.wanted,
        "profiles": [
            {
                "profile": profile,
                "says": why.rooms[profile],
                "nodes": [
                    {"node": node, "reason": agreeing(reason, 1)} for node, reason in sorted(by_node.items())
                ],
            }
            for profile, by_node in why.reasons.items()
        ],
    }


def consequences_tables(
    found: Consequences, row_of: Callable[[Item], Sequence[Any]] = item_row
) -> Iterator[tuple[str, Sequence[str], Sequence[Sequence[Any]]]]:
    """What a change would bring about: tables, each with a heading and what its columns are called."""
    if found.stale:
        is_of_several = len({each.model for each in found.stale}) > 1
        rows = [
            (
                each.replica[:8],
                f"{each.model}/{each.profile}" if is_of_several else each.profile,
                ", ".join(each.nodes),
                ", ".join(one.field for one in each.fields),
            )
            for each in found.stale
        ]
        says = "Would be stale, and run on as started"
        yield says, ("replica", "profile", "node", "differs in"), rows
    if found.items:
        yield "With it, the next pass would", ITEM_HEADINGS, [row_of(item) for item in found.items]
    if found.lifted:
        yield "Would wait no more", ITEM_HEADINGS, [row_of(item) for item in found.lifted]


NO_CONSEQUENCES = "Nothing that runs, starts or waits would change."


def consequences_as_dict(found: Consequences, *, sees_env: bool = False) -> dict[str, Any]:
    return {
        "stale": [
            {
                "replica": each.replica,
                "model": each.model,
                "profile": each.profile,
                "nodes": list(each.nodes),
                "differences": differences_as_dicts(each.fields, sees_env=sees_env),
                "why": each.why,
            }
            for each in found.stale
        ],
        "plan": [item_as_dict(item) for item in found.items],
        "lifted": [item_as_dict(item) for item in found.lifted],
    }
