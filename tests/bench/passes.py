"""How long a pass takes that finds everything as it should be, all agents asked and the database read.

`python -m tests.bench.passes`. The agents answer from a thread of the same process, so their work is in it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from tests.bench.databases import DATABASES, begin, measured_on

NODES = 1_000


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.passes", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--database", choices=DATABASES, action="append", help="both if left out")
    parser.add_argument(
        "--here", action="store_true", help="on the database of this environment, which is empty"
    )
    options = parser.parse_args(words)
    if options.here:
        begin()
        from tests.bench.whole_pass import measure  # its tables need Django

        print(json.dumps(measure(options.nodes)))
        return
    telling = ("--here", "--nodes", str(options.nodes))
    found = measured_on(options.database or DATABASES, "tests.bench.passes", *telling)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for database, row in found.items():
        print(
            f"{database}: {row['nodes']} agents, {row['replicas']} replicas: "
            f"{row['pass_s']:.2f} s a pass, {row['queries']} queries"
        )


if __name__ == "__main__":
    main()
