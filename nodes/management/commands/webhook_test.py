"""`manage.py webhook_test`: whether a webhook takes what it is sent."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from catalog.management.shell import DOOR, add_json, add_why, print_json, refusals, who
from catalog.reading import shown
from nodes.management.shell import find_webhook
from nodes.webhooks import delivery_as_dict, try_webhook


class Command(BaseCommand):
    help = "Post a notice of kind test to a webhook, once, and tell what it answered."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("webhook", help="its name, or its id")
        add_why(parser)
        add_json(parser)

    def handle(self, *args: Any, webhook: str, why: str, **options: Any) -> None:
        with refusals():
            found = find_webhook(webhook)
            delivery = try_webhook(found, by=who(), why=why, door=DOOR)
        if options["json"]:
            print_json(self.stdout, delivery_as_dict(delivery))
        if delivery.problem:
            raise CommandError(f"{shown(found.name)} did not take it. {delivery.problem}")
        if not options["json"]:
            self.stdout.write(f"{shown(found.name)} took it, and answered {delivery.status}.")
