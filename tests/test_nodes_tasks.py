"""The reconciler's doorway."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from nodes.models import Replica
from nodes.protocol import READY
from nodes.tasks import PASSES_A_TICK, tick
from tests.fake_agent import joining
from tests.passes import add_model

ROOT = Path(__file__).parent.parent

WAKE = """
import time, django
django.setup()
from nodes.tasks import wake
begun = time.monotonic()
wake()
wake()
print(time.monotonic() - begun)
"""


@pytest.mark.django_db(transaction=True)
def test_a_tick_goes_on_while_passes_change_something() -> None:
    """Stopping one replica and starting the next takes two passes, and one that finds nothing more to do."""
    with ExitStack() as stack:
        agent = joining(stack)()
        model = add_model()
        tick()
        first = Replica.objects.get()
        Replica.objects.filter(pk=first.pk).update(wanted="stop")
        before = agent.requests.count(("GET", "/v1/state"))

        tick()

        assert Replica.objects.exclude(pk=first.pk).get(model=model).state == READY
        assert agent.requests.count(("GET", "/v1/state")) - before <= PASSES_A_TICK

        settled = agent.requests.count(("GET", "/v1/state"))
        tick()
        assert agent.requests.count(("GET", "/v1/state")) == settled + 1


def test_a_broker_that_is_down_delays_nobody_and_raises_nothing(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-c", WAKE],
            cwd=ROOT,
            env={
                **os.environ,
                "LLMGW_VAR": str(tmp_path),
                "REDIS_URL": f"redis://127.0.0.1:{port}/0",
                "DJANGO_SETTINGS_MODULE": "llmgw.settings",
            },
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.5
