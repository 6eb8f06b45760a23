"""`manage.py series`: how a model, a node or the cluster did lately, a line for each thing measured."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from catalog.actions import find_model
from catalog.management.shell import add_json, print_json, print_table, refusals
from catalog.models import database_now
from nodes.management.shell import find_node
from nodes.sampling import SPANS, Span, Value
from nodes.series import USUAL_SPAN, Series, series_of_cluster, series_of_model, series_of_node

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 60  # characters of a line that is drawn, at most
HEADINGS = ("what", "unit", "least", "mean", "most", "last", "then ... now")


class Command(BaseCommand):
    help = "Tell how a model, a node or the whole cluster did lately."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("model", nargs="?", help="by its name; the cluster unless told")
        parser.add_argument("--node", help="of this node")
        parser.add_argument(
            "--span", choices=SPANS, default=USUAL_SPAN, help=f"how long until now ({USUAL_SPAN})"
        )
        add_json(parser)

    def handle(self, *args: Any, model: str | None, node: str | None, span: str, **options: Any) -> None:
        if model is not None and node is not None:
            raise CommandError("Name a model or --node, not both: which requests a node had is not kept.")
        found = _series(model, node, SPANS[span])
        if options["json"]:
            print_json(self.stdout, found.as_dict())
            return
        rows = [
            [f"{plot.title}: {line.label}", plot.unit, *_told(line.values)]
            for plot in found.plots
            for line in plot.lines
            if any(value is not None for value in line.values)
        ]
        if not rows:
            self.stdout.write(f"Nothing is known of {found.span.words}.")
            return
        self.stdout.write(f"{found.span.words.capitalize()}, from {found.begins_at:%Y-%m-%d %H:%M} UTC on.")
        print_table(self.stdout, HEADINGS, rows)


def _series(model: str | None, node: str | None, span: Span) -> Series:
    now = database_now()
    if node is not None:
        return series_of_node(find_node(node).name, span, now)
    if model is None:
        return series_of_cluster(span, now)
    with refusals():
        return series_of_model(find_model(model).name, span, now)


def _told(values: Sequence[Value]) -> list[str]:
    """In figures and as a picture. What nothing is known of is a gap in it."""
    known = [value for value in values if value is not None]
    figures = (min(known), sum(known) / len(known), max(known), known[-1])
    return [*(f"{value:,.4g}" for value in figures), _drawn(values)]


def _drawn(values: Sequence[Value]) -> str:
    times = -(-len(values) // WIDTH)
    parts = [values[at : at + times] for at in range(0, len(values), times)]
    known = [[value for value in part if value is not None] for part in parts]
    few = [sum(part) / len(part) if part else None for part in known]
    most = max((value for value in few if value is not None), default=0)
    return "".join(
        "·" if value is None else BARS[round(value / most * (len(BARS) - 1))] if most else BARS[0]
        for value in few
    )
