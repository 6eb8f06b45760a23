"""`manage.py nodes`: the machines, whether they answer, and what is free on them."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from catalog.management.shell import add_json, ago, print_json, print_table, refusals
from nodes.showing import node_as_dict, nodes

HEADINGS = ("node", "state", "seen", "GPUs free", "runs", "engines", "address", "note")


class Command(BaseCommand):
    help = "List nodes: whether their agents answer, and what is free on them."

    def add_arguments(self, parser: ArgumentParser) -> None:
        add_json(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        with refusals():
            found = [node_as_dict(node) for node in nodes()]
        if options["json"]:
            print_json(self.stdout, found)
        elif not found:
            self.stdout.write("There is no node yet; manage.py node_add adds one.")
        else:
            print_table(self.stdout, HEADINGS, [_line(node) for node in found])


def _line(node: dict[str, Any]) -> tuple[object, ...]:
    kept_free = "draining" if node["draining"] else "cordoned" if node["cordoned"] else ""
    state = ", ".join(filter(None, (node["state"], kept_free)))
    engines = ", ".join(engine["name"] for engine in node["engines"])
    free = f"{node['gpus_free']} of {node['gpus_total']}"
    sick = (f"GPU {gpu['index']}: {gpu['sickness']}" for gpu in node["gpus"] if gpu.get("sickness"))
    note = node["problem"] or node["cordoned_why"] or "; ".join(sick)
    runs = len(node["replicas"])
    return (node["name"], state, ago(node["age_s"]), free, runs, engines, node["address"], note)
