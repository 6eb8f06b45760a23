"""`manage.py why`: why a model does not run where or as wanted, and what each node says."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from catalog.management.shell import add_json, print_json, print_table, refusals
from catalog.reading import shown
from nodes.outlook import why_of
from nodes.telling import why_as_dict, why_rows
from nodes.why import Why

HEADINGS = ("profile", "node", "says")


class Command(BaseCommand):
    help = "Tell why a model does not run where or as wanted, and what each node says to each profile."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("model", metavar="MODEL", help="the model's canonical name")
        add_json(parser)

    def handle(self, *args: Any, model: str, **options: Any) -> None:
        with refusals():
            why = why_of(model)
        if options["json"]:
            print_json(self.stdout, why_as_dict(why))
        else:
            self._tell(why)

    def _tell(self, why: Why) -> None:
        self.stdout.write(f"{shown(why.says, 2_000)}{':' if why.amiss else '.'}")
        for each in (*why.amiss, *why.notes):
            self.stdout.write(f"  - {shown(each, 2_000).rstrip('.')}.")
        rows = list(why_rows(why))
        if rows:
            self.stdout.write("\nWhat each node says to one replica more:")
            print_table(self.stdout, HEADINGS, rows)
