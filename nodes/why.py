"""Why a model does not run where or as it is wanted: each thing that is amiss in a sentence, and for every
profile what each node has to say. Where all is as wanted, it says that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from catalog.reading import quote
from nodes import placement, retry, stale
from nodes.agenda import BLOCKED, DRAIN, EVICT, HELD, LOST, START, STOP, Item
from nodes.draft import Draft
from nodes.placement import Reasons
from nodes.seating import reasons
from nodes.snapshot import LOST as IS_LOST
from nodes.snapshot import RUN, Model, Replica, Snapshot, launch_of
from nodes.starting import Starter


@dataclass(frozen=True, slots=True)
class Why:
    """amiss: what is not as wanted, a sentence each. notes: what is, and could be better. says: the answer in
    one sentence.

    ready, wanted: how many replicas. rooms: by profile, what all nodes say together. reasons: by profile and
    node why not, "" where there is room for one more.
    """

    model: str
    amiss: tuple[str, ...]
    says: str
    ready: int
    wanted: int
    rooms: Mapping[str, str]
    reasons: Reasons
    notes: tuple[str, ...] = ()

    @property
    def is_as_wanted(self) -> bool:
        return not self.amiss


def explain(snapshot: Snapshot, items: tuple[Item, ...], model: Model) -> Why:
    """`items` are what the plan of this snapshot would do."""
    name = model.spec.name
    mine = [item for item in items if item.model == name]
    replicas = [each for each in snapshot.replicas if each.model == model.id]
    lost = {item.replica for item in mine if item.bucket == LOST}
    running = [
        each for each in replicas if each.wanted == RUN and each.state != IS_LOST and each.id not in lost
    ]
    ready = sum(each.is_ready for each in running)
    missing = sum(item.missing for item in mine if item.bucket == BLOCKED)
    starts = sum(item.bucket == START and not item.replaces for item in mine)
    wanted = max(model.spec.scaling.min, len(running) + missing + starts)
    found = _reasons(snapshot, model, mine)
    names = {node.id: node.name for node in snapshot.nodes}
    amiss = (
        *_waiting(mine, wanted),
        *_of_replicas(model, replicas, names),
        *_moving(model, mine),
    )
    rooms = {profile: _room(by_node) for profile, by_node in found.items()}
    says = _summary(model, ready, wanted, bool(amiss))
    notes = (*_failed(snapshot, model, names, amiss), *_not_preferred(model, running, rooms))
    return Why(name, amiss, says, ready, wanted, rooms, found, notes)


def _summary(model: Model, ready: int, wanted: int, is_amiss: bool) -> str:
    name, scaling = quote(model.spec.name), model.spec.scaling
    if is_amiss:
        return f"model {name} does not run as wanted: {ready} of {wanted} ready"
    if scaling.max == 0:
        return f"model {name} is off (max 0), and nothing of it runs"
    if not wanted:
        return f"model {name} is on demand and nobody asks for it; the first request loads it"
    return f"model {name} runs as wanted: {ready} of {wanted} ready, each as the catalog has it"


def _waiting(items: list[Item], wanted: int) -> Iterator[str]:
    """What is to be and is not: it waits for something, or for the next pass."""
    for item in items:
        if item.bucket == BLOCKED:
            replicas = "replica" if wanted == 1 else "replicas"
            short = f"{item.missing} of {wanted} {replicas} cannot be started: "
            yield (short if item.missing else "") + item.why
        elif item.bucket == START:
            yield f"the next pass starts {item.profile} on {', '.join(item.nodes)}: {item.why}"


def _of_replicas(model: Model, replicas: list[Replica], names: Mapping[int, str]) -> Iterator[str]:
    for each in sorted(replicas, key=lambda replica: (replica.created_at, replica.id)):
        profile = str(each.launch.profile.get("name", ""))
        where = ", ".join(names.get(rank.node, "a node that is gone") for rank in each.ranks)
        who = f"replica {each.id[:8]} ({profile}) on {where}"
        if each.wanted != RUN:
            yield f"{who} is {each.state} and to {each.wanted}: {each.wanted_why or 'no reason is kept'}"
        elif not each.is_ready:
            yield f"{who} is {each.state}" + (f": {each.reason}" if each.reason else "")
        found = stale.judge(
            each.fingerprint,
            each.launch,
            model.spec.profile(profile),
            model.spec,
            source_revision=model.source_revision,
        )
        if each.wanted == RUN and found.restart_needed:
            yield f"{who} is stale: {found.sentence}"


def _failed(
    snapshot: Snapshot, model: Model, names: Mapping[int, str], amiss: tuple[str, ...]
) -> Iterator[str]:
    """What failed before what runs now, where that is not said already."""
    mine = [failure for owner, failure in snapshot.failures if owner == model.id]
    for profile in model.spec.profiles if mine else ():
        failed = retry.lately(mine, launch_of(model, profile), snapshot.now)
        if not failed or any(retry.told(failed[0]) in each for each in amiss):
            continue
        last = failed[0]
        where = f" on {names[last.node]}" if last.node is not None and last.node in names else ""
        times = "once" if len(failed) == 1 else f"{len(failed)} times"
        yield (
            f"profile {quote(profile.name)} failed {times} within the hour, last at {last.at:%H:%M:%S} UTC"
            f"{where}: {retry.told(last)}"
        )


def _not_preferred(model: Model, running: list[Replica], rooms: Mapping[str, str]) -> Iterator[str]:
    """Profiles that come before all that anything runs of."""
    run = {str(each.launch.profile.get("name", "")) for each in running}
    for profile in placement.by_preference(model.spec.profiles) if run else ():
        if profile.name in run:
            return
        if profile.name in rooms:
            yield f"nothing runs of profile {quote(profile.name)}, which comes first: {rooms[profile.name]}"


def _moving(model: Model, items: list[Item]) -> Iterator[str]:
    does = {DRAIN: "drains", STOP: "stops", EVICT: "evicts", LOST: "gives up"}
    for item in items:
        if item.bucket == HELD:
            yield f"replica {item.replica[:8]} would end and waits for a person's yes: {item.why}"
        elif item.bucket in does:
            yield f"the next pass {does[item.bucket]} replica {item.replica[:8]}: {item.why}"
    if model.roll is not None:
        under_way = f"it is being rolled, by {model.roll.by}, since {model.roll.asked_at:%H:%M:%S} UTC"
        yield model.roll.halted or under_way


def _reasons(snapshot: Snapshot, model: Model, items: list[Item]) -> dict[str, Mapping[str, str]]:
    """What the plan met, where it tried; and where it did not have to, what it would meet."""
    met: dict[str, Mapping[str, str]] = {}
    for item in items:
        met |= item.reasons
    if model.fault:
        return met
    draft = Draft(snapshot)
    draft.muster()
    starter = Starter(draft)
    crew = draft.crews[model.id]
    want = starter.want(crew, starter.choose(model))
    return {
        profile.name: met.get(profile.name) or reasons(want, profile, draft.room)
        for profile in placement.by_preference(model.spec.profiles)
    }


def _room(by_node: Mapping[str, str]) -> str:
    room = sum(not reason for reason in by_node.values())
    if not room:
        return placement.unseated({"": by_node}, len(by_node)).why
    return f"{room} of {len(by_node)} nodes {'has' if room == 1 else 'have'} room for one more"
