"""`manage.py model_remove`: takes a model out of the catalog; its replicas drain."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from catalog.actions import find_model, remove_model
from catalog.management.shell import DOOR, add_dry_run, add_why, print_table, refusals, who
from catalog.reading import shown
from nodes.management.shell import print_consequences
from nodes.models import Replica
from nodes.outlook import preview_change
from nodes.showing import replicas
from nodes.tasks import wake

HEADINGS = ("replica", "profile", "node", "state")


class Command(BaseCommand):
    help = "Take a model out of the catalog; its replicas finish what they are doing and stop."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("name", help="its canonical name")
        add_why(parser)
        add_dry_run(parser)

    def handle(self, *args: Any, name: str, why: str, dry_run: bool, **options: Any) -> None:
        with refusals():
            model = find_model(name)
            stopping = list(replicas().filter(model=model).exclude(state__in=Replica.OVER))
            remove_model(
                model.name,
                expected=model.revision,
                is_trial=dry_run,
                by=who(),
                why=why,
                door=DOOR,
                after_change=wake,
            )
            found = preview_change(model.name, None) if dry_run else None
        if found is not None:
            self.stdout.write(f"Would remove {shown(name)}.")
            print_consequences(self.stdout, found)
        elif stopping:
            self.stdout.write(f"Removed {shown(name)}; these replicas finish what they are doing and stop:")
            print_table(self.stdout, HEADINGS, [_line(each) for each in stopping])
        else:
            self.stdout.write(f"Removed {shown(name)}; nothing of it runs.")


def _line(replica: Replica) -> tuple[object, ...]:
    nodes = ", ".join(rank.node.name for rank in replica.ranks.all())
    return str(replica.pk)[:8], replica.profile_name, nodes, replica.state
