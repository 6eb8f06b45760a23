"""The bench of the plan runs, and finds what does not depend on the machine."""

from __future__ import annotations

import json

import pytest

from nodes.plan import plan
from tests.bench import plan as bench


def test_it_tells_what_it_promises(capsys: pytest.CaptureFixture[str]) -> None:
    bench.main(["--json", "--nodes", "20"])
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"calibration_s", "cold_placements_per_s", "steady_plan_ms", "scaling"}
    (row,) = found["scaling"]
    assert (row["nodes"], row["models"]) == (20, 10)
    assert row["placed"] + row["unplaced"] == 80
    assert found["cold_placements_per_s"] > 0


def test_people_get_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    row: dict[str, float] = {"nodes": 8, "models": 4, "placed": 30, "unplaced": 2}
    row |= {"cold_ms": 5.0, "steady_ms": 1.5, "cold_placements_per_s": 6000}
    bench._print_table({"calibration_s": 0.1, "scaling": [row]})
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "calibration 0.1 s; 8 nodes: 6000 placements a second, steady plan 1.5 ms"
    assert told[1].split() == ["nodes", "models", "placed", "unplaced", "cold", "ms", "steady", "ms"]
    assert told[2].split() == ["8", "4", "30", "2", "5.0", "1.5"]


def test_almost_all_of_a_full_cluster_is_placed() -> None:
    """Of the GPUs of each class, 95 of a hundred are asked for in pieces of one to eight."""
    cluster = bench.empty_cluster(200)
    decision = plan(cluster)
    wanted = len(cluster.models) * bench.REPLICAS_PER_MODEL
    assert len(decision.start) >= 0.97 * wanted
