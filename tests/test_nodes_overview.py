"""How the cluster is at a glance: what is counted as what, in the same words through every door, and as fast
for a thousand nodes as for ten."""

from __future__ import annotations

import io
import json
import re
from datetime import timedelta
from uuid import uuid4

import pytest
from django.contrib.auth.models import Permission, User
from django.core.management import call_command
from django.db import connection
from django.db.models.functions import Now
from django.test import Client
from django.test.utils import CaptureQueriesContext

from catalog.actions import mint_key
from catalog.models import Model, Name, Profile, database_now
from nodes import lease, usage
from nodes.models import Claim, Lease, Node, Orphan, Rank, Replica, Unplaced
from nodes.overview import facts_of, look
from nodes.tallies import Tally
from tests.cast import PROFILE, a_model, a_node, a_replica, alice, edited, viola
from tests.rest_client import Api

pytestmark = [pytest.mark.django_db, pytest.mark.one_database]


@pytest.fixture(autouse=True)
def a_pass_was_just_made(db: None) -> None:
    Lease.objects.create(name=lease.NAME, expires_at=Now())


def words() -> dict[str, str]:
    return {fact.name: fact.words for fact in facts_of(look())}


def test_an_empty_cluster_is_said_to_be_empty() -> None:
    assert words() == {"nodes": "none", "models": "none", "replicas": "none", "last hour": "no requests"}


def test_nodes_are_counted_by_how_far_they_can_be_believed() -> None:
    a_node("fresh")
    for name, minutes in (("suspect", 0.5), ("lost", 60)):
        node = a_node(name)
        Node.objects.filter(pk=node.pk).update(seen_at=Now() - timedelta(minutes=minutes))
    a_node("never", seen_at=None)
    a_node("cordoned", is_cordoned=True)
    a_node("draining", is_cordoned=True, is_draining=True)
    assert words()["nodes"] == "3 fresh, 1 suspect, 1 lost, 1 never heard from, 1 cordoned, 1 draining"


def test_gpus_are_counted_by_what_has_them() -> None:
    node = a_node(gpus=6)
    report = node.report
    report["gpus"][2] |= {"foreign_mib": 20_000}
    report["gpus"][3] |= {"is_healthy": False}
    report["gpus"][4] |= {"gpu_class": "other"}
    Node.objects.filter(pk=node.pk).update(report=report)
    a_replica(a_model(), node, gpu=0)
    Orphan.objects.create(replica=uuid4(), node=node, why="unknown", gpus=["gpu-01-gpu-1"])
    a_node("cordoned", gpus=2, is_cordoned=True)
    told = words()
    assert told["GPUs other"] == "0 of 1 in use, 1 free"
    assert told["GPUs sim"] == (
        "2 of 7 in use, 1 free, 2 free on nodes that take nothing, 1 used by something else, 1 not healthy"
    )


def test_what_a_node_reports_is_read_again_when_it_differs() -> None:
    node = a_node(gpus=1)
    assert words()["GPUs sim"] == "0 of 1 in use, 1 free"
    node.report["gpus"][0]["is_healthy"] = False
    Node.objects.filter(pk=node.pk).update(report=node.report)
    assert words()["GPUs sim"] == "0 of 1 in use, 1 not healthy"


@pytest.mark.parametrize(
    ("scaling", "make", "says"),
    [
        pytest.param({"max": 0}, [], "1 off", id="nothing may run of it"),
        pytest.param({"max": 2}, [], "1 asleep until asked for", id="on demand, and nobody asks"),
        pytest.param({"min": 1, "max": 2}, ["ready"], "1 ready", id="all that is wanted is ready"),
        pytest.param({"min": 1, "max": 2}, [], "1 loading", id="the next pass starts it"),
        pytest.param({"max": 2}, ["starting"], "1 loading", id="on demand, and on the way"),
        pytest.param({"min": 2, "max": 2}, ["ready", "fetching"], "1 loading", id="one of two is ready"),
        pytest.param({"min": 1, "max": 2}, ["failed"], "1 failing", id="what was started failed"),
        pytest.param({"min": 1, "max": 2}, ["ready", "failed"], "1 ready", id="one failed and another runs"),
        pytest.param({"min": 1, "max": 2}, ["lost"], "1 failing", id="its node is gone"),
    ],
)
def test_a_model_is_counted_once(scaling: dict[str, int], make: list[str], says: str) -> None:
    model, node = a_model(scaling=scaling), a_node(gpus=4)
    for gpu, state in enumerate(make):
        a_replica(model, node, state, gpu=gpu)
    assert words()["models"] == says


def test_a_want_without_a_place_makes_a_model_failing_and_is_told_with_its_sentence() -> None:
    model = a_model()
    Unplaced.objects.create(model=model, missing=1, why="0 of 1 node: 1 lacks 1 free sim")
    seen = look()
    assert words()["models"] == "1 failing"
    assert [(want.model, want.missing, want.why) for want in seen.unplaced or ()] == [
        ("tiny", 1, "0 of 1 node: 1 lacks 1 free sim")
    ]


def test_replicas_are_counted_by_state_and_by_what_a_restart_would_change() -> None:
    node = a_node(gpus=8)
    stale, mild, sound = a_model("stale"), a_model("mild"), a_model("sound")
    for gpu, (model, state) in enumerate(
        [(stale, "ready"), (stale, "starting"), (mild, "ready"), (sound, "ready"), (sound, "lost")]
    ):
        a_replica(model, node, state, gpu=gpu)
    a_replica(sound, node, gpu=5, wanted="drain")
    a_replica(sound, node, "stopped", gpu=None)
    edited(stale, tp=2)
    edited(mild, priority=3)
    assert words()["replicas"] == (
        "3 ready, 1 on the way, 1 leaving, 1 lost, 2 stale, 1 stale, no restart needed"
    )
    assert [(matter.word, matter.subject) for matter in look().needs] == [("2 stale", "stale")]


def test_what_was_judged_before_is_judged_anew_when_the_catalog_differs() -> None:
    model = a_model()
    a_replica(model, a_node())
    for edit, says in (
        ({"tp": 2}, "1 ready, 1 stale"),
        ({"tp": 2}, "1 ready, 1 stale"),
        ({"tp": 1, "weight": 2}, "1 ready, 1 stale, no restart needed"),
        ({"tp": 4}, "1 ready, 1 stale"),
        ({"tp": 1}, "1 ready"),
    ):
        edited(model, **edit)
        assert words()["replicas"] == says
        assert words()["replicas"] == says, "as it was kept"


def test_the_last_hour_is_told_as_rates_and_times() -> None:
    tally = Tally()
    tally.requests, tally.errors, tally.completion_tokens = 7_200, 72, 720_000
    for _ in range(100):
        tally.observe("ttft", 0.2)
    usage.add_lot(uuid4(), 1, database_now().timestamp() - 120, {("", "tiny", "/v1/x", "2xx"): tally})
    told = words()["last hour"]
    assert re.fullmatch(
        r"2 requests/s, 1.00% errors, TTFT p50 \d+ ms, TTFT p99 \d+ ms, 200 tokens/s", told
    ), told


def test_who_may_not_see_what_others_used_is_told_of_their_own_keys() -> None:
    looker = viola()
    own, _ = mint_key("k", user=looker, scope="inference", by="viola", door="command")
    for number, (key, count) in enumerate([(own.pk, 36), ("somebody", 324)]):
        tally = Tally()
        tally.requests = count
        usage.add_lot(
            uuid4(), number + 1, database_now().timestamp() - 120, {(key, "tiny", "/v1/x", "2xx"): tally}
        )
    looker.user_permissions.remove(Permission.objects.get(codename="all_usage"))
    assert words()["last hour"] == "0.1 requests/s, 0 tokens/s"
    told = {fact.name: fact.words for fact in facts_of(look(User.objects.get(pk=looker.pk)))}
    assert told["last hour"] == "0.01 requests/s, 0 tokens/s"


def manage(*options: str) -> str:
    said = io.StringIO()
    call_command("status", *options, stdout=said)
    return said.getvalue()


def test_every_door_tells_the_same_in_the_same_words(client: Client) -> None:
    model, node = a_model(), a_node(gpus=4)
    a_replica(model, node)
    edited(model, tp=2)
    Unplaced.objects.create(model=model, missing=1, why="0 of 1 node: 1 lacks <2> free sim")
    anna = alice()
    told = Api(anna)("GET", "overview")[1]
    printed = manage()
    client.force_login(anna)
    html = client.get("/admin/").content.decode()
    shown = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))
    assert json.loads(manage("--json"))["facts"] == told["facts"]
    for fact in told["facts"]:
        assert fact["words"] in printed
        assert all(part in shown for part in fact["words"].split(", ")), fact
    for matter in told["needs"]:
        assert matter["why"] in printed
        assert matter["why"].replace("<", "&lt;").replace(">", "&gt;") in html
    assert [each["did"] for each in told["events"] if "model" in each["did"]] == [
        "edit model tiny",
        "add model tiny",
    ]
    assert "edit model tiny" in printed
    assert "edit model tiny" in shown


def test_what_needs_a_person_comes_first(client: Client) -> None:
    Unplaced.objects.create(model=a_model(), missing=1, why="no room")
    client.force_login(alice())
    html = client.get("/admin/").content.decode()
    assert html.index("no room") < html.index('id="now"') < html.index('id="events"')
    printed = manage()
    assert printed.index("no room") < printed.index("models") < printed.index("add model tiny")
    assert printed.startswith("Needs a person:\n")


def test_a_cluster_that_needs_nobody_says_so() -> None:
    a_replica(a_model(), a_node())
    assert manage().startswith("Nothing needs a person now.\n")


def test_everybody_is_told_what_they_may_see() -> None:
    a_replica(a_model(), a_node())
    looker = viola()
    whole = look(looker)
    assert None not in (whole.nodes, whole.gpus, whole.models, whole.replicas, whole.traffic, whole.events)
    looker.user_permissions.set(Permission.objects.filter(codename="view_node"))
    part = look(User.objects.get(pk=looker.pk))
    assert part.nodes == whole.nodes
    assert (part.models, part.replicas, part.unplaced, part.traffic, part.events) == (None,) * 5
    assert [fact.name for fact in facts_of(part)] == ["nodes", "GPUs sim"]


def grow(first: int, last: int) -> None:
    """Nodes with these numbers: four replicas on each, a model for each two. All of the first are stale."""
    report = {
        "cluster": "c",
        "node": "n",
        "gpus": [{"id": str(gpu), "index": gpu, "gpu_class": "sim"} for gpu in range(8)],
    }
    machines = Node.objects.bulk_create(
        Node(name=f"gpu-{number:04d}", address="http://x:1", report=report, seen_at=database_now())
        for number in range(first, last)
    )
    models = Model.objects.bulk_create(
        Model(name=f"model-{number:04d}", source="sim/x", scaling_min=8, scaling_max=8)
        for number in range(first // 2, last // 2)
    )
    Name.objects.bulk_create(Name(name=each.name, is_canonical=True, model=each) for each in models)
    profiles = Profile.objects.bulk_create(
        Profile(model=each, **PROFILE, fingerprint="f" * 16) for each in models
    )
    launches = [{"model": each.name, "source": "sim/x", "profile": PROFILE} for each in models]
    replicas = Replica.objects.bulk_create(
        Replica(
            model=models[number // 8],
            profile=profiles[number // 8],
            state="ready",
            fingerprint=("f" if first or number >= 8 else "e") * 16,
            launch=launches[number // 8],
        )
        for number in range(4 * len(machines))
    )
    ranks = Rank.objects.bulk_create(
        Rank(replica=replica, node=machines[number // 4], state="ready")
        for number, replica in enumerate(replicas)
    )
    Claim.objects.bulk_create(
        Claim(rank=rank, node=rank.node, gpu=str(number % 4)) for number, rank in enumerate(ranks)
    )


def test_pages_take_the_same_queries_at_a_thousand_nodes_as_at_ten(client: Client) -> None:
    def queries(path: str) -> int:
        with CaptureQueriesContext(connection) as seen:
            assert client.get(path).status_code == 200
        return len(seen)

    client.force_login(alice())
    grow(0, 10)
    replica = Replica.objects.order_by("model__name")[0]
    paths = [
        "/admin/",
        "/api/overview",
        f"/admin/catalog/model/{replica.model_id}/change/",
        f"/admin/nodes/replica/{replica.pk}/change/",
        f"/admin/nodes/node/{replica.ranks.get().node_id}/change/",
    ]
    for path in paths:
        client.get(path)
    few = [queries(path) for path in paths]
    grow(10, 1_000)
    assert [queries(path) for path in paths] == few
    told = look()
    assert facts_of(told)[1].words == "4000 of 8000 in use, 4000 free"
    assert facts_of(told)[3].words == "4000 ready, 8 stale"
