"""`manage.py weights_fetch`."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from catalog.actions import find_model
from catalog.management.shell import DOOR, add_why, refusals, who
from nodes import stocking
from nodes.management.shell import find_node


class Command(BaseCommand):
    help = "Have a node fetch a model's weights ahead of time, from a node that holds them where one does."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("model")
        parser.add_argument("--node", required=True, help="the one that is to have them")
        add_why(parser)

    def handle(self, *args: Any, model: str, node: str, why: str, **options: Any) -> None:
        with refusals():
            row, place = find_model(model), find_node(node)
            stocking.fetch(row, place, by=who(), why=why, door=DOOR)
        self.stdout.write(f"{node} fetches the weights of {row.name}; manage.py weights tells how far it is.")
