"""Engines' own numbers under one set of names, and the text form that Prometheus reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from nodes.engines import ENGINES
from nodes.engines.figures import FIGURES, figures_of
from nodes.exposition import COUNTER, GAUGE, HISTOGRAM, Distribution, Family, read_samples, written

pytestmark = pytest.mark.one_database

RECORDED = Path(__file__).parent / "data" / "engines"


def recorded(engine: str) -> dict[str, Any]:
    return dict(figures_of((RECORDED / engine / "metrics.prom").read_text(), ENGINES[engine]))


def test_vllm_tells_all_of_them() -> None:
    found = recorded("vllm")
    assert found.keys() == {each.name for each in FIGURES}
    assert (found["prompt_tokens_total"], found["kv_cache_usage_ratio"]) == (62, 0)
    ttft = found["time_to_first_token_seconds"]
    assert [bound for bound, _ in ttft.below][-1] == "+Inf"
    assert ttft.below[-1][1] == ttft.count > 0
    assert ttft.total > 0


def test_llama_server_tells_what_it_has() -> None:
    assert recorded("llamacpp") == {
        "running": 1,
        "waiting": 0,
        "prompt_tokens_total": 2218 + 117,
        "cached_tokens_total": 117,
        "generation_tokens_total": 347,
    }


def test_ranks_of_one_engine_are_added_up_and_their_ratios_are_not() -> None:
    told = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a b} 7"} 2.0
vllm:num_requests_running{engine="1",model_name="a b} 7"} 3.0
vllm:kv_cache_usage_perc{engine="0"} 0.2
vllm:kv_cache_usage_perc{engine="1"} 0.4
vllm:time_to_first_token_seconds_bucket{le="0.1",engine="0"} 1
vllm:time_to_first_token_seconds_bucket{le="+Inf",engine="0"} 2
vllm:time_to_first_token_seconds_bucket{le="0.1",engine="1"} 3
vllm:time_to_first_token_seconds_bucket{le="+Inf",engine="1"} 3
vllm:time_to_first_token_seconds_sum{engine="0"} 1.5
"""
    found = figures_of(told, ENGINES["vllm"])
    assert found["running"] == 5
    assert found["kv_cache_usage_ratio"] == pytest.approx(0.3)
    assert found["time_to_first_token_seconds"] == Distribution([("0.1", 4), ("+Inf", 5)], 1.5, 5)


@pytest.mark.parametrize(
    "told",
    [
        "",
        "<html>not found</html>",
        "vllm:num_requests_running many",
        "vllm:num_requests_running{",
        'vllm:time_to_first_token_seconds_bucket{le="0.1"} 1',
        "".join(f'vllm:time_to_first_token_seconds_bucket{{le="{n}"}} 1\n' for n in ["often", "+Inf"]),
        "".join(f'vllm:time_to_first_token_seconds_bucket{{le="{n}"}} 1\n' for n in [*range(200), "+Inf"]),
    ],
    ids=[
        "nothing",
        "a page",
        "a word",
        "half a line",
        "no last bound",
        "a bound of words",
        "no end of bounds",
    ],
)
def test_what_cannot_be_read_is_not_told(told: str) -> None:
    assert figures_of(told, ENGINES["vllm"]) == {}


@given(st.text())
def test_no_answer_of_an_engine_is_a_fault_of_ours(text: str) -> None:
    for adapter in ENGINES.values():
        for known in (text, f"{adapter.running} {text}", f"{adapter.running}{{{text}}} 1"):
            figures_of(known, adapter)


@given(st.dictionaries(st.sampled_from(["model", "node", "state"]), st.text()), st.floats(allow_nan=False))
def test_what_is_written_is_read_back(labels: dict[str, str], value: float) -> None:
    family = Family("llmgw_x", GAUGE, "It says so.")
    family.add(value, **labels)
    text = written([family])
    (told,) = text_string_to_metric_families(text)
    plain = {name: text.encode("utf-8", "backslashreplace").decode() for name, text in labels.items()}
    assert [(each.labels, each.value) for each in told.samples] == [(plain, value)]
    assert [each.value for each in read_samples(text)] == [value]


def test_a_family_without_samples_is_told_of() -> None:
    empty = [Family("llmgw_a_total", COUNTER, "A."), Family("llmgw_b", HISTOGRAM, "B.")]
    empty[0].add(None, model="tiny")
    assert written(empty).split("\n") == [
        "# HELP llmgw_a_total A.",
        "# TYPE llmgw_a_total counter",
        "# HELP llmgw_b B.",
        "# TYPE llmgw_b histogram",
        "",
    ]
