"""When a profile that has failed may be tried again, by the kind of its failures.

configuration waits for an edit; capacity and disk wait long, doubling, and disk only half a minute once there
is room again; a node's trouble sends the next try elsewhere; everything else backs off 1, 2, 4 ... 60 s. A
profile that keeps failing gives way to the others for as long as its failures are recent. All of it is
computed from failures that are on record: a restart of anything forgets nothing, and minutes of health reset
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from catalog.reading import quote, shown
from nodes.protocol import CAPACITY, CONFIGURATION, DISK, NODE, Launch

CRASH_LOOP = 5  # failures in WINDOW, by which time it is called by its name
SLOW_LOOP = 2  # failures in SLOW_WINDOW, by which time others go first
WINDOW = timedelta(minutes=10)
SLOW_WINDOW = timedelta(hours=1)
FIRST, LONGEST = timedelta(seconds=1), timedelta(seconds=60)
SLOW_FIRST, SLOW_LONGEST = timedelta(seconds=30), timedelta(minutes=10)
TOLD_LIMIT = 500  # characters of an agent's sentence within another
NODE_FIRST, NODE_LONGEST = timedelta(seconds=60), timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class Failure:
    """A replica that failed while it was wanted, on which node and when. `reason` is its agent's sentence.
    total_bytes: of what it was to fetch, where it failed for want of room."""

    replica: str
    launch: Launch
    at: datetime
    kind: str = ""
    reason: str = ""
    node: int | None = None
    created_at: datetime | None = None
    total_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether to try now. retry_at is None where only a person ends the wait; avoid: nodes to pass over, each
    with what it failed of there.

    gives_way: whether profiles that come after it may be tried before it.
    """

    may_try: bool = True
    gives_way: bool = False
    retry_at: datetime | None = None
    avoid: Mapping[int, str] = field(default_factory=dict)
    why: str = ""


def is_same_attempt(was: Launch, now: Launch) -> bool:
    """Whether starting `now` would repeat `was`: an edit to what shapes the command makes it a new one."""
    return _key(was) == _key(now)


def judge(
    profile: str,
    failures: Iterable[Failure],
    *,
    wanted: int,
    now: datetime,
    has_room: Callable[[Failure], bool] = lambda failure: False,
) -> Verdict:
    """`failures` are those of one profile as it is now; `wanted` is how many replicas there should be.
    `has_room`: whether a disk that was too full for it is so no more, which ends the doubling of the wait."""
    newest = sorted(failures, key=lambda failure: (failure.at, failure.replica), reverse=True)
    for failure in newest:
        if failure.kind == CONFIGURATION:
            return Verdict(
                may_try=False,
                gives_way=True,
                why=f"profile {quote(profile)} failed: {told(failure)}; it is tried again after an edit, "
                f"or once the failed replica {failure.replica[:8]} is stopped",
            )
    slow = [each for each in newest if each.kind in (CAPACITY, DISK) and _is_recent(each, SLOW_WINDOW, now)]
    brief = [
        each
        for each in newest
        if each.kind not in (CONFIGURATION, CAPACITY, DISK, NODE) and _is_recent(each, WINDOW, now)
    ]
    slow_longest = SLOW_FIRST if slow and slow[0].kind == DISK and has_room(slow[0]) else SLOW_LONGEST
    waits = [
        (failures[0].at + _doubled(first, longest, _rounds(failures, wanted)), failures)
        for failures, first, longest in ((slow, SLOW_FIRST, slow_longest), (brief, FIRST, LONGEST))
        if failures
    ]
    retry_at, cause = max(waits, default=(now, []), key=lambda wait: wait[0])
    keeps_failing = _rounds(brief, wanted) >= CRASH_LOOP or _rounds(slow, wanted) >= SLOW_LOOP
    if retry_at > now:
        return Verdict(
            may_try=False,
            gives_way=keeps_failing or cause is slow,
            retry_at=retry_at,
            why=_waiting(profile, cause, wanted, retry_at),
        )
    avoid = _nodes_to_avoid(newest, now)
    if not avoid:
        return Verdict(gives_way=keeps_failing)
    back_at = min(until for until, _ in avoid.values())
    return Verdict(
        gives_way=keeps_failing,
        retry_at=back_at,
        avoid={node: cause for node, (_, cause) in avoid.items()},
        why=f"profile {quote(profile)} may be tried where it failed from {back_at:%H:%M:%S} UTC",
    )


def lately(failures: Iterable[Failure], now: Launch, moment: datetime) -> list[Failure]:
    """Those of the last hour that starting `now` would repeat, the newest first."""
    return sorted(
        (
            each
            for each in failures
            if _is_recent(each, SLOW_WINDOW, moment) and is_same_attempt(each.launch, now)
        ),
        key=lambda failure: (failure.at, failure.replica),
        reverse=True,
    )


def _key(launch: Launch) -> tuple[object, ...]:
    capabilities = frozenset(name for name, is_on in launch.capabilities.items() if is_on)
    return (launch.fingerprint, launch.source, launch.revision, launch.context_length, capabilities)


def _is_recent(failure: Failure, window: timedelta, now: datetime) -> bool:
    """One in the future says nothing about now: the clock was set back since, by nobody knows how much."""
    return timedelta(0) <= now - failure.at < window


def _rounds(failures: Sequence[Failure], wanted: int) -> int:
    """How often each of the wanted replicas has failed, about: eight that fail at once are no crash loop."""
    return -(-len(failures) // max(wanted, 1))


def _doubled(first: timedelta, longest: timedelta, times: int) -> timedelta:
    return min(longest, first * (1 << min(times - 1, 20)))


def _nodes_to_avoid(failures: Iterable[Failure], now: datetime) -> dict[int, tuple[datetime, str]]:
    """Until when, and for what reason. `failures` are the newest first."""
    on_node: dict[int, list[Failure]] = {}
    for failure in failures:
        if failure.kind == NODE and failure.node is not None and _is_recent(failure, SLOW_WINDOW, now):
            on_node.setdefault(failure.node, []).append(failure)
    until = {
        node: failed[0].at + _doubled(NODE_FIRST, NODE_LONGEST, len(failed))
        for node, failed in on_node.items()
    }
    return {node: (moment, told(on_node[node][0])) for node, moment in sorted(until.items()) if moment > now}


def _waiting(profile: str, failures: Sequence[Failure], wanted: int, retry_at: datetime) -> str:
    count = len(failures)
    failed = "failed"
    if failures[0].kind not in (CAPACITY, DISK) and _rounds(failures, wanted) >= CRASH_LOOP:
        failed = f"is in a crash loop ({count} failures in ten minutes), the last"
    # A moment rather than a countdown: it stays true for as long as it is shown.
    return f"profile {quote(profile)} {failed}: {told(failures[0])}; next try at {retry_at:%H:%M:%S} UTC"


def told(failure: Failure) -> str:
    """Its agent's sentence, as a part of another."""
    return shown(failure.reason.strip(), TOLD_LIMIT).rstrip(".") or "its agent gives no reason"
