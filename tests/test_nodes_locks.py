"""Operators and passes that meet at the same rows wait for each other in one order, and none is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from django.db import connection

from catalog.actions import remove_model
from nodes.actions import register_node, stop_replica
from nodes.models import Node, Replica
from nodes.protocol import FAILED
from nodes.reconcile import run_pass
from tests.cast import a_model
from tests.fake_agent import FakeAgent, joining
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

WAITING = "SELECT count(*) FROM pg_locks WHERE NOT granted"


@pytest.fixture
def agent() -> Iterator[FakeAgent]:
    with ExitStack() as stack:
        yield joining(stack)()


def remove() -> None:
    remove_model("tiny", by="ann", door="command", after_change=int)


def stop() -> None:
    stop_replica(Replica.objects.get(), by="ann", why="", door="command")


def move() -> None:
    register_node("node-a", "http://127.0.0.1:9", by="ann", door="command")


def reconcile() -> None:
    run_pass("here:1:1")


@pytest.mark.parametrize(
    ("first", "its_write", "second"),
    [
        pytest.param(stop, 'UPDATE "nodes_replica"', remove, id="a replica is stopped, its model removed"),
        pytest.param(stop, 'UPDATE "nodes_replica"', reconcile, id="a replica is stopped, a pass comes by"),
        pytest.param(reconcile, 'UPDATE "nodes_replica"', remove, id="a pass, the model is removed"),
        pytest.param(reconcile, 'UPDATE "nodes_replica"', stop, id="a pass, the replica is stopped"),
        pytest.param(reconcile, 'UPDATE "nodes_node"', move, id="a pass, the node moves"),
        pytest.param(move, 'UPDATE "nodes_node"', reconcile, id="a node moves, a pass comes by"),
    ],
)
def test_two_that_write_the_same_rows_both_come_through(
    agent: FakeAgent, first: Callable[[], None], its_write: str, second: Callable[[], None]
) -> None:
    """`second` begins once `first` has written, and `first` goes on once `second` waits for it."""
    if connection.vendor == "sqlite":
        pytest.skip("SQLite has one writer at a time")
    a_model()
    reconcile()
    agent.become(Replica.objects.get().pk, FAILED, kind="transient")  # which changes where requests go
    begun: list[Future[None]] = []

    def in_between(execute: Any, sql: str, *rest: Any) -> Any:
        done = execute(sql, *rest)
        if sql.startswith(its_write) and not begun:
            begun.append(somebody.submit(run_second))
            with connection.cursor() as cursor:
                wait_until(lambda: _counted(cursor) or begun[0].done(), "the second to wait")
        return done

    def run_second() -> None:
        try:
            second()
        finally:
            connection.close()

    with ThreadPoolExecutor(1) as somebody:
        with connection.execute_wrapper(in_between):
            first()
        begun[0].result(10)
    assert Node.objects.count() == 1


def _counted(cursor: Any) -> int:
    cursor.execute(WAITING)
    return int(cursor.fetchone()[0])
