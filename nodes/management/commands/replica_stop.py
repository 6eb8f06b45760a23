"""`manage.py replica_stop`."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from catalog.management.shell import DOOR, add_why, refusals, who
from catalog.reading import shown
from nodes.actions import stop_orphan, stop_replica
from nodes.management.shell import find_replica_or_orphan
from nodes.models import Orphan
from nodes.tasks import wake


class Command(BaseCommand):
    help = (
        "Stop a replica; where one is still wanted, another is started from the catalog as it is now. "
        "Stopping one that has failed lets its profile be tried again. An orphan is ended."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("id", help="its id, or the first digits")
        add_why(parser)

    def handle(self, *args: Any, id: str, why: str, **options: Any) -> None:
        with refusals():
            replica = find_replica_or_orphan(id)
            said: dict[str, Any] = {"by": who(), "why": why, "door": DOOR}
            if not (
                stop_orphan(replica, **said) if isinstance(replica, Orphan) else stop_replica(replica, **said)
            ):
                self.stdout.write(f"{shown(str(replica))} is stopped already, or about to be.")
                return
        wake()
        self.stdout.write(f"Told {shown(str(replica))} to stop.")
