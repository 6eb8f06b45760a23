"""`manage.py reconcile_outrank`: agents obey a database again that was restored from a backup."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from catalog.management.shell import DOOR, add_why, refusals, who
from nodes.actions import outrank
from nodes.tasks import wake


class Command(BaseCommand):
    help = "Have agents obey this database again, which was restored from a backup; stop any other first."

    def add_arguments(self, parser: ArgumentParser) -> None:
        add_why(parser)

    def handle(self, *args: Any, why: str, **options: Any) -> None:
        with refusals():
            outrank(by=who(), why=why, door=DOOR)
        wake()
        self.stdout.write("Agents obey this database from the next pass on, and no other any more.")
