"""`manage.py node_remove`."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from catalog.management.shell import DOOR, add_why, refusals, who
from nodes.actions import remove_node
from nodes.management.shell import find_node
from nodes.tasks import wake


class Command(BaseCommand):
    help = "Forget a node that is drained, and empty or lost; its agent's token opens nothing from then on."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("name")
        add_why(parser)

    def handle(self, *args: Any, name: str, why: str, **options: Any) -> None:
        with refusals():
            node = find_node(name)
            remove_node(node, by=who(), why=why, door=DOOR)
        wake()
        self.stdout.write(
            f"Removed {name}. If its agent is still on the machine, `uninstall` in its folder takes it off."
        )
