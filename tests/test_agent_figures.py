"""What an agent tells Prometheus: the host, its cards, its ranks and its engines, by one scheme of names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nodes.agent.figures import families
from nodes.exposition import read_samples
from nodes.protocol import StateReport
from tests.agent_process import KEY, AgentProcess
from tests.waiting import wait_until

pytestmark = pytest.mark.one_database


def test_an_agent_tells_of_its_host_its_cards_and_its_engines(tmp_path: Path) -> None:
    with AgentProcess(tmp_path) as agent:
        replica = agent.run()["replica"]

        def told() -> dict[str, list[tuple[dict[str, str], float]]]:
            answer = agent.ask("GET", "/metrics")
            assert answer.status == 200
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            list(text_string_to_metric_families(answer.body.decode()))  # raises for what is none of its form
            found: dict[str, list[tuple[dict[str, str], float]]] = {}
            for sample in read_samples(answer.body.decode()):
                found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
            return found

        # Its readiness took a token, which is counted by the next look.
        def has_generated() -> bool:
            return told().get("llmgw_engine_generation_tokens_total", [({}, 0.0)])[0][1] >= 1

        wait_until(has_generated, "the engine's count", tell=agent.story)
        found = told()
        of = {"model": "m", "profile": "p", "replica": replica, "rank": "0"}
        assert found["llmgw_rank_state"] == [({**of, "state": "ready"}, 1)]
        assert found["llmgw_engine_up"] == [({**of, "engine": "sim"}, 1)]
        assert found["llmgw_engine_running"] == [({**of, "engine": "sim"}, 0)]
        assert found["llmgw_engine_time_to_first_token_seconds_count"][0][1] >= 1
        assert found["llmgw_host_disk_bytes"][0][1] > found["llmgw_host_disk_free_bytes"][0][1] > 0
        assert {labels["gpu_class"] for labels, _ in found["llmgw_gpu_healthy"]} == {"sim"}
        assert KEY not in agent.ask("GET", "/metrics").body.decode()


def test_names_are_of_one_scheme() -> None:
    told = families(StateReport("c", "n"), [])
    for family in told:
        assert re.fullmatch(r"llmgw_(agent|host|gpu|rank|engine)_[a-z_]+", family.name)
        assert family.name.endswith("_total") is (family.kind == "counter")
        assert "\n" not in family.says
        assert family.says.endswith(".")
    assert len({family.name for family in told}) == len(told)
