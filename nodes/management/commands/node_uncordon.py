"""`manage.py node_uncordon`."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from catalog.management.shell import DOOR, add_why, refusals, who
from nodes.actions import uncordon
from nodes.management.shell import find_node
from nodes.tasks import wake


class Command(BaseCommand):
    help = "Let replicas be placed on a node again; a drain of it ends."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("name")
        add_why(parser)

    def handle(self, *args: Any, name: str, why: str, **options: Any) -> None:
        with refusals():
            node = find_node(name)
            if not uncordon(node, by=who(), why=why, door=DOOR):
                self.stdout.write(f"{node.name} is not cordoned.")
                return
        wake()
        self.stdout.write(f"Uncordoned {node.name}.")
