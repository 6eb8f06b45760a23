"""What Prometheus is told of the control plane and the nodes, with which key, where it finds all of it; and
that the dashboard and the alerts speak of nothing else."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from django.db import connection
from django.db.models.functions import Now
from django.test import Client
from django.test.utils import CaptureQueriesContext
from prometheus_client.parser import text_string_to_metric_families

from catalog.actions import mint_key, revoke_key
from catalog.durations import HOUR
from catalog.models import Key, Model
from llmgw.gateway.metrics import Figures, Own, render
from nodes import gauges, noticing
from nodes.actions import NodeRefused, check_name, cordon, register_node
from nodes.agent import figures as agents_figures
from nodes.exposition import is_told_by, written
from nodes.models import Job, Lease, Node, Orphan, Trouble, Unplaced
from nodes.monitoring import FILES
from nodes.protocol import StateReport
from nodes.reconcile import run_pass
from nodes.webhooks import add_webhook
from tests.cast import a_model, a_node, a_replica, alice, edited
from tests.fake_agent import FakeAgent
from tests.rest_client import Api, sentence

pytestmark = [pytest.mark.django_db, pytest.mark.one_database]

Labels = frozenset[tuple[str, str]]


@pytest.fixture
def api() -> Api:
    return Api(alice(), scope="metrics")


def told(text: str) -> dict[str, dict[Labels, float]]:
    """Every sample by name and labels, as Prometheus's own reader has them."""
    found: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = frozenset(sample.labels.items())
            assert labels not in found.get(sample.name, {}), "told twice"
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def scraped() -> dict[str, dict[Labels, float]]:
    return told(written(gauges.families()))


def of(**labels: str) -> Labels:
    return frozenset(labels.items())


# --- with which key -------------------------------------------------------------------------------

PATHS = ("metrics", "sd", "monitoring/alerts.yml", "nodes/gpu-01/metrics")


@pytest.mark.parametrize("path", PATHS)
def test_a_key_of_the_scope_metrics_opens_it_and_no_other(path: str) -> None:
    user = alice()
    for scope in ("manage", "inference"):
        status, says = sentence(Api(user, scope=scope)("GET", path))
        assert status == 403
        assert says.endswith("use one whose scope is metrics, or make one.")
    client = Client()
    client.force_login(user)
    assert client.get(f"/api/{path}").status_code == 401
    key = Api(user, scope="metrics")
    assert key.ask("GET", path).status_code != 401
    assert key.ask("POST", path).status_code == 405
    assert sentence(key("GET", f"{path}?x=1"))[0] == 400
    revoke_key(key.key.pk, by="alice", door="command")
    assert key.ask("GET", path).status_code == 401


def test_it_opens_nothing_else(api: Api) -> None:
    for path in ("models", "nodes", "webhooks", "keys", "usage"):
        assert sentence(api("GET", path))[0] == 403


# --- the control plane's own ----------------------------------------------------------------------


def test_nodes_and_gpus_are_told(api: Api) -> None:
    model = a_model()
    disk = {"disk_total_bytes": 1000, "disk_free_bytes": 250}
    node = a_node("gpu-01", gpus=4)
    Node.objects.filter(pk=node.pk).update(
        report={**node.report, **disk, "gpus": [*node.report["gpus"][:3], _sick(node.report["gpus"][3])]}
    )
    a_replica(model, node)
    Orphan.objects.create(replica="0" * 8 + "-0000-4000-8000-" + "0" * 12, node=node, gpus=["gpu-01-gpu-1"])
    silent = a_node('b"ad\n', gpus=0)
    Node.objects.filter(pk=silent.pk).update(seen_at=Now() - timedelta(minutes=5))
    a_node("new", gpus=0, seen_at=None)
    cordon(silent, by="alice", door="command", why="")
    answer = api.ask("GET", "metrics")
    assert answer["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = told(answer.content.decode())
    assert {dict(labels)["state"]: count for labels, count in found["llmgw_nodes"].items()} == {
        "fresh": 1, "suspect": 0, "lost": 1, "never": 1,
    }  # fmt: skip
    assert found["llmgw_node_up"] == {of(node="gpu-01"): 1, of(node='b"ad\n'): 0, of(node="new"): 0}
    assert 299 < found["llmgw_node_silence_seconds"][of(node='b"ad\n')] < 330
    assert of(node="new") not in found["llmgw_node_silence_seconds"]
    assert found["llmgw_node_kept_free"][of(node='b"ad\n')] == 1
    assert {dict(labels)["use"]: count for labels, count in found["llmgw_gpus"].items()} == {
        "free": 1, "replica": 1, "orphan": 1, "foreign": 0, "sick": 1,
    }  # fmt: skip
    assert found["llmgw_node_disk_bytes"] == {of(node="gpu-01"): 1000}
    assert found["llmgw_node_disk_free_bytes"] == {of(node="gpu-01"): 250}
    assert found["llmgw_orphans"][of()] == 1


def _sick(gpu: dict[str, Any]) -> dict[str, Any]:
    return {**gpu, "is_healthy": False, "sickness": "it does not answer"}


def test_models_are_told_with_what_they_lack_and_promise() -> None:
    model, node = a_model(), a_node()
    a_replica(model, node)
    edited(model, args=["--x"])
    Model.objects.update(ttft_p99_ns=1_500_000_000, scaling_min=3, scaling_max=4)
    Unplaced.objects.create(model=model, missing=2, why="no room", since=Now() - timedelta(minutes=4))
    noticing.look(["stale"])
    Trouble.objects.update(since=Now() - timedelta(hours=2))
    for _ in range(5):
        a_replica(model, node, "failed", gpu=None)
    found = scraped()
    of_model = of(model="tiny")
    assert (found["llmgw_stale_replicas"][of_model], found["llmgw_unplaced_replicas"][of_model]) == (1, 2)
    assert 7200 <= found["llmgw_stale_seconds"][of_model] < 7300
    assert 240 <= found["llmgw_unplaced_seconds"][of_model] < 300
    assert found["llmgw_slo_time_to_first_token_seconds"] == {of_model: 1.5}
    assert "llmgw_slo_time_per_output_token_seconds" not in found
    assert (
        found["llmgw_model_wanted_replicas"][of_model],
        found["llmgw_model_ready_replicas"][of_model],
    ) == (3, 1)
    assert found["llmgw_crash_loops"] == {of(model="tiny", profile="default"): 1}


def test_passes_are_counted_and_timed() -> None:
    assert scraped()["llmgw_pass_age_seconds"][of()] == math.inf
    for _ in range(2):
        assert run_pass("here") is not None
    found = scraped()
    assert found["llmgw_pass_duration_seconds_count"][of()] == 2
    whole, last = (
        found["llmgw_pass_duration_seconds_sum"][of()],
        found["llmgw_pass_last_duration_seconds"][of()],
    )
    assert 0 < last < whole
    assert 0 <= found["llmgw_pass_age_seconds"][of()] < 30
    Lease.objects.update(holder="another", expires_at=Now() + timedelta(seconds=20))
    assert run_pass("here") is None
    assert scraped()["llmgw_pass_duration_seconds_count"][of()] == 2, "none was made"


def test_jobs_keys_and_webhooks_are_told() -> None:
    model, user = a_model(), alice()
    Job.objects.create(kind=Job.Kind.BENCH, model=model, model_name="tiny", by="alice")
    made: dict[str, Any] = {"user": user, "scope": "inference", "by": "alice", "door": "command"}
    key, text = mint_key("ci", expires_in_ns=48 * HOUR, **made)
    Key.objects.update(created_at=Now() - timedelta(days=60))
    mint_key("for good", **made)
    webhook, secret = add_webhook("pager", "https://pager.invalid/t0ken", by="alice", door="command")
    noticing.hear([webhook], {"kind": "node_lost", "state": "begins", "subject": "gpu-07"})
    body = written(gauges.families())
    found = told(body)
    assert found["llmgw_jobs"][of(kind="bench", state="queued")] == 1
    assert found["llmgw_jobs"][of(kind="engine_check", state="failed")] == 0
    (labels,) = found["llmgw_key_expires_seconds"]
    assert labels == of(key=key.pk, name="ci")
    assert math.isclose(found["llmgw_key_expires_seconds"][labels], 48 * 3600, abs_tol=60)
    assert found["llmgw_webhook_waiting"] == {of(webhook="pager"): 1}
    assert found["llmgw_webhook_delivered_total"] == {of(webhook="pager"): 0}
    for private in (text, key.digest, secret, "t0ken", "pager.invalid"):
        assert private not in body


def test_so_many_queries_however_much_there_is() -> None:
    def queries() -> int:
        with CaptureQueriesContext(connection) as context:
            scraped()
        return len(context)

    a_replica(a_model("first"), a_node("first"))
    run_pass("here")
    before = queries()
    for number in range(5):
        a_replica(a_model(f"model-{number}"), a_node(f"node-{number}"))
        add_webhook(f"hook-{number}", "https://pager.invalid/", by="alice", door="command")
    assert queries() == before


# --- nodes ----------------------------------------------------------------------------------------


@pytest.fixture
def agent() -> Iterator[FakeAgent]:
    agent = FakeAgent()
    with agent.running():
        node, identity = register_node("gpu/01", agent.address, by="alice", door="command")
        agent.serve(node, identity)
        yield agent


def test_a_nodes_own_numbers_are_passed_on_and_its_token_is_not(api: Api, agent: FakeAgent) -> None:
    answer = api.ask("GET", "nodes/gpu%2F01/metrics")
    assert (answer.status_code, answer["Content-Type"][:26]) == (200, "text/plain; version=0.0.4;")
    assert "llmgw_gpu_healthy" in told(answer.content.decode())
    assert agent.token not in answer.content.decode()
    assert agent.requests[-1] == ("GET", "/metrics")


@pytest.mark.parametrize(
    "says",
    [
        "llmgw_nodes 7",
        'llmgw_key_expires_seconds{key="x"} 1',
        "<html>",
        "# TYPE process_cpu_seconds_total counter",
        "llmgw_gpu_healthy",
        "llmgw_gpu_healthy 1 # {",
    ],
    ids=["the control plane's", "a key's", "a page", "another program's", "half a line", "more than a line"],
)
def test_an_agent_is_believed_about_itself_alone(api: Api, agent: FakeAgent, says: str) -> None:
    agent.metrics = f"llmgw_gpu_healthy 1\n{says}\n"
    status, told_of = sentence(api("GET", "nodes/gpu%2F01/metrics"))
    assert (status, "metrics that are none of an agent's" in told_of) == (503, True)


def test_a_node_that_is_away_or_unknown_is_a_sentence(api: Api, agent: FakeAgent) -> None:
    assert sentence(api("GET", "nodes/other/metrics")) == (
        404,
        'there is no node "other"; GET /api/sd lists them',
    )
    agent.is_deaf = True
    status, says = sentence(api("GET", "nodes/gpu%2F01/metrics"))
    assert status == 503
    assert "cannot be reached" in says


@pytest.mark.parametrize("name", ["gpu-01/metrics", "..", ".", "rack/../gpu-01", "rack/."])
def test_no_node_is_called_what_leads_elsewhere(name: str) -> None:
    with pytest.raises(NodeRefused, match="as its address would lead elsewhere: give it another name"):
        check_name(name)


@pytest.mark.parametrize("name", ["gpu..01", "...", "rack/.gpu", "a/metrics/b"])
def test_a_node_may_have_dots_in_its_name(name: str) -> None:
    check_name(name)


# --- where it is found ----------------------------------------------------------------------------


def test_prometheus_finds_all_of_it(api: Api, agent: FakeAgent, settings: Any) -> None:
    status, targets = api("GET", "sd")
    assert status == 200
    assert targets == [
        {
            "targets": ["testserver"],
            "labels": {
                "__scheme__": "http",
                "__metrics_path__": path,
                "job": job,
                "instance": instance,
                **more,
            },
        }
        for path, job, instance, more in (
            ("/api/metrics", "llmgw", "testserver", {}),
            ("/metrics", "llmgw-gateway", "testserver", {}),
            ("/api/nodes/gpu%2F01/metrics", "llmgw-node", "gpu/01", {"node": "gpu/01"}),
        )
    ]
    for target in targets:
        path = target["labels"]["__metrics_path__"]
        if path.startswith("/api/"):
            assert api.ask("GET", path.removeprefix("/api/")).status_code == 200
    settings.LLMGW_GATEWAYS = ["https://gw-1.example:8443", "https://gw-2.example"]
    gateways = [each for each in api("GET", "sd")[1] if each["labels"]["job"] == "llmgw-gateway"]
    assert [each["targets"] for each in gateways] == [["gw-1.example:8443"], ["gw-2.example"]]
    assert {each["labels"]["__scheme__"] for each in gateways} == {"https"}


# --- the dashboard and the alerts -----------------------------------------------------------------

_METRIC = re.compile(r"\bllmgw_[a-z_]+\b")


def exported() -> set[str]:
    """Every name that a query may use, of all who tell any."""
    text = written([*gauges.families(), *agents_figures.families(StateReport("c", "n"), [])])
    text += render(Figures(), Own(is_database_there=True, table_age_s=0.0, lines_dropped=0)).decode()
    found = set()
    kinds = re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE)
    assert len({name for name, _ in kinds}) == len(kinds), "two tell one name"
    for name, kind in kinds:
        assert name.endswith("_total") is (kind == "counter"), name
        endings = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}.get(kind, ("",))
        found |= {name + ending for ending in endings}
    return found


def test_a_query_names_what_is_told_and_nothing_else() -> None:
    dashboard = json.loads((FILES / "dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    queries += [each["query"]["query"] for each in dashboard["templating"]["list"][1:]]
    alerts = yaml.safe_load((FILES / "alerts.yml").read_text())
    queries += [rule["expr"] for group in alerts["groups"] for rule in group["rules"]]
    named = {name for query in queries for name in _METRIC.findall(query)}
    assert named <= exported()
    assert len(named) > 40


def test_panels_have_places_of_their_own() -> None:
    panels = json.loads((FILES / "dashboard.json").read_text())["panels"]
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len({*cells}) == len(cells)
    assert max(x for x, _ in cells) == 23
    assert len({panel["id"] for panel in panels}) == len(panels)


@pytest.mark.parametrize("name", ["dashboard.json", "alerts.yml", "prometheus.yml"])
def test_the_files_are_given_out(api: Api, name: str) -> None:
    answer = api.ask("GET", f"monitoring/{name}")
    assert (answer.status_code, answer.content) == (200, (FILES / name).read_bytes())
    assert sentence(api("GET", "monitoring/..")) == (
        404,
        'there is no file ".."; there are alerts.yml, dashboard.json, prometheus.yml',
    )


promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="there is no promtool on this machine")


def check(*words: str, told_to_it: str = "") -> None:
    done = subprocess.run(["promtool", "check", *words], input=told_to_it, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@promtool
def test_prometheus_takes_the_alerts_and_the_sample(tmp_path: Path) -> None:
    check("rules", str(FILES / "alerts.yml"))
    for name in ("prometheus.yml", "alerts.yml"):
        text = (FILES / name).read_text()
        (tmp_path / name).write_text(text.replace("/etc/prometheus/llmgw.key", str(tmp_path / "key")))
    (tmp_path / "key").write_text("llmgw_x")
    check("config", str(tmp_path / "prometheus.yml"))


@promtool
def test_prometheus_finds_no_fault_with_what_is_told() -> None:
    a_replica(a_model(), a_node())
    run_pass("here")
    check("metrics", told_to_it=written(gauges.families()))
    check("metrics", told_to_it=written(agents_figures.families(StateReport("c", "n"), [])))


def test_lines_are_judged_by_the_names_they_are_of() -> None:
    ours = re.compile("llmgw_gpu_")
    assert is_told_by("# HELP llmgw_gpu_x It.\n# TYPE llmgw_gpu_x gauge\nllmgw_gpu_x 1\n\n", ours)
    for line in ("# HELP llmgw_gpu_x", "# EOF x y z", "# ", "llmgw_gpu_x", "up 1", "#x"):
        assert not is_told_by(line, ours), line
