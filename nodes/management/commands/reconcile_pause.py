"""`manage.py reconcile_pause`."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from catalog.management.shell import DOOR, add_why, refusals, who
from nodes.actions import pause


class Command(BaseCommand):
    help = "Start and stop nothing until reconcile_resume; looking goes on, and requests are answered."

    def add_arguments(self, parser: ArgumentParser) -> None:
        add_why(parser)

    def handle(self, *args: Any, why: str, **options: Any) -> None:
        with refusals():
            has_paused = pause(by=who(), why=why, door=DOOR)
        self.stdout.write("Paused; manage.py reconcile_resume ends it." if has_paused else "Paused already.")
