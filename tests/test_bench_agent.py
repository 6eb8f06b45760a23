"""The bench of the agent runs, and finds what it promises."""

from __future__ import annotations

import json

import pytest

from tests.bench import agent as bench


@pytest.mark.soak
def test_it_tells_what_it_promises(capsys: pytest.CaptureFixture[str]) -> None:
    bench.main(["--json", "--replicas", "2", "--idle", "0.5"])
    found = json.loads(capsys.readouterr().out)
    assert found["numbers"].keys() == found["limits"].keys() | {"watching, CPU"}
    assert 0 < found["numbers"]["idle, memory"] < found["limits"]["idle, memory"]
    assert found["numbers"]["state report, CPU"] > 0


def test_people_get_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = dict.fromkeys(bench.LIMITS, 1.5)
    bench._print_table({"replicas": 3, "numbers": numbers})
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "an agent, with 3 replicas where it has any"
    assert told[2].split() == ["PUT", "to", "ready", "1.50", "ms", "(below", "1500", "ms)"]
