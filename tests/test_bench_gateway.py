"""The bench of the gateway runs, and tells what it promises; what cannot be measured here is told of."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from tests.bench import gateway as bench
from tests.bench import peers

pytestmark = pytest.mark.one_database


@pytest.mark.soak
def test_a_row_has_all_it_promises(capsys: pytest.CaptureFixture[str]) -> None:
    once = ["--json", "--passes", "1", "--seconds", "0.3", "--streams", "8"]
    bench.main([*once, "--lasting", "200", "--leaving", "50"])
    found = json.loads(capsys.readouterr().out)
    row = found["rows"]["llmgw"]
    assert row.keys() == bench.COLUMNS.keys() | {"growth_mib"}
    assert all(row[name] > 0 for name in ("req_per_s", "cpu_us_per_request", "cpu_us_per_chunk", "rss_mib"))
    assert found["verdicts"].keys() == bench.LIMITS.keys() - bench._OF_PEERS.keys()
    assert found["absent"] == {}


ROW = dict.fromkeys(bench.COLUMNS, 12.34)


@pytest.mark.parametrize(
    ("row", "met"),
    [
        pytest.param({"req_per_s": 5_000.0}, True, id="at least is met by just so many"),
        pytest.param({"req_per_s": 4_999.0}, False, id="and not by fewer"),
        pytest.param({"cpu_us_per_request": 59.9}, True, id="below is met by less"),
        pytest.param({"cpu_us_per_request": 60.0}, False, id="and not by just so much"),
        pytest.param({"ttfc_of_sglang_router": 1.3}, True, id="at most is met by just so much"),
        pytest.param({"ttfc_of_sglang_router": 1.31}, False, id="and not by more"),
    ],
)
def test_a_verdict_says_whether_a_limit_is_met(row: Mapping[str, float], met: bool) -> None:
    (verdict,) = bench.verdicts(row).values()
    assert verdict["met"] is met


def test_what_is_told_of_several_passes_is_the_median_of_each_number() -> None:
    rows = [{"req_per_s": number, "rss_mib": 10 - number} for number in (1.0, 9.0, 2.0)]
    assert bench.medians(rows) == {"req_per_s": 2.0, "rss_mib": 8.0}


def test_people_get_a_table_and_why_a_peer_is_not_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    found = {
        "rows": {"llmgw": ROW | {"req_per_s": 5_123.4}},
        "verdicts": bench.verdicts({"req_per_s": 5_123.4, "cpu_us_per_chunk": 41}),
        "absent": {"nginx": "nginx is not on PATH."},
    }
    bench._print_table(found)
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("| proxy | req/s | CPU us/req |")
    assert told[2].startswith("| llmgw | 5,123 | 12.3 |")
    assert told[3:] == [
        "req_per_s: 5,123 (at least 5000: yes)",
        "cpu_us_per_chunk: 41.0 (below 25: NO)",
        "Not measured: nginx is not on PATH.",
    ]


def test_a_peer_that_nobody_knows_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--peers", "nginx,envoy"])
    assert "'envoy' is no peer; there are nginx, sglang-router, litellm." in capsys.readouterr().err


def test_a_peer_that_is_not_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(peers.Absent, match="nginx is not on PATH"), peers.nginx([1], None):
        pass


def test_a_peer_that_does_not_start_says_its_last_words() -> None:
    command = ["sh", "-c", "echo cannot listen; exit 3"]
    with (
        pytest.raises(peers.Absent, match="broken ended with code 3: cannot listen"),
        peers._started("broken", command, "http://127.0.0.1:9", "none", None),
    ):
        pass
