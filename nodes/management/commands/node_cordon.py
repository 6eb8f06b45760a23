"""`manage.py node_cordon`."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from catalog.management.shell import DOOR, add_why, refusals, who
from nodes.actions import cordon
from nodes.management.shell import find_node
from nodes.tasks import wake


class Command(BaseCommand):
    help = "Place nothing new on a node; what runs there stays."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("name")
        add_why(parser)

    def handle(self, *args: Any, name: str, why: str, **options: Any) -> None:
        with refusals():
            node = find_node(name)
            if not cordon(node, by=who(), why=why, door=DOOR):
                self.stdout.write(f"{node.name} is cordoned already.")
                return
        wake()
        self.stdout.write(f"Cordoned {node.name}.")
