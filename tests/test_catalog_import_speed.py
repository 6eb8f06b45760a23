"""What a whole catalog costs: the same queries for one model and for two hundred."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from catalog.actions import read_catalog
from catalog.models import Model
from tests.bench.catalog import LISTS, cost_of_look
from tests.bench.catalog import main as bench_main
from tests.cast import a_model, alice
from tests.importing import form, imported, profile

pytestmark = pytest.mark.django_db


def many(count: int, **fields: Any) -> list[dict[str, Any]]:
    profiles = [profile(name) for name in ("p", "q", "r")]
    return [form(f"m{each}", aliases=[f"a{each}"], profiles=profiles, **fields) for each in range(count)]


def queries_of(*raws: object, **told: Any) -> int:
    with CaptureQueriesContext(connection) as queries:
        imported(*raws, **told)
    return len(queries)


def test_queries_do_not_grow_with_models() -> None:
    """But for statements that are full: SQLite takes a thousand values in one, and here gets 200 models."""
    room = 25 if connection.vendor == "sqlite" else 0
    a_model("there")
    assert queries_of(*many(1)) == 15
    assert queries_of(*many(200)) <= 15 + room
    assert queries_of(*many(200)) == 4
    assert queries_of(*many(1, description="other")) == 12
    assert queries_of(*many(200, description="other")) <= 12 + room
    removing = queries_of(*many(199), prune=True)
    assert queries_of(prune=True, is_sure=True) <= removing + 25  # Django deletes a hundred rows at a time
    assert not Model.objects.exists()


@pytest.mark.parametrize("address", LISTS.values(), ids=LISTS)
def test_what_a_list_asks_of_the_database_does_not_grow_with_models(address: str, settings: Any) -> None:
    settings.ALLOWED_HOSTS = ["127.0.0.1"]
    ada = alice()
    counts = []
    for count in (1, 10, 150):
        imported(*many(count))
        counts.append(cost_of_look(address, ada)["queries"])
    assert counts[0] == counts[1] == counts[2] > 0


@pytest.mark.soak
@pytest.mark.one_database
def test_the_bench_runs(capfd: Any) -> None:
    bench_main(["--json", "--models", "12", "--database", "sqlite"])
    told = json.loads(capfd.readouterr().out)
    assert told["models"] == 12
    numbers = told["databases"]["sqlite"]
    assert all(seconds > 0 for seconds in numbers["seconds"].values())
    for looks in numbers["looks"].values():
        assert list(looks) == ["10", "100", "12"]
        assert len({look["queries"] for look in looks.values()}) == 1


def test_two_thousand_aliases_are_no_matter() -> None:
    aliases = [f"a{number}" for number in range(2_000)]
    imported(form("m", aliases=aliases))
    assert list(read_catalog().models[0].aliases) == aliases
    imported(form("m", aliases=aliases[1000:]), form("n", aliases=aliases[:1000]))
    assert read_catalog().resolve("a0").name == "n"
