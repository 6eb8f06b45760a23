"""`manage.py status`: how the cluster is, at a glance."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Iterable, Sequence
from typing import Any

from django.core.management.base import BaseCommand
from django.core.serializers.json import DjangoJSONEncoder

from catalog.management.shell import add_json, add_watch, ago, clear, print_table, refusals, watched
from nodes.attention import Matter
from nodes.overview import Overview, facts_of, look, overview_as_dict


class Command(BaseCommand):
    help = "Tell how the cluster is: what needs a person, what there is in numbers, and what happened last."

    def add_arguments(self, parser: ArgumentParser) -> None:
        add_json(parser)
        add_watch(parser)

    def handle(self, *args: Any, watch: float | None, **options: Any) -> None:
        for clears in watched(self.stdout, watch):
            with refusals():
                seen = look()
            if clears:
                clear(self.stdout)
            if options["json"]:
                self.stdout.write(json.dumps(overview_as_dict(seen), cls=DjangoJSONEncoder, indent=2))
            else:
                self._tell(seen)

    def _tell(self, seen: Overview) -> None:
        if seen.needs:
            self._print("Needs a person:", ("state", "what", "why"), _rows(seen.needs))
        else:
            self.stdout.write("Nothing needs a person now.")
        if seen.under_way:
            self._print("\nUnder way:", ("state", "what", "why"), _rows(seen.under_way))
        self._print("", ("of", "now"), [(fact.name, fact.words) for fact in facts_of(seen)])
        if seen.events:
            rows = [
                (ago((seen.at - each.at).total_seconds()), each.did, each.by or "llmgw", each.why)
                for each in seen.events
            ]
            self._print("\nWhat happened last:", ("when", "did", "who", "why"), rows)

    def _print(self, says: str, headings: tuple[str, ...], rows: Sequence[Sequence[object]]) -> None:
        self.stdout.write(says)
        print_table(self.stdout, headings, rows)


def _rows(matters: Iterable[Matter]) -> list[tuple[object, ...]]:
    return [(each.word, each.subject, each.why) for each in matters]
