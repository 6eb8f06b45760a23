"""`manage.py key_list`: which API keys there are, and whose. Never their texts, which nobody has kept."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from catalog.management.shell import add_json, print_json, print_table, refusals
from catalog.models import Key
from catalog.reach import reach_words
from catalog.showing import key_as_dict, keys


class Command(BaseCommand):
    help = "List API keys, without their texts."

    def add_arguments(self, parser: ArgumentParser) -> None:
        add_json(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        with refusals():
            listed = list(keys())
        if options["json"]:
            print_json(self.stdout, [key_as_dict(key) for key in listed])
        elif not listed:
            self.stdout.write("There is no API key; manage.py key_create makes one.")
        else:
            headings = ("id", "name", "user", "scope", "state", "created", "expires", "revoked", "opens")
            print_table(self.stdout, headings, [_line(key) for key in listed])


def _line(key: Key) -> list[object]:
    told = key_as_dict(key)
    days = [(told[moment] or "")[:10] for moment in ("created_at", "expires_at", "revoked_at")]
    named = [told[field] for field in ("id", "name", "user", "scope", "state")]
    return [*named, *days, reach_words(key.reach)]
