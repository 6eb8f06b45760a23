"""Histories of a cluster in which everything goes wrong: nothing is ever held twice, and once faults end,
what is wanted comes about and stays.

Seeded: a history that fails is had again by its number. `make soak` takes twenty times as many.
"""

from __future__ import annotations

import os

import pytest

from catalog.spec import ModelSpec
from nodes.snapshot import RUN, Model, Roll
from tests.simulated import BEAT, Agent, Cluster

STEPS = 200  # of one history
ALL_STEPS = int(os.environ.get("SOAK_STEPS", "5000"))
FIRST = int(os.environ.get("SOAK_SEED", "1"))
SETTLING = 400  # passes at most; failures that wait for long are tried again meanwhile


def lived_through(seed: int, steps: int = STEPS) -> Cluster:
    cluster = Cluster(seed)
    for _ in range(steps):
        cluster.step()
        assert not cluster.audit(), (seed, cluster.audit(), cluster.history[-20:])
    return cluster


def settled(cluster: Cluster, seed: int) -> Cluster:
    cluster.calm_down()
    quiet = 0
    for _ in range(SETTLING):
        cluster.run_pass()
        cluster.engines_go_on()
        cluster.now += BEAT
        assert not cluster.audit(), (seed, cluster.audit())
        quiet = 0 if cluster.last_plan.acts or cluster.last_plan.held or cluster.unsettled() else quiet + 1
        if quiet == 3:
            return cluster
    raise AssertionError((seed, cluster.unsettled(), cluster.last_plan))


def test_from_any_history_what_is_wanted_comes_about_and_stays() -> None:
    print(f"histories {FIRST} to {FIRST + ALL_STEPS // STEPS - 1}")
    for seed in range(FIRST, FIRST + ALL_STEPS // STEPS):
        settled(lived_through(seed), seed)


def test_a_history_can_be_had_again() -> None:
    first, second = lived_through(7), lived_through(7)
    assert first.history == second.history
    assert first.replicas == second.replicas


@pytest.mark.parametrize("gpus", [4, 8], ids=["without room beside them", "with room beside them"])
def test_a_roll_never_takes_more_than_one_away(gpus: int) -> None:
    """Four replicas on four or eight GPUs: three at least are ready until all are replaced."""
    cluster = Cluster(1)
    cluster.calm_down()
    cluster.agents = {1: Agent(1, gpus, "")}
    spec = ModelSpec.load(
        {
            "name": "m",
            "source": "org/m",
            "profiles": [{"name": "p", "engine": "sim", "gpu_class": "sim"}],
            "scaling": {"min": 4, "max": 4},
        }
    )
    cluster.models = {0: Model(0, spec)}
    settled(cluster, 1)
    before = set(cluster.replicas)

    raw = spec.as_dict()
    raw["profiles"][0]["args"] = ["--seed", "2"]
    roll = Roll(cluster.now, "ann", 4)
    cluster.models[0] = Model(0, ModelSpec.load(raw), roll=roll)
    least = most = 4
    for _ in range(100):
        cluster.run_pass()
        cluster.engines_go_on()
        cluster.now += BEAT
        ready = sum(each.is_ready and each.wanted == RUN for each in cluster.replicas.values())
        least, most = min(least, ready), max(most, len(cluster.replicas))
    assert cluster.models[0].roll is None
    assert len(cluster.replicas) == 4
    assert not before & set(cluster.replicas)
    assert (least, most) == ((3, 4) if gpus == 4 else (4, 5))


def test_faults_do_happen() -> None:
    """Among many histories there are lost nodes, failures, adoptions, evictions, rolls and moves."""
    seen = set()
    for seed in range(20):
        cluster = Cluster(seed)
        for _ in range(STEPS):
            cluster.step()
            plan = cluster.last_plan
            seen |= {
                name
                for name in ("adopt", "lost", "drain", "stop", "evict", "start", "rolls")
                if getattr(plan, name)
            }
            seen |= {"replaces"} if any(start.replaces for start in plan.start) else set()
            seen |= {"gang"} if any(len(start.places) > 1 for start in plan.start) else set()
            seen |= {"held"} if plan.held else set()
            seen |= {"alarm"} if plan.alarm else set()
        seen |= {"failed"} if cluster.failures else set()
    assert seen >= {
        "adopt", "lost", "drain", "stop", "evict", "start", "rolls", "replaces", "gang", "alarm", "failed",
    }  # fmt: skip
