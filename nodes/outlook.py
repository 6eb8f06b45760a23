"""What the next pass would do and why, without doing it: read from the rows, and nothing is written.

No agent is asked and no lease is held, so what agents have not reported yet is not in it. A change of the
catalog is looked at in the same way, before it is made.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from django.conf import settings

from catalog.actions import find_model
from catalog.models import database_now
from catalog.names import removed_meanwhile
from catalog.reading import CatalogError
from catalog.source import Finding
from catalog.spec import ModelSpec
from nodes import lease
from nodes.agenda import Item, agenda
from nodes.buckets import Plan
from nodes.consequences import Consequences, consequences, with_added, with_edited, with_model, without
from nodes.models import Cluster, Node, Orphan
from nodes.picture import known_of_source, picture_of
from nodes.plan import plan
from nodes.protocol import READY, RankReport
from nodes.showing import Acting
from nodes.snapshot import Model, Snapshot, Stranger
from nodes.stale import launch_from
from nodes.standing import Standing
from nodes.why import Why, explain

LONG_AGO = datetime.min.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Outlook:
    """The plan line by line, and what keeps passes from acting on it."""

    snapshot: Snapshot
    plan: Plan
    items: tuple[Item, ...]
    acting: Acting

    def model(self, name: str) -> Model | None:
        return next((each for each in self.snapshot.models if each.spec.name == name), None)

    def why(self, model: Model) -> Why:
        """Why the model does not run where or as wanted; what keeps passes from acting is a part of that."""
        found = explain(self.snapshot, self.items, model)
        if found.is_as_wanted:
            return found
        in_the_way = (self.acting.unwatched_says, self.acting.paused_says, self.plan.alarm)
        return replace(found, amiss=(*filter(None, in_the_way), *found.amiss))


def preview_plan() -> Outlook:
    """The plan of this moment. A fixed number of queries."""
    unwatched = lease.unwatched()
    now = database_now()
    nodes = list(Node.objects.all())
    is_watched = unwatched is not None and unwatched.total_seconds() <= settings.LLMGW_SUSPECT_AFTER_S
    standing = Standing(now, nodes, watching_since=LONG_AGO if is_watched else now)
    standing.strangers = [_stranger(orphan) for orphan in Orphan.objects.all()]
    snapshot = picture_of(standing)
    decision = plan(snapshot)
    held = decision.held
    alarm = "; ".join(filter(None, (decision.alarm, held.why if held else "")))
    count = len(held.drain) + len(held.stop) if held else 0
    state = Acting(Cluster.this(), unwatched, alarm, count)
    return Outlook(snapshot, decision, agenda(decision, snapshot), state)


def why_of(name: str) -> Why:
    """Why the model does not run where or as wanted. Raises CatalogError where there is none of this name."""
    find_model(name)
    outlook = preview_plan()
    model = outlook.model(name)
    if model is None:
        raise CatalogError([removed_meanwhile(name)])
    return outlook.why(model)


def preview_change(name: str, wanted: ModelSpec | None, finding: Finding | None = None) -> Consequences:
    """What it would bring about if the model of this name (none of it yet: a new one) were as it is wanted;
    None: removed. `finding` is what its source check found."""
    return preview_changes([(name, wanted, finding)])


def preview_changes(changes: Iterable[tuple[str, ModelSpec | None, Finding | None]]) -> Consequences:
    """As `preview_change`, of several at once."""
    now = preview_plan().snapshot
    known = {model.spec.name: model for model in now.models}
    then, edits = now, []
    for name, wanted, finding in changes:
        was = known.get(name)
        if wanted is None:
            then = without(then, was) if was else then
            continue
        then, model = with_edited(then, was, wanted) if was else with_added(then, wanted)
        if finding is not None and finding.code != "recorded":
            commit = str(finding.facts.get("commit", ""))
            model = replace(model, source_revision=commit, **known_of_source(dict(finding.facts)))
            then = with_model(then, model)
        edits += [(was, model)] if was else []
    return consequences(now, then, edits)


def _stranger(orphan: Orphan) -> Stranger:
    """An engine that belongs to nobody, as the last pass left it."""
    launch = launch_from(orphan.launch) if orphan.launch else None
    report = RankReport(
        str(orphan.replica), 1, orphan.rank, READY, launch=launch, gpus=tuple(map(str, orphan.gpus))
    )
    return Stranger(orphan.node_id, report)
