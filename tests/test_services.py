"""The tests' own servers: what they are, and that they go when pytest goes, however it goes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from redis import Redis

from tests.waiting import wait_until

ROOT = Path(__file__).parent.parent

BLOCKS = """
import threading
from django.conf import settings
from django.db import connection

def test_blocks(redis_url, django_db_blocker):
    with django_db_blocker.unblock(), connection.cursor() as cursor:
        cursor.execute("SELECT version()")
        print(cursor.fetchone()[0], connection.settings_dict["HOST"], settings.LLMGW_VAR, flush=True)
    threading.Event().wait()
"""


def test_redis_is_real(redis_url: str) -> None:
    with Redis.from_url(redis_url) as redis:
        assert redis.info("server")["redis_version"]


@pytest.mark.e2e
def test_a_killed_pytest_leaves_no_server_and_no_folder_behind(tmp_path: Path) -> None:
    (tmp_path / "test_blocks.py").write_text(BLOCKS)
    blocks = str(tmp_path / "test_blocks.py")
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", "-sq", "-c", "pyproject.toml", "--rootdir", str(ROOT), blocks],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"}
        | {"LLMGW_TEST_DATABASE": "postgresql"},
        stdout=subprocess.PIPE,
        text=True,
    ) as running:
        assert running.stdout is not None
        told = next(line for line in running.stdout if line.startswith("PostgreSQL"))
        *_, host, var = told.split()
        started = psutil.Process(running.pid).children(recursive=True)
        assert {"postgres", "redis-server"} <= {process.name() for process in started}
        running.kill()
    wait_until(
        lambda: not any(process.is_running() for process in started), "the servers to stop", timeout_s=20
    )
    wait_until(lambda: not Path(host).exists() and not Path(var).exists(), "their folders to go")
