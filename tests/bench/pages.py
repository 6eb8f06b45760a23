"""How long the server takes for the pages that operators look at, and with how many queries, where there are
30 days of samples.

`python -m tests.bench.pages`. Pages are asked for in the same process, without a wire.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from tests.bench.databases import DATABASES, begin, measured_on

NODES = 1_000


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.pages", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--database", choices=DATABASES, action="append", help="both if left out")
    parser.add_argument(
        "--here", action="store_true", help="on the database of this environment, which is empty"
    )
    options = parser.parse_args(words)
    if options.here:
        begin()
        from tests.bench.page_times import measure  # its tables need Django

        print(json.dumps(measure(options.nodes)))
        return
    telling = ("--here", "--nodes", str(options.nodes))
    found = measured_on(options.database or DATABASES, "tests.bench.pages", *telling)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for database, row in found.items():
        print(
            f"{database}: {row['nodes']} nodes, {row['replicas']} replicas, {row['samples']} rows of samples"
        )
        for page, took in row["pages"].items():
            figures = f"{took['ms']:7.1f} ms ({took['cpu_ms']:.1f} of CPU)  {took['queries']:3} queries"
            print(f"{figures}  {took['kb']:6.1f} KB  {page}")


if __name__ == "__main__":
    main()
