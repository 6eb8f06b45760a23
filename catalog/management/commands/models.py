"""`manage.py models`: the catalog, and how much of it runs."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand

from catalog.actions import read_catalog
from catalog.management.shell import add_json, print_json, print_table, refusals
from catalog.models import Model
from catalog.reading import shown
from catalog.typed import bounds_words, scaling_words
from nodes.showing import check_of_model, checked_words, model_as_dict, models_with_replicas, spec_of, tally


class Command(BaseCommand):
    help = "List the models of the catalog, and how much of each runs."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--plain", action="store_true", help="the catalog alone, a line a model and a profile"
        )
        add_json(parser)

    def handle(self, *args: Any, plain: bool, **options: Any) -> None:
        with refusals():
            if plain:
                self.stdout.write(str(read_catalog()), ending="")
                return
            rows = list(models_with_replicas())
            if options["json"]:
                print_json(self.stdout, [model_as_dict(row, sees_env=True) for row in rows])
                return
            if not rows:
                self.stdout.write("The catalog is empty; manage.py model_add adds a model.")
                return
            headings = ("model", "scaling", "ready", "stale", "source", "limits", "engine check")
            print_table(self.stdout, headings, [_line(row) for row in rows])
            for row in rows:
                if hasattr(row, "unplaced"):
                    name, why = shown(row.name), shown(row.unplaced.why, 2_000)
                    self.stdout.write(f"{name} is {row.unplaced.missing} short: {why}")
                for fault in spec_of(row).faults_today():
                    self.stdout.write(shown(fault.sentence, 2_000))


def _line(row: Model) -> tuple[object, ...]:
    counted = tally(row)
    return (
        row.name,
        scaling_words(spec_of(row).scaling, settings.LLMGW_IDLE_TIMEOUT),
        f"{counted.ready} of {counted.wanted}",
        counted.stale or "",
        Model.Source(row.source_state).label,
        bounds_words(spec_of(row)),
        checked_words(check_of_model(row)),
    )
