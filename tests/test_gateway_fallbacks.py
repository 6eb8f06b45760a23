"""Which models may stand in for one that cannot answer."""

from __future__ import annotations

import pytest

from llmgw.gateway.admission import ModelEntry
from llmgw.gateway.fallbacks import fallbacks_of


@pytest.mark.parametrize(
    ("names", "unable", "expected"),
    [
        pytest.param({"a": "bc", "b": "", "c": ""}, "", "bc", id="in order"),
        pytest.param({"a": ""}, "", "", id="none"),
        pytest.param({"a": "b", "b": "a"}, "", "b", id="two that name each other"),
        pytest.param({"a": "bc", "b": "d", "c": "", "d": "a"}, "", "bcd", id="theirs after its own"),
        pytest.param({"a": "b", "b": "c", "c": ""}, "b", "c", id="behind one that may not"),
        pytest.param({"a": "bxc", "b": "", "c": ""}, "", "bc", id="one that is no longer there"),
        pytest.param({"a": "bcb", "b": "c", "c": "b"}, "", "bc", id="each once"),
    ],
)
def test_fallbacks_stand_in(names: dict[str, str], unable: str, expected: str) -> None:
    models = {
        name: ModelEntry(ord(name), name, fallbacks=tuple(fallbacks)) for name, fallbacks in names.items()
    }
    found = fallbacks_of(models["a"], models.get, lambda model: model.name not in unable)
    assert "".join(model.name for model in found) == expected
