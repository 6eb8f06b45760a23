"""`manage.py node_uncordon`."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from catalog.management.shell import DOOR, add_why, refusals, who
from catalog.reading import quote
from nodes.actions import uncordon
from nodes.models import Node
from nodes.tasks import wake


class Command(BaseCommand):
    help = "Let replicas be placed on a node again."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("name")
        add_why(parser)

    def handle(self, *args: Any, name: str, why: str, **options: Any) -> None:
        with refusals():
            node = Node.objects.filter(name=name).first()
            if node is None:
                raise CommandError(f"There is no node {quote(name)}; manage.py nodes tells which there are.")
            if not uncordon(node, by=who(), why=why, door=DOOR):
                self.stdout.write(f"{node.name} is not cordoned.")
                return
        wake()
        self.stdout.write(f"Uncordoned {node.name}.")
