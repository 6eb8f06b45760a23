"""`manage.py plan`: what the next pass would do and why, without doing it."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from catalog.management.shell import add_json, print_json, print_table, refusals
from catalog.reading import shown
from nodes.outlook import preview_plan
from nodes.telling import ITEM_HEADINGS, item_row, outlook_as_dict


class Command(BaseCommand):
    help = "Show what the next pass of the reconciler would do and why, and what waits; nothing is done."

    def add_arguments(self, parser: ArgumentParser) -> None:
        add_json(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        with refusals():
            outlook = preview_plan()
        if options["json"]:
            print_json(self.stdout, outlook_as_dict(outlook))
            return
        for obstacle in outlook.acting.obstacles:
            self.stdout.write(f"Note: {shown(obstacle, 2_000)}.")
        if not outlook.items:
            self.stdout.write("Nothing is to be done: all is as wanted, or on its way there.")
            return
        print_table(self.stdout, ITEM_HEADINGS, [item_row(item) for item in outlook.items])
