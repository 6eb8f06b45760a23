"""What this process is asked for, written down for the reconciler: waiting and in-flight requests per model.

Counted on the event loop, written by a thread in batches, and only what changed. A request that begins to
wait is written at once, and the reconciler is woken after that, so that it finds the row. Nobody here waits
for a broker or a database: a request's path only counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

from django.db import DatabaseError, InterfaceError, transaction
from django.db.models.functions import Now

from catalog.models import Model
from llmgw.gateway.database import DatabaseThread
from llmgw.gateway.table import LiveTable
from nodes.models import Demand, Gateway

log = logging.getLogger(__name__)

FLUSH_S = 0.5
HEARTBEAT_S = 2.0
WAKE_GAP_S = 0.5
"""The least time between two wakes: one tick serves every request that waits."""


def write_demand(gateway: uuid.UUID, revision: int, rows: Mapping[int, tuple[int, int]]) -> bool:
    """This process's heartbeat, and (waiting, in flight) for some models. False when the process's row was
    new, so that nothing of what was written before is there. Runs in the book's thread."""
    with transaction.atomic():
        is_known = Gateway.objects.filter(pk=gateway).update(heartbeat_at=Now(), seen_revision=revision) == 1
        if not is_known:
            Gateway.objects.create(id=gateway, seen_revision=revision)
        there = Model.objects.filter(pk__in=rows).values_list("pk", flat=True)
        Demand.objects.bulk_create(
            [
                Demand(
                    gateway_id=gateway,
                    model_id=model,
                    asked_at=Now(),
                    waiting=rows[model][0],
                    in_flight=rows[model][1],
                )
                for model in there
            ],
            update_conflicts=True,
            unique_fields=["gateway", "model"],
            update_fields=["asked_at", "waiting", "in_flight"],
        )
    return is_known


class DemandBook:
    """Counts of this process, and the loops that write them down and wake the reconciler."""

    def __init__(self, table: LiveTable, *, wake: Callable[[], object]) -> None:
        self.gateway = uuid.uuid4()
        self._table, self._wake = table, wake
        self._waiting: Counter[int] = Counter()
        self._in_flight: defaultdict[int, int] = defaultdict(int)
        self._changed: set[int] = set()
        self._urgent = asyncio.Event()
        self._must_wake = asyncio.Event()
        self._thread = DatabaseThread("demand")
        self._wake_thread = ThreadPoolExecutor(1, thread_name_prefix="wake")
        self._tasks: list[asyncio.Task[None]] = []
        self._written_revision, self._written_at_s = -1, float("-inf")
        self._is_failing = self._is_wake_failing = False

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(self._keep_writing()), asyncio.create_task(self._keep_waking())]

    async def stop(self) -> None:
        """Ends with a last write, and with the word that this process is gone: nobody waits for it to go
        quiet. The rows stay, because when a model was last asked for outlives it."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._changed:
            await self._write()
        with contextlib.suppress(DatabaseError, InterfaceError):  # its silence says it, later
            await self._thread.run(lambda: Gateway.objects.filter(pk=self.gateway).update(stopped_at=Now()))
        self._wake_thread.shutdown(wait=False, cancel_futures=True)
        await self._thread.stop()

    def waiting_for(self, model: int) -> int:
        return self._waiting[model]

    @contextlib.contextmanager
    def waits(self, model: int) -> Iterator[None]:
        """While a request waits for the model to have a replica."""
        self._waiting[model] += 1
        self._changed.add(model)
        self._urgent.set()
        try:
            yield
        finally:
            self._waiting[model] -= 1
            self._changed.add(model)

    def begin_serving(self, model: int) -> None:
        """A replica of the model works on a request, until `end_serving`."""
        self._in_flight[model] = self._in_flight.get(model, 0) + 1
        self._changed.add(model)

    def end_serving(self, model: int) -> None:
        """Counts as being asked for, so that a model is idle from its last answer on."""
        self._in_flight[model] -= 1
        self._changed.add(model)

    def ask_to_look(self) -> None:
        """Has the reconciler look at what there is, because somebody saw that it is not so."""
        self._must_wake.set()

    async def _keep_writing(self) -> None:
        while True:
            is_urgent = self._urgent.is_set()
            self._urgent.clear()
            revision, now = self._table.current.revision, monotonic()
            if self._changed or revision != self._written_revision or now - self._written_at_s >= HEARTBEAT_S:
                await self._write()
            if is_urgent:
                self._must_wake.set()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._urgent.wait(), FLUSH_S)

    async def _write(self) -> None:
        models, self._changed = self._changed, set()
        rows = {model: (self._waiting[model], self._in_flight[model]) for model in models}
        revision, now = self._table.current.revision, monotonic()
        try:
            is_known = await self._thread.run(lambda: write_demand(self.gateway, max(revision, 0), rows))
        except Exception as error:  # kept, and written once the database is back
            self._changed |= models
            if not self._is_failing:
                log.error("Demand cannot be written, and is kept: %s", error)
            self._is_failing = True
            return
        self._is_failing = False
        self._written_revision, self._written_at_s = revision, now
        if not is_known:
            self._changed |= {model for model in (*self._waiting, *self._in_flight) if model not in rows}

    async def _keep_waking(self) -> None:
        while True:
            await self._must_wake.wait()
            self._must_wake.clear()
            try:
                await asyncio.get_running_loop().run_in_executor(self._wake_thread, self._wake)
            except Exception as error:  # the beat's next tick sees the row all the same
                if not self._is_wake_failing:
                    log.warning("The reconciler could not be woken and will find out by itself: %s", error)
                self._is_wake_failing = True
            else:
                self._is_wake_failing = False
            await asyncio.sleep(WAKE_GAP_S)
