"""`manage.py replica_stop`."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from catalog.management.shell import DOOR, add_why, refusals, who
from catalog.reading import shown
from nodes.actions import stop_replica
from nodes.management.shell import find_replica
from nodes.tasks import wake


class Command(BaseCommand):
    help = (
        "Stop a replica; where one is still wanted, another is started from the catalog as it is now. "
        "Stopping one that has failed lets its profile be tried again."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("id", help="the replica's id, or its first digits")
        add_why(parser)

    def handle(self, *args: Any, id: str, why: str, **options: Any) -> None:
        with refusals():
            replica = find_replica(id)
            if not stop_replica(replica, by=who(), why=why, door=DOOR):
                self.stdout.write(f"{shown(str(replica))} is stopped already, or about to be.")
                return
        wake()
        self.stdout.write(f"Told {shown(str(replica))} to stop.")
