"""What a door answers when something fails that it could not expect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import OperationalError, connection
from django.test import Client

from catalog.models import Event, Model
from tests.cast import alice, model_form

pytestmark = [pytest.mark.django_db, pytest.mark.one_database]

DOORS = [
    pytest.param("/admin/", id="admin"),
    pytest.param("/admin/login/", id="login"),
    pytest.param("/api/models", id="REST"),
    pytest.param("/api/nodes", id="REST of another app"),
]


@contextmanager
def failing(problem: Callable[[], Exception]) -> Iterator[None]:
    def fail(*_: Any) -> Any:
        raise problem()

    with connection.execute_wrapper(fail):
        yield


def outsider() -> Client:
    return Client(raise_request_exception=False)


@pytest.mark.parametrize("path", DOORS)
def test_a_database_that_is_away_is_said_and_worth_another_try(path: str) -> None:
    client = outsider()
    client.force_login(alice())
    with failing(lambda: OperationalError("could not connect to db.internal:5432")):
        answer = client.get(path)
    assert answer.status_code == 503
    assert answer["Retry-After"] == "5"
    assert "The database cannot be used at this moment; try again soon." in answer.content.decode()
    assert b"internal" not in answer.content
    if path.startswith("/api/"):
        assert answer.json()["errors"][0]["code"] == "database_away"


@pytest.mark.parametrize("path", ["/admin/", "/api/models"])
def test_a_fault_of_our_own_tells_nothing_of_itself(path: str) -> None:
    client = outsider()
    client.force_login(alice())
    with failing(lambda: RuntimeError("secret")):
        answer = client.get(path)
    assert answer.status_code == 500
    assert "llmgw itself failed here" in answer.content.decode()
    assert b"secret" not in answer.content
    assert "Retry-After" not in answer


def test_a_write_that_fails_is_said_and_leaves_nothing() -> None:
    client = outsider()
    client.force_login(alice())

    def fail(execute: Any, sql: str, *rest: Any) -> Any:
        if sql.startswith('INSERT INTO "catalog_profile"'):
            raise OperationalError("database or disk is full")
        return execute(sql, *rest)

    with connection.execute_wrapper(fail):
        answer = client.post("/api/models", model_form(), content_type="application/json")
    assert answer.status_code == 503
    assert not Model.objects.exists()
    assert not Event.objects.exists()


@pytest.mark.parametrize("path", ["/api", "/api/"])
def test_the_address_of_rest_itself_tells_what_there_is(path: str) -> None:
    assert Client().get(path).status_code == 401
    client = Client()
    client.force_login(alice())
    told = client.get(path).json()
    rows = ["events", "jobs", "join-tokens", "keys", "models", "nodes", "replicas", "webhooks", "weights"]
    assert sorted(told) == sorted(
        [*rows, "overview", "plan", "reconciler", "schema", "series", "docs", "usage"]
    )
    assert all(client.get(address).status_code == 200 for address in told.values())


def test_a_strange_host_is_told_the_way_out_and_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    answer = Client().get("/admin/login/", headers={"host": "llm.example.org"})
    assert answer.status_code == 400
    assert "LLMGW_ALLOWED_HOSTS" in answer.content.decode()
    assert "Traceback" not in caplog.text
