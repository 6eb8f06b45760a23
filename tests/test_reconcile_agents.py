"""Agents that are slow, lie, forget or refuse: each costs itself and nobody else."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from django.db import OperationalError, connection

from catalog.models import Revision
from nodes.models import Claim, Node, Orphan, Rank, Replica
from nodes.protocol import FAILED, READY, STARTING, ClusterKey, Launch, RankReport
from nodes.reconcile import run_pass
from tests.fake_agent import FakeAgent, gpus
from tests.passes import HOLDER, add_model, one_pass

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        pytest.param(b"<html>hello</html>", "sends no JSON", id="a page"),
        pytest.param(b'{"cluster": 7, "node": "x"}', "StateReport.cluster must be a text", id="a wrong type"),
        pytest.param(b"[" * 100_000, "sends no JSON", id="a thousand brackets"),
        pytest.param(b'{"cluster": "c", "node": "n"}', "serves another cluster", id="another cluster's"),
        pytest.param(b"1" * (9 << 20), "longer than", id="nine megabytes"),
        pytest.param(b'{"cluster": NaN}', "sends no JSON", id="a number that is none"),
    ],
)
def test_an_agent_that_talks_nonsense_does_not_stop_the_others(
    agent_of: Callable[..., FakeAgent], body: bytes, says: str
) -> None:
    agent_of("node-a", state_body=body)
    agent_of("node-b")
    add_model()
    one_pass()
    assert says in Node.objects.get(name="node-a").problem
    assert Replica.objects.get().ranks.get().node.name == "node-b"
    assert Replica.objects.get().state == READY


def ranks_of(*reports: RankReport) -> dict[str, Any]:
    return {"ranks": {report.replica: report for report in reports}}


def a_rank(**columns: Any) -> RankReport:
    return replace(RankReport(str(uuid.uuid4()), 1, 0, READY, port=18500, pid=77), **columns)


@pytest.mark.parametrize(
    ("lies", "says"),
    [
        pytest.param(
            ranks_of(*(a_rank() for _ in range(10_000))), "it has 10000 ranks", id="ten thousand replicas"
        ),
        pytest.param({"gpus": gpus(10_000)}, "it has 10000 gpus", id="ten thousand GPUs"),
        pytest.param(
            ranks_of(a_rank(generation=2**40)), "whole numbers from 0", id="a generation no column holds"
        ),
        pytest.param(ranks_of(a_rank(generation=-1)), "whole numbers from 0", id="a generation below zero"),
        pytest.param(ranks_of(a_rank(rank=2**40)), "whole numbers from 0", id="a rank no column holds"),
        pytest.param(ranks_of(a_rank(rank=-1)), "whole numbers from 0", id="a rank below zero"),
        pytest.param({"gpus": gpus(1) * 2}, "a GPU is in it twice", id="one GPU twice"),
        pytest.param(
            {"ranks": dict.fromkeys("ab", a_rank())}, "a rank is in it twice", id="one rank in two states"
        ),
        pytest.param({"gpus": gpus(1, "g" * 100)}, "1 to 100 characters", id="a GPU with an endless id"),
        pytest.param(
            ranks_of(a_rank(gpus=("g", "g"))), "a GPU is in it twice", id="a rank holds one GPU twice"
        ),
        pytest.param(
            ranks_of(a_rank(launch=Launch("m", "org/m", {"args": json.loads("[" * 400 + "]" * 400)}))),
            "sends no JSON",
            id="lists within lists",
        ),
    ],
)
def test_an_agent_that_reports_what_no_machine_has_does_not_stop_the_others(
    agent_of: Callable[..., FakeAgent], lies: dict[str, Any], says: str
) -> None:
    agent_of("node-a", **lies)
    agent_of("node-b")
    add_model()
    one_pass()
    assert says in Node.objects.get(name="node-a").problem
    assert Replica.objects.get().ranks.get().node.name == "node-b"
    assert not Orphan.objects.exists()
    assert not one_pass().has_changed


@pytest.mark.parametrize(
    "etag", [b'"\xff\xfe"', b'"\xc3\xa9"', b"x" * 4000], ids=["no text", "not ASCII", "long"]
)
def test_an_etag_may_be_anything(agent_of: Callable[..., FakeAgent], etag: bytes) -> None:
    agent = agent_of(state_etag=etag)
    add_model()
    one_pass()
    one_pass()
    assert Replica.objects.get().state == READY
    assert Node.objects.get().problem == ""
    assert not one_pass().has_changed
    assert len(agent.commands()) == 1


def test_the_context_that_an_engine_tells_is_kept_and_routed_by(agent_of: Callable[..., FakeAgent]) -> None:
    agent = agent_of()
    add_model()
    one_pass()
    one_pass()
    rank = Rank.objects.get()
    assert rank.context_length is None
    for told, kept in ((4096, 4096), (2**40, None), (None, None)):
        seen = Revision.current()
        agent.become(rank.replica_id, READY, context_length=told)
        one_pass()
        rank.refresh_from_db()
        has_changed = kept is not None or told == 2**40
        assert (rank.context_length, Revision.current() > seen) == (kept, has_changed)


def test_the_certificate_that_an_engine_shows_is_kept_and_routed_by(
    agent_of: Callable[..., FakeAgent],
) -> None:
    """One that is no checksum makes nobody ask in the clear instead."""
    agent = agent_of()
    add_model()
    one_pass()
    one_pass()
    rank = Rank.objects.get()
    port = rank.port
    assert (rank.certificate, port is not None) == ("", True)
    for told, kept in (("ab" * 32, ("ab" * 32, port)), ("cd" * 32, ("cd" * 32, port)), ("x", ("", None))):
        seen = Revision.current()
        agent.become(rank.replica_id, READY, certificate=told)
        one_pass()
        rank.refresh_from_db()
        assert ((rank.certificate, rank.port), Revision.current() > seen) == (kept, True)
    agent.become(rank.replica_id, READY, certificate="")  # as an older agent does, which says nothing of it
    one_pass()
    rank.refresh_from_db()
    assert (rank.certificate, rank.port) == ("", port)


def test_an_answer_to_a_command_may_be_nonsense(agent_of: Callable[..., FakeAgent]) -> None:
    """It was carried out all the same, and the next report tells."""
    agent = agent_of(lies_in_answers=True)
    agent_of("node-b")
    add_model(low=3, high=3)
    one_pass()
    assert set(Replica.objects.values_list("state", "generation")) == {("pending", 1), (READY, 1)}
    one_pass()
    assert {replica.state for replica in Replica.objects.all()} == {READY}
    assert len(agent.commands()) == 2


def test_a_database_that_is_away_costs_that_pass_only(
    agent_of: Callable[..., FakeAgent], caplog: pytest.LogCaptureFixture
) -> None:
    agent_of()
    add_model()

    def fail(execute: Any, sql: str, *rest: Any) -> Any:
        if sql.startswith("INSERT"):
            raise OperationalError("the server closed the connection")
        return execute(sql, *rest)

    with connection.execute_wrapper(fail):
        assert run_pass(HOLDER) is None
    assert "This pass broke off" in caplog.text
    assert "the server closed the connection" in caplog.text
    assert not Replica.objects.exists()
    one_pass()
    assert Replica.objects.get().state == READY


def test_an_agent_that_lost_the_record_of_a_running_engine_is_told_again(
    agent_of: Callable[..., FakeAgent],
) -> None:
    agent = agent_of()
    add_model()
    one_pass()
    replica = Replica.objects.get()
    assert agent.ranks[str(replica.pk)].launch is not None

    agent.become(replica.pk, STARTING, launch=None)
    one_pass()
    assert [method for method, _ in agent.commands()] == ["PUT", "PUT"]
    assert Claim.objects.exists()

    agent.become(replica.pk, READY, launch=agent.assignments[str(replica.pk)].launch)
    one_pass()
    replica.refresh_from_db()
    assert replica.state == READY
    assert len(agent.commands()) == 2


def test_processes_that_cannot_be_taken_up_are_stopped_and_replaced(
    agent_of: Callable[..., FakeAgent],
) -> None:
    agent = agent_of()
    add_model()
    one_pass()
    first = Replica.objects.get()
    agent.become(first.pk, STARTING, launch=None)
    agent.refuses = (409, "stray", "Processes of it run here without a record; delete it first.")
    one_pass()
    first.refresh_from_db()
    assert (first.wanted, first.state) == ("stop", STARTING)
    assert "without a record" in first.wanted_why
    assert Claim.objects.exists(), "they still hold the GPU"

    agent.refuses = None
    one_pass()
    one_pass()
    assert [row.state for row in Replica.objects.order_by("created_at")] == ["stopped", READY]


def test_what_a_report_says_beyond_every_column_is_unknown(agent_of: Callable[..., FakeAgent]) -> None:
    agent = agent_of()
    add_model()
    one_pass()
    replica = Replica.objects.get()
    agent.become(
        replica.pk,
        "on fire",
        port=2**40,
        pid=-4,
        running=2**60,
        age_s=1e300,
        reason="a\0b\ud800c",
        kind="k" * 99,
    )
    one_pass()
    rank = Rank.objects.get()
    assert (rank.port, rank.pid, rank.running) == (None, None, None)
    replica.refresh_from_db()
    assert replica.state == STARTING
    assert "\0" not in replica.reason


def test_a_slow_agent_costs_its_own_deadline_only(agent_of: Callable[..., FakeAgent], settings: Any) -> None:
    settings.LLMGW_AGENT_TIMEOUT_S = 0.3
    agent_of("node-a", state_delay_s=3)
    agent_of("node-b")
    add_model()
    one_pass()
    assert "did not answer within 0.3 s" in Node.objects.get(name="node-a").problem
    assert Replica.objects.get().state == READY


def test_an_agent_of_another_node_is_not_believed(agent_of: Callable[..., FakeAgent]) -> None:
    agent = agent_of()
    agent.node = str(uuid.uuid4())
    add_model()
    one_pass()
    assert "is not the one of node-a" in Node.objects.get().problem
    assert not Replica.objects.exists()


def test_a_wrong_token_is_said(agent_of: Callable[..., FakeAgent]) -> None:
    agent_of().token = "another"
    one_pass()
    assert "does not accept the token of node-a" in Node.objects.get().problem


def test_the_token_of_an_older_cluster_key_still_works(
    agent_of: Callable[..., FakeAgent], settings: Any
) -> None:
    agent_of()
    settings.LLMGW_CLUSTER_KEYS = (ClusterKey("new", b"n" * 32), *settings.LLMGW_CLUSTER_KEYS)
    add_model()
    one_pass()
    assert Replica.objects.get().state == READY


@pytest.mark.parametrize(
    ("refusal", "state", "kind"),
    [
        pytest.param(422, FAILED, "node", id="a GPU it does not have: it is tried elsewhere"),
        pytest.param("gpu_taken", FAILED, "node", id="a GPU that is taken there: it is tried elsewhere"),
        pytest.param("fence", "pending", "", id="older than what it has obeyed: it is told again"),
        pytest.param(410, FAILED, "transient", id="stopped there before: another replica follows"),
        pytest.param(400, FAILED, "configuration", id="a launch it cannot read: waits for an edit"),
        pytest.param(503, "pending", "", id="busy: it is told again"),
    ],
)
def test_a_refused_replica_says_the_agents_sentence(
    agent_of: Callable[..., FakeAgent], refusal: int | str, state: str, kind: str
) -> None:
    status, code = (409, refusal) if isinstance(refusal, str) else (refusal, "no")
    agent_of(refuses=(status, code, "It has no GPU of that name."))
    add_model()
    one_pass()
    replica = Replica.objects.get()
    assert (replica.state, replica.failure_kind) == (state, kind)
    assert replica.reason.startswith("It has no GPU of that name.")
