"""Puts a release of the agent on this machine: its code, and a virtual environment with what it imports.

This is what `python3 BUNDLE` runs first (see `nodes/bundle.py`), before any library is there: the standard
library alone. Then the release itself joins (`join.py`), with the same arguments and the same standard input.

    <home>/releases/<id>/code       what the bundle holds
    <home>/releases/<id>/venv       made with this python, filled by pip
    <home>/releases/<id>/complete   written last: a release without it is made anew

A release is never changed, so that an engine which runs from an older one is left alone. What pip is told by
its environment and its files (an index, a mirror, a folder of wheels) holds.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from argparse import ArgumentParser
from pathlib import Path

NAME = "llmgw-agent"
KEPT = 3  # releases
REQUIREMENTS = Path("nodes", "agent", "requirements.txt")


class InstallError(Exception):
    """The release cannot be made here; the text is the sentence."""


def default_home() -> Path:
    if os.geteuid() == 0:
        return Path("/var/lib", NAME)
    data = os.environ.get("XDG_DATA_HOME", "")
    return (Path(data) if data.startswith("/") else Path.home() / ".local" / "share") / NAME


def add_home(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--home", type=Path, default=default_home(), metavar="FOLDER",
        help="where all of it goes; default %(default)s",
    )  # fmt: skip


def open_home(home: Path) -> int:
    """The folder, made if need be, for this process alone until it ends. Raises InstallError."""
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(home / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InstallError(
            f"The folder {home} cannot be used ({error.strerror}); give another one with --home."
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise InstallError(f"Somebody else joins from {home} just now; wait for them to end.") from None
    return lock


def install(bundle: Path, home: Path) -> Path:
    """The release's folder; nothing is done where it is there already. Raises InstallError."""
    release = home / "releases" / hashlib.sha256(bundle.read_bytes()).hexdigest()[:12]
    if (release / "complete").exists():
        return release
    print(f"Installing the agent into {release} ...", flush=True)
    try:
        shutil.rmtree(release, ignore_errors=True)
        release.mkdir(mode=0o700, parents=True)
        with zipfile.ZipFile(bundle) as archive:
            archive.extractall(release / "code")  # our own, its checksum known
        _make_venv(release / "venv")
        _fill_venv(release / "venv", release / "code" / REQUIREMENTS)
        (release / "complete").touch()
        _forget_old(release)
    except OSError as error:
        raise InstallError(
            f"{release} could not be written ({error.strerror}); make room there, or give another --home."
        ) from None
    return release


def python_of(release: Path) -> Path:
    return release / "venv" / "bin" / "python"


def _make_venv(folder: Path) -> None:
    done = _run(sys.executable, "-m", "venv", str(folder))
    if done.returncode:
        raise InstallError(
            f"{sys.executable} makes no virtual environment ({_last_words(done)}); install what it lacks "
            f"(Debian and Ubuntu: apt install python3-venv), then run the line again."
        )


def _fill_venv(folder: Path, requirements: Path) -> None:
    pip = (str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input")
    done = _run(*pip, "install", "--quiet", "--no-compile", "--requirement", str(requirements))
    if done.returncode:
        raise InstallError(
            f"pip could not install what the agent imports ({_last_words(done)}); if this machine reaches no "
            f"package index, name a mirror or a folder of wheels (PIP_INDEX_URL, PIP_FIND_LINKS), then run "
            f"the line again."
        )


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
    )


def _last_words(done: subprocess.CompletedProcess[str]) -> str:
    """What an error said last; pip writes ERROR in front of what matters."""
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    said = (errors or lines or [f"exit code {done.returncode}"])[-1]
    return said[:300].rstrip(".")


def _forget_old(release: Path) -> None:
    """Engines that were started from one of the last releases may still read from it."""
    others = [each for each in release.parent.iterdir() if each != release]
    others.sort(key=lambda each: each.stat().st_mtime, reverse=True)
    for each in others[KEPT - 1 :]:
        shutil.rmtree(each, ignore_errors=True)


def main(bundle: Path) -> None:
    """With the arguments of `join.py`, which is run in the release."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    add_home(parser)
    home = parser.parse_known_args()[0].home.absolute()
    try:
        lock = open_home(home)
        release = install(bundle, home)
    except InstallError as no:
        sys.exit(str(no))
    os.close(lock)
    python = str(python_of(release))
    os.chdir(release / "code")
    sys.stdout.flush()
    os.execv(python, [python, "-m", "nodes.agent.join", *sys.argv[1:]])  # noqa: S606
