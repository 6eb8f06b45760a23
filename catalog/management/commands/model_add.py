"""`manage.py model_add`: one more model, through the same law and source check as everywhere."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand

from catalog.actions import add_model
from catalog.hiding import hide_model
from catalog.management.model_options import PROFILE_HELP, add_options, new_model
from catalog.management.shell import (
    DOOR,
    add_dry_run,
    add_json,
    add_why,
    print_json,
    print_warnings,
    refusals,
    who,
)
from catalog.reading import shown
from catalog.source import Finding
from catalog.spec import ModelSpec
from catalog.typed import scaling_words
from nodes.agents import ask_paths
from nodes.management.shell import print_consequences
from nodes.outlook import preview_change
from nodes.showing import model_as_dict, models_with_replicas, spec_of
from nodes.tasks import wake
from nodes.telling import consequences_as_dict

EXAMPLES = """

examples:
  manage.py model_add qwen --source Qwen/Qwen3-8B --gpu-class h100-80g --min 1 --max 2
  manage.py model_add gemma --source /models/gemma.gguf --engine llamacpp --max 1 \\
      --profile args=--ctx-size args=8192 env.OMP_NUM_THREADS=8
  manage.py model_add qwen --source Qwen/Qwen3-8B --max 1 \\
      --profile fast gpu_class=h100-80g tp=2 priority=10 --profile cheap gpu_class=l4
"""


class Command(BaseCommand):
    help = "Add a model to the catalog." + EXAMPLES + PROFILE_HELP

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("name", help="what a request asks for")
        add_options(parser, is_new=True)
        add_why(parser)
        add_dry_run(parser)
        add_json(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        with refusals():
            outcome = add_model(
                new_model(options),
                is_trial=options["dry_run"],
                by=who(),
                why=options["why"],
                door=DOOR,
                skip_source_check=options["skip_source_check"],
                ask_paths=ask_paths,
                after_change=wake,
            )
            if outcome.trial:
                self._foretell(outcome.trial, outcome.finding, is_json=options["json"])
                print_warnings(self.stderr, outcome)
                return
            row = models_with_replicas().get(pk=outcome.model.pk)
        if options["json"]:
            print_json(self.stdout, model_as_dict(row, sees_env=True))
        else:
            scaling = scaling_words(spec_of(row).scaling, settings.LLMGW_IDLE_TIMEOUT)
            hint = "; without --min or --max nothing runs" if row.scaling_max == 0 else ""
            self.stdout.write(f"Added {shown(row.name)} ({scaling}{hint}).")
            if outcome.finding.level == "ok":
                self.stdout.write(shown(outcome.finding.sentence, 2_000))
        print_warnings(self.stderr, outcome)

    def _foretell(self, wanted: ModelSpec, finding: Finding, *, is_json: bool) -> None:
        found = preview_change(wanted.name, wanted, finding)
        if is_json:
            model = hide_model(wanted.as_text_dict(), sees_env=True)
            foretold = consequences_as_dict(found, sees_env=True)
            print_json(self.stdout, {"saved": False, "model": model, "consequences": foretold})
            return
        scaling = scaling_words(wanted.scaling, settings.LLMGW_IDLE_TIMEOUT)
        self.stdout.write(f"Would add {shown(wanted.name)} ({scaling}).")
        print_consequences(self.stdout, found)
