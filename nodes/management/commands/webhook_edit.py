"""`manage.py webhook_edit`: another name, address or choice of troubles for a webhook, or a pause."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from catalog.management.shell import DOOR, add_json, add_why, print_differences, print_json, refusals, who
from catalog.reading import shown
from nodes.management.shell import find_webhook, read_url
from nodes.notices import KINDS
from nodes.webhooks import edit_webhook, webhook_as_dict, webhooks

FIELDS = ("name", "url", "kinds", "paused")


class Command(BaseCommand):
    help = (
        "Change a webhook, pause or resume it; its secret stays. What begins while one is paused is lost on "
        "it. What is left out stays as it is."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("webhook", help="its name, or its id")
        parser.add_argument("--name", help="what it is for, such as pager")
        parser.add_argument(
            "--url", action="store_true", help="ask for another URL, or read it from standard input"
        )
        kinds = parser.add_mutually_exclusive_group()
        kinds.add_argument("--kinds", nargs="+", metavar="KIND", help=f"of {', '.join(KINDS)}; no others")
        kinds.add_argument("--all-kinds", dest="kinds", action="store_const", const=[], help="of all again")
        paused = parser.add_mutually_exclusive_group()
        paused.add_argument("--pause", dest="is_paused", action="store_true", default=None)
        paused.add_argument("--resume", dest="is_paused", action="store_false", default=None)
        add_why(parser)
        add_json(parser)

    def handle(self, *args: Any, webhook: str, url: bool, json: bool, **options: Any) -> None:
        wanted = {key: options[key] for key in ("name", "kinds", "is_paused", "why")}
        with refusals():
            found = find_webhook(webhook)
            before = webhook_as_dict(found, sees_url=True)
            edit_webhook(found, url=read_url() if url else None, **wanted, by=who(), door=DOOR)
            after = webhook_as_dict(webhooks().get(pk=found.pk), sees_url=True)
        changed = [(key, before[key], after[key]) for key in FIELDS if before[key] != after[key]]
        if json:
            print_json(self.stdout, after)
        elif not changed:
            self.stdout.write(f"Nothing of {shown(found.name)} changes.")
        else:
            self.stdout.write(f"Changed {shown(before['name'])}:")
            print_differences(self.stdout, changed)
