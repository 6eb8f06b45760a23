"""`manage.py bench`: how much a model can take while it keeps its promise, and what earlier runs found."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from catalog.actions import find_model
from catalog.management.shell import DOOR, add_json, add_why, print_json, print_table, refusals, who
from catalog.models import Model
from catalog.reading import quote, shown
from nodes import jobs
from nodes.agents import ask_paths
from nodes.bench.asks import DISTRIBUTIONS, Row, read_rows
from nodes.bench.options import Options
from nodes.benching import apply_weights, ask_bench, carry_out, proposed
from nodes.jobs import Progress
from nodes.management.meter import Meter
from nodes.management.shell import STOPPED_CODE, asked_to_stop, find_replica
from nodes.measured import (
    HEADINGS,
    STEP_HEADINGS,
    run_as_dict,
    run_line,
    runs_of,
    step_line,
    weighing_as_dict,
)
from nodes.models import Job
from nodes.tasks import wake

DATASET_LIMIT_BYTES = 256 * 1024 * 1024
DEFAULT = Options()

EXAMPLES = """

examples:
  manage.py bench qwen --prompt-tokens 1000 --output-tokens 200 --shared-prefix 0.5
  manage.py bench qwen --profile cheap --dataset chats.jsonl --seed 7
  manage.py bench qwen --gateway --step 1m
  manage.py bench qwen --runs --apply      # what was found so far, and the weights that follow from it
"""


class Command(BaseCommand):
    help = (
        "Find the highest load at which a model's SLO holds, by real requests that arrive at random and wait "
        "for nobody. A replica that serves clients meanwhile is slowed down, and measured as it is."
        + EXAMPLES
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("model", help="its canonical name")
        parser.add_argument("--runs", action="store_true", help="show what earlier runs found, and run none")
        parser.add_argument("--apply", action="store_true", help="set the weights that follow, once shown")
        where = parser.add_mutually_exclusive_group()
        where.add_argument("--replica", metavar="ID", help="directly at this replica, or its first digits")
        where.add_argument("--profile", default="", metavar="NAME", help="directly at a replica of it")
        where.add_argument("--gateway", action="store_true", help="through the gateway, as clients do")
        parser.add_argument(
            "--gateway-url", default="", metavar="URL", help="through this one; LLMGW_GATEWAY_URL unless told"
        )
        load = parser.add_argument_group("load").add_argument
        load("--distribution", choices=DISTRIBUTIONS, help=f"of lengths ({DEFAULT.distribution})")
        load("--prompt-tokens", type=int, metavar="N", help=f"on average ({DEFAULT.prompt_tokens})")
        load("--output-tokens", type=int, metavar="N", help=f"on average ({DEFAULT.output_tokens})")
        load("--spread", type=float, metavar="PART", help=f"of lengths, of their mean ({DEFAULT.spread})")
        load("--shared-prefix", type=float, metavar="PART", help="of each prompt that all share, 0 to 1 (0)")
        load("--dataset", metavar="FILE", help='lines such as {"messages": [...], "output_tokens": 40}')
        load(
            "--seed", type=int, metavar="N", help=f"the same asks the same at the same times ({DEFAULT.seed})"
        )
        search = parser.add_argument_group("search").add_argument
        search("--start-rate", type=float, metavar="R", help=f"requests a second ({DEFAULT.start_rate:g})")
        search("--max-rate", type=float, metavar="R", help=f"tries no more than this ({DEFAULT.max_rate:g})")
        search("--precision", type=float, metavar="PART", help=f"of what is found ({DEFAULT.precision})")
        search("--step", metavar="TIME", help="how long each load is measured (20s)")
        search("--warmup", metavar="TIME", help="before anything counts (5s)")
        search("--ttft-p99", metavar="TIME", help="what has to hold, instead of the model's SLO")
        search("--tpot-p99", metavar="TIME", help="what has to hold, instead of the model's SLO")
        add_why(parser)
        add_json(parser)

    def handle(self, *args: Any, model: str, runs: bool, **options: Any) -> None:
        with refusals():
            row = find_model(model)
            job = None if runs else self._run(row, **options)
        if options["json"]:
            self._tell_json(row, job)
        elif job is None:
            self._tell_runs(row)
        else:
            self._tell_run(job)
        if job is not None and job.state != Job.State.DONE:
            code = STOPPED_CODE if job.state == Job.State.STOPPED else 1
            raise CommandError(_end_of(job), returncode=code)
        self._weigh(row.name, **options)

    # --- running

    def _run(self, model: Model, *, replica: str | None, profile: str, why: str, **options: Any) -> Job:
        given, rows = _read(options)
        job = ask_bench(
            model,
            given,
            replica=None if replica is None else find_replica(replica).pk,
            profile=profile,
            address=options["gateway_url"].rstrip("/"),
            rows=rows,
            by=who(),
            why=why,
            door=DOOR,
        )
        with asked_to_stop() as asked, Meter(self.stderr, _numbers) as meter:

            def show(progress: Progress) -> None:
                meter.show(progress)
                if asked:
                    jobs.stop(job.pk, by=who(), why=asked.pop(), door=DOOR)

            ended = jobs.run(job.pk, lambda job, report: carry_out(job, report, rows=rows), on_progress=show)
        if ended is None:
            raise CommandError("A worker has taken the bench; manage.py jobs tells how it goes.")
        return ended

    # --- telling

    def _tell_json(self, model: Model, job: Job | None) -> None:
        told: dict[str, Any] = {"runs": [run_as_dict(each) for each in runs_of(model.name)]}
        if job is not None:
            told = {"run": run_as_dict(job)}
        print_json(self.stdout, told | {"weights": weighing_as_dict(proposed(model.name)[1])})

    def _tell_run(self, job: Job) -> None:
        steps = job.result.get("steps", [])
        if steps:
            print_table(self.stdout, STEP_HEADINGS, [step_line(each) for each in steps])
        if job.state == Job.State.DONE:
            self.stdout.write(f"\n{shown(job.result['says'], 2_000)}")

    def _tell_runs(self, model: Model) -> None:
        found = runs_of(model.name)
        if not found:
            name = shown(model.name)
            self.stdout.write(f"No bench of {name} has run yet; manage.py bench {name} runs one.")
            return
        print_table(self.stdout, HEADINGS, [run_line(each) for each in found])

    def _weigh(self, name: str, *, apply: bool, why: str, json: bool, **options: Any) -> None:
        with refusals():
            model, weighing = proposed(name)
            if not json and weighing.proposals:
                self.stdout.write("\nWeights by what was measured:")
                lines = [
                    (each.profile, each.gpu_class, f"{each.rate:.3g}", f"{each.was:g}", f"{each.weight:g}")
                    for each in weighing.proposals
                ]
                print_table(self.stdout, ("profile", "gpu class", "held, req/s", "weight", "proposed"), lines)
            elif not json:
                self.stdout.write(f"\n{shown(weighing.says, 2_000)}")
            if not apply:
                if weighing.changes and not json:
                    self.stdout.write("--apply sets them.")
                return
            said: dict[str, Any] = {"by": who(), "why": why, "door": DOOR}
            outcome = apply_weights(model, weighing, **said, ask_paths=ask_paths, after_change=wake)
        if not json:
            says = "They have these weights." if outcome is None else "Set; requests follow at once."
            self.stdout.write(says)


def _read(options: dict[str, Any]) -> tuple[dict[str, Any], tuple[Row, ...]]:
    """The bench's options as JSON, and the dataset's rows."""
    names = (
        *("distribution", "prompt_tokens", "output_tokens", "spread", "shared_prefix", "seed"),
        *("start_rate", "max_rate", "precision", "step", "warmup", "ttft_p99", "tpot_p99"),
    )
    given = {name: options[name] for name in names if options[name] is not None}
    if options["gateway"] or options["gateway_url"]:
        given["through"] = "gateway"
    if not options["dataset"]:
        return given, ()
    path = Path(options["dataset"])
    return given | {"dataset": shown(path.name)}, read_dataset(path)


def read_dataset(path: Path, *, limit_bytes: int = DATASET_LIMIT_BYTES) -> tuple[Row, ...]:
    """Its rows. Raises CommandError."""
    try:
        with path.open("rb") as file:  # a pipe, or a device, has no size and perhaps no end
            content = file.read(limit_bytes + 1)
        if len(content) > limit_bytes:
            size = f"{limit_bytes // 2**20} MiB"
            raise CommandError(f"The dataset {quote(str(path))} is larger than {size}; give a smaller one.")
        # Not splitlines: what JSON may hold in a text, such as U+2028, ends lines for it.
        return read_rows(content.decode("utf-8-sig").split("\n"), quote(path.name))
    except OSError as fault:
        why = fault.strerror or type(fault).__name__
        raise CommandError(f"The dataset {quote(str(path))} cannot be read: {why}.") from None
    except UnicodeDecodeError:
        raise CommandError(
            f"The dataset {quote(str(path))} is no text in UTF-8; give lines of JSON."
        ) from None


def _end_of(job: Job) -> str:
    if job.state == Job.State.STOPPED:
        return f"Stopped; nothing of it goes on. {shown(job.result.get('says', ''), 2_000)}".rstrip()
    return shown(job.problem, 2_000)


def _numbers(progress: Progress) -> str:
    """Of the moment, behind what it does."""
    numbers = [f"{progress['answered']} answered", f"{progress['open']} open"]
    if progress["failed"]:
        numbers.append(f"{progress['failed']} failed")
    for name, key in (("TTFT p99", "ttft_p99_ms"), ("TPOT p99", "tpot_p99_ms")):
        if progress[key] is not None:
            numbers.append(f"{name} {progress[key]:.0f} ms")
    if progress["held"]:
        numbers.append(f"held {progress['held']:.3g}/s")
    return f"{progress['say']}; {', '.join(numbers)}"
