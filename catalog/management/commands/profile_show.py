"""`manage.py profile_show`: what a profile needs and will run, and what of it is seldom meant."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from catalog.actions import find_model
from catalog.lint import Lint, lint
from catalog.management.shell import add_json, print_json, refusals
from catalog.models import Model
from catalog.reading import quote, shown
from catalog.spec import ModelSpec, ProfileSpec
from nodes.preview import Preview, preview

LINE_LIMIT = 20_000  # characters of a command


class Command(BaseCommand):
    help = "Show what a profile needs and will run, and what of it is seldom meant; nothing is started."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("model", metavar="MODEL", help="the model's canonical name")
        parser.add_argument("profile", nargs="?", metavar="PROFILE", help="all of them, if left out")
        add_json(parser)

    def handle(self, *args: Any, model: str, profile: str | None, **options: Any) -> None:
        with refusals():
            row = find_model(model)
            spec = row.spec
            chosen = _chosen(spec, profile)
            found = lint(spec, row.source_facts)
        if options["json"]:
            print_json(self.stdout, _as_dict(row, chosen, found))
            return
        for each in chosen:
            self._tell(preview(spec, each, row.source_revision), _about(found, each.name))
        for general in _about(found, ""):
            self.stdout.write(_line("warning", general.sentence, indent=""))

    def _tell(self, told: Preview, found: Iterable[Lint]) -> None:
        self.stdout.write(f"{shown(told.model)}/{shown(told.profile)} is {told.fingerprint}")
        lines = [("needs", str(told.needs))]
        lines.append(("refused", told.refusal) if told.refusal else ("runs", told.command_line))
        lines += [("with", f"{name}={value}") for name, value in told.shown_env(sees_env=True).items()]
        lines += [("note", remark) for remark in told.remarks]
        lines += [("warning", each.sentence) for each in found]
        for label, text in lines:
            self.stdout.write(_line(label, text))
        self.stdout.write("")


def _line(label: str, text: str, indent: str = "  ") -> str:
    return f"{indent}{label:<9}{shown(text, LINE_LIMIT)}"


def _about(found: Iterable[Lint], profile: str) -> list[Lint]:
    return [each for each in found if each.profile == profile]


def _chosen(spec: ModelSpec, name: str | None) -> tuple[ProfileSpec, ...]:
    if name is None:
        return spec.profiles
    profile = spec.profile(name)
    if profile is None:
        there = ", ".join(shown(each.name) for each in spec.profiles)
        raise CommandError(f"model {quote(spec.name)} has no profile {quote(name)}; it has {there}")
    return (profile,)


def _as_dict(row: Model, chosen: Iterable[ProfileSpec], found: tuple[Lint, ...]) -> dict[str, Any]:
    profiles = [
        preview(row.spec, each, row.source_revision).as_dict(sees_env=True)
        | {"warnings": [asdict(lint) for lint in _about(found, each.name)]}
        for each in chosen
    ]
    return {
        "model": row.name,
        "profiles": profiles,
        "warnings": [asdict(each) for each in _about(found, "")],
    }
