"""The bench of whole passes runs, and takes as many queries for many nodes and replicas as for few."""

from __future__ import annotations

import pytest

from tests.bench.databases import measured_on


@pytest.mark.soak
def test_a_pass_takes_as_many_queries_for_a_hundred_replicas_as_for_ten() -> None:
    few, many = (
        measured_on(["sqlite"], "tests.bench.passes", "--here", "--nodes", nodes)["sqlite"]
        for nodes in ("4", "30")
    )
    assert (few["replicas"], many["replicas"]) == (16, 108)
    assert few["queries"] == many["queries"]
    assert few["pass_s"] > 0
