"""`manage.py key_revoke`: ends an API key for good."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from catalog.actions import revoke_key
from catalog.management.shell import DOOR, add_why, refusals, who
from catalog.reading import quote


class Command(BaseCommand):
    help = "End an API key for good; every process refuses it within a second or two."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("id", help="as in key_list, or as in the key between its underscores")
        add_why(parser)

    def handle(self, *args: Any, id: str, why: str, **options: Any) -> None:
        with refusals():
            if not revoke_key(id, by=who(), why=why, door=DOOR):
                raise CommandError(
                    f"There is no live key {quote(id)}; manage.py key_list tells which there are."
                )
        self.stdout.write(f"Revoked {id}.")
