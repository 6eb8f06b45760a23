"""A pass: observe, plan, act, tell. One at a time, and safe to break off anywhere.

Assignments are committed before an agent is told of them, every message is one that may be repeated, and each
transaction confirms the lease first: so the next pass finishes what a broken one began. A pass that finds
everything as it should be writes nothing but when each node was seen, and once a minute what is plotted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from time import monotonic
from uuid import UUID

from django.conf import settings
from django.db import DataError, IntegrityError, InterfaceError, OperationalError, transaction
from django.db.models import Q
from django.db.models.functions import Now

from catalog.models import Event, Model, Profile, Revision, database_now
from nodes import agents, lease, samples
from nodes.agents import Message, Told
from nodes.buckets import Adopt, Blocked, End, Hold, Plan, RollEnd, Start
from nodes.buckets import Orphan as OrphanFound
from nodes.conversation import cluster_keys
from nodes.models import Claim, Cluster, Gateway, Held, Node, Orphan, Rank, Replica, Roll, Unplaced
from nodes.orders import Order, orders
from nodes.picture import picture_of, replicas_of
from nodes.placement import Place
from nodes.plan import plan
from nodes.protocol import (
    CONFIGURATION,
    FAILED,
    NODE,
    STOPPED,
    TRANSIENT,
    Assignment,
    ClusterKey,
    to_json,
)
from nodes.sampling import sample
from nodes.sharing import needed_sources
from nodes.snapshot import DRAIN, LOST, RUN, STOP, Snapshot
from nodes.standing import DOOR, Standing
from nodes.stores import peers_for

BITE = 100  # rows that one pass removes of each kind
KEEP_FAILURES = timedelta(days=30)  # those that wait for an edit, and so are still a reason
KEEP_GATEWAYS = timedelta(days=7)  # their demand says when a model was last asked for

# What an agent's refusal to run something says about another try, by its code or else its status.
REFUSED: dict[str | int, str] = {
    "gpu_taken": NODE,
    400: CONFIGURATION,
    410: TRANSIENT,
    413: CONFIGURATION,
    422: NODE,
}
# It runs something of the replica that it cannot take up, and that has to be stopped first.
STRAY = "stray"
# It has obeyed commands of a later lease than this database knows.
FENCE = "fence"

logger = logging.getLogger(__name__)

_watching_since: datetime | None = None
_minutes = samples.Minutes()


@dataclass(frozen=True, slots=True)
class PassReport:
    """What a pass came to. told: messages sent to agents. has_changed: another pass may find more to do."""

    plan: Plan
    told: int
    has_changed: bool


def run_pass(holder: str, *, minutes: samples.Minutes = _minutes) -> PassReport | None:
    """One pass. None when another holder has the lease or took it meanwhile, when an edit overtook it, or
    when the database is away."""
    try:
        held = lease.take(holder)
        return None if held is None else _pass_with(held, minutes)
    except (OperationalError, InterfaceError) as away:
        logger.warning("This pass broke off, and the next one goes on from what is on record: %s", away)
        return None


def _pass_with(held: lease.Held, minutes: samples.Minutes) -> PassReport | None:
    began_s, took_s = monotonic(), None
    try:
        report = _pass(held, minutes)
        took_s = monotonic() - began_s
        return report
    except lease.LeaseLost:
        logger.warning("This pass took longer than its lease, and another holder goes on from here.")
        return None
    except IntegrityError as conflict:  # a model was removed while this pass decided about it
        logger.warning("This pass was overtaken by an edit, and the next one looks again: %s", conflict)
        return None
    finally:
        lease.release(held, took_s=took_s)


def _pass(held: lease.Held, minutes: samples.Minutes) -> PassReport:
    cluster = str(Cluster.this().uuid)
    asked = list(Node.objects.all())
    observations = agents.observe(asked, cluster=cluster, now=database_now())
    with _writing(held):
        now = database_now()
        # Read again: an operator may have cordoned one while its agent was asked.
        standing = Standing(now, list(Node.objects.all()), watching_since=_watch(held, now))
        standing.observe({node.pk: each for node, each in zip(asked, observations, strict=True)})
        before = picture_of(standing)
        standing.keep_loads(before.models)
        decision = plan(before)
        this = Cluster.this()
        _sound(decision, this, standing)
        to_tell: Sequence[Order] = ()
        if not this.is_paused:
            _act(decision, standing)
            to_tell = orders(_after(before, standing))
        if minutes.are_due(now):
            samples.keep(now, sample(before, {each.model: each.missing for each in decision.blocked}))
        has_changed = standing.finish()
    minutes.are_kept(now)
    needed = needed_sources(before.models) if to_tell else None
    told = agents.tell([_message(order, standing, cluster, held.token, needed) for order in to_tell])
    if told:
        with _writing(held):
            for order, answer in zip(to_tell, told, strict=True):
                # What it reported last is out of date, even if it reports the same again.
                standing.write(standing.nodes[order.node], etag="")
                _hear_answer(order, answer, standing)
            has_changed |= standing.finish()
    _prune()
    return PassReport(decision, told=len(told), has_changed=has_changed)


@contextmanager
def _writing(held: lease.Held) -> Iterator[None]:
    """A transaction of a pass that has the lease, and keeps edits of the catalog waiting meanwhile."""
    with transaction.atomic():
        lease.confirm(held)
        Revision.hold()
        yield


def _watch(held: lease.Held, now: datetime) -> datetime:
    """Since when this process knows that nodes were asked without a gap."""
    global _watching_since
    gap = held.unwatched
    has_gap = gap is None or gap.total_seconds() > settings.LLMGW_SUSPECT_AFTER_S
    # A moment in the future is one before the clock was set back.
    if _watching_since is None or has_gap or _watching_since > now:
        _watching_since = now
    return _watching_since


def _after(before: Snapshot, standing: Standing) -> Snapshot:
    return replace(before, replicas=tuple(replicas_of(standing)))


# --- act --------------------------------------------------------------------------------------------


def _act(decision: Plan, standing: Standing) -> None:
    """Write the plan down. What it starts and ends, agents are told afterwards."""
    for adopt in decision.adopt:
        _adopt(adopt, standing)
    for end in decision.lost:
        row = standing.replicas[end.replica]
        standing.write(row, state=LOST, reason=end.why, state_since=standing.now)
        standing.record(LOST, row, end.why)
        standing.rerouted.add(row.pk)
    for verb, ends in ((DRAIN, decision.drain), (STOP, decision.stop)):
        for end in ends:
            _end(verb, end, standing)
    for end in decision.evict:
        _end(DRAIN, end, standing, verb="evict")
    for start in decision.start:
        _start(start, standing)
    for over in decision.rolls:
        _end_roll(over, standing)
    _show_held(decision.held, standing)
    _show_blocked(decision.blocked, standing)
    _show_orphans(decision.orphans, standing)


def _end(wanted: str, end: End, standing: Standing, *, verb: str = "") -> None:
    row = standing.replicas.get(end.replica)
    if row is None:  # it was to be adopted first, and that failed
        return
    standing.write(row, wanted=wanted, wanted_why=end.why, wanted_since=standing.now)
    standing.record(verb or wanted, row, end.why)
    standing.rerouted.add(row.pk)


def _start(start: Start, standing: Standing) -> None:
    names = ", ".join(standing.nodes[place.node].name for place in start.places)
    row = Replica(
        model_id=start.model,
        profile=_profile(start.model, start.launch.profile.get("name")),
        launch=to_json(start.launch),
        fingerprint=start.launch.fingerprint,
        key_id=cluster_keys()[0].id,
        replaces=start.replaces or None,
        created_at=standing.now,
        wanted_why=start.why,
        wanted_since=standing.now,
        reason=f"waiting for the agent of {names} to take it",
        state_since=standing.now,
    )
    if _assign(row, start.places, standing):
        gpus = [gpu for place in start.places for gpu in place.gpus]
        standing.record("start", row, start.why, gpus=gpus)


def _adopt(adopt: Adopt, standing: Standing) -> None:
    report = adopt.report
    row = Replica(
        pk=UUID(report.replica),
        model_id=adopt.model,
        profile=_profile(adopt.model, adopt.launch.profile.get("name")),
        launch=to_json(adopt.launch),
        fingerprint=adopt.launch.fingerprint[:16],
        is_adopted=True,
        generation=report.generation,
        key_id=report.key_id,
        created_at=standing.now,
        wanted_why=adopt.why,
        wanted_since=standing.now,
        state_since=standing.now,
    )
    if _assign(row, [Place(adopt.node, tuple(report.gpus))], standing):
        standing.record("adopt", row, adopt.why, gpus=list(report.gpus))
        standing.hear_rank(standing.ranks[report.replica][0], report)
        standing.settle(report.replica)


def _assign(row: Replica, places: Sequence[Place], standing: Standing) -> bool:
    """The replica, its ranks and their claims, or nothing: a GPU claimed meanwhile is the next pass's
    affair."""
    try:
        with transaction.atomic():
            row.save(force_insert=True)
            ranks = Rank.objects.bulk_create(
                [
                    Rank(replica=row, node_id=place.node, rank=number, reason=row.reason)
                    for number, place in enumerate(places)
                ]
            )
            claims = Claim.objects.bulk_create(
                [
                    Claim(rank=rank, node_id=rank.node_id, gpu=gpu)
                    for rank, place in zip(ranks, places, strict=True)
                    for gpu in place.gpus
                ]
            )
    except (IntegrityError, DataError) as refusal:
        logger.warning("Replica %s of %s could not be assigned: %s", row.pk, row.model_name, refusal)
        return False
    standing.add(row, ranks, claims)
    return True


def _profile(model: int, name: object) -> Profile | None:
    return Profile.objects.filter(model=model, name=name).first()


def _end_roll(over: RollEnd, standing: Standing) -> None:
    rolls = Roll.objects.filter(model=over.model)
    name = Model.objects.values_list("name", flat=True).get(pk=over.model)
    changed = rolls.update(halted=over.why) if over.is_halted else rolls.delete()[0]
    if changed:
        verb = "roll halted" if over.is_halted else "rolled"
        standing.events.append(
            Event(door=DOOR, verb=verb, kind="model", subject=name, subject_key=over.model, why=over.why)
        )


def _sound(decision: Plan, this: Cluster, standing: Standing) -> None:
    """Show what keeps passes from acting on what they see; an Event tells when that begins and ends."""
    alarm = "; ".join(filter(None, (decision.alarm, decision.held.why if decision.held else "")))
    if alarm == this.alarm:
        return
    Cluster.objects.filter(pk=this.pk).update(alarm=alarm)
    if not (alarm and this.alarm):
        verb, why = ("alarm", alarm) if alarm else ("alarm over", this.alarm)
        standing.events.append(Event(door=DOOR, verb=verb, kind="cluster", subject=str(this), why=why))


def _show_held(held: Hold | None, standing: Standing) -> None:
    """What waits for a person's yes, as of this pass: a yes is to what was shown last."""
    known = {str(row.replica_id): row for row in Held.objects.all()}
    for wanted, ends in ((DRAIN, held.drain), (STOP, held.stop)) if held else ():
        for end in ends:
            if end.replica in standing.replicas and not known.pop(end.replica, None):
                Held.objects.create(replica_id=end.replica, wanted=wanted, why=end.why, since=standing.now)
    if known:
        Held.objects.filter(pk__in=[row.pk for row in known.values()]).delete()


def _show_blocked(blocked: Sequence[Blocked], standing: Standing) -> None:
    known = {row.model_id: row for row in Unplaced.objects.all()}
    for each in blocked:
        row = known.pop(each.model, None)
        if row is None:
            Unplaced.objects.create(
                model_id=each.model, missing=each.missing, why=each.why, since=standing.now
            )
        elif (row.missing, row.why) != (each.missing, each.why):
            Unplaced.objects.filter(pk=row.pk).update(missing=each.missing, why=each.why)
    if known:
        Unplaced.objects.filter(pk__in=[row.pk for row in known.values()]).delete()


def _show_orphans(found: Sequence[OrphanFound], standing: Standing) -> None:
    """Of nodes that reported; what another node was found to run stays shown."""
    known = {
        (str(row.replica), row.node_id, row.rank): row
        for row in Orphan.objects.filter(node__in=standing.reported)
    }
    for each in found:
        report = each.report
        row = known.pop((report.replica, each.node, report.rank), None)
        shown = {"why": each.why, "gpus": list(report.gpus)}
        if row is None:
            launch = to_json(report.launch) if report.launch else {}
            Orphan.objects.create(
                replica=report.replica,
                node_id=each.node,
                rank=report.rank,
                launch=launch,
                since=standing.now,
                **shown,
            )
        elif (row.why, row.gpus) != (shown["why"], shown["gpus"]):
            Orphan.objects.filter(pk=row.pk).update(**shown)
    if known:
        Orphan.objects.filter(pk__in=[row.pk for row in known.values()]).delete()


# --- tell -------------------------------------------------------------------------------------------


def _message(
    order: Order, standing: Standing, cluster: str, fence: int, needed: Sequence[str] | None
) -> Message:
    assignment = None
    if order.launch is not None:
        key = ClusterKey.chosen(cluster_keys(), standing.replicas[order.replica].key_id)
        assignment = Assignment(
            cluster=cluster,
            replica=order.replica,
            generation=order.generation,
            fence=fence,
            launch=order.launch,
            key=key.replica_key(order.replica, order.generation),
            gpus=order.gpus,
            rank=order.rank,
            meeting=order.meeting,
            peers=peers_for(
                standing.nodes[order.node],
                order.launch,
                [(standing.nodes[each.node], each.is_fetching) for each in order.holders],
                now=standing.now,
            ),
            needed=needed,
        )
    return Message(
        node=standing.nodes[order.node],
        cluster=cluster,
        replica=order.replica,
        generation=order.generation,
        fence=fence,
        assignment=assignment,
        drain_s=order.drain_s,
    )


def _hear_answer(order: Order, answer: Told, standing: Standing) -> None:
    """Write what the agent said to a message. Silence or a lack of authority ends nothing."""
    rank = next((rank for rank in standing.ranks.get(order.replica, ()) if rank.rank == order.rank), None)
    if rank is None:  # a stranger's
        return
    row = standing.replicas[order.replica]
    if answer.report is not None:
        standing.hear_rank(rank, answer.report)
    elif order.launch is None and answer.status == 404:
        standing.end_rank(rank, STOPPED, "its agent runs no such replica")
    elif order.launch is not None and answer.code == STRAY:
        _end(STOP, End(order.replica, answer.sentence), standing)
    elif order.launch is not None and (kind := REFUSED.get(answer.code) or REFUSED.get(answer.status or 0)):
        standing.end_rank(rank, FAILED, answer.sentence, kind=kind)
    elif answer.code == FENCE:
        standing.write(row, reason=_outranked(answer.sentence, standing.nodes[order.node].name))
    elif not answer.is_accepted:
        standing.write(row, reason=answer.sentence)
    standing.settle(order.replica)


def _outranked(sentence: str, node: str) -> str:
    """Whoever holds the lease and is refused as one who has lost it: by which database, only people know."""
    return (
        f"{sentence} If this database was restored from a backup, {lease.OUTRANK_COMMAND} has it obeyed "
        f"again; if it was not, another control plane drives {node}: stop one of the two."
    )


# --- forget -----------------------------------------------------------------------------------------


def _prune() -> None:
    """Remove what nobody needs to be told any more, a bite a pass."""
    is_a_reason = Q(state=FAILED, wanted=RUN, failure_kind=CONFIGURATION, model__isnull=False)
    over = Replica.objects.filter(state__in=Replica.OVER)
    old = Q(state_since__lt=Now() - timedelta(seconds=settings.LLMGW_KEEP_REPLICAS_S))
    for rows in (
        over.filter(old & ~is_a_reason | Q(state_since__lt=Now() - KEEP_FAILURES)),
        Gateway.objects.filter(heartbeat_at__lt=Now() - KEEP_GATEWAYS),
    ):
        if bite := list(rows.values_list("pk", flat=True)[:BITE]):
            with transaction.atomic():
                Revision.hold()
                rows.model.objects.filter(pk__in=bite).delete()
