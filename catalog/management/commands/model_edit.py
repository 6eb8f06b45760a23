"""`manage.py model_edit`: changes what is said of a model, and tells field by field what that changes."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from catalog.actions import Outcome, find_model, patch_model
from catalog.differences import listed
from catalog.hiding import hide_model
from catalog.management.model_options import PROFILE_HELP, add_options, model_patch
from catalog.management.shell import (
    DOOR,
    add_dry_run,
    add_json,
    add_why,
    print_differences,
    print_json,
    print_warnings,
    refusals,
    who,
)
from catalog.reading import shown
from catalog.spec import ModelSpec
from nodes.agents import ask_paths
from nodes.consequences import Consequences
from nodes.management.shell import print_consequences
from nodes.outlook import preview_change
from nodes.showing import becoming_stale, models_with_replicas, spec_of
from nodes.tasks import wake
from nodes.telling import consequences_as_dict

EXAMPLES = """

examples:
  manage.py model_edit qwen --max 4
  manage.py model_edit qwen --profile fast tp=4 args=--max-num-seqs args=64 --dry-run
  manage.py model_edit qwen --add-profile cheap gpu_class=l4 --remove-profile slow
  manage.py model_edit qwen --profile env.HF_HOME- --description '' --alias qwen3 --why "as ordered"

What is not named stays as it is. Nothing that runs is touched: replicas that differ become stale.
"""


class Command(BaseCommand):
    help = "Change a model of the catalog." + EXAMPLES + PROFILE_HELP

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("name", metavar="model", help="its canonical name")
        add_options(parser, is_new=False)
        add_why(parser)
        add_dry_run(parser)
        add_json(parser)

    def handle(self, *args: Any, name: str, **options: Any) -> None:
        with refusals():
            before = models_with_replicas().get(pk=find_model(name).pk)
            outcome = patch_model(
                before.name,
                model_patch(options, spec_of(before)),
                expected=before.revision,
                is_trial=options["dry_run"],
                by=who(),
                why=options["why"],
                door=DOOR,
                skip_source_check=options["skip_source_check"],
                ask_paths=ask_paths,
                after_change=wake,
            )
            wanted = outcome.trial or outcome.model.spec
            stale = becoming_stale(before, wanted)
            found = preview_change(before.name, outcome.trial, outcome.finding) if outcome.trial else None
        if options["json"]:
            print_json(self.stdout, _as_dict(outcome, wanted, stale, found))
        else:
            self._tell(outcome, before.name, stale, found)
        print_warnings(self.stderr, outcome)

    def _tell(self, outcome: Outcome, name: str, stale: int, found: Consequences | None) -> None:
        if not outcome.changes:
            self.stdout.write(f"Nothing of {shown(name)} changes.")
            return
        was_saved = outcome.trial is None
        self.stdout.write(f"Changed {shown(name)}:" if was_saved else f"Would change {shown(name)}:")
        rows = [(each.field, each.was, each.now) for each in listed(outcome.changes)]
        print_differences(self.stdout, rows)
        if outcome.finding.level == "ok" and outcome.finding.code != "recorded":
            self.stdout.write(shown(outcome.finding.sentence, 2_000))
        if found is not None:
            print_consequences(self.stdout, found)
        elif stale:
            become = (
                "1 replica becomes stale and runs" if stale == 1 else f"{stale} replicas become stale and run"
            )
            self.stdout.write(f"{become} on as started; manage.py replicas --diff tells what differs.")


def _as_dict(outcome: Outcome, wanted: ModelSpec, stale: int, found: Consequences | None) -> dict[str, Any]:
    foretold = {} if found is None else {"consequences": consequences_as_dict(found, sees_env=True)}
    return foretold | {
        "saved": bool(outcome.changes) and outcome.trial is None,
        "changes": outcome.changes,
        "becoming_stale": stale,
        "source": {"level": outcome.finding.level, "sentence": outcome.finding.sentence},
        "warnings": outcome.warnings,
        "model": hide_model(wanted.as_text_dict(), sees_env=True),
    }
