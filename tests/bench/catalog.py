"""How long a catalog of thousands takes to import and to export, and what its lists cost.

`python -m tests.bench.catalog`. Sources are not asked about; everything else is as operators have it: through
the commands, a file and all, and through the pages they look at.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from catalog.files import write_catalog_file
from catalog.spec import ModelSpec
from tests.bench.databases import DATABASES, begin, measured_on

MODELS = 2_000
SMALLER = (10, 100)  # catalogs whose lists are looked at as well
LOOKS = 5  # of which the one in the middle counts
PROFILES = (("h100", "vllm", "h100-80g"), ("l40s", "sglang", "l40s-48g"), ("cpu", "llamacpp", ""))
LISTS = {"admin list": "/admin/catalog/model/", "GET /api/models?limit=100": "/api/models?limit=100"}


def models(count: int, *, changed_every: int = 0) -> list[ModelSpec]:
    """As operators write them: an alias, a fallback, three profiles with arguments and an environment."""
    told = {"args": ["--extra", "8"], "env": {"OMP_NUM_THREADS": "8"}, "node_selector": {"zone": "a"}}
    profiles = [
        {"name": name, "engine": engine, "gpu_class": gpu_class, **told}
        for name, engine, gpu_class in PROFILES
    ]
    return [
        ModelSpec.load(
            {
                "name": f"org/model-{number}",
                "aliases": [f"model-{number}"],
                "description": "A model of the bench.\nIt is like the others.",
                "source": f"org/model-{number}@main",
                "profiles": profiles,
                "scaling": {"max": 2, "idle_timeout": "20m"},
                "fallbacks": [f"model-{number - 1}"] if number else [],
                "context_length": 16_384 if changed_every and number % changed_every == 0 else 8_192,
                "capabilities": {"tools": True},
            }
        )
        for number in range(count)
    ]


def measure(count: int, folder: Path) -> dict[str, Any]:
    """In the database of this process, which is empty at first and full in the end."""
    looks: dict[str, dict[int, Any]] = {name: {} for name in LISTS}
    bench = get_user_model().objects.create_superuser("bench")

    def look(size: int) -> None:
        for name, address in LISTS.items():
            looks[name][size] = cost_of_look(address, bench)

    for size in SMALLER:
        imported(_file(models(size), folder))
        look(size)
    imported(_file([], folder), "--prune", "--yes")
    whole, changed = _file(models(count), folder), _file(models(count, changed_every=10), folder, "changed")
    seconds = {
        "import, empty": _seconds(lambda: imported(whole)),
        "import, unchanged": _seconds(lambda: imported(whole)),
        "import, a tenth changed": _seconds(lambda: imported(changed)),
        "export": _seconds(
            lambda: call_command("catalog_export", stdout=io.StringIO(), stderr=io.StringIO())
        ),
    }
    look(count)
    return {"seconds": seconds, "looks": looks}


def imported(path: Path, *words: str) -> None:
    told = (*words, "--skip-source-check", "--why", "bench")
    call_command("catalog_import", str(path), *told, stdout=io.StringIO(), stderr=io.StringIO())


def cost_of_look(address: str, user: Any) -> dict[str, float]:
    """The queries of a page, and how long it takes a process that has shown it before."""
    client = Client(SERVER_NAME="127.0.0.1")
    client.force_login(user)

    def look() -> None:
        answer = client.get(address)
        assert answer.status_code == 200, f"{address} answers {answer.status_code}"

    look()
    with CaptureQueriesContext(connection) as queries:
        look()
    return {"queries": len(queries), "ms": statistics.median(_seconds(look) for _ in range(LOOKS)) * 1_000}


def _file(specs: Iterable[ModelSpec], folder: Path, name: str = "catalog") -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(write_catalog_file([spec.as_text_dict() for spec in specs], "yaml"))
    return path


def _seconds(act: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    act()
    return time.perf_counter() - began_s


def _print_table(found: dict[str, Any]) -> None:
    for database, numbers in found["databases"].items():
        print(f"{database}, {found['models']} models, {len(PROFILES)} profiles each")
        for what, seconds in numbers["seconds"].items():
            print(f"  {what:<32}{seconds:>8.2f} s")
        for what, by_size in numbers["looks"].items():
            for size, cost in by_size.items():
                counted = f"{what}, {size} models"
                print(f"  {counted:<40}{cost['ms']:>8.0f} ms{cost['queries']:>5} queries")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.catalog", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    parser.add_argument("--models", type=int, default=MODELS)
    parser.add_argument("--database", choices=DATABASES, action="append", help="both if left out")
    parser.add_argument(
        "--here", action="store_true", help="on the database of this environment, which is empty"
    )
    options = parser.parse_args(words)
    if options.here:
        begin()
        print(json.dumps(measure(options.models, Path(os.environ["LLMGW_VAR"]))))
        return
    telling = ("--here", "--models", str(options.models))
    databases = measured_on(options.database or DATABASES, "tests.bench.catalog", *telling)
    found = {"models": options.models, "databases": databases}
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        _print_table(found)


if __name__ == "__main__":
    main()
