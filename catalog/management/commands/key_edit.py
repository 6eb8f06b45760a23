"""`manage.py key_edit`: changes what an API key opens and how much of it, and tells what that changes."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from catalog.actions import edit_key
from catalog.management.key_options import add_reach, reach_patch
from catalog.management.shell import (
    DOOR,
    add_json,
    add_why,
    print_differences,
    print_json,
    refusals,
    who,
)
from catalog.reading import shown
from catalog.showing import key_as_dict, keys


class Command(BaseCommand):
    help = "Change what an API key opens; every process heeds it within a second or two."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("id", help="as in key_list, or as in the key between its underscores")
        add_reach(parser)
        add_why(parser)
        add_json(parser)

    def handle(self, *args: Any, id: str, **options: Any) -> None:
        with refusals():
            changed = edit_key(id, reach_patch(options), by=who(), why=options["why"], door=DOOR)
        if options["json"]:
            print_json(self.stdout, {"changed": changed, "key": key_as_dict(keys().get(pk=id))})
        elif not changed:
            self.stdout.write(f"Nothing of {shown(id)} changes.")
        else:
            self.stdout.write(f"Changed {shown(id)}:")
            print_differences(self.stdout, [(each["field"], each["was"], each["now"]) for each in changed])
