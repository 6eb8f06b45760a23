"""`manage.py engine_check`: asks a running engine for all that it should do, and says what it does."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from catalog.actions import find_model
from catalog.durations import SECOND
from catalog.management.shell import DOOR, add_json, add_why, print_json, print_table, refusals, who
from catalog.reading import shown
from catalog.typed import read_duration
from nodes import jobs
from nodes.checking import PATIENCE_S, ask_check, carry_out
from nodes.checks import CHECKS, Verdict
from nodes.jobs import job_as_dict
from nodes.management.meter import Meter
from nodes.management.shell import STOPPED_CODE, asked_to_stop, find_replica
from nodes.models import Job

HEADINGS = ("check", "claimed", "verdict", "what it does")


class Command(BaseCommand):
    help = (
        "Check what a running engine really does: health, chat, streams, stop texts, limits, tools, JSON "
        "schemas, pictures, embeddings, cancellation and prefix reuse. Ends with an error where it fails in "
        "something that is claimed."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("model", metavar="MODEL", help="the model's canonical name")
        parser.add_argument("--replica", metavar="ID", help="this one; else the newest that is ready")
        parser.add_argument(
            "--patience",
            metavar="TIME",
            default=f"{PATIENCE_S:g}s",
            help="how long one answer may take (%(default)s); three times as long for long prompts",
        )
        add_why(parser)
        add_json(parser)

    def handle(
        self, *args: Any, model: str, replica: str | None, patience: str, why: str, **options: Any
    ) -> None:
        with refusals():
            patience_s = read_duration("--patience", patience) / SECOND
            row = find_model(model)
            chosen = str(find_replica(replica).pk) if replica else ""
            job = ask_check(row, replica=chosen, patience_s=patience_s, by=who(), why=why, door=DOOR)
            with asked_to_stop() as asked, Meter(self.stderr) as meter:

                def show(progress: jobs.Progress) -> None:
                    meter.show(progress)
                    if asked:
                        jobs.stop(job.pk, by=who(), why=asked.pop(), door=DOOR)

                ended = jobs.run(job.pk, carry_out, on_progress=show)
        if ended is None:
            raise CommandError(
                f"Somebody stopped the check, or a worker carries it out: manage.py jobs tells "
                f"({str(job.pk)[:8]})."
            )
        if options["json"]:
            print_json(self.stdout, job_as_dict(ended))
        else:
            self._tell(ended)
        if ended.state == Job.State.STOPPED:
            raise CommandError(f"It was {shown(ended.problem, 2_000)}.", returncode=STOPPED_CODE)
        if ended.state != Job.State.DONE:
            raise CommandError(shown(ended.problem, 2_000))
        failed = [each for each in ended.result["findings"] if each["verdict"] == Verdict.FAILED]
        if failed:
            what = ", ".join(CHECKS[each["check"]] for each in failed)
            raise CommandError(f"{len(failed)} of {len(ended.result['findings'])} checks failed: {what}.")

    def _tell(self, job: Job) -> None:
        findings = job.result.get("findings", [])
        if findings:
            about = f"{job.engine} {job.engine_version}".strip() + (f" on {job.gpu}" if job.gpu else "")
            self.stdout.write(f"{shown(job.model_name)}, replica {job.result['replica'][:8]}, {about}:")
            print_table(self.stdout, HEADINGS, [_line(each) for each in findings])


def _line(finding: dict[str, Any]) -> tuple[object, ...]:
    claimed = {True: "yes", False: "no", None: ""}[finding["claimed"]]
    return (CHECKS[finding["check"]], claimed, finding["verdict"], finding["says"])
