"""Replicas that move on a person's word: off a node that is to be empty, or to the catalog as it is now.

Each is replaced one for one, and leaves once its stand-in is ready; where there is no room for both, it
leaves first. A roll does one at a time and stops at the first replacement that fails.
"""

from __future__ import annotations

from catalog.reading import quote
from nodes import eviction, scaling, stale
from nodes.buckets import RollEnd
from nodes.draft import Crew, Draft
from nodes.placement import Seat
from nodes.snapshot import Replica, Roll
from nodes.starting import Starter


def relieve(draft: Draft, crew: Crew) -> None:
    """End what has its stand-in ready by now."""
    by_id = {each.id: each for each in crew.units}
    for replica in tuple(crew.units):
        replaced = by_id.get(replica.replaces)
        if replaced is not None and replaced in crew.units and replica.is_ready and replaced is not replica:
            draft.end(crew, replaced, f"replica {replica.id[:8]} has taken its place")


def empty_nodes(draft: Draft, crew: Crew, starter: Starter) -> None:
    """Move what runs on draining nodes."""
    for replica in tuple(crew.units):
        nodes = [rank.node for rank in replica.ranks if _is_draining(draft, rank.node)]
        if not nodes or replica.id in crew.stand_ins:
            continue
        where = draft.names(nodes)
        if not replica.is_ready:
            draft.end(crew, replica, f"{where} is draining, and it is not ready yet")
            continue
        choice = starter.choose(crew.model)
        if not choice.profiles:
            why = f"replica {replica.id[:8]} stays on {where}, which is draining, as nothing can replace it"
            draft.block(crew.model, 0, f"{why}: {'; '.join(choice.waits)}")
            continue
        seat = starter.seat(crew, choice)
        if isinstance(seat, Seat):
            why = f"{where} is draining: in place of replica {replica.id[:8]}"
            starter.start(crew, seat, why, replaces=replica.id)
        else:
            draft.end(crew, replica, f"{where} is draining, and nowhere else is room for it: {seat.why}")


def conclude(draft: Draft, crew: Crew) -> None:
    """A roll is done once nothing that it was asked for is stale, and all is ready."""
    if crew.roll is None or crew.roll.halted or _stale(crew, crew.roll):
        return
    is_short = scaling.wanted(draft, crew) > len(crew.units)
    if _is_settled(crew) and not is_short:
        draft.rolls.append(
            RollEnd(crew.model.id, is_halted=False, why="all that was stale has been replaced")
        )
        crew.roll = None


def roll(draft: Draft, crew: Crew, starter: Starter) -> None:
    """The next step of a roll: one more stand-in, or one stale replica that leaves first."""
    rolling = crew.roll
    if rolling is None or rolling.halted:
        return
    failed = min(
        (
            each
            for each in starter.failures_of(crew.model)
            if each.created_at is not None and each.created_at >= rolling.asked_at
        ),
        key=lambda each: (each.at, each.replica),
        default=None,
    )
    if failed is not None:
        told = failed.reason.strip() or "Its agent gives no reason."
        _halt(draft, crew, f"its replacement {failed.replica[:8]} failed: {told}")
        return
    left = _stale(crew, rolling)
    if left and _is_settled(crew) and not (crew.pending or crew.missing):
        _replace(draft, crew, starter, min(left, key=lambda each: (each.created_at, each.id)), rolling)


def _is_settled(crew: Crew) -> bool:
    return not (crew.stand_ins or crew.leaving) and all(each.is_ready for each in crew.units)


def _stale(crew: Crew, rolling: Roll) -> list[Replica]:
    """What was there when the roll was asked for, and would run otherwise if it were started now."""
    return [each for each in crew.units if each.created_at < rolling.asked_at and _is_stale(crew, each)]


def _replace(draft: Draft, crew: Crew, starter: Starter, replica: Replica, rolling: Roll) -> None:
    choice = starter.choose(crew.model)
    if not choice.profiles:
        _halt(draft, crew, f"nothing can be started now: {'; '.join(choice.waits)}")
        return
    why = f"rolled by {rolling.by}"
    seat = starter.seat(crew, choice)
    if isinstance(seat, Seat):
        starter.start(crew, seat, f"{why}: in place of replica {replica.id[:8]}", replaces=replica.id)
        return
    leaver = eviction.Tenant(replica.id, replica.holdings(), replica.state_since)
    if not eviction.makes_room(starter.want(crew, choice), draft.room, [leaver]):
        _halt(draft, crew, f"replica {replica.id[:8]} would leave no room for another: {seat.why}")
        return
    draft.end(crew, replica, f"{why}; there is no room for its replacement beside it")
    if scaling.wanted(draft, crew) > len(crew.units):
        draft.block(crew.model, 1, f"replica {replica.id[:8]} is stopping first, to make room")


def _halt(draft: Draft, crew: Crew, why: str) -> None:
    name = quote(crew.model.spec.name)
    says = f"The roll of {name} stopped: {why.rstrip('.')}. Put it right, then roll again."
    draft.rolls.append(RollEnd(crew.model.id, is_halted=True, why=says))


def _is_stale(crew: Crew, replica: Replica) -> bool:
    """Only what a restart would change is rolled."""
    spec = crew.model.spec
    profile = spec.profile(str(replica.launch.profile.get("name", "")))
    return stale.judge(
        replica.fingerprint, replica.launch, profile, spec, source_revision=crew.model.source_revision
    ).restart_needed


def _is_draining(draft: Draft, node_id: int) -> bool:
    spot = draft.room.spots.get(node_id)
    return spot is not None and spot.node.is_draining
