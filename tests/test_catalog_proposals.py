"""What the facts of a source propose for the fields that an operator left empty."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog.proposals import Proposal, proposals
from catalog.spec import ModelSpec

FACTS = {"commit": "a" * 40, "bytes": 16_060_000_000, "context_length": 32768}


def model(*profiles: dict[str, Any], **fields: Any) -> ModelSpec:
    usual = {"engine": "vllm", "gpu_class": "any"}
    named = [{"name": f"p{number}"} | usual | profile for number, profile in enumerate(profiles or ({},))]
    return ModelSpec.load({"name": "m", "source": "org/m", "profiles": named} | fields)


def test_what_is_empty_is_proposed_with_its_reason() -> None:
    assert proposals(model({}, {}), FACTS) == (
        Proposal(
            "context_length",
            32768,
            (
                'model "m": the model\'s own context length is 32768 tokens;'
                " set context_length to it, or to less"
            ),
        ),
        Proposal(
            "min_disk_gb",
            17,
            'model "m" profile "p0": the weights take 16.1 GB; set min_disk_gb to 17, or to more',
            "p0",
        ),
        Proposal(
            "min_disk_gb",
            17,
            'model "m" profile "p1": the weights take 16.1 GB; set min_disk_gb to 17, or to more',
            "p1",
        ),
    )


@pytest.mark.parametrize(
    ("spec", "facts", "proposed"),
    [
        pytest.param(model(context_length=4096), FACTS, {"min_disk_gb"}, id="context_length is set"),
        pytest.param(model({"min_disk_gb": 1}), FACTS, {"context_length"}, id="min_disk_gb is set"),
        pytest.param(model({"engine": "sim"}), FACTS, set(), id="a model that only simulates"),
        pytest.param(model(), {}, set(), id="nothing is known"),
        pytest.param(model(), {"bytes": 5, "nodes": ["a"]}, set(), id="a path on the nodes"),
        pytest.param(
            model(), {"commit": "a" * 40, "bytes": "5", "context_length": True}, set(), id="nonsense"
        ),
    ],
)
def test_nothing_is_proposed_where(spec: ModelSpec, facts: dict[str, Any], proposed: set[str]) -> None:
    assert {each.field for each in proposals(spec, facts)} == proposed


@given(st.integers(1, 2**31 - 1), st.integers(1, 2**53))
def test_what_is_proposed_is_accepted_and_then_proposed_no_more(tokens: int, size_bytes: int) -> None:
    facts = {"commit": "a" * 40, "bytes": size_bytes, "context_length": tokens}
    given_ = {each.field: each.value for each in proposals(model(), facts)}
    accepted = model({"min_disk_gb": given_["min_disk_gb"]}, context_length=given_["context_length"])
    assert proposals(accepted, facts) == ()
    assert given_["min_disk_gb"] * 10**9 >= size_bytes
