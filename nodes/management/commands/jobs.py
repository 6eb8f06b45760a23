"""`manage.py jobs`: who asked for which bench or engine check, how far it is, and what came of it."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from catalog.management.shell import add_json, print_json, print_table, refusals
from catalog.typed import span_words
from nodes.jobs import job_as_dict, jobs, says_of
from nodes.models import Job

HEADINGS = ("job", "kind", "model", "state", "by", "asked", "lasted", "note")
SHOWN = 50


class Command(BaseCommand):
    help = "List jobs, newest first: benches and engine checks, how far they are, and what came of them."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--model", help="about this model alone")
        parser.add_argument("--all", action="store_true", help=f"more than the last {SHOWN}")
        add_json(parser)

    def handle(self, *args: Any, model: str | None, **options: Any) -> None:
        with refusals():
            rows = jobs() if model is None else jobs().filter(model_name=model)
            found = list(rows if options["all"] else rows[:SHOWN])
        if options["json"]:
            print_json(self.stdout, [job_as_dict(job) for job in found])
        elif not found:
            self.stdout.write("There are no jobs; manage.py bench and manage.py engine_check make some.")
        else:
            print_table(self.stdout, HEADINGS, [_line(job) for job in found])


def _line(job: Job) -> tuple[object, ...]:
    lasted = job.lasted  # type: ignore[attr-defined]  # annotated
    span = "" if lasted is None else span_words(lasted.total_seconds())
    note = job.problem or says_of(job)
    return (
        *(str(job.pk)[:8], job.kind, job.model_name, job.state, job.by),
        *(f"{job.asked_at:%Y-%m-%d %H:%M}", span, note),
    )
