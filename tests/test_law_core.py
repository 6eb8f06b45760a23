"""Core decides and does nothing else: no I/O, no clock, no chance, no library. The agent needs no Django."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# What of the standard library core may use: a name here says that it reads no file, socket, clock or dice.
PURE = {
    "__future__", "abc", "base64", "binascii", "bisect", "collections", "contextlib", "copy", "dataclasses",
    "datetime", "decimal", "difflib", "enum", "fnmatch", "fractions", "functools", "graphlib", "hashlib",
    "heapq", "hmac", "ipaddress", "itertools", "json", "math", "operator", "re", "shlex", "statistics",
    "string", "struct", "textwrap", "types", "typing", "unicodedata", "urllib.parse", "zlib",
}  # fmt: skip
IMPURE_CALLS = {"open", "print", "input", "exec", "eval", "compile", "__import__", "breakpoint"}
CLOCK_CALLS = {"now", "utcnow", "today"}


CONTRACTS = {
    contract["id"]: contract
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
}
ROOMS = ("catalog", "nodes", "gateway")


def _modules(rooms: Iterable[str], layers: slice) -> set[str]:
    """Those in these layers, where the first is the doors' and the last is core."""
    return {
        f"{CONTRACTS[room]['containers'][0]}.{module.strip()}"
        for room in rooms
        for layer in CONTRACTS[room]["layers"][layers]
        for module in layer.split(":")
    }


def _files(module: str) -> list[Path]:
    path = ROOT.joinpath(*module.split("."))
    return sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]


CORE = _modules(ROOMS, slice(-1, None))
CORE_FILES = [file for module in sorted(CORE) for file in _files(module)]


def faults_of(source: str) -> list[str]:
    """What in this source is not core's to do."""
    faults = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                modules = [alias.name for alias in names]
            case ast.ImportFrom(module=module, names=names, level=0) if module is not None:
                modules = [module] if _is_pure(module) else [f"{module}.{alias.name}" for alias in names]
            case ast.ImportFrom():
                faults.append("a relative import")
                continue
            case ast.Call(func=ast.Name(id=name)) if name in IMPURE_CALLS:
                faults.append(f"{name}()")
                continue
            case ast.Call(func=ast.Attribute(attr=name)) if name in CLOCK_CALLS:
                faults.append(f".{name}()")
                continue
            case _:
                continue
        faults += [f"import {module}" for module in modules if not _is_pure(module)]
    return faults


def _is_pure(module: str) -> bool:
    if module.partition(".")[0] in sys.stdlib_module_names:
        return module in PURE or module == "collections.abc"
    return any(module == core or module.startswith(f"{core}.") for core in CORE)


@pytest.mark.parametrize("file", CORE_FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_core_decides_and_does_nothing_else(file: Path) -> None:
    assert faults_of(file.read_text()) == []


@pytest.mark.parametrize(
    ("contract", "importing", "imported"),
    [
        ("core", slice(-1, None), slice(0, -1)),
        ("memory", slice(-2, -1), slice(1, -2)),
        ("verbs", slice(1, -1), slice(0, 1)),
    ],
)
def test_the_law_across_apps_knows_every_layer(contract: str, importing: slice, imported: slice) -> None:
    """import-linter sees that each file is in a layer of its app; this, that the law across apps knows it."""
    assert set(CONTRACTS[contract]["source_modules"]) == _modules(ROOMS, importing)
    assert set(CONTRACTS[contract]["forbidden_modules"]) == _modules(ROOMS, imported)


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("import time", "import time"),
        ("from random import choice", "import random.choice"),
        ("import os.path", "import os.path"),
        ("from pathlib import Path", "import pathlib.Path"),
        ("import urllib.request", "import urllib.request"),
        ("from django.db import models", "import django.db.models"),
        ("from catalog.models import Model", "import catalog.models.Model"),
        ("from catalog import models", "import catalog.models"),
        ("from . import spec", "a relative import"),
        ("def f():\n    import socket", "import socket"),
        ("text = open('/etc/passwd').read()", "open()"),
        ("then = datetime.now(tz=UTC)", ".now()"),
        ("then = datetime.date.today()", ".today()"),
    ],
)
def test_what_is_not_cores_to_do_is_seen(source: str, fault: str) -> None:
    assert faults_of(source) == [fault]


@pytest.mark.parametrize(
    "line",
    [
        "import time\n\ntime.time()",
        "import datetime\n\ndatetime.datetime.now(tz=datetime.UTC)",
        "from django.utils import timezone\n\ntimezone.now()",
        "import urllib.request\n\nurllib.request.urlopen('http://localhost/')",
        "import http.client\n\nhttp.client.HTTPConnection('localhost')",
    ],
    ids=lambda line: line.rpartition("\n")[2],
)
def test_ruff_keeps_clocks_and_http_out_of_verbs(line: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--stdin-filename", "nodes/actions.py", "-"],
        input=line + "\n",
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "TID251" in done.stdout


_WITHOUT_DJANGO = """
import importlib, pkgutil, sys

class Blocked:
    names = {"django", "rest_framework", "celery", "kombu", "redis", "psycopg", "uvicorn", "honcho"}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ImportError(f"{name} is not on a GPU box")

sys.meta_path.insert(0, Blocked())
for package in ("nodes.agent", "nodes.engines"):
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        importlib.import_module(module.name)
        print(module.name)
"""


def test_the_agent_runs_on_a_machine_without_django() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_DJANGO], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "nodes.agent.__main__" in done.stdout.split()
