"""`manage.py model_add`: one model with one profile, through the same law and source check as everywhere."""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand

from catalog.actions import add_model
from catalog.management.shell import DOOR, add_json, add_why, print_json, refusals, who
from catalog.reading import shown
from catalog.typed import TypingError, read_settings, scaling_words, typed_value
from nodes.agents import ask_paths
from nodes.showing import model_as_dict, models_with_replicas, spec_of
from nodes.tasks import wake

EXAMPLES = """

examples:
  manage.py model_add qwen --source Qwen/Qwen3-8B --gpu-class h100-80g --min 1 --max 2
  manage.py model_add gemma --source /models/gemma.gguf --engine llamacpp --max 1 \\
      --profile args=--ctx-size --profile args=8192 --profile env.OMP_NUM_THREADS=8

Each --profile sets one key of the profile: name, engine, gpu_class, tp, pp, nodes, gpus_per_node,
min_memory_gb, min_disk_gb, weight, priority, startup_timeout (20m); args once an argument; env.NAME and
node_selector.LABEL. min 0 with max above it is on demand; min 0, max 0 is off.
"""


class Command(BaseCommand):
    help = "Add a model with one profile to the catalog." + EXAMPLES

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> Any:
        return super().create_parser(prog_name, subcommand, formatter_class=_AsWritten, **kwargs)

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("name", help="what a request asks for")
        parser.add_argument("--source", required=True, help="org/name[@revision][:file-or-glob], or a path")
        parser.add_argument("--engine", help="vllm (if left out), sglang, llamacpp or sim")
        parser.add_argument("--gpu-class", help="leave out to run without a card (llamacpp)")
        parser.add_argument("--tp", help="GPUs that share each layer")
        parser.add_argument("--min", help="replicas kept running")
        parser.add_argument("--max", help="replicas at most")
        parser.add_argument(
            "--idle-timeout", help="with min 0: unloaded after this long without a request, as 15m"
        )
        parser.add_argument("--alias", action="append", default=[], help="a further name; may be repeated")
        parser.add_argument("--description")
        parser.add_argument("--context-length", help="tokens")
        parser.add_argument("--max-output", help="tokens")
        parser.add_argument(
            "--capability", action="append", default=[], metavar="NAME", help="tools, vision or embeddings"
        )
        parser.add_argument("--profile", action="append", default=[], metavar="KEY=VALUE", help="see below")
        parser.add_argument(
            "--skip-source-check",
            action="store_true",
            help="save without asking for the source; --why says the reason",
        )
        add_why(parser)
        add_json(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        with refusals():
            outcome = add_model(
                _raw(options),
                by=who(),
                why=options["why"],
                door=DOOR,
                skip_source_check=options["skip_source_check"],
                ask_paths=ask_paths,
                after_change=wake,
            )
            row = models_with_replicas().get(pk=outcome.model.pk)
        if options["json"]:
            print_json(self.stdout, model_as_dict(row, sees_env=True))
        else:
            scaling = scaling_words(spec_of(row).scaling, settings.LLMGW_IDLE_TIMEOUT)
            hint = "; without --min or --max nothing runs" if row.scaling_max == 0 else ""
            self.stdout.write(f"Added {shown(row.name)} ({scaling}{hint}).")
            if outcome.finding.level == "ok":
                self.stdout.write(shown(outcome.finding.sentence, 2_000))
        told = [outcome.finding.sentence] if outcome.finding.level == "warn" else []
        for warning in [*told, *outcome.warnings]:
            self.stderr.write(f"warning: {shown(warning, 2_000)}")


class _AsWritten(RawDescriptionHelpFormatter):
    """Examples keep their lines."""


def _raw(options: dict[str, Any]) -> dict[str, Any]:
    """The model as the law reads it; what was not said is left out."""
    profile = {"name": "default"} | read_settings(options["profile"])
    for key in ("engine", "gpu_class", "tp"):
        if options[key] is None:
            continue
        if key in profile:
            option = key.replace("_", "-")
            raise TypingError(f"--{option} and --profile {key}= say the same thing; keep one of the two")
        profile[key] = typed_value(key, options[key])
    scaling = {
        key: typed_value(key, options[key])
        for key in ("min", "max", "idle_timeout")
        if options[key] is not None
    }
    told = {
        key: typed_value(key, options[key])
        for key in ("description", "context_length", "max_output")
        if options[key] is not None
    }
    return {
        "name": options["name"],
        "aliases": options["alias"],
        "source": options["source"],
        "profiles": [profile],
        "scaling": scaling,
        "capabilities": dict.fromkeys(options["capability"], True),
        **told,
    }
