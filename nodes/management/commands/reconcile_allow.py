"""`manage.py reconcile_allow`: a person's yes to what a pass held back."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from catalog.management.shell import DOOR, add_dry_run, add_why, print_table, refusals, who
from nodes.actions import allow_held
from nodes.models import Held
from nodes.tasks import wake

HEADINGS = ("replica", "would", "why")


class Command(BaseCommand):
    help = "Say yes to ends of replicas that the last pass held back, being too many at once."

    def add_arguments(self, parser: ArgumentParser) -> None:
        add_why(parser)
        add_dry_run(parser)

    def handle(self, *args: Any, why: str, dry_run: bool, **options: Any) -> None:
        with refusals():
            held = list(Held.objects.select_related("replica").order_by("pk"))
            count = 0 if dry_run else allow_held(by=who(), why=why, door=DOOR)
        if not held:
            self.stdout.write("Nothing is held back.")
            return
        print_table(self.stdout, HEADINGS, [(each.replica, each.wanted, each.why) for each in held])
        if count:
            wake()
            self.stdout.write(f"Allowed: {count} {'replica ends' if count == 1 else 'replicas end'} now.")
