"""`manage.py weights`: what is in which node's store, how big it is, and who needs it."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from catalog.management.shell import add_json, print_json, print_table, refusals
from nodes.holdings import needing, state_words, weights, weights_as_dict
from nodes.management.shell import find_node
from nodes.models import Weights

HEADINGS = ("weights", "commit", "node", "state", "in use", "needed by", "note")


class Command(BaseCommand):
    help = "List weights: what is in which node's store, how big it is, and which models need it."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--node", help="on this node alone")
        add_json(parser)

    def handle(self, *args: Any, node: str | None, **options: Any) -> None:
        with refusals():
            rows = weights() if node is None else weights().filter(node=find_node(node))
            found = list(rows)
            needed = needing(found)
        if options["json"]:
            print_json(self.stdout, [weights_as_dict(row, needed[row.pk]) for row in found])
        elif not found:
            self.stdout.write("No node holds weights of a hub; manage.py weights_fetch has one fetch some.")
        else:
            print_table(self.stdout, HEADINGS, [_line(row, needed[row.pk]) for row in found])


def _line(row: Weights, needed_by: tuple[str, ...]) -> tuple[object, ...]:
    used = "yes" if row.is_used else ""
    names = ", ".join(needed_by)
    return (row.repo, row.revision[:8], row.node.name, state_words(row), used, names, row.reason)
