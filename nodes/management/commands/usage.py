"""`manage.py usage`: who used what since when: requests, errors, tokens, and how long they waited."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from catalog.management.shell import add_json, print_json, print_table, refusals
from nodes.reckoning import BY, SINCE, Answer, answer, ask, lasted
from nodes.tallies import Tally

COUNTS = (
    *("requests", "errors", "left", "prompt", "cached", "output"),
    *("ttft p50", "ttft p99", "tpot p50", "hold p50"),
)


class Command(BaseCommand):
    help = "Tell what was used: by key and by model, with tokens and times."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--key", default="", help="of this key: its id or its name")
        parser.add_argument("--model", default="", help="of this model")
        parser.add_argument("--since", default=SINCE, metavar="TIME", help=f"how long ago ({SINCE})")
        parser.add_argument("--by", choices=BY, default="both", help="told apart by key, model or both")
        add_json(parser)

    def handle(self, *args: Any, key: str, model: str, since: str, by: str, **options: Any) -> None:
        with refusals():
            found = answer(ask(since=since, by=by, key=key, model=model))
        if options["json"]:
            told = found.as_dict()
            print_json(self.stdout, told | {"until": told["until"].isoformat()})
        elif not found.lines:
            self.stdout.write(f"Nothing was asked for in the last {since}, of what you ask about.")
        else:
            self._print(found)

    def _print(self, found: Answer) -> None:
        apart = BY[found.question.by]
        rows = []
        for line in found.lines:
            names = {"key": line.key_name or line.key or "none", "model": line.model or "none"}
            rows.append([*(names[each] for each in apart), *_counts(line.tally)])
        if len(rows) > 1:
            rows.append(["total", *[""] * (len(apart) - 1), *_counts(found.total)])
        print_table(self.stdout, (*apart, *COUNTS), rows)


def _counts(tally: Tally) -> list[object]:
    return [
        tally.requests,
        tally.errors,
        tally.left,
        tally.prompt_tokens,
        tally.cached_tokens,
        tally.completion_tokens,
        lasted(tally.quantile("ttft", 0.5)),
        lasted(tally.quantile("ttft", 0.99)),
        lasted(tally.quantile("tpot", 0.5)),
        lasted(tally.quantile("hold", 0.5)),
    ]
