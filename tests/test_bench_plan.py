"""The bench of the plan runs, and finds what does not depend on the machine."""

from __future__ import annotations

import json

import pytest

from nodes.plan import plan
from tests.bench import plan as bench


def test_it_tells_what_it_promises(capsys: pytest.CaptureFixture[str]) -> None:
    bench.main(["--json", "--nodes", "40"])
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"calibration_s", "cold_placements_per_s", "steady_plan_ms", "scaling"}
    (row,) = found["scaling"]
    assert (row["nodes"], row["models"]) == (40, 20)
    assert row["placed"] + row["unplaced"] == 160
    assert found["cold_placements_per_s"] > 0


def test_people_get_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    bench.main(["--nodes", "8"])
    told = capsys.readouterr().out.splitlines()
    assert told[1].split() == ["nodes", "models", "placed", "unplaced", "cold", "ms", "steady", "ms"]
    assert told[2].split()[:2] == ["8", "4"]


def test_almost_all_of_a_full_cluster_is_placed() -> None:
    """Of the GPUs of each class, 95 of a hundred are asked for in pieces of one to eight."""
    cluster = bench.empty_cluster(200)
    decision = plan(cluster)
    wanted = len(cluster.models) * bench.REPLICAS_PER_MODEL
    assert len(decision.start) >= 0.97 * wanted
