"""`manage.py node_drain`."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from catalog.management.shell import DOOR, add_why, refusals, who
from nodes.actions import drain_node
from nodes.management.shell import find_node
from nodes.models import Replica
from nodes.tasks import wake


class Command(BaseCommand):
    help = (
        "Empty a node: nothing new is placed on it, and what runs there moves, each replica once another has "
        "taken its place. node_uncordon ends it."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("name")
        add_why(parser)

    def handle(self, *args: Any, name: str, why: str, **options: Any) -> None:
        with refusals():
            node = find_node(name)
            running = node.ranks.exclude(replica__state__in=Replica.OVER).count()
            if not drain_node(node, by=who(), why=why, door=DOOR):
                self.stdout.write(f"{node.name} is draining already; {_left(running)}")
                return
        wake()
        self.stdout.write(f"Draining {node.name}; {_left(running)}")


def _left(running: int) -> str:
    if not running:
        return "nothing runs there."
    replicas = "1 replica is" if running == 1 else f"{running} replicas are"
    return f"{replicas} there still, and manage.py plan tells what becomes of them."
