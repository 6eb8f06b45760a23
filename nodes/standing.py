"""How things stand, for the length of one pass: the rows, and what agents just said of them.

What is observed is written here, and only what changed: a rank's state from its agent's report, a replica's
from its ranks. A rank that a report leaves out is `pending` again, never ended: that takes its agent's word.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.conf import settings

from catalog.models import Event, Revision
from nodes import snapshot as values
from nodes.agents import Observation, report_from
from nodes.certificates import is_checksum
from nodes.instances import Instance, instance_of, restored_says, second_says
from nodes.kept import Kept
from nodes.models import Claim, Load, Node, Rank, Replica, Weights
from nodes.protocol import (
    DRAINING,
    FAILED,
    FETCHING,
    RANK_STATES,
    READY,
    STARTING,
    STOPPED,
    RankReport,
    StateReport,
    WeightsReport,
    to_json,
)
from nodes.stale import launch_from

DOOR = "loop"
LONGEST_AGE_S = 10 * 365 * 24 * 3600.0
COLUMN_LIMIT = 2**31 - 1
BYTES_LIMIT = 2**53
MEETING_LIMIT = 80
REPO_LIMIT = 200
ATTEMPTS_KEPT = 20  # agents keep fewer

# Of ranks in different states, the first of these tells most about the whole.
_TELLING = (FAILED, values.PENDING, STOPPED, DRAINING, FETCHING, STARTING, READY)


class Standing:
    """The rows of one pass. Made and used inside the transaction that writes what follows from them."""

    def __init__(self, now: datetime, nodes: Sequence[Node], *, watching_since: datetime) -> None:
        self.now = now
        self.watching_since = watching_since
        self.nodes = {node.pk: node for node in nodes}
        self.answered: set[int] = set()
        self.reported: set[int] = set()  # those that sent a whole report
        self.strangers: list[values.Stranger] = []
        self.replicas: dict[str, Replica] = {}
        self.ranks: dict[str, list[Rank]] = {}
        self.claims: dict[int, list[str]] = {}
        self.said: dict[int, RankReport] = {}
        self.events: list[Event] = []
        self.rerouted: set[UUID] = set()
        self.loads: dict[int, values.Load | None] = {}  # by model, as they were kept
        # Joined by hand: there are thousands, and each related manager costs more than its row.
        for row in Replica.objects.exclude(state__in=Replica.OVER):
            self.add(row, [], [])
        for rank in Rank.objects.exclude(replica__state__in=Replica.OVER):
            self.ranks[str(rank.replica_id)].append(rank)
        claims = Claim.objects.exclude(rank__replica__state__in=Replica.OVER).order_by("pk")
        for rank_id, gpu in claims.values_list("rank_id", "gpu"):
            self.claims.setdefault(rank_id, []).append(gpu)
        launches.keep_only(self.replicas.keys())
        reports.keep_only(self.nodes.keys())

    def add(self, row: Replica, ranks: Sequence[Rank], claims: Iterable[Claim]) -> None:
        """Count a replica in that is not over."""
        self.replicas[str(row.pk)] = row
        self.ranks[str(row.pk)] = list(ranks)
        for claim in claims:
            self.claims.setdefault(claim.rank_id, []).append(claim.gpu)

    # --- what agents said -------------------------------------------------------------------------

    def observe(self, observations: Mapping[int, Observation]) -> None:
        """Write what the agents reported, and nothing that was known already."""
        observations = {pk: self._own(self.nodes[pk], each) for pk, each in observations.items()}
        self.answered = {pk for pk, observation in observations.items() if observation.is_answered}
        Node.objects.filter(pk__in=self.answered).update(seen_at=self.now)
        for pk, observation in observations.items():
            node = self.nodes[pk]
            if observation.is_answered:
                node.seen_at = self.now
            elif node.seen_at is not None and node.seen_at > self.now:  # the clock was set back
                self.write(node, seen_at=self.now)
            self.write(node, problem=observation.problem or self._rivalry(node))
            if observation.report is not None:
                self.reported.add(pk)
                self._hear(node, observation.report)
        self._recognise()
        self._keep_etags(observations)
        for replica_id in list(self.replicas):
            self.settle(replica_id)

    def _own(self, node: Node, observation: Observation) -> Observation:
        """The observation, unless it is of another agent than the node's own. The first time is an Event."""
        told = observation.report
        if told is None:
            return observation
        known = reports.get(node.pk, node.report)
        silent_for = self.now - node.seen_at if node.seen_at else None
        found = instance_of(told, known, silent_for, lost_after_s=settings.LLMGW_LOST_AFTER_S)
        if found is Instance.RESTORED:
            self._record_of_node("restored agent", node, restored_says(node.name))
        if found is not Instance.SECOND:
            return observation
        says = second_says(node.name, node.address)
        if not self._rivalry(node):
            self._record_of_node("second agent", node, says)
        self.write(node, rival_at=self.now)
        return Observation(problem=says)

    def _rivalry(self, node: Node) -> str:
        """Of a second agent that answered for the node lately, if not now."""
        lately = timedelta(seconds=settings.LLMGW_LOST_AFTER_S)
        if node.rival_at is None or not self.now - lately < node.rival_at <= self.now:
            return ""
        return second_says(node.name, node.address)

    def _record_of_node(self, verb: str, node: Node, why: str) -> None:
        self.events.append(
            Event(door=DOOR, verb=verb, kind="node", subject=node.name, subject_key=node.pk, why=why)
        )

    def hear_rank(self, rank: Rank, said: RankReport) -> None:
        """Write one report of a rank that is assigned to the node which sends it."""
        row = self.replicas[str(rank.replica_id)]
        if said.generation > row.generation:  # this database was restored; the agent has seen more
            self.write(row, generation=said.generation)
        certificate, port = said.certificate, _within(said.port, 65_535)
        if certificate and not is_checksum(certificate):  # its key is not said to whoever answers there
            certificate, port = "", None
        context_length = _within(said.context_length)
        asked = (rank.port, rank.certificate, rank.context_length)
        if rank.rank == 0 and asked != (port, certificate, context_length):
            self.rerouted.add(row.pk)
        exit_code = said.exit_code
        self.said[rank.pk] = said
        self.write(
            rank,
            state=said.state if said.state in RANK_STATES else STARTING,
            reason=said.reason,
            port=port,
            certificate=certificate,
            pid=_within(said.pid),
            command=list(said.command),
            exit_code=exit_code if exit_code is None or abs(exit_code) <= COLUMN_LIMIT else None,
            running=_within(said.running),
            waiting=_within(said.waiting),
            done_bytes=_within(said.done_bytes, BYTES_LIMIT),
            total_bytes=_within(said.total_bytes, BYTES_LIMIT),
            bytes_per_s=_within(said.bytes_per_s, BYTES_LIMIT),
            meeting=said.meeting[:MEETING_LIMIT],
            context_length=context_length,
            attempts=[to_json(each) for each in said.attempts[-ATTEMPTS_KEPT:]],
        )

    def end_rank(self, rank: Rank, state: str, reason: str, *, kind: str = "") -> None:
        """Its agent has said that it does not run there and will not."""
        self.said[rank.pk] = RankReport(str(rank.replica_id), 0, rank.rank, state, reason=reason, kind=kind)
        self.write(rank, state=state, reason=reason)

    def settle(self, replica_id: str) -> None:
        """Write the replica's state as its ranks have it, with an Event, and a revision where requests go."""
        row, ranks = self.replicas[replica_id], self.ranks[replica_id]
        if len(ranks) > 1 and row.wanted != values.RUN:
            self._release([rank for rank in ranks if rank.state in Replica.OVER and rank.pk in self.claims])
        if not ranks or not all(rank.node_id in self.answered for rank in ranks):
            return
        telling = min(ranks, key=self._telling_order)
        said = self.said.get(telling.pk)
        was, state, reason = row.state, telling.state, telling.reason
        if any(rank.state in Replica.OVER for rank in ranks) and not all(
            rank.state in Replica.OVER for rank in ranks
        ):
            state = DRAINING  # what is left of it is on its way out, and holds its GPUs until then
        if row.failure_kind:  # of a gang that broke: its first failure is the cause of the others
            said, reason = None, row.reason
        if state == was:
            if said is not None:
                self.write(row, reason=reason)
            return
        age_s = min(max(said.age_s, 0.0), LONGEST_AGE_S) if said else 0.0
        self.write(
            row,
            state=state,
            reason=reason,
            # Agents tell ages; moments are the database's.
            state_since=self.now - timedelta(seconds=age_s),
            cause=said.cause[:40] if said else row.cause,
            failure_kind=said.kind[:20] if said else row.failure_kind,
        )
        self.record(state, row, reason, was=was)
        if READY in (was, state):
            self.rerouted.add(row.pk)
        if state in Replica.OVER:
            self._release(ranks)
            del self.replicas[replica_id], self.ranks[replica_id]

    def _telling_order(self, rank: Rank) -> tuple[int, float, int]:
        """Of several that failed, the first to do so took the others along."""
        said = self.said.get(rank.pk)
        age_s = said.age_s if said and rank.state == FAILED else 0.0
        return (_TELLING.index(rank.state), -age_s, rank.rank)

    def _release(self, ranks: Sequence[Rank]) -> None:
        """Give back what ranks held whose engines are gone, by their agents' word."""
        if ranks:
            Claim.objects.filter(rank__in=ranks).delete()
            for rank in ranks:
                self.claims.pop(rank.pk, None)

    def _hear(self, node: Node, report: StateReport) -> None:
        known = node.report
        self.write(node, report=to_json(replace(report, ranks=())))
        if node.report.get("holdings") != known.get("holdings"):
            self._keep_weights(node, report.holdings)
        heard = {(said.replica, said.rank): said for said in report.ranks}
        for replica_id, ranks in self.ranks.items():
            for rank in ranks:
                if rank.node_id != node.pk:
                    continue
                said = heard.pop((replica_id, rank.rank), None)
                if said is None or said.generation < self.replicas[replica_id].generation:
                    self.write(
                        rank, state=values.PENDING, reason=f"waiting for the agent of {node.name} to take it"
                    )
                else:
                    self.hear_rank(rank, said)
        self.strangers += [values.Stranger(node.pk, said) for said in heard.values()]

    def _keep_weights(self, node: Node, told: Sequence[WeightsReport]) -> None:
        rows = {row.key: row for row in Weights.objects.filter(node=node)}
        for each in {each.key[:32]: each for each in told}.values():
            row = rows.pop(each.key[:32], None)
            columns = {
                "repo": each.repo[:REPO_LIMIT],
                "revision": each.revision[:REPO_LIMIT],
                "state": each.state if each.state in Weights.State.values else Weights.State.PARTIAL,
                "size_bytes": _within(each.size_bytes, BYTES_LIMIT) or 0,
                "total_bytes": _within(each.total_bytes, BYTES_LIMIT),
                "bytes_per_s": _within(each.bytes_per_s, BYTES_LIMIT),
                "is_used": each.is_used,
                "reason": each.reason,
            }
            if row is None:
                Weights.objects.create(node=node, key=each.key[:32], **columns)
            else:
                self.write(row, **columns)
        if rows:
            Weights.objects.filter(pk__in=[row.pk for row in rows.values()]).delete()

    def _recognise(self) -> None:
        """Tell the strangers whose replicas have ended by this database's record from those it never knew."""
        ids = {stranger.report.replica for stranger in self.strangers} - self.replicas.keys()
        if ids:
            over = {str(pk) for pk in Replica.objects.filter(pk__in=ids).values_list("pk", flat=True)}
            self.strangers = [
                replace(stranger, is_over_here=stranger.report.replica in over) for stranger in self.strangers
            ]

    def _keep_etags(self, observations: Mapping[int, Observation]) -> None:
        """A node with engines that are not assigned to it is heard in full until that is settled."""
        strange = {each.node for each in self.strangers if each.report.state not in (STOPPED, FAILED)}
        for pk in self.reported:
            self.write(self.nodes[pk], etag="" if pk in strange else observations[pk].etag)

    # --- writing ----------------------------------------------------------------------------------

    def write(self, row: Node | Replica | Rank | Weights, **columns: Any) -> None:
        """Only the columns that differ: operators write others of the same row."""
        changed = {name: value for name, value in columns.items() if getattr(row, name) != value}
        if changed:
            rows: Any = type(row)._default_manager
            rows.filter(pk=row.pk).update(**changed)
            for name, value in changed.items():
                setattr(row, name, value)

    def record(self, verb: str, row: Replica, why: str, **detail: Any) -> None:
        names = [
            self.nodes[rank.node_id].name for rank in self.ranks[str(row.pk)] if rank.node_id in self.nodes
        ]
        detail = {"model": row.model_name, "profile": row.profile_name, "nodes": names, **detail}
        self.events.append(
            Event(door=DOOR, verb=verb, kind="replica", subject=str(row.pk), why=why, detail=detail)
        )

    def keep_loads(self, models: Iterable[values.Model]) -> None:
        """For the next pass, which is to know since when a model has been so busy."""
        for model in models:
            load = model.load
            if load == self.loads.get(model.id):
                continue
            if load is None:
                Load.objects.filter(model_id=model.id).delete()
            else:
                columns = {"level": load.level, "since": load.since, "replicas": load.replicas}
                Load.objects.update_or_create(model_id=model.id, defaults=columns)

    def finish(self) -> bool:
        """Write the events, and one revision for all that requests are routed by. True if any."""
        has_changed = bool(self.events or self.rerouted)
        if self.rerouted:
            Replica.objects.filter(pk__in=self.rerouted).update(revision=Revision.advance())
        Event.objects.bulk_create(self.events)
        self.rerouted, self.events = set(), []
        return has_changed


launches, reports = Kept(launch_from), Kept(report_from)
"""What rows have as JSON, read once: of replicas, and of nodes."""


def _within(number: int | None, limit: int = COLUMN_LIMIT) -> int | None:
    """What does not fit its column is unknown."""
    return number if number is not None and 0 <= number <= limit else None
