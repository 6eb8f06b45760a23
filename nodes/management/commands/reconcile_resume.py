"""`manage.py reconcile_resume`."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from catalog.management.shell import DOOR, add_why, refusals, who
from nodes.actions import resume
from nodes.tasks import wake


class Command(BaseCommand):
    help = "Let the reconciler act again; manage.py plan tells first what it will do."

    def add_arguments(self, parser: ArgumentParser) -> None:
        add_why(parser)

    def handle(self, *args: Any, why: str, **options: Any) -> None:
        with refusals():
            has_resumed = resume(by=who(), why=why, door=DOOR)
        if has_resumed:
            wake()
        self.stdout.write("It acts again." if has_resumed else "It was not paused.")
