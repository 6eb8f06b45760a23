"""`manage.py catalog_export`: the whole catalog as a file, fit to be kept under version control."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from catalog.actions import read_catalog
from catalog.files import FORMATS, write_catalog_file
from catalog.hiding import HIDDEN, hide_model
from catalog.management.shell import refusals


class Command(BaseCommand):
    help = "Print the catalog as a file that catalog_import reads; secrets are hidden."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--format", choices=FORMATS, default="yaml", help="yaml if left out")
        parser.add_argument(
            "--with-secrets",
            action="store_true",
            help=f"print values of env that look secret as they are, instead of {HIDDEN}",
        )

    def handle(self, *args: Any, format: str, with_secrets: bool, **options: Any) -> None:
        with refusals():
            models = [model.as_text_dict() for model in read_catalog().models]
        hidden = [hide_model(model, sees_env=True) for model in models]
        self.stdout.write(write_catalog_file(models if with_secrets else hidden, format), ending="")
        secrets = _secrets(hidden)
        if secrets and with_secrets:
            says = f"secrets ({secrets}) are in this file as plain text; keep it as you keep them"
            self.stderr.write(f"warning: {says}")
        elif secrets:
            says = f"{HIDDEN}, which catalog_import takes for what it finds in the catalog"
            self.stderr.write(f"Secrets ({secrets}) are written as {says}; --with-secrets writes them out.")


def _secrets(models: list[dict[str, Any]]) -> int:
    profiles = [profile for model in models for profile in model["profiles"]]
    return sum(value == HIDDEN for profile in profiles for value in profile.get("env", {}).values())
