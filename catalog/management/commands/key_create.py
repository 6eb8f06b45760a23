"""`manage.py key_create`: an API key, printed once."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.contrib.auth import get_user_model
from django.core.management.base import BaseCommand, CommandError

from catalog.actions import mint_key
from catalog.management.key_options import add_reach, reach_patch
from catalog.management.shell import DOOR, add_json, add_why, print_json, refusals, who
from catalog.models import Key
from catalog.reading import quote
from catalog.showing import key_as_dict, keys
from catalog.typed import read_duration


class Command(BaseCommand):
    help = "Make an API key for a user and print it; it cannot be shown again."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("name", help="what it is for")
        parser.add_argument("--user", required=True, help="whose it is")
        parser.add_argument(
            "--scope",
            choices=Key.Scope.values,
            default=Key.Scope.INFERENCE.value,
            help="inference (if left out): /v1/; manage: /api/ too, as the user; metrics: /metrics alone",
        )
        parser.add_argument("--expires-in", metavar="TIME", help="such as 720h; it lasts, if left out")
        add_reach(parser)
        add_why(parser)
        add_json(parser)

    def handle(
        self, *args: Any, name: str, user: str, scope: str, expires_in: str | None, why: str, **options: Any
    ) -> None:
        with refusals():
            owner = get_user_model().objects.filter(username=user).first()
            if owner is None:
                raise CommandError(
                    f"There is no user {quote(user)}; add them in the admin under Users, or let manage.py "
                    f"createsuperuser make one who may do everything."
                )
            lives_ns = None if expires_in is None else read_duration("expires_in", expires_in)
            reach = {key: value for key, value in reach_patch(options).items() if value is not None}
            key, text = mint_key(
                name,
                user=owner,
                scope=scope,
                by=who(),
                door=DOOR,
                why=why,
                expires_in_ns=lives_ns,
                reach=reach,
            )
        if options["json"]:
            print_json(self.stdout, key_as_dict(keys().get(pk=key.pk)) | {"key": text})
            return
        self.stderr.write(f"The key {key.pk} of {user}, shown this once:")
        self.stdout.write(text)
