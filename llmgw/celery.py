"""The Celery app, the broker that needs no server, and a beat that no clock can stop.

Tasks are doorways: JSON, ids only, an expiry on each. Settings are the `CELERY_*` names of llmgw/settings.py.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from queue import Empty
from time import monotonic
from typing import Any

from celery import Celery, bootsteps
from celery.beat import EmbeddedService, ScheduleEntry, Scheduler
from celery.schedules import schedstate
from celery.worker import WorkController, components
from kombu.transport import filesystem, virtual
from kombu.utils.encoding import bytes_to_str, str_to_bytes
from kombu.utils.json import dumps, loads

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "llmgw.settings")

logger = logging.getLogger(__name__)


class FileChannel(virtual.Channel):
    """Each message is a whole file in one folder, and whoever removes it has taken it.

    kombu's own channel dies of a message that is half written or none at all, of a folder that is gone, and
    of the half of its table of bindings that a full disk leaves; these bindings are in memory, because both
    ends make them anew.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._listed: dict[str, deque[Path]] = {}

    def _put(self, queue: str, payload: dict[str, Any], **_: object) -> None:
        path = self._folder / f"{round(monotonic() * 1000):015}_{uuid.uuid4()}.{queue}.msg"
        part = path.with_name(f"{path.name}.part")
        try:
            part.write_bytes(str_to_bytes(dumps(payload)))
            part.replace(path)
        except OSError:
            part.unlink(missing_ok=True)
            raise

    def _get(self, queue: str, timeout: float | None = None) -> dict[str, Any]:
        """The oldest. What is no message is thrown away. Raises Empty."""
        # Listed again when the last list is used up: a pile of files costs each of its messages nothing.
        listed = self._listed.get(queue) or deque(self._messages(queue))
        self._listed[queue] = listed
        while listed:
            path = listed.popleft()
            try:
                content = path.read_bytes()
                path.unlink()
            except OSError:  # another has taken it, or it is no file
                continue
            try:
                payload: dict[str, Any] = loads(bytes_to_str(content))
                self.Message(payload, channel=self)
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                logger.warning("Threw away %s, which is no message.", path)
                continue
            return payload
        raise Empty

    def _size(self, queue: str) -> int:
        return len(self._messages(queue))

    def _purge(self, queue: str) -> int:
        messages = self._messages(queue)
        for path in messages:
            path.unlink(missing_ok=True)
        return len(messages)

    def _messages(self, queue: str) -> list[Path]:
        return sorted(self._folder.glob(f"*.{queue}.msg"))

    @property
    def _folder(self) -> Path:
        """Made again if somebody has removed it."""
        folder = Path(self.connection.client.transport_options["folder"])
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder


class FileTransport(filesystem.Transport):
    Channel = FileChannel


class SteadyEntry(ScheduleEntry):
    """One that is due by the monotonic clock. Celery's own goes by the wall clock, and when that is set back
    it waits until the clock has caught up."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ran_at_s = monotonic()

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """What the next run's entry is made from."""
        return ((name, value) for name, value in super().__iter__() if name != "_ran_at_s")

    def is_due(self) -> schedstate:
        every_s = self.schedule.run_every.total_seconds()
        left_s = self._ran_at_s + every_s - monotonic()
        return schedstate(True, every_s) if left_s <= 0 else schedstate(False, left_s)


class SteadyScheduler(Scheduler):
    """Knows intervals alone, and forgets them all when it ends."""

    Entry = SteadyEntry

    def _when(self, entry: SteadyEntry, next_time_to_run: float, **_: object) -> float:
        return monotonic() + next_time_to_run


app = Celery("llmgw")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["catalog", "nodes"])


class BeatInside(bootsteps.StartStopStep):
    """`--beat` as a thread of the worker. Celery's own is a process beside it: killed alone it is not missed,
    and nothing ticks any more; left alone it ticks for nobody."""

    requires = (components.Beat,)

    def __init__(self, worker: WorkController, beat: bool = False, **kwargs: Any) -> None:
        super().__init__(worker, **kwargs)
        self.enabled = beat
        worker.blueprint.steps[components.Beat.name].enabled = False

    def create(self, worker: WorkController) -> Any:
        return EmbeddedService(worker.app, thread=True, scheduler_cls=worker.scheduler)


app.steps["worker"].add(BeatInside)
