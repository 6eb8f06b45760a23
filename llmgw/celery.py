"""The Celery app, and the broker that needs no server.

Tasks are doorways: JSON, ids only, an expiry on each. Settings are the `CELERY_*` names of llmgw/settings.py.
"""

from __future__ import annotations

import os
import signal
import uuid
from pathlib import Path
from time import monotonic
from typing import Any

from celery import Celery
from celery.signals import beat_embedded_init
from kombu.transport import filesystem
from kombu.utils.encoding import str_to_bytes
from kombu.utils.json import dumps

from llmgw.supervisor import signal_me_when_my_parent_dies

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "llmgw.settings")


class WholeFileChannel(filesystem.Channel):
    """kombu's own lets a worker read a message that is only half written, and the worker dies of it."""

    def _put(self, queue: str, payload: dict[str, Any], **_: object) -> None:
        name = f"{round(monotonic() * 1000):015}_{uuid.uuid4()}.{queue}.msg"
        folder = Path(self.data_folder_out)
        part = folder / f"{name}.part"
        part.write_bytes(str_to_bytes(dumps(payload)))
        part.replace(folder / name)


class WholeFileTransport(filesystem.Transport):
    Channel = WholeFileChannel


app = Celery("llmgw")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["nodes"])


@beat_embedded_init.connect(weak=False)
def _end_with_the_worker(**_: object) -> None:
    """A worker that is killed would leave the beat it started ticking for ever."""
    signal_me_when_my_parent_dies(signal.SIGTERM)
