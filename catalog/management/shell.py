"""What all commands share: who is at the shell, how a table and an age look, what is watched, and how a
refusal does."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import textwrap
import time
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from typing import Any

from django.core.management.base import CommandError, OutputWrapper
from django.db import DatabaseError

from catalog.actions import Outcome, SourceRefused
from catalog.reading import CatalogError, quote, shown
from catalog.typed import TypingError, span_words

DOOR = "command"
WATCH_S = 2.0
CELL_LIMIT = 400  # characters
NARROWEST = 8  # columns of a terminal are not made narrower
GAP, INDENT, EMPTY = "  ", "    ", "-"


def who() -> str:
    """As events name somebody who is known by a login on this machine alone."""
    try:
        return f"shell:{getpass.getuser()}"
    except (KeyError, OSError):  # a container whose user has no name
        return f"shell:{os.getuid()}"


def add_json(parser: ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")


def add_why(parser: ArgumentParser) -> None:
    parser.add_argument("--why", default="", help="kept in the history")


def add_dry_run(parser: ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="say what would happen, and change nothing")


def add_watch(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--watch",
        nargs="?",
        type=_seconds,
        const=WATCH_S,
        metavar="SECONDS",
        help=f"again every {WATCH_S:g} seconds, until Ctrl-C",
    )


def watched(stdout: OutputWrapper, every_s: float | None) -> Iterator[bool]:
    """Once, and then each time what is watched is to be shown again, until Ctrl-C: whether the terminal is to
    be cleared for it."""
    yield False
    if every_s is not None:
        with suppress(KeyboardInterrupt):
            while True:
                stdout.flush()
                time.sleep(every_s)
                yield bool(stdout.isatty())


def clear(stdout: OutputWrapper) -> None:
    stdout.write("\x1b[H\x1b[J", ending="")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0
    if not 0 < seconds <= 3600:
        raise ArgumentTypeError(f"{quote(text)} is not a number of seconds above 0 and up to 3600")
    return seconds


def print_json(stdout: OutputWrapper, value: Any) -> None:
    stdout.write(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(stdout: OutputWrapper, headings: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Aligned columns under headings; a cell that is empty shows as a dash. In a terminal that is too narrow,
    the last column, which is the wordiest, stands below its row, and what is still too wide is wrapped."""
    lines = [[heading.upper() for heading in headings]]
    lines += [[shown(str(cell), CELL_LIMIT) or EMPTY for cell in row] for row in rows]
    notes = [EMPTY] * len(lines)
    widths = _widths(lines)
    if stdout.isatty() and sum(widths) > _room(widths):
        notes[1:] = [line[-1] for line in lines[1:]]
        lines = [line[:-1] for line in lines]
        widths = _widths(lines)
        while sum(widths) > _room(widths) and max(widths) > NARROWEST:
            widths[widths.index(max(widths))] -= 1
    for line, note in zip(lines, notes, strict=True):
        cells = [textwrap.wrap(cell, width) for cell, width in zip(line, widths, strict=True)]
        for parts in zip_longest(*cells, fillvalue=""):
            padded = (part.ljust(width) for part, width in zip(parts, widths, strict=True))
            stdout.write(GAP.join(padded).rstrip())
        if note != EMPTY:
            columns = shutil.get_terminal_size().columns
            stdout.write(textwrap.fill(note, columns, initial_indent=INDENT, subsequent_indent=INDENT))


def print_differences(stdout: OutputWrapper, differences: Sequence[tuple[str, Any, Any]]) -> None:
    """Field, what it was and what it is now."""
    rows = [(field, _value(was), _value(now)) for field, was, now in differences]
    print_table(stdout, ("field", "was", "is now"), rows)


def _value(value: Any) -> str:
    if value in (None, {}, []):
        return "not set"
    if isinstance(value, dict):
        return ", ".join(f"{name}={inner}" for name, inner in value.items())
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def print_warnings(stderr: OutputWrapper, outcome: Outcome) -> None:
    """What a verb allows and has something to say about."""
    for warning in outcome.warnings:
        stderr.write(f"warning: {shown(warning, 2_000)}")


def _widths(lines: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*lines, strict=True)]


def _room(widths: Sequence[int]) -> int:
    """What a terminal has for the cells of a line."""
    return shutil.get_terminal_size().columns - len(GAP) * (len(widths) - 1)


def ago(seconds: float | None) -> str:
    return "never" if seconds is None else f"{span_words(seconds)} ago"


@contextmanager
def refusals() -> Iterator[None]:
    """A verb's no, in its own sentences and without a traceback."""
    try:
        yield
    except CatalogError as no:
        raise CommandError("\n".join(fault.sentence for fault in no.faults)) from None
    except SourceRefused as no:
        hint = "Nothing was saved; --skip-source-check --why REASON saves it all the same."
        raise CommandError(f"{shown(str(no), 2_000)}\n{hint}") from None
    except TypingError as no:
        raise CommandError(str(no)) from None
    except UnicodeEncodeError:
        raise CommandError(
            "An argument holds bytes that are not UTF-8, and so names nothing; type it again."
        ) from None
    except DatabaseError as problem:
        hint = "Is it the right one, with room on its disk, and up to date (manage.py migrate)?"
        said = shown(str(problem).partition("\n")[0], 500)  # PostgreSQL goes on with the whole statement
        raise CommandError(f"The database said no: {said}. {hint}") from None
