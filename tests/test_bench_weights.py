"""The bench of weights runs, and finds that three nodes cost one download."""

from __future__ import annotations

import json

import pytest

from tests.bench import weights as bench


@pytest.mark.soak
def test_it_tells_what_it_promises(capsys: pytest.CaptureFixture[str]) -> None:
    bench.main(["--json", "--bytes", "20000000", "--rounds", "1"])
    found = json.loads(capsys.readouterr().out)
    assert found["numbers"].keys() >= found["limits"].keys()
    assert found["numbers"]["downloads of three nodes"] == 1.0
    assert found["numbers"]["peer, s"] > 0
    bench._print_table(found)
    assert capsys.readouterr().out.splitlines()[0].startswith("a file of 0.02 GB")
