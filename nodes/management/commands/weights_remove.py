"""`manage.py weights_remove`."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from catalog.management.shell import DOOR, add_why, refusals, who
from catalog.reading import quote
from nodes import stocking
from nodes.holdings import needing, state_words, weights
from nodes.management.shell import find_node
from nodes.models import Weights


class Command(BaseCommand):
    help = "Have a node give back the room of weights that nothing there uses. Asks first."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("weights", help="org/name, or org/name@COMMIT, as manage.py weights lists them")
        parser.add_argument("--node", required=True, help="the one that has them")
        parser.add_argument("--yes", action="store_true", help="do not ask")
        add_why(parser)

    def handle(self, *args: Any, node: str, yes: bool, why: str, **options: Any) -> None:
        with refusals():
            row = _find(options["weights"], node)
            needed_by = needing([row])[row.pk]
        told = f"{row} ({state_words(row)}) on {node}"
        if needed_by:
            told += f", which {', '.join(needed_by)} will fetch again when started there"
        if not yes:
            self.stdout.write(f"Remove {told}? Type yes to do it.")
            if input().strip() != "yes":
                raise CommandError("Nothing was removed.")
        with refusals():
            stocking.remove(row, by=who(), why=why, door=DOOR)
        self.stdout.write(f"Removed {told}.")


def _find(text: str, node: str) -> Weights:
    repo, _, revision = text.partition("@")
    found = list(weights().filter(node=find_node(node), repo=repo, revision__startswith=revision)[:2])
    if not found:
        raise CommandError(f"{node} has no weights {quote(text)}; manage.py weights tells what there is.")
    if len(found) > 1:
        raise CommandError(
            f"{node} has several commits of {quote(repo)}; write {repo}@ and the one's digits."
        )
    return found[0]
