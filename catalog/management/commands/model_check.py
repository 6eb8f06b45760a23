"""`manage.py model_check`: asks about sources again, now, and says what was found."""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import asdict
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from catalog.actions import Outcome, check_model
from catalog.management.shell import DOOR, add_json, add_why, print_json, refusals, who
from catalog.models import Model
from catalog.proposals import proposals
from catalog.reading import CatalogError, shown
from nodes.agents import ask_paths
from nodes.tasks import wake

SENTENCE_LIMIT = 2_000


class Command(BaseCommand):
    help = "Ask the hub, or the nodes, about models' sources again; what runs is left alone."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("names", nargs="*", metavar="NAME", help="a canonical name; several may be given")
        parser.add_argument("--all", action="store_true", help="every model of the catalog")
        parser.add_argument(
            "--pin", action="store_true", help="have launches use the commit that the source is at now"
        )
        add_why(parser)
        add_json(parser)

    def handle(self, *args: Any, names: list[str], pin: bool, why: str, **options: Any) -> None:
        if bool(names) == options["all"]:
            raise CommandError("Name the models to check, or give --all, and not both.")
        if pin and options["all"]:
            raise CommandError("Each model is pinned by its name: leave out --all, or --pin.")
        done: list[Outcome] = []
        refused: list[str] = []
        with refusals():
            for name in names or Model.objects.values_list("name", flat=True):
                try:
                    outcome = check_model(
                        name, by=who(), why=why, door=DOOR, pin=pin, ask_paths=ask_paths, after_change=wake
                    )
                except CatalogError as no:  # the others are asked about all the same
                    refused += [fault.sentence for fault in no.faults]
                    continue
                done.append(outcome)
                if not options["json"]:
                    self._tell(outcome)
            if options["json"]:
                print_json(self.stdout, [_as_dict(outcome) for outcome in done])
        count = sum(outcome.finding.is_refused for outcome in done)
        if count:
            refused.append(f"{count} of {len(done)} sources {'is' if count == 1 else 'are'} refused.")
        if refused:
            raise CommandError("\n".join(shown(sentence, SENTENCE_LIMIT) for sentence in refused))

    def _tell(self, outcome: Outcome) -> None:
        finding = outcome.finding
        self.stdout.write(f"{finding.level:<8}{shown(finding.sentence, SENTENCE_LIMIT)}")
        for sentence in finding.facts.get("also", ()):
            self.stdout.write(f"{'also':<8}{shown(sentence, SENTENCE_LIMIT)}")
        if finding.is_refused:
            return
        for proposal in proposals(outcome.model.spec, outcome.model.source_facts):
            self.stdout.write(f"{'propose':<8}{shown(proposal.sentence, SENTENCE_LIMIT)}")


def _as_dict(outcome: Outcome) -> dict[str, Any]:
    row, finding = outcome.model, outcome.finding
    return {
        "model": row.name,
        "level": finding.level,
        "code": finding.code,
        "sentence": finding.sentence,
        "facts": dict(finding.facts),
        "state": row.source_state or "unchecked",
        "revision": row.source_revision,
        "proposals": [asdict(proposal) for proposal in proposals(row.spec, row.source_facts)],
    }
