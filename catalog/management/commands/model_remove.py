"""`manage.py model_remove`: takes a model out of the catalog; its replicas drain."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from catalog.actions import remove_model
from catalog.management.shell import DOOR, add_why, refusals, who
from catalog.reading import shown
from nodes.tasks import wake


class Command(BaseCommand):
    help = "Take a model out of the catalog; its replicas finish what they are doing and stop."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("name", help="its canonical name")
        add_why(parser)

    def handle(self, *args: Any, name: str, why: str, **options: Any) -> None:
        with refusals():
            remove_model(name, by=who(), why=why, door=DOOR, after_change=wake)
        self.stdout.write(f"Removed {shown(name)}.")
