"""How many replicas a model should have now: between min and max, by who asks and how busy they are.

More are started when requests have waited for a while, fewer are kept when some have had nothing to do for
much longer, and one that is on demand is unloaded when nobody asks. What is unknown is neither busy nor idle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from catalog.durations import format_duration
from nodes.draft import Crew, Draft
from nodes.snapshot import PRESSED, RUN, SLACK, Load, Model, Rank, Replica

WAKE_FOR = timedelta(seconds=30)  # a request still counts as asking after its client has given up
PRESSED_FOR = timedelta(seconds=15)  # that requests wait before another replica is started
SLACK_FOR = timedelta(minutes=5)  # that replicas have nothing to do before one of them goes


def trim(draft: Draft, crew: Crew) -> None:
    """End what is too many: beyond the maximum, replaced, idle or without anything to do."""
    spec, high = crew.model.spec, crew.model.spec.scaling.max
    if len(crew.units) > high:
        why = "the model is off (max 0)" if high == 0 else f"{len(crew.units)} run and the maximum is {high}"
        for replica in sorted(crew.units, key=lambda each: first_to_stay(draft, crew, each))[high:]:
            draft.end(crew, replica, why, is_sudden=True)
    if not crew.units:
        return
    if spec.on_demand and is_idle(draft, crew):
        timeout = format_duration(idle_timeout_ns(draft, crew))
        for replica in tuple(crew.units):
            draft.end(crew, replica, f"nobody has asked for it for {timeout}")
    elif has_lasted(draft, crew, SLACK, SLACK_FOR) and _could_do_with_fewer(crew):
        replica = max(crew.units, key=lambda each: first_to_stay(draft, crew, each))
        told = format_duration(int(SLACK_FOR.total_seconds()) * 10**9)
        draft.end(crew, replica, f"{len(crew.units)} run, and one or more had nothing to do for {told}")


def wanted(draft: Draft, crew: Crew) -> int:
    """How many there should be at least, whether or not they are busy."""
    scaling = crew.model.spec.scaling
    if crew.model.spec.on_demand:
        return 1 if is_asked_for(draft, crew) else 0
    if crew.roll:  # replaced one by one: as many as there were
        return max(scaling.min, min(crew.roll.keep, scaling.max))
    return scaling.min


def why_started(draft: Draft, crew: Crew, low: int) -> str:
    waiting = crew.model.demand.waiting
    if crew.model.spec.on_demand:
        return f"asked for, {waiting} waiting" if waiting else "asked for"
    return f"{low} wanted, {len(crew.units)} there before it"


def is_pressed(draft: Draft, crew: Crew) -> bool:
    """Whether one more would help: requests have waited for a while although all that there are is ready."""
    return (
        not crew.stand_ins
        and not crew.missing
        and not crew.pending
        and 0 < len(crew.units) < crew.model.spec.scaling.max
        and has_lasted(draft, crew, PRESSED, PRESSED_FOR)
        and all(each.is_ready for each in crew.units)
    )


def load_now(model: Model, replicas: Iterable[Replica], known: Load | None, now: datetime) -> Load | None:
    """How busy those that are ready are, and since when; None for anything in between, and for unknown.

    Pressed: as many requests wait as there are replicas, or more. Slack: none waits, and fewer run than there
    are replicas. In between nothing changes. Where one came or went, the clock begins anew.
    """
    heads = [
        rank
        for each in replicas
        if each.is_ready and each.wanted == RUN
        for rank in each.ranks
        if rank.rank == 0
    ]
    level = _level(model, heads)
    if not level:
        return None
    if known is not None and (known.level, known.replicas) == (level, len(heads)) and known.since <= now:
        return known
    return Load(level, now, len(heads))


def _level(model: Model, heads: Sequence[Rank]) -> str:
    if not heads or model.spec.scaling.max < 2:
        return ""
    if model.demand.waiting + sum(rank.waiting or 0 for rank in heads) >= len(heads):
        return PRESSED
    if len(heads) <= max(model.spec.scaling.min, 1):
        return ""
    if any(rank.running is None or rank.waiting is None or rank.waiting for rank in heads):
        return ""
    return SLACK if sum(rank.running or 0 for rank in heads) < len(heads) else ""


def has_lasted(draft: Draft, crew: Crew, level: str, span: timedelta) -> bool:
    load = crew.model.load
    return load is not None and load.level == level and draft.now - load.since >= span


def is_asked_for(draft: Draft, crew: Crew) -> bool:
    demand = crew.model.demand
    if demand.waiting:
        return True
    lately = min(WAKE_FOR, timedelta(microseconds=idle_timeout_ns(draft, crew) / 1000))
    # Either way: where the clock was set back, a moment in the future is no reason for hours to come.
    return demand.asked_at is not None and abs(draft.now - demand.asked_at) < lately


def is_idle(draft: Draft, crew: Crew) -> bool:
    """The clock runs only while all are ready, nothing is in flight and somebody listens: silence is not
    idleness, nor are the days by which a clock was set."""
    if not is_unused(crew):
        return False
    since = max(last_of_use(crew, each) for each in crew.units)
    if draft.snapshot.watching_since is not None:
        since = max(since, draft.snapshot.watching_since)
    return draft.now - since >= timedelta(microseconds=idle_timeout_ns(draft, crew) / 1000)


def is_unused(crew: Crew) -> bool:
    """All are ready, nothing waits or is in flight, and a gateway is there that would tell."""
    demand = crew.model.demand
    return (
        demand.is_known
        and not (demand.waiting or demand.in_flight)
        and all(each.is_ready and not any(rank.requests for rank in each.ranks) for each in crew.units)
    )


def last_of_use(crew: Crew, replica: Replica) -> datetime:
    """When its model was last asked for, or since when it could have been."""
    asked_at = crew.model.demand.asked_at
    return replica.state_since if asked_at is None else max(asked_at, replica.state_since)


def idle_timeout_ns(draft: Draft, crew: Crew) -> int:
    return crew.model.spec.scaling.idle_timeout or draft.snapshot.idle_timeout_ns


def first_to_stay(draft: Draft, crew: Crew, replica: Replica) -> tuple[bool, int, bool, float, str]:
    """Sorts those to keep first: ready, in contact, as the catalog has them now, oldest."""
    profile = crew.model.spec.profile(str(replica.launch.profile.get("name", "")))
    is_current = profile is not None and replica.fingerprint == profile.fingerprint()
    return (
        not replica.is_ready,
        draft.silence(replica),
        not is_current,
        replica.created_at.timestamp(),
        replica.id,
    )


def _could_do_with_fewer(crew: Crew) -> bool:
    is_settled = not (crew.stand_ins or crew.leaving or crew.roll)
    return is_settled and len(crew.units) > max(crew.model.spec.scaling.min, 1)
