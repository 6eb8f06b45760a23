"""`manage.py webhook_add`: an address that is told of troubles, and the secret that it knows us by."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from catalog.management.shell import DOOR, add_json, add_why, print_json, refusals, who
from nodes import webhooks
from nodes.management.shell import read_url
from nodes.notices import KINDS


class Command(BaseCommand):
    help = (
        "Add a webhook and print the secret that its notices are signed with, once. The URL is asked for, or "
        "read from standard input: its path may be a secret, and everybody on a machine sees arguments."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("name", help="what it is for, such as pager")
        parser.add_argument(
            "--kinds", nargs="+", default=[], metavar="KIND", help=f"of {', '.join(KINDS)}; all, if left out"
        )
        add_why(parser)
        add_json(parser)

    def handle(self, *args: Any, name: str, kinds: list[str], why: str, **options: Any) -> None:
        with refusals():
            webhook, secret = webhooks.add_webhook(
                name, read_url(), kinds=kinds, by=who(), door=DOOR, why=why
            )
        if options["json"]:
            told = webhooks.webhook_as_dict(webhooks.webhooks().get(pk=webhook.pk), sees_url=True)
            print_json(self.stdout, told | {"secret": secret})
            return
        self.stderr.write("Its notices are signed with this secret, which is not shown again:")
        self.stdout.write(secret)
        self.stderr.write(f"Try it: manage.py webhook_test {webhook.pk}")
