"""The import law of the project, and that each of its contracts catches a breach.

The contracts are in pyproject.toml. A breach is planted in a copy of the tree, one file with one line more.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINT = Path(sys.executable).with_name("lint-imports")

BREACHES = {
    "a core file of the catalog that reads its tables": ("core", "catalog/spec.py", "import catalog.models"),
    "a core file of nodes that reads the catalog's tables": (
        "core",
        "nodes/plan.py",
        "import catalog.models",
    ),
    "a core file of the gateway that knows the table": (
        "core",
        "llmgw/gateway/routing.py",
        "import llmgw.gateway.table",
    ),
    "the catalog's tables that call a verb": ("catalog", "catalog/models.py", "import catalog.actions"),
    "the reconciler's tables that call a verb": (
        "nodes",
        "nodes/models/replicas.py",
        "import nodes.reconcile",
    ),
    "an agent's client that calls the catalog's verbs": (
        "memory",
        "nodes/agents.py",
        "import catalog.actions",
    ),
    "a verb that knows a door of its app": ("catalog", "catalog/actions/models.py", "import catalog.admin"),
    "a verb that knows a door of another app": ("verbs", "nodes/actions.py", "import catalog.admin"),
    "the gateway's table that knows its door": (
        "gateway",
        "llmgw/gateway/table.py",
        "import llmgw.gateway.app",
    ),
    "a catalog verb that asks nodes": ("apps", "catalog/actions/models.py", "import nodes.models"),
    "a nodes verb that knows the gateway": ("apps", "nodes/actions.py", "import llmgw.gateway.table"),
    "settings that know the gateway": ("llmgw", "llmgw/settings.py", "import llmgw.gateway.routing"),
    "an agent with Django": ("bare", "nodes/agent/__init__.py", "import django"),
    "an engine adapter with the database": ("bare", "nodes/engines/sim.py", "import nodes.models"),
    "somebody who imports the agent": ("agent", "nodes/reconcile.py", "import nodes.agent"),
    "a verb that downloads": ("hub", "catalog/actions/models.py", "import huggingface_hub"),
    "a verb that calls out": ("http", "nodes/actions.py", "import aiohttp"),
    "a file that is in no layer of the catalog": ("catalog", "catalog/utils.py", ""),
    "a file that is in no layer of nodes": ("nodes", "nodes/helpers.py", ""),
    "a file that is in no layer of the project": ("llmgw", "llmgw/services.py", ""),
    "a file that is in no layer of the gateway": ("gateway", "llmgw/gateway/constants.py", ""),
}


def lint(tree: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [str(LINT), "--no-cache", "--config", "pyproject.toml", *arguments],
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": str(tree), "PATH": "/usr/bin:/bin", "COLUMNS": "200", "TERM": "dumb"},
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("tree")
    for part in ("catalog", "nodes", "llmgw"):
        shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    return copy


def test_the_tree_keeps_the_law(tree: Path) -> None:
    status, said = lint(tree)
    assert status == 0, said


@pytest.mark.parametrize(("contract", "file", "line"), BREACHES.values(), ids=BREACHES.keys())
def test_a_breach_is_caught(tree: Path, contract: str, file: str, line: str) -> None:
    path = tree / file
    before = path.read_text() if path.exists() else None
    try:
        path.write_text(f"{before or ''}\n{line}\n")
        status, said = lint(tree, "--contract", contract)
        assert status == 1, said
        assert "BROKEN" in said
        assert (line.removeprefix("import ") or path.stem) in said
    finally:
        if before is None:
            path.unlink()
        else:
            path.write_text(before)
