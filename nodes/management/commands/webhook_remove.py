"""`manage.py webhook_remove`."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from catalog.management.shell import DOOR, add_why, refusals, who
from catalog.reading import shown
from nodes.management.shell import find_webhook
from nodes.webhooks import remove_webhook


class Command(BaseCommand):
    help = "Tell a webhook nothing any more; what waits for it is told to nobody."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("webhook", help="its name, or its id")
        add_why(parser)

    def handle(self, *args: Any, webhook: str, why: str, **options: Any) -> None:
        with refusals():
            found = find_webhook(webhook)
            remove_webhook(found, by=who(), why=why, door=DOOR)
        self.stdout.write(f"Removed {shown(found.name)}.")
