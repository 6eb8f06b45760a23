"""`manage.py job_stop`."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from catalog.management.shell import DOOR, add_why, refusals, who
from catalog.reading import shown
from nodes.jobs import stop
from nodes.management.shell import find_job


class Command(BaseCommand):
    help = "Stop a bench or an engine check; what it has found until then is kept with it."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("id", help="its id, or the first digits, as manage.py jobs shows them")
        add_why(parser)

    def handle(self, *args: Any, id: str, why: str, **options: Any) -> None:
        with refusals():
            job = find_job(id)
            is_told = stop(job.pk, by=who(), why=why, door=DOOR)
        told = "Told it to stop" if is_told else "It is over, or about to be"
        self.stdout.write(f"{told}: the {shown(str(job))}.")
