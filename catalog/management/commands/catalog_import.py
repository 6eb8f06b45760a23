"""`manage.py catalog_import`: makes the catalog what a file says, and tells first what that changes."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from catalog.actions import Imported, SourcesRefused, import_catalog
from catalog.files import BYTES_LIMIT, CatalogFile, FileError, Placed, read_catalog_file
from catalog.importing import ImportRefused
from catalog.management.shell import DOOR, add_json, add_why, print_json, refusals, who
from catalog.reading import quote, shown
from catalog.typed import scaling_words
from nodes.agents import ask_paths
from nodes.management.shell import print_consequences
from nodes.models import Replica
from nodes.outlook import preview_changes
from nodes.tasks import wake
from nodes.telling import consequences_as_dict

STDIN = "-"
SENTENCES = 100  # of one kind; a file with more faults is mended in several rounds
VALUE_LIMIT = 200  # characters of one value


class Command(BaseCommand):
    help = "Make the catalog what a file says, in one transaction, and print first what that changes."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("file", help="YAML or JSON, as catalog_export prints it; - is standard input")
        parser.add_argument(
            "--dry-run",
            action="store_true",
            help="print the difference, and what the next pass would make of it; nothing is changed",
        )
        parser.add_argument("--prune", action="store_true", help="remove models that the file does not name")
        parser.add_argument(
            "--yes", action="store_true", help="remove even more than a third of the catalog, or all"
        )
        parser.add_argument(
            "--skip-source-check",
            action="store_true",
            help="save without asking for the sources; --why says the reason",
        )
        add_why(parser)
        add_json(parser)

    def handle(self, *args: Any, file: str, dry_run: bool, prune: bool, yes: bool, **options: Any) -> None:
        read = _read(file)
        is_json = options["json"]
        with refusals():
            try:
                imported = import_catalog(
                    read.models,
                    prune=prune,
                    is_trial=dry_run,
                    is_sure=yes,
                    by=who(),
                    why=options["why"],
                    door=DOOR,
                    file=file,
                    skip_source_check=options["skip_source_check"],
                    ask_paths=ask_paths,
                    before_change=None if is_json else self._tell,
                    after_change=wake,
                )
            except SourcesRefused as no:
                hint = "Nothing was saved; --skip-source-check --why REASON saves it all the same."
                raise CommandError("\n".join([*_refused(read, no), hint])) from None
            except ImportRefused as no:
                raise CommandError("\n".join(_refused(read, no))) from None
            found = preview_changes(imported.wanted) if dry_run and imported.changes_anything else None
        if is_json:
            foretold = {} if found is None else {"consequences": consequences_as_dict(found, sees_env=True)}
            print_json(self.stdout, _as_dict(imported, dry_run) | foretold)
        else:
            self.stdout.write(_summary(imported, dry_run))
            if found is not None:
                print_consequences(self.stdout, found)
            if dry_run and imported.sweeps:
                self.stderr.write(f"warning: {imported.sweeps.sentence}")
        for warning in _bounded([f"warning: {shown(each, 2_000)}" for each in imported.warnings]):
            self.stderr.write(warning)

    def _tell(self, imported: Imported) -> None:
        for line in _difference(imported):
            self.stdout.write(line)


def _read(file: str) -> CatalogFile:
    try:
        if file == STDIN:
            content = sys.stdin.buffer.read(BYTES_LIMIT + 1)
        else:
            with Path(file).open("rb") as opened:
                content = opened.read(BYTES_LIMIT + 1)
        return read_catalog_file(content, file)
    except (OSError, ValueError) as problem:
        if isinstance(problem, FileError):
            raise CommandError("\n".join(_bounded(_sentences(problem.placed)))) from None
        why = problem.strerror if isinstance(problem, OSError) else str(problem)
        raise CommandError(f"{quote(file, 500)} cannot be read: {why}; check the path.") from None


def _refused(read: CatalogFile, no: ImportRefused) -> list[str]:
    return _bounded(_sentences([read.placed(each.fault, each.number) for each in no.placed]))


def _sentences(placed: Sequence[Placed]) -> list[str]:
    return [shown(str(each), 2_000) for each in placed]


def _bounded(sentences: Sequence[str]) -> list[str]:
    more = len(sentences) - SENTENCES
    return [*sentences[:SENTENCES], *([f"... and {more} more."] if more > 0 else [])]


# --- the difference -------------------------------------------------------------------------------


def _difference(imported: Imported) -> Iterator[str]:
    for model in imported.added:
        words = scaling_words(model.scaling, settings.LLMGW_IDLE_TIMEOUT)
        profiles = ", ".join(shown(profile.name) for profile in model.profiles)
        yield f"add {shown(model.name)} ({words}; {profiles})"
    for each in imported.changed:
        yield f"change {shown(each.name)}"
        yield from (f"    {line}" for line in _changes(each.detail))
    running = _running(imported.removed)
    for name in imported.removed:
        stops = running[name]
        yield f"remove {shown(name)}" + (f" ({stops} of its replicas will stop)" if stops else "")
    if imported.kept:
        names = ", ".join(shown(name) for name in imported.kept[:SENTENCES])
        more = ", ..." if len(imported.kept) > SENTENCES else ""
        yield f"In the catalog and not in the file: {names}{more}. They stay; --prune removes them."


def _running(names: Sequence[str]) -> Counter[str]:
    if not names:
        return Counter()
    alive = Replica.objects.exclude(state__in=Replica.OVER).exclude(model=None)
    counted = Counter(alive.values_list("model__name", flat=True))
    return Counter({name: counted[name] for name in names})


def _changes(detail: Mapping[str, Any]) -> Iterator[str]:
    yield from _fields(detail["changed"])
    for name in detail["profiles_added"]:
        yield f"profile {shown(name)}: added"
    for name, changed in detail["profiles_changed"].items():
        yield from (f"profile {shown(name)}: {line}" for line in _fields(changed))
    for name in detail["profiles_removed"]:
        yield f"profile {shown(name)}: removed"
    if order := detail.get("profiles_order"):
        yield f"profiles in this order: {', '.join(map(shown, order))}"


def _fields(changed: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for each in changed:
        was, now = each["was"], each["now"]
        if not isinstance(was or now, Mapping):
            yield f"{each['field']}: {_value(was)} -> {_value(now)}"
            continue
        was, now = was or {}, now or {}
        for name in dict.fromkeys((*was, *now)):
            yield f"{each['field']}.{shown(name)}: {_value(was.get(name))} -> {_value(now.get(name))}"


def _value(value: Any) -> str:
    return "none" if value is None else shown(json.dumps(value, ensure_ascii=False), VALUE_LIMIT)


def _summary(imported: Imported, is_trial: bool) -> str:
    if not imported.changes_anything:
        return f"Nothing to change: the catalog has all {imported.unchanged} models as the file has them."
    counted = [len(imported.added), len(imported.changed), len(imported.removed)]
    if is_trial:
        would = "Would add {}, change {} and remove {} models".format(*counted)
        return f"{would}; {imported.unchanged} stay as they are. Nothing was changed."
    done = "Added {}, changed {} and removed {} models".format(*counted)
    return f"{done}; {imported.unchanged} stayed as they were."


def _as_dict(imported: Imported, is_trial: bool) -> dict[str, Any]:
    return {
        "dry_run": is_trial,
        "added": [model.name for model in imported.added],
        "changed": [{"name": each.name, **each.detail} for each in imported.changed],
        "removed": list(imported.removed),
        "not_in_file": list(imported.kept),
        "unchanged": imported.unchanged,
        "warnings": list(imported.warnings),
    }
