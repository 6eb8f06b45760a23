"""The life of one rank: fetching, starting, ready, draining, and stopped or failed.

Every state has one sentence and an age. What must survive the agent is written before it is done: the record
first, then the process. An engine that ends while it is wanted has failed, whatever its exit code, and is not
started again here: the control plane decides where the next one goes. Only a port that somebody took before
the engine could is replaced by another one at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from catalog.durations import MINUTE, SECOND, format_duration
from nodes.agent.clock import boot_id, now_s
from nodes.agent.failures import Failed, cause_of_end, with_end
from nodes.agent.gpus import unreturned
from nodes.agent.host import Host
from nodes.agent.inventory import OF_ALL, oom_counter, oom_kills
from nodes.agent.launching import engine_of, mark_of, own_certificate, prepare
from nodes.agent.logs import bound_log, read_words
from nodes.agent.probes import Load, Probe
from nodes.agent.processes import Process
from nodes.agent.state import Record
from nodes.agent.watch import Ended, Watch
from nodes.agent.weights.fetches import Fetch
from nodes.agent.weights.sources import FetchError
from nodes.engines import ENGINES
from nodes.engines.causes import Cause
from nodes.protocol import (
    DISK,
    DRAINING,
    FAILED,
    FETCHING,
    NODE,
    READY,
    STARTING,
    STOPPED,
    TRANSIENT,
    ClusterKey,
    Launch,
    Peer,
    RankReport,
)

log = logging.getLogger("llmgw.agent")

GPU_POLL_S = 0.2
GPU_RETURN_S = 30.0  # for a driver to give back what an engine held
PORTS_TRIED = 3
DEFAULT_STARTUP_TIMEOUT_NS = 20 * MINUTE


class Rank:
    """One rank on this node."""

    def __init__(self, host: Host, record: Record, process: Process | None = None) -> None:
        self.host, self.record = host, record
        self._process = process
        self._life: asyncio.Task[None] | None = None
        self._note = ""  # what is in the way just now; not worth a write
        self._watch: Watch | None = None
        self._fetch_seen: Fetch | None = None
        self._oom_counter, self._oom_kills = OF_ALL, oom_kills(OF_ALL)
        self.is_saved = True

    @property
    def launch(self) -> Launch:
        return self.record.assignment.launch

    @property
    def load(self) -> Load:
        """What its engine said last."""
        is_serving = self.record.state in (READY, DRAINING)
        return self._watch.load if self._watch and is_serving else Load()

    def report(self) -> RankReport:
        record, load = self.record, self.load
        note = self._note or (self._watch.note if self._watch else "")
        is_fetching = record.state == FETCHING
        is_short_of_disk = record.state == FAILED and record.kind == DISK
        fetch = self._fetch_seen if is_fetching or is_short_of_disk else None
        if fetch is not None and is_fetching:
            note = fetch.says
        return RankReport(
            replica=record.id,
            generation=record.assignment.generation,
            rank=record.assignment.rank,
            state=record.state,
            reason=note or record.reason,
            age_s=round(max(0.0, now_s() - record.since_s), 3),
            port=record.port,
            pid=record.pid,
            gpus=tuple(record.assignment.gpus),
            launch=self.launch if self.launch.engine else None,
            command=record.command,
            cause=record.cause,
            kind=record.kind,
            exit_code=record.exit_code,
            running=load.running,
            waiting=load.waiting,
            done_bytes=fetch.done if fetch and fetch.total is not None else None,
            total_bytes=fetch.total if fetch else None,
            bytes_per_s=fetch.bytes_per_s if fetch and is_fetching else None,
            wants_peers=fetch is not None and is_fetching and fetch.wants_peers,
            key_id=ClusterKey.id_of(record.assignment.key),
            meeting=record.meeting,
            attempt=record.attempt or None,
            attempts=record.attempts,
            context_length=record.context_length,
            certificate=record.certificate,
        )

    # --- from outside

    def live(self, taken_ports: Callable[[], set[int]]) -> None:
        """Go on from wherever the record stands. taken_ports: those that other ranks hold."""
        self._run(self._live(taken_ports))

    def meet(self, peers: Sequence[Peer]) -> None:
        """These nodes have its weights now."""
        if self.record.state == FETCHING and self._fetch_seen is not None:
            self.host.fetches.meet(self._fetch_seen, peers)

    def lament(self) -> None:
        """Its leader ended unseen and others of its processes are left: end those, then tell the cause."""
        self._run(self._bury())

    def drain(self, drain_s: float, *, why: str, grace_s: float | None = None) -> None:
        """Let running requests finish, for so long at most, then stop. A second call can only shorten it."""
        if self.record.is_over:
            return
        until_s = now_s() + drain_s
        if self.record.state == DRAINING and self.record.drain_until_s is not None:
            if until_s < self.record.drain_until_s:
                self._set(drain_until_s=until_s)
            if grace_s is None:
                return
        was_ready = self.record.state in (READY, DRAINING) and self.launch.engine in ENGINES
        self._set(state=DRAINING, reason=why, drain_until_s=until_s)
        self.leave(was_ready=was_ready, grace_s=grace_s)

    def leave(self, *, was_ready: bool, grace_s: float | None = None) -> None:
        self._run(
            self._leave(
                self._life, was_ready, self.host.configuration.stop_grace_s if grace_s is None else grace_s
            )
        )

    async def over(self) -> None:
        """Returns when the life that is under way has come to its end."""
        while self._life is not None and not self._life.done():
            await asyncio.wait([self._life])

    async def let_go(self) -> None:
        """The agent goes; the engine stays."""
        if self._life is not None:
            self._life.cancel()
            await asyncio.wait([self._life])
        if self._process is not None:
            self._process.close()

    def save(self) -> None:
        """What has happened is not undone by a full disk: it is written as soon as there is room."""
        try:
            self.host.state.save(self.record)
            self.is_saved = True
        except OSError as error:
            if self.is_saved:
                log.error("The record of replica %s is not saved yet: %s", self.record.id, error)
            self.is_saved = False

    # --- the life

    def _run(self, life: Coroutine[Any, Any, None]) -> None:
        self._life = asyncio.create_task(self._guard(life), name=f"rank {self.record.id}")

    async def _guard(self, life: Coroutine[Any, Any, None]) -> None:
        try:
            await life
        except Exception:
            log.exception("The life of replica %s broke off.", self.record.id)
            await self._end_process(0)
            sentence = "The agent itself failed here; its log tells more."
            self._fail(Cause("agent_fault", sentence, NODE))

    async def _live(self, taken_ports: Callable[[], set[int]]) -> None:
        """A process that was taken up is not started again: where its weights are is not on record."""
        try:
            tries = 0
            if self._process is None:
                path = await self._fetch()
                self._change(gpu_used_mib=await asyncio.to_thread(self._used))
                tries = PORTS_TRIED if self.record.meeting == "" else 1
            while True:
                if self._process is None:
                    tries -= 1
                    self._start(path, taken_ports())
                is_new = self.record.state != READY
                try:
                    if is_new:
                        await self._wait_until_ready()
                        is_new = False
                    await self._stay_ready()
                except Ended:
                    failed = await self._mourn()
                    if not (is_new and tries and failed.is_of_its_port):
                        raise failed from None
        except Failed as failed:
            self._fail(failed.cause)

    async def _fetch(self) -> str:
        self._set(
            state=FETCHING,
            reason="",
            pid=None,
            started=None,
            port=None,
            certificate="",
            command=(),
            context_length=None,
        )
        if not engine_of(self.host, self.launch.engine).adapter.needs_weights:
            return ""

        def watch(fetch: Fetch) -> None:
            self._fetch_seen = fetch

        try:
            path = await self.host.fetches.obtain(self.launch, self.record.assignment.peers, watch)
        except FetchError as error:
            raise Failed(error.cause) from None
        with self._disk():
            self.host.state.keep_weights(self.launch.source, path)
        return path

    def _start(self, model_path: str, taken_ports: set[int]) -> None:
        """Without a pause in it: the record says that a process may exist before one does."""
        host = self.host
        prepared = prepare(host, self.record, model_path, taken_ports)
        with self._disk():
            host.state.keep_next_port(prepared.port + 1)
            self._change(
                state=STARTING,
                reason="",
                port=prepared.port,
                certificate=prepared.certificate,
                command=prepared.command.shown,
                pid=None,
                started=None,
                context_length=None,
                attempt=host.state.next_attempt(self.record),
            )
            host.state.save(self.record)
        try:
            self._process = Process.spawn(
                prepared.command.argv,
                env=prepared.env,
                mark=mark_of(self.record),
                log=host.state.log_path(self.record.id, self.record.attempt),
                folder=host.state.path,
                ends_with_agent=host.configuration.engines_end_with_agent,
            )
        except OSError as error:
            title = ENGINES[self.launch.engine].title
            sentence = f"{title} cannot be run ({error.strerror}); check it on the node."
            raise Failed(Cause("engine_broken", sentence, NODE)) from None
        self._set(pid=self._process.pid, started=self._process.started)
        self._count_oom_kills()

    async def _wait_until_ready(self) -> None:
        watch = self._watch_of_process()
        limit_ns = self.launch.profile.get("startup_timeout")
        if not isinstance(limit_ns, int) or limit_ns <= 0:
            limit_ns = DEFAULT_STARTUP_TIMEOUT_NS
        if await watch.until_ready(self.record.since_s + limit_ns / SECOND - now_s()):
            is_part = self.record.assignment.rank > 0
            self._set(
                state=READY,
                reason="Its part runs; rank 0 tells when all of the replica serves." if is_part else "",
                context_length=watch.context_length,
            )
            return
        sentence = (
            f"It did not become ready within {format_duration(limit_ns)} ({watch.note}); give the profile a "
            f"longer startup_timeout, or look into its log."
        )
        raise await self._put_down(Cause("start_timeout", sentence, TRANSIENT))

    async def _stay_ready(self) -> None:
        """Until its process ends, or is stuck."""

        async def look_after() -> None:
            self._count_oom_kills()
            await asyncio.to_thread(bound_log, self._log_path())

        sentence = await self._watch_of_process().until_stuck(
            self.host.configuration.stuck_after_s, look_after
        )
        raise await self._put_down(Cause("stuck", sentence, TRANSIENT))

    # --- its end

    async def _bury(self) -> None:
        self._fail((await self._mourn()).cause)

    async def _mourn(self) -> Failed:
        """Its process ended while it was wanted. It has failed once nothing of it is left."""
        process = self._process
        assert process is not None
        now = oom_kills(self._oom_counter)
        is_short_of_memory = now is not None and self._oom_kills is not None and now > self._oom_kills
        if process.has_remains:
            self._set(state=DRAINING, reason="Its engine ended; what it left behind is being stopped.")
        await self._end_process(0)
        tail = read_words(self._log_path(), key=self.record.assignment.key)
        cause = cause_of_end(
            self.launch.engine,
            tail,
            process.exit_code,
            is_short_of_memory=is_short_of_memory,
            full_disk=await asyncio.to_thread(self.host.state.full_disk),
        )
        self._keep_end(cause.cause, cause.sentence, process)
        return Failed(cause)

    async def _put_down(self, cause: Cause) -> Failed:
        """It runs, and has failed all the same."""
        process = self._process
        await self._end_process(0)
        if process is not None:
            self._keep_end(cause.cause, cause.sentence, process)
        return Failed(cause)

    async def _leave(self, life: asyncio.Task[None] | None, was_ready: bool, grace_s: float) -> None:
        if life is not None:
            life.cancel()
            await asyncio.wait([life])
        if (process := self._process) is not None:
            if was_ready:
                with contextlib.suppress(Ended):
                    await self._watch_of_process().until_idle(lambda: self.record.drain_until_s or 0.0)
            await self._end_process(grace_s)
            self._keep_end("", self.record.reason, process)
        self._set(state=STOPPED, drain_until_s=None)

    async def _end_process(self, grace_s: float) -> None:
        """Returns when nothing of it is left, and its GPUs are what they were."""
        if (process := self._process) is None:
            return
        await process.end(grace_s=grace_s, tell=self._tell)
        process.close()
        ended_s = now_s()
        while held := await asyncio.to_thread(self._unreturned):
            if now_s() - ended_s > GPU_RETURN_S:
                log.warning("replica %s: its processes are gone, and %s.", self.record.id, held)
                break
            self._tell(f"its processes are gone, and {held}")
            await asyncio.sleep(GPU_POLL_S)
        self._process = self._watch = None

    def _count_oom_kills(self) -> None:
        """While it runs, as later nobody can tell which cgroup it was in."""
        if self._process is not None:
            self._oom_counter = oom_counter(self._process.pid)
            self._oom_kills = oom_kills(self._oom_counter)

    def _unreturned(self) -> str:
        before = self.record.gpu_used_mib
        return unreturned(self.host.devices.read(), before) if before else ""

    def _used(self) -> dict[str, int]:
        gpus = self.record.assignment.gpus
        cards = self.host.devices.read() if gpus else ()
        return {card.id: card.used_mib for card in cards if card.id in gpus and card.used_mib is not None}

    def _tell(self, note: str) -> None:
        self._note = note

    def _keep_end(self, cause: str, reason: str, process: Process) -> None:
        code = process.exit_code
        self._change(exit_code=code)
        self.record = with_end(self.record, cause=cause, reason=reason, exit_code=code, was_seen=True)

    def _fail(self, cause: Cause) -> None:
        self._set(state=FAILED, reason=cause.sentence, cause=cause.cause, kind=cause.kind)

    # --- parts

    def _log_path(self) -> Path:
        return self.host.state.log_path(self.record.id, self.record.attempt)

    @contextlib.contextmanager
    def _disk(self) -> Iterator[None]:
        """What must be written before it is done is not done without."""
        try:
            yield
        except OSError as error:
            raise Failed(Cause("disk_full", self.host.state.no_room(error), DISK)) from None

    def _watch_of_process(self) -> Watch:
        """Rank 0 answers for its whole replica; the others have no door."""
        assert self._process is not None
        if self._watch is None:
            self._watch = Watch(self._process, self._probe() if self.record.assignment.rank == 0 else None)
        return self._watch

    def _probe(self) -> Probe:
        address = self.host.configuration.address
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)  # noqa: S104
        at = f"[{host}]" if ":" in host else host
        return Probe(
            self.host.session,
            ENGINES[self.launch.engine],
            self.launch,
            base_url=f"{'https' if self.record.certificate else 'http'}://{at}:{self.record.port}",
            key=self.record.assignment.key,
            certificate=self.record.certificate,
            is_own=self._is_own,
        )

    def _is_own(self, certificate: str) -> bool:
        """Whether it shows what was renewed while it loaded: engines read their files when they listen, which
        is long after they were started."""
        try:
            is_own = self.host.configuration.tls is not None and certificate == own_certificate(self.host)
        except Failed:
            return False
        if is_own:
            self._set(certificate=certificate)
        return is_own

    def _set(self, **changes: Any) -> None:
        self._change(**changes)
        self.save()

    def _change(self, **changes: Any) -> None:
        """A note ends with the state it was about."""
        before = self.record.state
        if changes.get("state", before) != before:
            changes |= {"since_s": now_s(), "boot": boot_id()}
            self._note = ""
            if self._watch is not None:
                self._watch.note = ""
            reason = changes.get("reason", self.record.reason)
            told = f"{before}, then {changes['state']}" + (f": {reason}" if reason else "")
            log.info("replica %s: %s", self.record.id, told)
            self.host.hints.tell()
        self.record = replace(self.record, **changes)
