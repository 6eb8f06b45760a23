"""What became of replicas without anybody's doing: engines that turn up, nodes that fall silent, models that
left the catalog.

Loss of contact is unknown, not dead: a lost replica is replaced, and counts again when it comes back.
"""

from __future__ import annotations

from catalog.reading import quote
from nodes.buckets import Adopt, End, Orphan
from nodes.draft import Draft, is_running
from nodes.snapshot import LOST, RUN, Model, Rank, Replica, Stranger


def adopt_strangers(draft: Draft) -> None:
    """Take over engines of this cluster whose model and profile exist; show the others."""
    by_name = {model.spec.name: model for model in draft.snapshot.models}
    assigned = {replica.id: replica for replica in draft.replicas}
    for stranger in sorted(draft.snapshot.strangers, key=stranger_order):
        report = stranger.report
        if stranger.is_over_here or not is_running(report):
            continue
        launch = report.launch
        model = by_name.get(launch.model) if launch else None
        why = _why_not_adopted(draft, stranger, model, assigned.get(report.replica))
        if why or launch is None or model is None:
            draft.orphans.append(Orphan(stranger.node, report, f"{why}; it is left running"))
            continue
        rank = Rank(
            stranger.node, report.rank, tuple(report.gpus), report.state, report.running, report.waiting
        )
        adopted = Replica(
            id=report.replica,
            model=model.id,
            launch=launch,
            ranks=(rank,),
            created_at=draft.now,
            state_since=draft.now,
            state=report.state,
            fingerprint=launch.fingerprint,
            generation=report.generation,
        )
        assigned[adopted.id] = adopted
        draft.replicas.append(adopted)
        draft.take_room(adopted)
        why = "its engine runs, and its model and profile are in the catalog"
        draft.adopt.append(Adopt(model.id, launch, stranger.node, report, why))


def take_as_lost(draft: Draft) -> None:
    """Replicas of lost nodes. Of a gang that lost a part, the rest serves nobody and makes room."""
    for replica in draft.replicas:
        if replica.id not in draft.lost_ids:
            continue
        lost = [rank.node for rank in replica.ranks if draft.node_is_lost(rank.node)]
        if replica.state != LOST:
            why = f"no contact with {draft.names(lost)}; it is replaced if it can be"
            draft.lost.append(End(replica.id, why))
        if len(lost) < len(replica.ranks) and replica.wanted == RUN:
            draft.stop.append(
                End(replica.id, f"its part on {draft.names(lost)} is lost, and with it the whole")
            )
            draft.leave(replica)


def end_what_was_removed(draft: Draft) -> None:
    for replica in draft.replicas:
        if replica.model is None and replica.wanted == RUN:
            why = f"model {quote(replica.launch.model)} was removed from the catalog"
            draft.end_replica(replica, why, is_sudden=True)


def stranger_order(stranger: Stranger) -> tuple[int, str, int]:
    return (stranger.node, stranger.report.replica, stranger.report.rank)


def _why_not_adopted(draft: Draft, stranger: Stranger, model: Model | None, assigned: Replica | None) -> str:
    report = stranger.report
    launch = report.launch
    if assigned is not None:
        names = draft.names([rank.node for rank in assigned.ranks])
        return f"replica {report.replica[:8]} is assigned to {names}, not to this node"
    if launch is None:
        return "its agent does not say what it was started from"
    if model is None:
        return f"model {quote(launch.model)} is not in the catalog"
    name = str(launch.profile.get("name", ""))
    if model.spec.profile(name) is None:
        return f"model {quote(launch.model)} has no profile {quote(name)}"
    if report.rank != 0 or launch.profile.get("nodes", 1) != 1:
        return "it is a part of a replica over several nodes"
    for gpu in report.gpus:
        if holder := draft.claims.get((stranger.node, gpu)):
            return f"GPU {gpu} is claimed by replica {holder[:8]}"
    return ""
