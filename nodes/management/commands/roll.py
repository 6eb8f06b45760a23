"""`manage.py roll`: replaces what is stale of a model, one replica after another."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from catalog.actions import find_model
from catalog.management.shell import DOOR, add_why, refusals, who
from catalog.reading import shown
from nodes.actions import cancel_roll, roll_model
from nodes.tasks import wake


class Command(BaseCommand):
    help = (
        "Replace the stale replicas of a model one after another with the catalog as it is now. Where there "
        "is room, the new one is ready before the old one leaves; the first that fails halts it."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("model", metavar="MODEL", help="the model's canonical name")
        parser.add_argument("--cancel", action="store_true", help="replace no more; what has been stays")
        add_why(parser)

    def handle(self, *args: Any, model: str, cancel: bool, why: str, **options: Any) -> None:
        with refusals():
            row = find_model(model)
            said = {"by": who(), "why": why, "door": DOOR}
            name = shown(row.name)
            if cancel:
                was_rolling = cancel_roll(row, **said)
                says = f"The roll of {name} ends here." if was_rolling else f"{name} is not being rolled."
            elif roll_model(row, **said):
                says = f"Rolling {name}, one replica after another; manage.py why tells how it goes."
            else:
                says = f"Nothing of {name} is stale, so there is nothing to roll."
        wake()
        self.stdout.write(says)
