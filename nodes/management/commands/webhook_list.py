"""`manage.py webhook_list`: who is told of troubles, and how that goes."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from catalog.management.shell import add_json, print_json, print_table, refusals
from nodes.models import Webhook
from nodes.webhooks import kinds_words, state_of, url_words, webhook_as_dict, webhooks

HEADINGS = ("name", "state", "waiting", "delivered", "given up", "url", "told of")


class Command(BaseCommand):
    help = "List webhooks: what they are told of, and what they have taken."

    def add_arguments(self, parser: ArgumentParser) -> None:
        add_json(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        with refusals():
            listed = list(webhooks())
        if options["json"]:
            print_json(self.stdout, [webhook_as_dict(each, sees_url=True) for each in listed])
        elif not listed:
            self.stdout.write("There is no webhook; manage.py webhook_add adds one.")
        else:
            print_table(self.stdout, HEADINGS, [_line(each) for each in listed])


def _line(webhook: Webhook) -> tuple[object, ...]:
    waiting = webhook.waiting  # type: ignore[attr-defined]  # annotated
    return (
        *(webhook.name, state_of(webhook), waiting, webhook.delivered, webhook.given_up),
        *(url_words(webhook, sees_url=True), kinds_words(webhook)),
    )
