"""The life of one rank: fetching, starting, ready, draining, and stopped or failed.

Every state has one sentence and an age. What must survive the agent is written before it is done: the record
first, then the process. An engine that ends while it is wanted has failed, whatever its exit code, and is not
started again here: the control plane decides where the next one goes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from catalog.durations import MINUTE, SECOND, format_duration
from nodes.agent.clock import boot_id, now_s
from nodes.agent.host import Host
from nodes.agent.inventory import FoundEngine
from nodes.agent.logs import bound_log, read_words
from nodes.agent.ports import PortError, find_port
from nodes.agent.probes import Load, Probe
from nodes.agent.processes import Mark, Process, engine_env
from nodes.agent.secrets import SecretError
from nodes.agent.state import Record
from nodes.agent.weights import FetchError, fetch
from nodes.engines import ENGINES, RenderError, Seat, render
from nodes.engines.causes import Cause, classify
from nodes.protocol import (
    CONFIGURATION,
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
    RankReport,
)

log = logging.getLogger("llmgw.agent")

READINESS_POLL_S = 0.2
LIVENESS_POLL_S = 1.5
DRAIN_POLL_S = 0.2
DRAIN_LEAST_S = 0.5  # a request that was routed just before the drain began is still on its way
UNHEALTHY_POLLS = 3
DEFAULT_STARTUP_TIMEOUT_NS = 20 * MINUTE

T = TypeVar("T")


class _Failed(Exception):
    def __init__(self, cause: Cause, exit_code: int | None = None) -> None:
        super().__init__(cause.sentence)
        self.cause, self.exit_code = cause, exit_code


class _Ended(Exception):
    """The process ended while something was asked of it."""


def mark_of(record: Record) -> Mark:
    return Mark(record.id, record.assignment.generation, record.assignment.rank)


class Rank:
    """One rank on this node."""

    def __init__(self, host: Host, record: Record, process: Process | None = None) -> None:
        self.host, self.record = host, record
        self._process = process
        self._life: asyncio.Task[None] | None = None
        self._note = ""  # what is in the way just now; not worth a write
        self._load = Load()
        self._fetched: tuple[int, int] | None = None
        self._is_saved = True

    @property
    def launch(self) -> Launch:
        return self.record.assignment.launch

    @property
    def log_path(self) -> Path:
        return self.host.state.log_path(self.record.id, self.record.assignment.generation)

    def report(self) -> RankReport:
        record = self.record
        is_serving = record.state in (READY, DRAINING)
        done, total = self._fetched if self._fetched and record.state == FETCHING else (None, None)
        return RankReport(
            replica=record.id,
            generation=record.assignment.generation,
            rank=record.assignment.rank,
            state=record.state,
            reason=self._note or record.reason,
            age_s=round(max(0.0, now_s() - record.since_s), 3),
            port=record.port,
            pid=record.pid,
            gpus=tuple(record.assignment.gpus),
            launch=self.launch if self.launch.engine else None,
            command=record.command,
            cause=record.cause,
            kind=record.kind,
            exit_code=record.exit_code,
            running=self._load.running if is_serving else None,
            waiting=self._load.waiting if is_serving else None,
            done_bytes=done,
            total_bytes=total,
            key_id=ClusterKey.id_of(record.assignment.key),
        )

    # --- from outside

    def live(self, taken_ports: Callable[[], set[int]]) -> None:
        """Go on from wherever the record stands. taken_ports: those that other ranks hold."""
        self._run(self._live(taken_ports))

    def lament(self) -> None:
        """Its leader ended unseen and others of its processes are left: end those, then tell the cause."""
        self._run(self._tell_end())

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
        self._run(self._leave(self._life, was_ready, self.host.stop_grace_s if grace_s is None else grace_s))

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
            self._is_saved = True
        except OSError as error:
            self._is_saved = False
            log.error("The record of replica %s is not saved yet: %s", self.record.id, error)

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
            self._fail(_Failed(Cause("agent_fault", sentence, NODE)))

    async def _live(self, taken_ports: Callable[[], set[int]]) -> None:
        try:
            if self._process is None:
                path = await self._fetch()
                self._start(path, taken_ports())
            try:
                if self.record.state != READY:
                    await self._wait_until_ready()
                await self._watch()
            except _Ended:
                await self._tell_end()
        except _Failed as failed:
            self._fail(failed)

    async def _fetch(self) -> str:
        self._set(state=FETCHING, reason="", pid=None, started=None, port=None, command=())
        if not self._engine().adapter.needs_weights:
            return ""

        def progress(done: int, total: int) -> None:
            self._fetched = (done, total)
            self._note = f"{done / 1e9:.1f} of {total / 1e9:.1f} GB of {self.launch.source} are on the node"

        try:
            path = await fetch(self.launch, self.host.store, progress)
        except FetchError as error:
            raise _Failed(error.cause) from None
        with self._disk():
            self.host.state.keep_weights(self.launch.source, path)
        return path

    def _start(self, model_path: str, taken_ports: set[int]) -> None:
        """Without a pause in it: the record says that a process may exist before one does."""
        host, assignment = self.host, self.record.assignment
        engine = self._engine()
        first, last = host.ports
        try:
            port = find_port(host.address, first, last, start=host.state.ledger.next_port, taken=taken_ports)
            seat = Seat(
                executable=engine.words,
                host=host.address,
                port=port,
                key=assignment.key,
                model_path=model_path,
                gpus=tuple(assignment.gpus),
                allowed_args=host.allowed_args,
            )
            command = render(self.launch, seat)
            given = {**engine.env, **host.secrets.resolve(command.env)}
        except PortError as error:
            raise _Failed(Cause("port_in_use", str(error), TRANSIENT)) from None
        except RenderError as error:
            raise _Failed(Cause("bad_argument", str(error), CONFIGURATION)) from None
        except SecretError as error:
            raise _Failed(Cause("no_secret", str(error), NODE)) from None
        mark = mark_of(self.record)
        env = engine_env(os.environ, given, mark=mark, node=host.node, port=port)
        with self._disk():
            host.state.keep_next_port(port + 1)
            self._change(state=STARTING, reason="", port=port, command=command.shown)
            host.state.save(self.record)
        try:
            self._process = Process.spawn(
                command.argv,
                env=env,
                mark=mark,
                log=self.log_path,
                folder=host.state.path,
                ends_with_agent=host.engines_end_with_agent,
            )
        except OSError as error:
            sentence = f"{engine.adapter.title} cannot be run ({error.strerror}); check it on the node."
            raise _Failed(Cause("engine_broken", sentence, NODE)) from None
        self._set(pid=self._process.pid, started=self._process.started)

    async def _wait_until_ready(self) -> None:
        limit_ns = self.launch.profile.get("startup_timeout")
        if not isinstance(limit_ns, int) or limit_ns <= 0:
            limit_ns = DEFAULT_STARTUP_TIMEOUT_NS
        probe = self._probe()
        try:
            async with asyncio.timeout(self.record.since_s + limit_ns / SECOND - now_s()):
                while obstacle := await self._while_it_runs(probe.obstacle()):
                    self._note = f"not ready yet: {obstacle}"
                    await self._while_it_runs(asyncio.sleep(READINESS_POLL_S))
                self._load = await self._while_it_runs(probe.load())
        except TimeoutError:
            note = self._note or "it did not answer"
            await self._end_process(0)
            sentence = (
                f"It did not become ready within {format_duration(limit_ns)} ({note}); give the profile a "
                f"longer startup_timeout, or look into its log."
            )
            raise _Failed(Cause("start_timeout", sentence, TRANSIENT)) from None
        self._set(state=READY, reason="")

    async def _watch(self) -> None:
        """Until its process ends. An engine that does not answer may be busy: it is said, not judged."""
        probe = self._probe()
        silent = 0
        while True:
            is_healthy = await self._while_it_runs(probe.is_healthy())
            self._load = await self._while_it_runs(probe.load())
            silent = 0 if is_healthy else silent + 1
            self._note = ""
            if silent >= UNHEALTHY_POLLS:
                self._note = f"its process runs, but did not answer the last {silent} health checks"
            if not self._is_saved:
                self.save()
            await asyncio.to_thread(bound_log, self.log_path)
            await self._while_it_runs(asyncio.sleep(LIVENESS_POLL_S))

    async def _tell_end(self) -> None:
        """Its process ended while it was wanted. It has failed once nothing of it is left."""
        assert self._process is not None
        exit_code = self._process.exit_code
        if self._process.has_remains:
            self._set(state=DRAINING, reason="Its engine ended; what it left behind is being stopped.")
        await self._end_process(0)
        tail = read_words(self.log_path, key=self.record.assignment.key)
        killed_by = -exit_code if exit_code is not None and exit_code < 0 else None
        self._fail(_Failed(classify(self.launch.engine, tail, exit_code, killed_by), exit_code))

    async def _leave(self, life: asyncio.Task[None] | None, was_ready: bool, grace_s: float) -> None:
        if life is not None:
            life.cancel()
            await asyncio.wait([life])
        exit_code = None
        if self._process is not None:
            if was_ready:
                with contextlib.suppress(_Ended):
                    await self._wait_until_idle()
            self._note = "its processes are being stopped"
            await self._process.end(grace_s=grace_s)
            exit_code = self._process.exit_code
            self._process.close()
        self._set(state=STOPPED, exit_code=exit_code, drain_until_s=None)

    async def _wait_until_idle(self) -> None:
        probe = self._probe()
        told_s = now_s()
        while (until_s := self.record.drain_until_s) is not None and now_s() < until_s:
            self._load = await self._while_it_runs(probe.load())
            if self._load.is_idle and now_s() - told_s >= DRAIN_LEAST_S:
                return
            self._note = self._waits_for()
            await self._while_it_runs(asyncio.sleep(min(DRAIN_POLL_S, max(0.0, until_s - now_s()))))

    def _waits_for(self) -> str:
        if self._load.running is None:
            return "waits for its running requests, whose number it does not tell"
        return f"waits for {self._load.running + (self._load.waiting or 0)} requests to finish"

    # --- parts

    def _engine(self) -> FoundEngine:
        name = self.launch.engine
        if name not in self.host.engines:
            sentence = f"The engine {name} is no longer on this node; install it, or give it with --engine."
            raise _Failed(Cause("engine_absent", sentence, NODE))
        return self.host.engines[name]

    @contextlib.contextmanager
    def _disk(self) -> Iterator[None]:
        """What must be written before it is done is not done without."""
        try:
            yield
        except OSError as error:
            raise _Failed(Cause("disk_full", self.host.state.no_room(error), DISK)) from None

    def _probe(self) -> Probe:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host.address, self.host.address)  # noqa: S104
        at = f"[{host}]" if ":" in host else host
        return Probe(
            self.host.session,
            ENGINES[self.launch.engine],
            self.launch,
            base_url=f"http://{at}:{self.record.port}",
            key=self.record.assignment.key,
        )

    async def _while_it_runs(self, work: Coroutine[Any, Any, T]) -> T:
        """The work's result; raises _Ended as soon as the process ends."""
        assert self._process is not None
        task = asyncio.ensure_future(work)
        end = asyncio.ensure_future(self._process.ended())
        try:
            await asyncio.wait([task, end], return_when=asyncio.FIRST_COMPLETED)
            if end.done():
                raise _Ended
            return task.result()
        finally:
            for each in (task, end):
                each.cancel()
            await asyncio.wait([task, end])

    async def _end_process(self, grace_s: float) -> None:
        if self._process is not None:
            await self._process.end(grace_s=grace_s)
            self._process.close()

    def _fail(self, failed: _Failed) -> None:
        cause = failed.cause
        self._set(
            state=FAILED,
            reason=cause.sentence,
            cause=cause.cause,
            kind=cause.kind,
            exit_code=failed.exit_code,
        )

    def _set(self, **changes: Any) -> None:
        self._change(**changes)
        self.save()

    def _change(self, **changes: Any) -> None:
        """A note ends with the state it was about."""
        before = self.record.state
        if changes.get("state", before) != before:
            changes |= {"since_s": now_s(), "boot": boot_id()}
            self._note = ""
            reason = changes.get("reason", self.record.reason)
            told = f"{before}, then {changes['state']}" + (f": {reason}" if reason else "")
            log.info("replica %s: %s", self.record.id, told)
        self.record = replace(self.record, **changes)
