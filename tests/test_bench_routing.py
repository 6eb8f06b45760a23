"""The bench of routing runs, and judges what it finds."""

from __future__ import annotations

from typing import Any

import pytest

from tests.bench import routing as bench

pytestmark = pytest.mark.one_database


@pytest.mark.soak
def test_a_run_has_its_row() -> None:
    (row,) = bench.measure(("prefix",), (75,), 2, 12, 40.0)
    assert (row["share"], row["way"]) == (75, "prefix")
    assert 50 < row["mean_ttft_ms"] <= row["p99_ttft_ms"]
    assert 0 <= row["cached"] < 1


@pytest.mark.parametrize("share", bench.SHARES)
def test_prompts_share_what_they_should_with_those_of_their_group_alone(share: int) -> None:
    requests = bench.traffic(share, 200, 10.0)
    openings = {request.messages[0]["content"] for request in requests if len(request.messages) > 1}
    assert {len(opening) for opening in openings} == ({4_096 * share // 100} if share else set())
    assert len(openings) <= bench.GROUPS
    own = {request.messages[-1]["content"] for request in requests}
    assert len(own) == 200
    assert {len(text) for text in own} == {4_096 - 4_096 * share // 100}
    moments = [request.at_s for request in requests]
    assert moments == sorted(moments)
    assert 10 < moments[-1] < 40


def test_the_same_requests_come_for_each_way_of_routing() -> None:
    assert bench.traffic(25, 50, 10.0) == bench.traffic(25, 50, 10.0)
    assert bench.traffic(25, 50, 10.0, 1) != bench.traffic(25, 50, 10.0), "but others in another turn"


def test_what_is_told_of_several_passes_is_the_median_of_each_number() -> None:
    row = {"share": 0, "way": "prefix"}
    passes = [[row | {"mean_ttft_ms": n, "p99_ttft_ms": 9 - n, "cached": 0.5}] for n in (1.0, 7.0, 3.0)]
    assert bench.medians(passes) == [row | {"mean_ttft_ms": 3.0, "p99_ttft_ms": 6.0, "cached": 0.5}]


def _rows(**prefix_ms: tuple[float, float]) -> list[dict[str, Any]]:
    """Of the others each took 400 ms; by prefix, a mean and a p99 at each share."""
    rows = []
    for share in bench.SHARES:
        for way in bench.WAYS:
            mean, p99 = prefix_ms[f"at_{share}"] if way == "prefix" else (400.0, 500.0)
            rows.append({"share": share, "way": way, "mean_ttft_ms": mean, "p99_ttft_ms": p99, "cached": 0.5})
    return rows


def test_good_numbers_meet_all_limits() -> None:
    found = bench.verdicts(_rows(at_0=(410, 500), at_25=(300, 490), at_75=(150, 480)))
    assert [round(verdict["value"], 3) for verdict in found.values()] == [0.375, 1.025, 1.0]
    assert all(verdict["met"] for verdict in found.values())


@pytest.mark.parametrize(
    ("numbers", "missed"),
    [
        pytest.param({"at_75": (170.0, 480.0)}, 0, id="little gain at 75 %"),
        pytest.param({"at_0": (430.0, 500.0)}, 1, id="a loss at 0 %"),
        pytest.param({"at_25": (300.0, 600.0)}, 2, id="a longer tail at 25 %"),
    ],
)
def test_each_limit_can_be_missed(numbers: dict[str, tuple[float, float]], missed: int) -> None:
    good = {"at_0": (400.0, 500.0), "at_25": (300.0, 490.0), "at_75": (150.0, 480.0)}
    found = list(bench.verdicts(_rows(**good | numbers)).values())
    assert [verdict["met"] for verdict in found] == [at != missed for at in range(3)]


def test_people_get_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    rows = _rows(at_0=(410, 500), at_25=(300, 490), at_75=(150, 480))
    bench._print_table({"rows": rows, "verdicts": bench.verdicts(rows)})
    told = capsys.readouterr().out.splitlines()
    assert told[2] == "| 0 % | round-robin | 400 | 500 | 50% |"
    assert told[-3] == "mean at 75 %, of round-robin's: 0.38 (at most 0.4: yes)"
