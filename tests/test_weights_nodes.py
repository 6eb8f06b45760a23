"""The reconciler's own passes, real agents and a real hub: what is one download for all nodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from catalog.models import Model
from nodes.actions import register_node
from nodes.models import Rank, Weights
from tests.agent_process import AgentProcess
from tests.passes import add_model, one_pass
from tests.test_agent_weights import agent_at
from tests.waiting import wait_until
from tests.weights_hub import COMMIT, running

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.one_database]
PARTS = {f"m-0000{part}-of-00003.gguf": bytes([part]) * 4_000_000 for part in (1, 2, 3)}


@contextmanager
def nodes(hub_url: str, folder: Path, names: str) -> Iterator[list[AgentProcess]]:
    """As many agents, each registered here."""
    with ExitStack() as stack:
        found = []
        for name in names:
            agent = stack.enter_context(agent_at(hub_url, folder / name))
            _, identity = register_node(name, agent.url, by="ann", door="command")
            agent.node, agent.token = identity["node"], identity["token"]
            agent.identity.write_text(json.dumps(identity))
            agent.restart()
            found.append(agent)
        yield found


def pass_until(states: set[str]) -> None:
    """Until each rank is in one of them."""

    def reached() -> bool:
        one_pass()
        found = set(Rank.objects.values_list("state", flat=True))
        return bool(found) and found <= states

    wait_until(reached, f"all ranks to be {states}", tell=lambda: str(Rank.objects.values()), timeout_s=60)


def test_three_nodes_that_are_told_to_run_a_model_cost_one_download(tmp_path: Path) -> None:
    with running(PARTS) as hub, nodes(hub.url, tmp_path, "abc") as agents:
        hub.bytes_per_s = 8_000_000
        add_model(low=3, high=3, engine="llamacpp", gpu_class="", tp=0)
        Model.objects.update(source_revision=COMMIT)
        pass_until({"starting"})

        assert sorted(hub.gets()) == sorted(PARTS)
        one_pass()
        assert set(Weights.objects.values_list("state", "size_bytes")) == {("held", 12_000_000)}
        for agent in agents:
            (told,) = agent.state()["ranks"]
            command = told["command"]
            path = Path(command[command.index("--model") + 1])
            assert {name: (path.parent / name).read_bytes() for name in PARTS} == PARTS
