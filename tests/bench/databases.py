"""A fresh database of each kind, and a process of its own on it, in which a measurement is made.

Settings are read once in a process, so the one that was started measures nothing: it starts one for each
database, which prints its numbers as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.services import start_postgresql

DATABASES = ("sqlite", "postgresql")
_ROOT = Path(__file__).parent.parent.parent
_KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "VIRTUAL_ENV")


def measured_on(databases: Sequence[str], module: str, *words: str) -> dict[str, Any]:
    """What `python -m MODULE WORDS` printed on each of the databases. Its errors go where ours go."""
    found = {}
    for database in databases:
        with tempfile.TemporaryDirectory(prefix="llmgw-bench-") as var, _url(database) as url:
            environment = {name: os.environ[name] for name in _KEPT if name in os.environ} | {
                "DJANGO_SETTINGS_MODULE": "llmgw.settings",
                "LLMGW_VAR": var,
                "LLMGW_PLAIN_HTTP": "1",
                "LLMGW_HUB_ENDPOINT": "http://127.0.0.1:9",  # closed: nothing goes out
                **({"DATABASE_URL": url} if url else {}),
            }
            printed = subprocess.run(
                [sys.executable, "-m", module, *words],
                cwd=_ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                check=True,
            )
        found[database] = json.loads(printed.stdout)
    return found


@contextmanager
def _url(database: str) -> Iterator[str]:
    """Empty for SQLite, which is a file in the folder."""
    if database == "sqlite":
        yield ""
        return
    url, service = start_postgresql()
    try:
        yield url
    finally:
        service.stop()


def begin() -> None:
    """In the process that measures: Django, and the tables."""
    import django
    from django.core.management import call_command

    django.setup()
    call_command("migrate", verbosity=0)
