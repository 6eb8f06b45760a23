"""All ranks of a node: what the agent accepts, what it refuses and why, and what it takes up after a restart.

It obeys one cluster, and nothing older than what it has seen: fences and tombstones are on the disk before a
command is carried out. What it cannot account for it reports and leaves alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace

from nodes.agent.clock import boot_id, now_s
from nodes.agent.failures import cause_of_end, with_end
from nodes.agent.host import Host
from nodes.agent.judging import Refusal, judge_form, ranks_in
from nodes.agent.launching import mark_of, meeting_at, next_port, split_meeting
from nodes.agent.logs import Follower, read_words
from nodes.agent.ports import PortError
from nodes.agent.processes import Process, Seen, marked_processes, start_time
from nodes.agent.rank import Rank
from nodes.agent.state import OVER, Record, take_place
from nodes.agent.weights.sources import FetchError, order_of
from nodes.agent.weights.store import Holding
from nodes.engines.causes import Cause
from nodes.protocol import (
    DRAINING,
    FAILED,
    FETCHING,
    READY,
    STARTING,
    STOPPED,
    TRANSIENT,
    Assignment,
    Launch,
    RankReport,
)

OVER_KEPT_S = 24 * 3600
OVER_KEPT = 50
STOP_WITH_AGENT_GRACE_S = 4.0


class Ranks:
    def __init__(self, host: Host) -> None:
        self.host = host
        self.cluster = host.configuration.identity.cluster
        self._ranks: dict[str, Rank] = {}
        self._strays: dict[str, Seen] = {}
        self._place: socket.socket | None = None

    def reports(self) -> list[RankReport]:
        self._prune()
        known = [rank.report() for _, rank in sorted(self._ranks.items())]
        return known + [_stray_report(seen) for _, seen in sorted(self._strays.items())]

    def alive(self) -> list[Rank]:
        """Those that are not over."""
        return [rank for _, rank in sorted(self._ranks.items()) if not rank.record.is_over]

    def groups(self) -> set[int]:
        """The process groups of engines, by which a driver's processes are told from others'."""
        return {rank.record.pid for rank in self.alive() if rank.record.pid is not None}

    def reads(self, holding: Holding) -> bool:
        """Whether something here reads these weights. What a stray reads, nobody knows."""
        for rank in self.alive():
            with contextlib.suppress(FetchError):
                order = order_of(rank.launch)
                if order is not None and holding.is_of(order.repo, order.revision):
                    return True
        return bool(self._strays)

    def follower(self, replica: str, attempt: int | None) -> tuple[int, Follower] | None:
        """Of this attempt's log or, by default, of the last one's; None where no engine has written it."""
        logs = self.host.state.logs(replica)
        attempt = next(iter(logs), 0) if attempt is None else attempt
        rank = self._ranks.get(replica)
        key = rank.record.assignment.key if rank else ""  # of one that is forgotten it opens nothing any more
        return (attempt, Follower(logs[attempt], key=key)) if attempt in logs else None

    def is_writing(self, replica: str, attempt: int) -> bool:
        """Whether more may come of this log."""
        rank = self._ranks.get(replica)
        if rank is None:
            return replica in self._strays
        return rank.record.attempt == attempt and not rank.record.is_over

    # --- commands

    def assign(self, assignment: Assignment) -> RankReport:
        """Run this, or go on running it. Raises Refusal."""
        judge_form(assignment)
        self._obey(assignment.cluster, assignment.fence)
        stone = self.host.state.tombstone(assignment.replica)
        if stone is not None and assignment.generation <= stone.generation:
            sentence = (
                f"Replica {assignment.replica} was deleted here and does not come back; start a new one."
            )
            raise Refusal(410, "deleted", sentence)
        known = self._ranks.get(assignment.replica)
        if known is not None:
            generation = known.record.assignment.generation
            if assignment.generation == generation:
                self._heed(assignment)
                known.meet(assignment.peers)
                return known.report()
            self._judge_generation(assignment.replica, assignment.generation, generation)
            if not known.record.is_over:
                sentence = (
                    f"Generation {generation} of {assignment.replica} still runs here; delete it first, and "
                    f"wait until it is gone."
                )
                raise Refusal(409, "generation", sentence)
        self._judge_room(assignment)
        record = Record(
            assignment,
            state=FETCHING,
            since_s=now_s(),
            boot=boot_id(),
            attempt=self.host.state.last_attempt(assignment.replica),
            attempts=known.record.attempts if known else (),
        )
        process = self._take_up_stray(assignment)
        if process is not None:
            stray = self._strays[assignment.replica]
            record = replace(
                record,
                state=STARTING,
                port=stray.port,
                certificate=stray.certificate,
                pid=process.pid,
                started=process.started,
            )
        else:
            record = replace(record, meeting=self._meeting_of(assignment))
        try:
            with self._disk():
                self.host.state.save(record)
        except Refusal:
            if process is not None:
                process.close()
            raise
        self._heed(assignment)
        self._strays.pop(assignment.replica, None)
        rank = self._ranks[assignment.replica] = Rank(self.host, record, process)
        rank.live(self._taken_ports)
        return rank.report()

    def release(
        self, replica: str, *, cluster: str, fence: int, generation: int, drain_s: float
    ) -> RankReport:
        """Drain, stop and bury it; one that is not here is buried, too. Raises Refusal."""
        self._obey(cluster, fence)
        rank = self._ranks.get(replica)
        stray = self._strays.get(replica)
        seen_generation = rank.record.assignment.generation if rank else stray.mark.generation if stray else 0
        self._judge_generation(replica, generation, seen_generation)
        with self._disk():
            self.host.state.bury(replica, generation)
        if rank is None and stray is not None:
            rank = self._account_for(stray)
        if rank is None:
            sentence = f"Replica {replica} is not on this node, and from now on will not be."
            raise Refusal(404, "unknown_replica", sentence)
        if rank.record.is_over:
            report = rank.report()
            self._forget(replica)
            return report
        rank.drain(drain_s, why="It was told to stop.")
        return rank.report()

    # --- the agent's own beginning and end

    def recover(self) -> None:
        """Take up every engine that can be accounted for; resolve what was cut in half. Raises StateError
        where another agent would do the same."""
        self._place = take_place(self.host.configuration.identity.node)
        found: dict[str, list[Seen]] = {}
        for seen in marked_processes(self.host.configuration.identity.node):
            found.setdefault(str(seen.mark), []).append(seen)
        for record in self.host.state.records():
            self._recover(record, found.pop(str(mark_of(record)), []))
        for others in found.values():
            self._strays.setdefault(others[0].mark.replica, others[0])
        self.host.fetches.begin(self.reads)
        self._prune()

    async def close(self, *, stop_engines: bool) -> None:
        """Let every engine run on without the agent, or stop them all."""
        self.host.fetches.part()
        if stop_engines:
            for rank in self._ranks.values():
                rank.drain(0, why="Its agent was stopped.", grace_s=STOP_WITH_AGENT_GRACE_S)
            await asyncio.gather(*(rank.over() for rank in self._ranks.values()))
        await asyncio.gather(*(rank.let_go() for rank in self._ranks.values()))
        await self.host.fetches.close()
        if self._place is not None:
            self._place.close()

    def _recover(self, record: Record, found: Sequence[Seen]) -> None:
        is_this_boot = record.boot == boot_id()
        if not is_this_boot:
            record = replace(record, boot=boot_id(), since_s=now_s(), drain_until_s=None)
        if record.is_over and found:  # the agent died between the end it wrote down and the last process
            record = replace(record, state=DRAINING, since_s=now_s())
        process, is_engine = self._take_up(record, found)
        if process is not None:
            record = replace(record, pid=process.pid, started=process.started)
        elif record.state == DRAINING:
            record = replace(record, state=STOPPED, since_s=now_s(), drain_until_s=None)
        elif record.state == READY or (record.state == STARTING and record.pid is not None):
            record = self._died_unseen(record, is_this_boot)
        rank = self._ranks[record.id] = Rank(self.host, record, process)
        rank.save()
        if record.state == DRAINING:
            rank.leave(was_ready=is_engine)
        elif process is not None and not is_engine:
            rank.lament()
        elif not record.is_over:
            rank.live(self._taken_ports)

    def _take_up(self, record: Record, found: Sequence[Seen]) -> tuple[Process | None, bool]:
        """The record's engine, or what is left of it; and whether it is the engine itself.

        One that was started and not yet written down is known by its mark.
        """
        if not found:
            return None, False
        recorded = (record.pid, record.started)
        engine = next((seen for seen in found if (seen.pid, seen.started) == recorded), None)
        if record.pid is None and found[0].is_leader:
            engine = found[0]
        seen = engine or found[0]
        process = Process.adopt(seen.pid, seen.started, seen.mark)
        return process, process is not None and engine is not None

    def _died_unseen(self, record: Record, is_this_boot: bool) -> Record:
        if is_this_boot:
            log_path = self.host.state.log_path(record.id, record.attempt)
            tail = read_words(log_path, key=record.assignment.key)
            engine = record.assignment.launch.engine
            cause = cause_of_end(engine, tail, None, full_disk=self.host.state.full_disk())
        else:
            cause = Cause(
                "rebooted", "The node restarted while this engine ran; a new one is started.", TRANSIENT
            )
        return replace(
            with_end(record, cause=cause.cause, reason=cause.sentence, exit_code=None, was_seen=False),
            state=FAILED,
            reason=cause.sentence,
            cause=cause.cause,
            kind=cause.kind,
            since_s=now_s(),
        )

    # --- judging

    def _heed(self, assignment: Assignment) -> None:
        with self._disk():
            self.host.fetches.heed(assignment.needed)

    def _obey(self, cluster: str, fence: int) -> None:
        """From here on, nothing that was decided under an older lease is carried out."""
        if cluster != self.cluster:
            sentence = "This node belongs to another cluster; remove it from this one, or join it anew."
            raise Refusal(409, "cluster", sentence)
        seen = self.host.state.ledger.fence
        if fence < seen:
            sentence = f"The command is older ({fence}) than one obeyed here ({seen}); look again first."
            raise Refusal(409, "fence", sentence)
        with self._disk():
            self.host.state.raise_fence(fence)

    @contextlib.contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise Refusal(507, "disk_full", self.host.state.no_room(error)) from None

    def _judge_generation(self, replica: str, given: int, seen: int) -> None:
        if given < seen:
            sentence = (
                f"Generation {given} of {replica} is older than {seen}, which this node has; look again."
            )
            raise Refusal(409, "generation", sentence)

    def _judge_room(self, assignment: Assignment) -> None:
        launch = assignment.launch
        if ranks_in(launch) > 1 and not self.host.configuration.runs_gangs:
            sentence = (
                f'model "{launch.model}" spans several nodes, and this one is in no fabric; start its agent '
                f"with --fabric, and with --fabric-address if it listens everywhere."
            )
            raise Refusal(422, "gang", sentence)
        if launch.engine not in self.host.engines:
            there = ", ".join(sorted(self.host.engines))
            sentence = (
                f"The engine {launch.engine} is not on this node, only {there}; install it, or give it "
                f"to the agent with --engine {launch.engine}=PROGRAM."
            )
            raise Refusal(422, "engine_absent", sentence)
        known = {gpu.id for gpu in self.host.devices.read()}
        for gpu in assignment.gpus:
            if gpu not in known:
                raise Refusal(
                    422, "gpu_unknown", f"There is no GPU {gpu} on this node; look at its state again."
                )
        for holder, gpus in self._held_gpus(assignment.replica):
            if taken := sorted(gpus & set(assignment.gpus)):
                sentence = (
                    f"GPU {taken[0]} is held by replica {holder}; stop that one first or choose another."
                )
                raise Refusal(409, "gpu_taken", sentence)

    def _held_gpus(self, replica: str) -> list[tuple[str, set[str]]]:
        running = [
            (each, set(rank.record.assignment.gpus))
            for each, rank in self._ranks.items()
            if not rank.record.is_over and each != replica
        ]
        strays = [(each, set(seen.gpus)) for each, seen in self._strays.items() if each != replica]
        return running + strays

    def _taken_ports(self) -> set[int]:
        running = [rank.record for rank in self._ranks.values() if not rank.record.is_over]
        ports = {record.port for record in running} | {seen.port for seen in self._strays.values()}
        meetings = {int(split_meeting(each.meeting)[1]) for each in running if each.meeting}
        return meetings | {port for port in ports if port is not None}

    def _meeting_of(self, assignment: Assignment) -> str:
        """Where the ranks of its replica meet, chosen anew for each by rank 0's agent. Raises Refusal."""
        if ranks_in(assignment.launch) == 1 or assignment.rank > 0:
            return assignment.meeting
        address = self.host.configuration.meeting_address
        try:
            port = next_port(self.host, address, self._taken_ports())
        except PortError as error:
            raise Refusal(503, "port_in_use", str(error)) from None
        with self._disk():
            self.host.state.keep_next_port(port + 1)
        return meeting_at(address, port)

    # --- strays: marked processes without a record

    def _take_up_stray(self, assignment: Assignment) -> Process | None:
        """The control plane knows the launch and the key of one that has lost its record. Raises Refusal."""
        seen = self._strays.get(assignment.replica)
        if seen is None:
            return None
        is_the_one = seen.mark.generation == assignment.generation and seen.mark.rank == assignment.rank
        process = None
        if is_the_one and seen.is_leader and seen.port is not None:
            process = Process.adopt(seen.pid, seen.started, seen.mark)
        if process is None:
            sentence = f"Processes of {assignment.replica} run here without a record; delete it first."
            raise Refusal(409, "stray", sentence)
        return process

    def _account_for(self, seen: Seen) -> Rank | None:
        """A stray that is to be stopped gets a record for that."""
        del self._strays[seen.mark.replica]
        process = Process.adopt(seen.pid, seen.started, seen.mark)
        if process is None:
            return None
        record = Record(
            Assignment(
                self.cluster,
                seen.mark.replica,
                seen.mark.generation,
                self.host.state.ledger.fence,
                Launch("", "", {}),
                "",
                seen.gpus,
                seen.mark.rank,
            ),
            state=STARTING,
            since_s=now_s(),
            boot=boot_id(),
            port=seen.port,
            certificate=seen.certificate,
            pid=seen.pid,
            started=seen.started,
            attempt=self.host.state.last_attempt(seen.mark.replica),
        )
        rank = self._ranks[record.id] = Rank(self.host, record, process)
        return rank

    # --- what is over

    def _forget(self, replica: str) -> None:
        self.host.state.forget(replica)
        del self._ranks[replica]

    def _prune(self) -> None:
        """What is over is told for a day, so that nobody misses it, and not without bound. What a full disk
        had no room for is written once it has."""
        for replica, seen in list(self._strays.items()):
            if start_time(seen.pid) != seen.started:
                del self._strays[replica]
        for rank in self._ranks.values():
            if not rank.is_saved:
                rank.save()
        over = [rank for rank in self._ranks.values() if rank.record.state in OVER]
        over.sort(key=lambda rank: rank.record.since_s, reverse=True)
        old = [rank for rank in over[:OVER_KEPT] if now_s() - rank.record.since_s > OVER_KEPT_S]
        for rank in old + over[OVER_KEPT:]:
            self._forget(rank.record.id)
        if old or len(over) > OVER_KEPT:
            self.host.state.prune_logs({*self._ranks, *self._strays})


def _stray_report(seen: Seen) -> RankReport:
    return RankReport(
        replica=seen.mark.replica,
        generation=seen.mark.generation,
        rank=seen.mark.rank,
        state=STARTING,
        reason="Its processes run here, but its record is lost; they are left alone until told to stop.",
        port=seen.port,
        certificate=seen.certificate,
        pid=seen.pid,
        gpus=seen.gpus,
    )
