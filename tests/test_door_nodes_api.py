"""REST: the plan, why a model does not run as wanted, and the words that let the reconciler act."""

from __future__ import annotations

import pytest
from django.db import connection
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext

from catalog.models import Event
from nodes import lease
from nodes.models import Cluster, Held, Lease, Replica, Roll
from tests.cast import a_model, a_node, a_replica, alice, edited
from tests.rest_client import Api, field, sentence

pytestmark = pytest.mark.django_db


@pytest.fixture
def api() -> Api:
    Lease.objects.create(name=lease.NAME, expires_at=Now())
    return Api(alice())


def test_the_plan_is_told_and_not_done(api: Api) -> None:
    a_replica(a_model(scaling={"min": 3, "max": 3}), a_node())
    status, told = api("GET", "plan")
    assert status == 200
    assert [(item["bucket"], item["missing"]) for item in told["items"]] == [("blocked", 1), ("start", 0)]
    assert told["items"][0]["why"] == "0 of 1 node: 1 lacks 1 free sim"
    assert (told["acts"], told["counts"]["start"], told["obstacles"]) == (True, 1, [])
    assert Replica.objects.count() == 1
    assert field(api("GET", "plan?at=noon"))[2] == "unknown_parameter"
    assert sentence(api("POST", "plan"))[0] == 405


def test_a_model_tells_why_it_does_not_run_as_wanted(api: Api) -> None:
    a_model()
    a_node(gpus=0)
    status, told = api("GET", "models/tiny/why")
    assert (status, told["as_wanted"], told["ready"], told["wanted"]) == (200, False, 0, 1)
    assert told["amiss"] == ["1 of 1 replica cannot be started: 0 of 1 node: 1 lacks 1 free sim"]
    assert told["profiles"] == [
        {
            "profile": "default",
            "says": "0 of 1 node: 1 lacks 1 free sim",
            "nodes": [{"node": "gpu-01", "reason": "lacks 1 free sim"}],
        }
    ]
    assert sentence(api("GET", "models/x/why")) == (
        404,
        'model "x" is not in the catalog; check the spelling',
    )


@pytest.mark.parametrize("name", ["why", "a/why", "a/why/why", "a/profiles/b", "ä why"])
def test_a_model_is_asked_why_by_any_name(api: Api, name: str) -> None:
    a_model("a")
    if name != "a":
        a_model(name)
    assert api("GET", f"models/{name}")[1]["name"] == name
    assert api("GET", f"models/{name}/why/")[1]["model"] == name


def test_a_roll_is_begun_and_cancelled(api: Api) -> None:
    model = a_model()
    a_replica(model, a_node())
    assert api("POST", "models/tiny/roll")[1]["status"]["roll"] is None, "nothing is stale"
    edited(model, tp=2)
    status, told = api("POST", "models/tiny/roll", {"why": "wider"})
    roll = told["status"]["roll"]
    assert (status, roll["by"], roll["why"], roll["halted"]) == (200, "alice", "wider", "")
    assert api("GET", "models/tiny")[1]["status"]["roll"] == roll
    Roll.objects.update(halted="The first one failed.")
    assert api("GET", "models/tiny")[1]["status"]["roll"]["halted"] == "The first one failed."
    assert api("POST", "models/tiny/roll", {"cancel": True})[1]["status"]["roll"] is None
    verbs = Event.objects.filter(kind="model", door="api").order_by("id").values_list("verb", "why")
    assert list(verbs) == [("roll", "wider"), ("cancel roll", "")]
    assert field(api("POST", "models/tiny/roll", {"cancel": "yes"}))[:2] == (400, "cancel")
    assert sentence(api("POST", "models/x/roll"))[0] == 404


def test_a_node_is_drained_until_it_is_uncordoned(api: Api) -> None:
    replica = a_replica(a_model(), a_node())
    status, told = api("POST", "nodes/gpu-01/drain", {"why": "new fans"})
    assert (status, told["draining"], told["cordoned"], told["cordoned_why"]) == (200, True, True, "new fans")
    assert told["replicas"] == [str(replica.pk)]
    assert len(api("GET", "nodes?draining=true")[1]["results"]) == 1
    assert api("GET", "nodes?draining=false")[1]["results"] == []
    assert api("POST", "nodes/gpu-01/uncordon")[1]["draining"] is False


def test_the_reconciler_is_paused_and_resumed(api: Api) -> None:
    assert api("GET", "reconciler")[1]["obstacles"] == []
    status, told = api("POST", "reconciler/pause", {"why": "new switches"})
    assert (status, told["paused"], told["paused_by"], told["paused_why"]) == (
        200, True, "alice", "new switches",
    )  # fmt: skip
    assert "alice has paused the reconciler (new switches)" in told["obstacles"][0]
    assert api("GET", "plan")[1]["obstacles"] == told["obstacles"]
    assert api("POST", "reconciler/pause", {"why": "again"})[1]["paused_why"] == "new switches"
    assert api("POST", "reconciler/resume")[1]["paused"] is False
    assert Cluster.this().is_paused is False
    assert field(api("POST", "reconciler/pause", {"because": 1}))[:2] == (400, "because")
    assert sentence(api("GET", "reconciler/pause"))[0] == 405
    assert sentence(api("POST", "reconciler/burn"))[0] == 404


def test_what_is_held_is_allowed(api: Api) -> None:
    replica = a_replica(a_model(), a_node())
    Held.objects.create(replica=replica, wanted="drain", why="too many")
    Cluster.this()
    Cluster.objects.update(alarm="4 of 5 would stop at once")
    told = api("GET", "reconciler")[1]
    assert (told["held"], told["alarm"]) == (1, "4 of 5 would stop at once")
    assert api("POST", "reconciler/allow", {"why": "meant"})[1]["held"] == 0
    replica.refresh_from_db()
    assert (replica.wanted, Event.objects.get(verb="allow").why) == ("drain", "meant")
    assert api("GET", "events?kind=cluster")[1]["results"][0]["verb"] == "allow"


def test_a_restored_database_is_obeyed_again(api: Api) -> None:
    Lease.objects.update(token=7)
    assert api("POST", "reconciler/outrank", {"why": "the disk was replaced"})[0] == 200
    assert Lease.objects.get().token == 7 + lease.FAR
    event = Event.objects.get(verb="outrank")
    assert (event.why, event.detail) == ("the disk was replaced", {"token": 7 + lease.FAR})


def test_a_gpu_tells_its_use(api: Api) -> None:
    node = a_node(gpus=4)
    a_replica(a_model(), node, gpu=0)
    report = node.report
    report["gpus"][1] |= {"is_healthy": False, "sickness": "it no longer answers"}
    report["gpus"][2]["foreign_mib"] = 9000
    report |= {"cpu_model": "EPYC 9654", "cpu_cores": 96}
    node.save()
    told = api("GET", "nodes/gpu-01")[1]
    assert (told["cpu_model"], told["cpu_cores"]) == ("EPYC 9654", 96)
    gpus = told["gpus"]
    assert gpus[1]["sickness"] == "it no longer answers"
    assert gpus[1]["taken_by"] == "nothing: it is not healthy (it no longer answers)"
    assert [gpu["use"] for gpu in gpus] == ["replica", "sick", "foreign", "free"]
    assert [bool(gpu["taken_by"]) for gpu in gpus] == [True, True, True, False]


def test_what_is_told_takes_the_same_queries_however_much_there_is(api: Api) -> None:
    def queries() -> list[int]:
        counts = []
        for path in ("plan", "models/tiny/why", "reconciler", "models", "nodes"):
            with CaptureQueriesContext(connection) as seen:
                assert api("GET", path)[0] == 200
            counts.append(len(seen))
        return counts

    a_replica(a_model(), a_node())
    queries()  # which makes the one row of the cluster
    few = queries()
    for number in range(1, 5):
        a_replica(a_model(f"m{number}", scaling={"min": 3, "max": 3}), a_node(f"gpu-1{number}"))
    assert queries() == few
