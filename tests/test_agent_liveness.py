"""An engine lives while it gets something done: a stuck one is ended with a sentence, a busy one is not."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.agent.liveness import LONGEST_LOOK_S, Liveness
from nodes.agent.probes import Load
from tests.agent_process import AgentProcess, Stream, assignment
from tests.waiting import wait_until

GRACE_S = 15.0


def after(*looks: tuple[bool, Load, float]) -> Liveness:
    liveness = Liveness(GRACE_S)
    for is_healthy, load, elapsed_s in looks:
        liveness.look(is_healthy=is_healthy, load=load, elapsed_s=elapsed_s)
    return liveness


BUSY, DONE_MORE, IDLE, UNTOLD = Load(2, 1, (7, None)), Load(2, 1, (8, None)), Load(0, 0, (7, None)), Load()
STUCK = "though its process runs; it was ended, and another is started."

VERDICTS = {
    "one that answers and moves": ([(True, BUSY, 5), (True, DONE_MORE, 5)] * 10, ""),
    "one that has nothing to do": ([(True, IDLE, 5)] * 10, ""),
    "one whose requests stand still": (
        [(True, BUSY, 5)] * 4,
        f"The engine has 3 requests and has moved none of them on for 15 s, {STUCK}",
    ),
    "one whose requests all wait": (
        [(True, Load(0, 1, (7,)), 5)] * 4,
        f"The engine has 1 request and has moved none of them on for 15 s, {STUCK}",
    ),
    "one that stood still and moves again": ([(True, BUSY, 5)] * 3 + [(True, DONE_MORE, 5)] * 2, ""),
    "one that stood still until nobody asked": (
        [(True, BUSY, 5)] * 3 + [(True, IDLE, 5), (True, BUSY, 5)], "",
    ),
    "one that does not tell what it does": ([(True, Load(2, 1, (None, None)), 5)] * 10, ""),
    "one that answers no health check": (
        [(False, UNTOLD, 5)] * 3,
        f"The engine has not answered health checks for 15 s, {STUCK}",
    ),
    "one that answers now and then": (
        [(False, UNTOLD, 5), (True, BUSY, 5), (True, DONE_MORE, 5)] * 10, "",
    ),
    "one that is long over a batch": ([(True, BUSY, 5)] + [(True, UNTOLD, 5)] * 10, ""),
    "one that tells no more": (
        [(True, BUSY, 5)] + [(True, UNTOLD, 5)] * 12,
        f"The engine has not told its counts for 60 s, {STUCK}",
    ),
    "one that never told": ([(True, UNTOLD, 5)] * 100, ""),
    "one whose agent slept for a day": ([(True, BUSY, 5), (True, BUSY, 86_400), (True, BUSY, 5)], ""),
}  # fmt: skip


@pytest.mark.parametrize(("looks", "verdict"), VERDICTS.values(), ids=VERDICTS)
def test_of_an_engine_is_judged(looks: list[tuple[bool, Load, float]], verdict: str) -> None:
    assert after(*looks).verdict == verdict


def test_before_it_is_judged_it_is_said() -> None:
    assert after((True, BUSY, 2), (True, BUSY, 2)).note == ""
    assert after(*[(True, BUSY, 2)] * 4).note == "has 3 requests and has moved none of them on for 6 s"
    assert after(*[(False, UNTOLD, 2)] * 3).note == (
        "its process runs, but has not answered health checks for 6 s"
    )


loads = st.builds(
    Load,
    running=st.none() | st.integers(0, 3),
    waiting=st.none() | st.integers(0, 3),
    progress=st.tuples(st.none() | st.integers(0, 2)),
)
looks = st.lists(st.tuples(st.booleans(), loads, st.floats(0, 1e6)), max_size=30)


@given(looks)
def test_nobody_is_judged_before_the_grace_or_for_the_agents_own_gap(
    seen: list[tuple[bool, Load, float]],
) -> None:
    counted_s = sum(min(elapsed_s, LONGEST_LOOK_S) for _, _, elapsed_s in seen)
    assert not after(*seen).verdict or counted_s >= GRACE_S


@given(looks)
def test_what_moves_and_answers_is_never_judged(seen: list[tuple[bool, Load, float]]) -> None:
    """Every other look brings progress."""
    liveness = Liveness(GRACE_S)
    for number, (_, load, elapsed_s) in enumerate(seen):
        liveness.look(is_healthy=True, load=load, elapsed_s=elapsed_s)
        liveness.look(is_healthy=True, load=Load(1, 0, (10 + number,)), elapsed_s=elapsed_s)
        assert not liveness.verdict


# --- a real agent over sims that go wrong ---------------------------------------------------------------


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    with AgentProcess(tmp_path, "--stuck-after", "5s") as agent:
        yield agent


def test_engines_that_stall_or_hang_are_ended_and_their_gpus_free(agent: AgentProcess) -> None:
    stalled = agent.run("--stall-after", "8", gpus=["sim-0"])
    hung = agent.run("--hang-after", "8", gpus=["sim-1"])
    streams = [Stream(rank["port"], max_tokens=1000) for rank in (stalled, hung)]
    began = time.monotonic()
    ended = [agent.wait_for(rank["replica"], "failed", timeout_s=30) for rank in (stalled, hung)]
    assert 4 < time.monotonic() - began < 20
    assert [(rank["cause"], rank["kind"]) for rank in ended] == [("stuck", "transient")] * 2
    assert ended[0]["reason"].startswith("The engine has 1 request and has moved none of them on for ")
    assert ended[1]["reason"].startswith("The engine has not answered health checks for ")
    assert agent.engines() == []
    assert not any(stream.finish() for stream in streams)
    agent.run(gpus=["sim-0"])


def test_a_long_prefill_is_busy(agent: AgentProcess) -> None:
    rank = agent.run("--ttft", "8s", "--default-tokens", "1")  # more than --stuck-after
    stream = Stream(rank["port"], max_tokens=3, waits=False)
    assert stream.finish(timeout_s=30), stream.error
    again = agent.rank(rank["replica"])
    assert (again["state"], again["pid"]) == ("ready", rank["pid"])


def test_an_engine_that_is_stopped_for_a_moment_is_said_to_be_silent(agent: AgentProcess) -> None:
    """By SIGSTOP, as a debugger does."""
    agent.options = ()
    agent.restart()
    wanted = assignment()
    agent.put(wanted)
    rank = agent.wait_for(wanted["replica"], "ready")
    os.kill(rank["pid"], signal.SIGSTOP)
    try:
        wait_until(
            lambda: "has not answered health checks" in agent.rank(rank["replica"]).get("reason", ""),
            "the silence to be told",
            tell=agent.story,
        )
    finally:
        os.kill(rank["pid"], signal.SIGCONT)
    wait_until(lambda: "reason" not in agent.rank(rank["replica"]), "an answer", tell=agent.story)
    assert agent.rank(rank["replica"])["state"] == "ready"
