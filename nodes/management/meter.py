"""How far a job is, for whoever waits for it in a shell: a bar that a terminal writes over again and again;
elsewhere a line for each of its steps."""

from __future__ import annotations

import shutil
from collections.abc import Callable

from django.core.management.base import OutputWrapper

from nodes.jobs import Progress

BAR = 24  # characters


def _step(progress: Progress) -> str:
    return str(progress["say"])


class Meter:
    """`words` are what a terminal shows beside the bar. When it is left, the bar is wiped away."""

    def __init__(self, out: OutputWrapper, words: Callable[[Progress], str] = _step) -> None:
        self._out, self._words = out, words
        self._is_terminal = out.isatty()
        self._said = ""

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._is_terminal and self._said:
            self._write(f"\r{' ' * len(self._said)}\r")

    def show(self, progress: Progress) -> None:
        if self._is_terminal:
            self._draw(progress)
        elif _step(progress) != self._said:
            self._said = _step(progress)
            self._write(f"{self._said}\n")

    def _draw(self, progress: Progress) -> None:
        filled = round(float(progress["part"]) * BAR)
        line = f"[{'#' * filled}{'.' * (BAR - filled)}] {self._words(progress)}"
        line = line[: shutil.get_terminal_size().columns - 1]  # one that is wrapped could not be written over
        self._write("\r" + line.ljust(len(self._said)))
        self._said = line

    def _write(self, text: str) -> None:
        self._out.write(text, style_func=str, ending="")
        self._out.flush()
