"""/metrics: figures that add up over processes, in a form that Prometheus reads, with labels that are few."""

from __future__ import annotations

import math
import uuid
from typing import Any

import pytest
from django.db import connection
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext
from prometheus_client.parser import text_string_to_metric_families

from catalog.models import database_now
from llmgw.gateway.accounts import Accounts
from llmgw.gateway.metrics import Figures, Own, read_figures, render
from nodes.models import Demand, Gateway
from nodes.usage import add_lot
from tests.cast import a_node, a_replica
from tests.stage import make_key, make_model
from tests.test_gateway_accounts import passed

OWN = Own(is_database_there=True, table_age_s=0.2, lines_dropped=0)

Labels = frozenset[tuple[str, str]]


def told(figures: Figures | None = None, own: Own = OWN) -> dict[str, dict[Labels, float]]:
    """Every sample, by name and labels."""
    found: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(render(figures or read_figures(), own).decode()):
        for sample in family.samples:
            labels = frozenset(sample.labels.items())
            assert labels not in found.get(sample.name, {}), "told twice"
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def of(**labels: str) -> Labels:
    return frozenset(labels.items())


def write(*passages: Any) -> None:
    """As a process of its own would."""
    accounts = Accounts(uuid.uuid4(), lambda: None)
    for passage in passages:
        accounts.close(passage)
    add_lot(uuid.uuid4(), 1, database_now().timestamp(), accounts._counted)


@pytest.mark.django_db
def test_requests_of_all_processes_are_added_up() -> None:
    make_model("tiny")
    chat = "/v1/chat/completions"
    write(passed(), passed(key="other"), passed(status=404, code="model_not_found", model="", endpoint=chat))
    write(passed(), passed(status=502, code="stream_cut"), passed(status=502, code="stream_cut"))
    found = told()
    assert found["llmgw_requests_total"] == {
        of(model="tiny", endpoint=chat, code="2xx"): 3,
        of(model="tiny", endpoint=chat, code="5xx"): 2,
        of(model="", endpoint=chat, code="4xx"): 1,
    }
    assert found["llmgw_errors_total"] == {
        of(model="tiny", reason="stream_cut"): 2,
        of(model="", reason="model_not_found"): 1,
    }
    assert found["llmgw_completion_tokens_total"][of(model="tiny")] == 55
    assert found["llmgw_cached_tokens_total"][of(model="tiny")] == 300


@pytest.mark.django_db
def test_counters_only_grow_whichever_process_ends() -> None:
    make_model("tiny")
    write(passed())
    before = told()["llmgw_requests_total"]
    Gateway.objects.all().delete()
    write(passed())
    after = told()["llmgw_requests_total"]
    assert sum(after.values()) == sum(before.values()) + 1


@pytest.mark.django_db
def test_times_are_histograms() -> None:
    make_model("tiny")
    write(passed(), passed(first_byte_at_s=100.002), passed(first_byte_at_s=5000.0, ended_at_s=6000.0))
    found = told()
    buckets = {
        dict(labels)["le"]: count
        for labels, count in found["llmgw_time_to_first_token_seconds_bucket"].items()
    }
    assert [buckets["0.001"], buckets["0.0025"], buckets["0.4"], buckets["0.63"]] == [0, 1, 1, 2]
    assert [buckets["1000.0"], buckets["+Inf"]] == [2, 3]
    counts = [buckets[bound] for bound in sorted(buckets, key=float)]
    assert counts == sorted(counts)
    assert found["llmgw_time_to_first_token_seconds_count"] == {of(model="tiny"): 3}
    assert math.isclose(found["llmgw_time_to_first_token_seconds_sum"][of(model="tiny")], 4900.502)


@pytest.mark.django_db
def test_gauges_tell_of_those_that_are_alive() -> None:
    model, idle = make_model("tiny"), make_model("idle")
    node = a_node(gpus=4)
    a_replica(model, node, "ready", gpu=0)
    a_replica(model, node, "ready", gpu=1)
    a_replica(idle, node, "failed", gpu=None)
    a_replica(idle, node, "starting", gpu=2)
    ends = {"stopped_at": Now()}, {"heartbeat_at": database_now().replace(year=2020)}
    for number, columns in enumerate(({}, {}, *ends), 1):
        gateway = Gateway.objects.create(**columns)
        Demand.objects.create(gateway=gateway, model=model, in_flight=number, waiting=10 * number)
    found = told(own=Own(is_database_there=False, table_age_s=None, lines_dropped=7))
    assert found["llmgw_in_flight"] == {of(model="tiny"): 3, of(model="idle"): 0}
    assert found["llmgw_waiting"] == {of(model="tiny"): 30, of(model="idle"): 0}
    assert found["llmgw_replicas"] == {
        of(model="tiny", state="ready"): 2,
        of(model="idle", state="starting"): 1,
    }
    alone = {name: found[name][of()] for name in ("llmgw_gateways", "llmgw_database_up")}
    assert alone == {"llmgw_gateways": 2, "llmgw_database_up": 0}
    assert found["llmgw_table_age_seconds"][of()] == math.inf
    assert found["llmgw_access_log_dropped_lines_total"][of()] == 7


@pytest.mark.django_db
def test_nothing_tells_of_keys_or_of_what_clients_wrote() -> None:
    make_model("tiny")
    key, text = make_key("ada")
    write(passed(key=key.id, asked_as="a secret project"), passed(model="", asked_as="x", status=404))
    body = render(read_figures(), OWN).decode()
    for secret in (key.id, key.digest, text, "ada", "secret project"):
        assert secret not in body


@pytest.mark.django_db
def test_so_many_queries_however_much_there_is() -> None:
    def queries() -> int:
        with CaptureQueriesContext(
            connection,
        ) as context:
            read_figures()
        return len(context)

    before = queries()
    for number in range(5):
        model = make_model(f"model-{number}")
        Demand.objects.create(gateway=Gateway.objects.create(), model=model)
        write(*(passed(model.name, key=str(key)) for key in range(3)))
    assert queries() == before


def test_figures_are_told_before_anything_was_read() -> None:
    found = told(Figures())
    assert found["llmgw_gateways"] == {of(): 0}
