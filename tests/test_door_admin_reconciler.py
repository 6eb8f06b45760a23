"""The reconciler in the admin: its page tells what happens next, and asks before it obeys."""

from __future__ import annotations

import re

import pytest
from django.db import connection
from django.db.models.functions import Now
from django.test import Client
from django.test.utils import CaptureQueriesContext

from catalog.models import Event
from nodes import lease
from nodes.models import Cluster, Held, Lease, Roll
from tests.cast import a_model, a_node, a_replica, alice, edited, viola
from tests.pages import MODELS, change, page, text_of

pytestmark = [pytest.mark.django_db, pytest.mark.one_database]

RECONCILER, NODES = "/admin/nodes/cluster/", "/admin/nodes/node/"


@pytest.fixture
def admin(client: Client) -> Client:
    Lease.objects.create(name=lease.NAME, expires_at=Now())
    Cluster.this()
    client.force_login(alice())
    return client


def acted(client: Client, path: str, action: str, pk: object = 1, **told: str) -> str:
    sent = {"action": action, "_selected_action": [str(pk)], "confirmed": "yes"} | told
    return text_of(client.post(path, sent, follow=True).content.decode())


# --- its page -------------------------------------------------------------------------------------


def test_its_page_tells_that_it_acts_and_what_is_next(admin: Client) -> None:
    html = page(admin, RECONCILER)
    assert '<span class="badge good">acts</span>' in html
    assert "Nothing: all is as wanted, or on its way there." in html
    a_replica(a_model(scaling={"min": 3, "max": 3}), a_node())
    html = page(admin, RECONCILER)
    assert '<span class="badge bad">1 short</span>' in html
    assert '<span class="badge good">start</span>' in html
    told = text_of(html)
    assert "0 of 1 node: 1 lacks 1 free sim" in told
    assert "gpu-01 (1 GPU) 3 wanted, 1 there before it" in told


def test_it_is_paused_and_resumed_after_asking(admin: Client) -> None:
    assert (
        "Start and stop nothing"
        in admin.post(RECONCILER, {"action": "pause", "_selected_action": ["1"]}).content.decode()
    )
    assert Cluster.this().is_paused is False
    told = acted(admin, RECONCILER, "pause", why="new <switches>")
    assert "1 of 1 reconciler paused." in told
    html = page(admin, RECONCILER)
    assert '<span class="badge warn">paused</span>' in html
    assert "alice has paused the reconciler (new &lt;switches&gt;)" in html
    assert 'value="resume"' in html
    assert "0 of 1 reconciler paused." in acted(admin, RECONCILER, "pause")
    acted(admin, RECONCILER, "resume", why="done")
    assert Cluster.this().is_paused is False
    history = admin.get(f"{RECONCILER}1/history/").context["page"]
    assert [(event.verb, event.why) for event in history] == [("resume", "done"), ("pause", "new <switches>")]


def test_what_is_held_back_is_listed_and_allowed(admin: Client) -> None:
    replica = a_replica(a_model(), a_node())
    assert 'value="allow"' not in page(admin, RECONCILER)
    Held.objects.create(replica=replica, wanted="drain", why="the model is off")
    told = text_of(page(admin, RECONCILER))
    assert f"{replica} would drain the model is off" in told
    asked = admin.post(RECONCILER, {"action": "allow", "_selected_action": ["1"]}).content.decode()
    assert f"{replica}, to drain: the model is off" in asked
    assert "1 of 1 reconciler told to end what was held back." in acted(admin, RECONCILER, "allow", why="yes")
    replica.refresh_from_db()
    assert (replica.wanted, Event.objects.get(verb="allow").why) == ("drain", "yes")
    assert "0 of 1 reconciler told" in acted(admin, RECONCILER, "allow")


def test_a_reconciler_that_nobody_runs_says_so(admin: Client) -> None:
    Lease.objects.all().delete()
    html = page(admin, RECONCILER)
    assert '<span class="badge bad">nobody looks</span>' in html
    assert "see to it that a worker runs" in html


def test_agents_are_had_to_obey_a_restored_database_after_asking(admin: Client) -> None:
    assert "Have agents obey this database" in page(admin, RECONCILER)
    asked = admin.post(RECONCILER, {"action": "outrank", "_selected_action": ["1"]}).content.decode()
    assert "stop any other first" in asked
    before = Lease.objects.get().token
    told = acted(admin, RECONCILER, "outrank", why="the disk was replaced")
    assert "1 of 1 reconciler obeyed from the next pass on." in told
    assert Lease.objects.get().token > before
    event = Event.objects.get(verb="outrank")
    assert (event.by, event.door, event.why) == ("alice", "admin", "the disk was replaced")


def test_who_may_look_may_not_pause(client: Client) -> None:
    client.force_login(viola())
    assert 'value="pause"' not in page(client, RECONCILER)
    acted(client, RECONCILER, "pause")
    assert Cluster.this().is_paused is False


def test_its_page_takes_the_same_queries_however_much_there_is(admin: Client) -> None:
    def queries() -> int:
        with CaptureQueriesContext(connection) as seen:
            page(admin, RECONCILER)
        return len(seen)

    a_replica(a_model(), a_node())
    queries()
    few = queries()
    for number in range(1, 5):
        replica = a_replica(a_model(f"m{number}", scaling={"min": 2, "max": 2}), a_node(f"gpu-1{number}"))
        Held.objects.create(replica=replica, wanted="drain", why="too many")
    assert queries() == few


# --- nodes ----------------------------------------------------------------------------------------


def test_a_node_is_drained_after_asking_and_tells_what_is_left(admin: Client) -> None:
    node = a_node()
    replica = a_replica(a_model(), node)
    asked = admin.post(NODES, {"action": "drain", "_selected_action": [str(node.pk)]}).content.decode()
    assert f"{replica} moves" in asked
    assert "1 of 1 node being drained." in acted(admin, NODES, "drain", node.pk, why="new fans")
    html = page(admin, NODES)
    assert '<span class="badge warn">draining, 1 left</span>' in html
    assert "drained by alice: new fans" in html
    replica.state = "stopped"
    replica.save()
    assert '<span class="badge warn">drained</span>' in page(admin, NODES)
    acted(admin, NODES, "uncordon", node.pk)
    assert "draine" not in page(admin, NODES).partition('id="result_list"')[2]


def test_the_map_of_gpus_tells_what_each_is_used_for(admin: Client) -> None:
    node = a_node(gpus=4)
    replica = a_replica(a_model(), node, gpu=1)
    gpus = node.report["gpus"]
    gpus[0]["used_mib"] = 1024
    gpus[2] |= {"is_healthy": False, "sickness": "the driver asks for <b>a reset</b>\x07 of it"}
    node.report |= {"cpu_model": "EPYC 9654", "cpu_cores": 96}
    gpus[3]["foreign_mib"] = 9000
    node.save()
    html = page(admin, f"{NODES}{node.pk}/change/")
    rows = [row for row in html.split("<tr>") if "gpu-01-gpu-" in row]
    words = [re.findall('<span class="badge ([a-z]+)">([a-z]+)</span>', row)[0] for row in rows]
    assert words == [("good", "free"), ("busy", "replica"), ("bad", "sick"), ("warn", "foreign")]
    assert f'href="/admin/nodes/replica/{replica.pk}/change/"' in rows[1]
    assert "1.0 GiB of 80.0 GiB" in rows[0]
    assert "something else on the node (9000 MiB)" in rows[3]
    assert "the driver asks for &lt;b&gt;a reset&lt;/b&gt;" in rows[2]
    assert "\x07" not in html
    assert "96 cores of EPYC 9654" in html


# --- models ---------------------------------------------------------------------------------------


def test_a_model_is_rolled_after_asking_and_the_roll_is_ended(admin: Client) -> None:
    model = a_model()
    replica = a_replica(model, a_node())
    assert 'value="roll"' not in page(admin, change(model)).partition("submit-row")[0]
    assert "0 of 1 model being rolled." in acted(admin, MODELS, "roll", model.pk)
    edited(model, tp=2)
    assert '<input type="hidden" name="action" value="roll">' in page(admin, change(model))
    asked = admin.post(MODELS, {"action": "roll", "_selected_action": [str(model.pk)]}).content.decode()
    assert f"{replica}: Profile" in asked
    assert "1 of 1 model being rolled." in acted(admin, MODELS, "roll", model.pk, why="wider")
    assert Roll.objects.get().why == "wider"
    html = page(admin, change(model))
    assert '<span class="badge busy">rolling</span>' in html
    assert "Rolled by alice: wider." in html
    assert '<input type="hidden" name="action" value="end_roll">' in html
    assert '<input type="hidden" name="action" value="roll">' not in html, "it is under way"
    Roll.objects.update(halted="The first one <failed>.")
    assert '<span class="badge bad">roll halted</span>' in page(admin, MODELS)
    html = page(admin, change(model))
    for action in ("roll", "end_roll"):
        assert f'<input type="hidden" name="action" value="{action}">' in html
    assert '<span class="badge bad">roll halted</span>' in html
    assert "The first one &lt;failed&gt;." in html
    assert "1 of 1 model no longer being rolled." in acted(admin, MODELS, "end_roll", model.pk)
    assert not Roll.objects.exists()


def test_the_page_of_why_tells_what_is_amiss_and_what_nodes_say(admin: Client) -> None:
    model = a_model(scaling={"min": 2, "max": 2})
    a_replica(model, a_node(gpus=1))
    a_node("gpu-02", is_cordoned=True)
    a_node("gpu-03", gpus=0)
    path = f"/admin/catalog/model/{model.pk}/why/"
    assert f'<details data-from="{path}" open>' in page(admin, change(model))
    told = text_of(page(admin, path))
    assert "model &quot;tiny&quot; does not run as wanted: 1 of 2 ready:" in told
    assert "1 of 2 replicas cannot be started: 0 of 3 nodes: 2 lack 1 free sim, 1 cordoned." in told
    assert "default 2 lack 1 free sim gpu-01, gpu-03 default 1 cordoned gpu-02" in told
    a_node("gpu-04")
    assert '<span class="badge good">has room</span>' in page(admin, path)
    assert admin.get("/admin/catalog/model/999/why/").status_code == 302
    assert admin.post(path).status_code == 405


def test_why_of_what_is_as_wanted_says_that(admin: Client) -> None:
    model = a_model()
    a_replica(model, a_node())
    path = f"/admin/catalog/model/{model.pk}/why/"
    assert "runs as wanted: 1 of 1 ready, each as the catalog has it." in text_of(page(admin, path))
    assert f'<details data-from="{path}"><summary>' in page(admin, change(model)), "closed, as it is no news"
