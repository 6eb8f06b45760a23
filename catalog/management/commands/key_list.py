"""`manage.py key_list`: which API keys there are, and whose. Never their texts, which nobody has kept."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from catalog.management.shell import add_json, print_json, print_table, refusals
from catalog.models import Key


class Command(BaseCommand):
    help = "List API keys, without their texts."

    def add_arguments(self, parser: ArgumentParser) -> None:
        add_json(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        with refusals():
            keys = [_as_dict(key) for key in Key.objects.select_related("user")]
        if options["json"]:
            print_json(self.stdout, keys)
        elif not keys:
            self.stdout.write("There is no API key; manage.py key_create makes one.")
        else:
            headings = ("id", "name", "user", "scope", "created", "expires", "revoked")
            print_table(self.stdout, headings, [_line(key) for key in keys])


def _as_dict(key: Key) -> dict[str, Any]:
    return {
        "id": key.pk,
        "name": key.name,
        "user": key.user.get_username(),
        "scope": key.scope,
        "created_at": key.created_at.isoformat(),
        "expires_at": key.expires_at and key.expires_at.isoformat(),
        "revoked_at": key.revoked_at and key.revoked_at.isoformat(),
    }


def _line(key: dict[str, Any]) -> list[object]:
    days = [(key[moment] or "")[:10] for moment in ("created_at", "expires_at", "revoked_at")]
    return [key["id"], key["name"], key["user"], key["scope"], *days]
