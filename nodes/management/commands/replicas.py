"""`manage.py replicas`: what runs, where, since when and why, and where it differs from the catalog."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from catalog.management.shell import add_json, ago, print_differences, print_json, print_table, refusals
from catalog.reading import quote, shown
from nodes.models import Replica
from nodes.showing import of_model, replica_as_dict, replicas, staleness_of

HEADINGS = ("replica", "model/profile", "node", "port", "state", "changed", "stale", "reason")


class Command(BaseCommand):
    help = "List replicas: what runs where, since when and why, and which are stale."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--model", help="of this model alone")
        parser.add_argument(
            "--diff", action="store_true", help="show what differs from the catalog, field by field"
        )
        parser.add_argument("--all", action="store_true", help="those that are stopped or failed as well")
        add_json(parser)

    def handle(self, *args: Any, model: str | None, diff: bool, **options: Any) -> None:
        with refusals():
            found = replicas() if options["all"] else replicas().exclude(state__in=Replica.OVER)
            if model is not None:
                found = found.filter(of_model(model))
            rows = [
                (replica_as_dict(replica, sees_env=True), staleness_of(replica).word) for replica in found
            ]
        if options["json"]:
            print_json(self.stdout, [told for told, _ in rows])
            return
        if not rows:
            whose = "" if model is None else f" of {quote(model)}"
            known = "is known" if options["all"] else "runs, or is on its way"
            self.stdout.write(f"No replica{whose} {known}.")
            return
        print_table(self.stdout, HEADINGS, [_line(told, word) for told, word in rows])
        if diff:
            for told, _ in rows:
                self._print_differences(told)

    def _print_differences(self, told: dict[str, Any]) -> None:
        differences = told["differences"] + told["launch_differences"]
        if told["stale_why"]:
            self.stdout.write(f"\n{_name(told)} {told['id'][:8]}: {shown(told['stale_why'], 2_000)}")
        if differences:
            print_differences(
                self.stdout, [(each["field"], each["was"], each["now"]) for each in differences]
            )


def _line(told: dict[str, Any], word: str) -> tuple[object, ...]:
    state = told["state"] if told["wanted"] == Replica.Wanted.RUN else f"{told['state']}, to {told['wanted']}"
    fields = ", ".join(each["field"] for each in told["differences"] + told["launch_differences"])
    stale = f"{word} ({fields})" if fields else word
    place = (told["node"] or "", told["port"] or "")
    return (told["id"][:8], _name(told), *place, state, ago(told["age_s"]), stale, told["reason"])


def _name(told: dict[str, Any]) -> str:
    return f"{told['model']}/{told['profile']}"
