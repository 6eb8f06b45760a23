"""What commands write to: pipes that are closed, disks that are full, locales that know no é."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NAME = "é-ü"

Shell = Callable[..., "subprocess.CompletedProcess[bytes]"]


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """A shell with a catalog of its own, in which one model has a name that ASCII cannot write."""
    var = tmp_path_factory.mktemp("var")
    environment = {**os.environ, "LLMGW_VAR": str(var), "PYTHON": sys.executable}
    environment.pop("DATABASE_URL", None)

    def run(line: str, **told: str) -> subprocess.CompletedProcess[bytes]:
        command = ["bash", "-o", "pipefail", "-c", line.replace("manage", '"$PYTHON" manage.py')]
        return subprocess.run(
            command, capture_output=True, cwd=ROOT, env=environment | told, timeout=120, check=False
        )

    assert run("manage migrate --verbosity 0").returncode == 0
    add = "manage model_add --source sim/x --engine sim --gpu-class sim --description $'two\\nlines'"
    assert run(f"{add} {NAME}").returncode == 0
    return run


SOAK = pytest.mark.soak  # each is some shells that start Django: one of a kind is enough for every day
ASCII = {"PYTHONIOENCODING": "ascii"}
C = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize(
    "locale", [pytest.param(ASCII, marks=SOAK), C], ids=["asked for ASCII", "a locale of ASCII"]
)
def test_a_file_is_utf8_whatever_the_locale(shell: Shell, locale: dict[str, str]) -> None:
    done = shell("manage catalog_export", **locale)
    assert (done.returncode, NAME in done.stdout.decode()) == (0, True), done.stderr
    again = shell("manage catalog_export | manage catalog_import - --prune", **locale)
    assert again.stdout.decode().startswith("Nothing to change"), again.stderr


@pytest.mark.parametrize(
    "command", ["catalog_export", pytest.param("models --json", marks=SOAK)], ids=["at the end", "in between"]
)
def test_a_full_disk_is_said(shell: Shell, command: str) -> None:
    done = shell(f"manage {command} > /dev/full")
    says = "Not all could be written: No space left on device. Look what was done before you repeat it.\n"
    assert (done.returncode, done.stderr.decode()) == (1, says)


def test_a_reader_that_leaves_has_enough(shell: Shell) -> None:
    done = shell("manage models | true")
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize(
    "closed", [*(pytest.param(each, marks=SOAK) for each in ("0<&-", "1>&-", "2>&-")), "0<&- 1>&- 2>&-"]
)
def test_streams_that_are_closed_are_no_failure(shell: Shell, closed: str) -> None:
    done = shell(f"manage model_edit {NAME} --description $RANDOM {closed}")
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr


def test_a_closed_standard_input_holds_no_catalog(shell: Shell) -> None:
    done = shell("manage catalog_import - <&-")
    assert done.returncode == 1
    assert done.stderr.decode().startswith("CommandError: there is no catalog in the file")
