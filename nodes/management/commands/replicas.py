"""`manage.py replicas`: what runs, where, since when and why, and where it differs from the catalog."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand
from django.db.models import QuerySet

from catalog.management.shell import (
    add_json,
    add_watch,
    ago,
    clear,
    print_differences,
    print_json,
    print_table,
    refusals,
    watched,
)
from catalog.reading import quote, shown
from catalog.typed import span_words
from nodes.models import Replica
from nodes.showing import of_model, replica_as_dict, replicas, staleness_of

HEADINGS = ("replica", "model/profile", "node", "port", "state", "changed", "stale", "reason")


class Command(BaseCommand):
    help = "List replicas: what runs where, since when and why, and which are stale."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--model", help="of this model alone")
        parser.add_argument("--stale", action="store_true", help="those alone that a restart would change")
        parser.add_argument(
            "--diff", action="store_true", help="show what differs from the catalog, field by field"
        )
        parser.add_argument("--all", action="store_true", help="those that are stopped or failed as well")
        add_json(parser)
        add_watch(parser)

    def handle(self, *args: Any, watch: float | None, **options: Any) -> None:
        for clears in watched(self.stdout, watch):
            self._show(clears=clears, **options)

    def _show(self, *, clears: bool, **options: Any) -> None:
        with refusals():
            found = _found(**options)
        if clears:
            clear(self.stdout)
        if options["json"]:
            print_json(self.stdout, [told for told, _ in found])
        else:
            self._print_table(found, **options)
            if not (options["all"] or options["stale"]):
                self._print_failed(options["model"])

    def _print_table(
        self, found: list[tuple[dict[str, Any], str]], *, model: str | None, diff: bool, **options: Any
    ) -> None:
        if not found:
            whose = "" if model is None else f" of {quote(model)}"
            known = "is known" if options["all"] else "runs, or is on its way"
            self.stdout.write(
                f"No replica{whose} is stale." if options["stale"] else f"No replica{whose} {known}."
            )
            return
        print_table(self.stdout, HEADINGS, [_line(told, word) for told, word in found])
        if diff:
            for told, _ in found:
                self._print_differences(told)

    def _print_failed(self, model: str | None) -> None:
        failed = _of(model).filter(state=Replica.State.FAILED).count()
        if failed:
            self.stdout.write(f"Failed, and not shown: {failed}; --all shows them, and why.")

    def _print_differences(self, told: dict[str, Any]) -> None:
        differences = told["differences"] + told["launch_differences"]
        if told["stale_why"]:
            self.stdout.write(f"\n{_name(told)} {told['id'][:8]}: {shown(told['stale_why'], 2_000)}")
        if differences:
            print_differences(
                self.stdout, [(each["field"], each["was"], each["now"]) for each in differences]
            )


def _found(*, model: str | None, stale: bool, **options: Any) -> list[tuple[dict[str, Any], str]]:
    """Each as `--json` tells it, and the word for how it differs from the catalog."""
    rows = _of(model) if options["all"] else _of(model).exclude(state__in=Replica.OVER)
    found = [(replica_as_dict(row, sees_env=True), staleness_of(row).word) for row in rows]
    return [(told, word) for told, word in found if told["restart_needed"] or not stale]


def _of(model: str | None) -> QuerySet[Replica]:
    return replicas() if model is None else replicas().filter(of_model(model))


def _line(told: dict[str, Any], word: str) -> tuple[object, ...]:
    state = told["state"] if told["wanted"] == Replica.Wanted.RUN else f"{told['state']}, to {told['wanted']}"
    fields = ", ".join(each["field"] for each in told["differences"] + told["launch_differences"])
    stale = f"{word} ({fields})" if fields else word
    tls = " (TLS)" if told["certificate"] else ""
    place = (told["node"] or "", f"{told['port']}{tls}" if told["port"] else "")
    if told["deadline_s"] is not None:
        state += f", {span_words(told['deadline_s'])} left"
    return (told["id"][:8], _name(told), *place, state, ago(told["age_s"]), stale, told["reason"])


def _name(told: dict[str, Any]) -> str:
    return f"{told['model']}/{told['profile']}"
