"""`manage.py web`: the admin, /api/ and the gateway, in one process or several that share a port.

Several share one listening socket, which their parent holds: what is sent while one of them is replaced waits
there for another. SIGHUP replaces them one by one, each by one that has started; SIGTERM lets all finish what
they have begun.
"""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError
from typing import Any

import uvicorn
from django.conf import settings
from django.core.management.base import BaseCommand
from uvicorn.supervisors import multiprocess

KEEP_ALIVE_S = 75
"""Longer than clients keep a connection that they do not use, so that none of them is closed on a request."""
WORKER_START_S = 60
"""How long a worker may take to start, or to show a sign of life, before it is replaced."""


class Worker(multiprocess.Process):
    """Its parent keeps no end of the pipe that is the worker's: it would wait out the whole of its patience
    for the answer of one that was killed meanwhile, and hear neither signals nor of the others until then."""

    def start(self) -> None:
        super().start()
        self.child_conn.close()


class Command(BaseCommand):
    help = "Serve the admin, /api/ and /v1/. SIGHUP replaces the processes without losing a request."
    app = "llmgw.asgi:application"
    requires_system_checks = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--host", default="127.0.0.1", help="where to listen (127.0.0.1)")
        parser.add_argument("--port", type=_port, default=8000, help="where to listen (8000)")
        parser.add_argument(
            "--workers",
            type=_workers,
            default=settings.LLMGW_WEB_WORKERS,
            help="how many processes (LLMGW_WEB_WORKERS, or 1)",
        )
        parser.add_argument(
            "--direct",
            action="store_true",
            help="no proxy is in front: what X-Forwarded-For and -Proto say is not believed",
        )

    def handle(self, *args: Any, host: str, port: int, workers: int, direct: bool, **options: Any) -> None:
        multiprocess.Process = Worker  # type: ignore[misc]  # uvicorn offers no other way
        uvicorn.run(
            self.app,
            host=host,
            port=port,
            workers=workers,
            loop="uvloop",
            http="llmgw.wire:BoundedProtocol",
            lifespan="on",
            proxy_headers=not direct,
            server_header=False,
            access_log=False,
            log_level="warning",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=round(settings.LLMGW_DRAIN_S),
            timeout_worker_healthcheck=WORKER_START_S,
        )


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise ArgumentTypeError(f"the port is {text!r}, which is not a number from 1 to 65535")
    return int(text)


def _workers(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1000:
        raise ArgumentTypeError(f"{text!r} is not a number of processes, from 1 to 1000")
    return int(text)
