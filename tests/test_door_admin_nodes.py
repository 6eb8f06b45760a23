"""Replicas and nodes in the admin: what the pages show of what runs, and what may be done to it."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from django.contrib.auth.models import Permission
from django.db import connection
from django.db.models.functions import Now
from django.test import Client
from django.test.utils import CaptureQueriesContext

from catalog.actions import edit_model
from catalog.hiding import HIDDEN
from catalog.models import Event, Model
from nodes.models import Node, Orphan, Rank, Replica
from tests.cast import (
    PROFILE,
    a_model,
    a_node,
    a_replica,
    alice,
    edited,
    model_form,
    nobody_is_asked,
    viola,
)

pytestmark = [pytest.mark.django_db, pytest.mark.one_database]

REPLICAS, NODES = "/admin/nodes/replica/", "/admin/nodes/node/"


@pytest.fixture
def admin(client: Client) -> Client:
    client.force_login(alice())
    return client


def page(client: Client, path: str) -> str:
    answer = client.get(path)
    assert answer.status_code == 200, answer
    return answer.content.decode()


def said(client: Client, path: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page(client, path)))


def of(replica: Replica) -> str:
    return f"{REPLICAS}{replica.pk}/change/"


# --- replicas -------------------------------------------------------------------------------------


def test_the_list_says_state_reason_age_and_place(admin: Client) -> None:
    replica = a_replica(a_model(), a_node(), "starting", reason="loading weights: 40 %")
    html = page(admin, REPLICAS)
    assert '<span class="badge busy">starting</span>' in html
    for words in ("loading weights: 40 %", "5 min", "gpu-01:18001", "1 GPU, pid 4242", str(replica)):
        assert words in html


def test_an_edit_of_a_profile_shows_a_badge_and_the_fields(admin: Client) -> None:
    model = a_model()
    replica = a_replica(model, a_node())
    assert "stale profile" not in said(admin, REPLICAS)
    edited(model, args=["--max-num-seqs", "8"], tp=2)
    assert '<span class="badge warn">stale profile</span>' in page(admin, REPLICAS)
    table = page(admin, of(replica))
    assert re.search(r'<td class="">tp</td><td class="was">1</td><td class="now">2</td>', table)
    assert re.search(r'<td class="was">not set</td><td class="now">--max-num-seqs\n8</td>', table)


def test_a_difference_that_needs_no_restart_has_a_grey_badge(admin: Client) -> None:
    model = a_model()
    a_replica(model, a_node())
    edited(model, priority=5)
    html = page(admin, REPLICAS)
    for word in ("stale profile", "no restart needed"):
        assert f'<span class="badge ">{word}</span>' in html


def test_an_adopted_replica_without_a_fingerprint_is_unknown_not_stale(admin: Client) -> None:
    model = a_model()
    a_replica(model, a_node(), fingerprint="", is_adopted=True)
    edited(model, tp=2)
    text = said(admin, REPLICAS)
    assert "unknown profile" in text
    assert "stale profile" not in text
    assert "0 replicas" in said(admin, f"{REPLICAS}?shown=stale")


def test_a_replica_that_starts_shows_how_long_it_may(admin: Client) -> None:
    a_replica(a_model(), a_node(), state="starting")
    assert re.search(r"5 min, 1[45] min left", admin.get("/admin/nodes/replica/").content.decode())


def test_replicas_that_are_over_are_shown_when_asked_for(admin: Client) -> None:
    model, node = a_model(), a_node()
    a_replica(model, node, "failed", gpu=None, reason="CUDA out of memory")
    assert "CUDA out of memory" not in said(admin, REPLICAS)
    assert "CUDA out of memory" in said(admin, f"{REPLICAS}?shown=over")
    assert "CUDA out of memory" in said(admin, f"{REPLICAS}?shown=all")


def test_the_lists_take_the_same_number_of_queries_however_long_they_are(admin: Client) -> None:
    def queries() -> list[int]:
        counts = []
        for path in (REPLICAS, NODES):
            with CaptureQueriesContext(connection) as seen:
                page(admin, path)
            counts.append(len(seen))
        return counts

    a_replica(a_model("first"), a_node("gpu-00"))
    page(admin, REPLICAS)
    few = queries()
    for number in range(1, 9):
        model, node = a_model(f"model-{number}"), a_node(f"gpu-0{number}")
        a_replica(model, node, gpu=0)
        a_replica(model, node, gpu=1)
        edited(model, tp=2)
    assert queries() == few


def test_a_profile_that_was_removed_and_is_back_is_the_same_profile(admin: Client) -> None:
    model = a_model()
    replica = a_replica(model, a_node())
    edited(model, name="wide")
    assert "profile removed" in said(admin, of(replica))
    edited(model)
    assert "It runs what the catalog says." in said(admin, of(replica))
    assert "0 replicas" in said(admin, f"{REPLICAS}?shown=stale")


def test_the_stale_ones_are_those_with_a_badge(admin: Client) -> None:
    model = a_model()
    a_replica(model, a_node())
    a_replica(a_model("other"), a_node("gpu-02"))
    form = model_form(context_length=4096)
    edit_model("tiny", form, by="alice", door="api", ask_paths=nobody_is_asked, after_change=int)
    text = said(admin, f"{REPLICAS}?shown=stale")
    assert "stale launch" in text
    assert "1 replica" in text
    assert "other/default" not in text


def test_the_page_of_a_replica_shows_its_launch_and_hides_secrets(admin: Client) -> None:
    model = a_model(profiles=[PROFILE | {"env": {"HF_TOKEN": "abracadabra"}}])
    replica = a_replica(model, a_node())
    edited(model, env={"HF_TOKEN": "simsalabim", "A": "1"})
    html = page(admin, of(replica))
    assert "sim --port 18001" in html
    assert HIDDEN in html
    assert "abracadabra" not in html
    assert "simsalabim" not in html


def test_the_page_of_a_replica_leads_to_its_model_whatever_that_is_called_now(admin: Client) -> None:
    model = a_model()
    replica = a_replica(model, a_node())
    Model.objects.filter(pk=model.pk).update(name="renamed")
    path = f"/admin/nodes/replica/{replica.pk}/change/"
    assert f'<a href="/admin/catalog/model/{model.pk}/change/">renamed</a>' in page(admin, path)
    Replica.objects.update(model=None)
    assert ">tiny</div>" in page(admin, path)


def test_the_page_of_a_replica_asks_no_agent_and_has_the_way_to_its_log(admin: Client) -> None:
    """Nothing listens at the node's address, and nothing is asked before the page is there."""
    replica = a_replica(a_model(), a_node(address="http://127.0.0.1:9"))
    html = page(admin, of(replica))
    assert f'data-log="/api/replicas/{replica.pk}/log"' in html
    assert f'<a href="/api/replicas/{replica.pk}/log?tail=1000">as text</a>' in html
    assert "127.0.0.1:9" not in html
    answer = admin.get(f"/api/replicas/{replica.pk}/log")
    assert (answer.status_code, answer.json()["errors"][0]["code"]) == (503, "agent_unreachable")


def test_each_ended_process_leads_to_its_log(admin: Client) -> None:
    replica = a_replica(a_model(), a_node(), "starting")
    Rank.objects.update(attempts=[{"number": 3, "exit_code": 1, "cause": "oom", "reason": "no <room>"}])
    html = page(admin, of(replica))
    assert f'href="/api/replicas/{replica.pk}/log?attempt=3&amp;rank=0" data-attempt="attempt 3"' in html
    assert "no &lt;room&gt;" in html


@pytest.mark.parametrize(
    ("state", "columns", "bar", "words"),
    [
        pytest.param(
            "fetching",
            {"done_bytes": 1_200_000_000, "total_bytes": 4_500_000_000, "bytes_per_s": 110_000_000},
            'max="4500000000" value="1200000000"',
            "1.2 of 4.5 GB, 110.0 MB/s, 30 s left",
            id="a fetch",
        ),
        pytest.param(
            "starting", {}, 'max="1200" value="30."', "starting, 1[45] min left at most", id="a start"
        ),
        pytest.param(
            "draining",
            {"running": 2},
            'max="30." value="30."',
            "2 requests to finish, 0 s left at most",
            id="an end",
        ),
        pytest.param("ready", {"running": 2}, "", "2 run, 0 wait", id="nothing that ends"),
    ],
)
def test_what_takes_its_time_has_a_bar_and_words(
    admin: Client, state: str, columns: dict[str, int], bar: str, words: str
) -> None:
    model = a_model()
    replica = a_replica(model, a_node(), state)
    Rank.objects.update(**columns)
    for path in (of(replica), REPLICAS):
        html = page(admin, path)
        assert re.search(words, html)
        assert html.count("<progress") == bool(bar)
        assert re.search(bar, html)
    assert html.count("<progress") == page(admin, f"/admin/catalog/model/{model.pk}/change/").count(
        "<progress"
    )


def test_a_stale_replica_offers_to_roll_its_model_to_whoever_may(admin: Client, client: Client) -> None:
    model = a_model()
    replica = a_replica(model, a_node())
    assert "Roll its model" not in page(admin, of(replica))
    edited(model, tp=2)
    html = page(admin, of(replica))
    assert re.search(
        rf'value="roll">\s*<input type="hidden" name="_selected_action" value="{model.pk}">', html
    )
    client.force_login(viola())
    assert "Roll its model" not in page(client, of(replica))


def test_a_models_page_tells_the_difference_once_for_all_that_differ_in_the_same(admin: Client) -> None:
    model, node = a_model(), a_node(gpus=4)
    ids = [str(a_replica(model, node, gpu=gpu).pk)[:8] for gpu in range(2)]
    path = f"/admin/catalog/model/{model.pk}/change/"
    assert "nothing: each runs what is written here" in said(admin, path)
    edited(model, tp=2)
    html = page(admin, path)
    assert f"2 of them: {', '.join(ids)}" in html
    assert len(re.findall('<td class="">tp</td><td class="was">1</td><td class="now">2</td>', html)) == 1


def test_lists_and_pages_mark_what_follows_what_happens(admin: Client) -> None:
    model, node = a_model(), a_node()
    replica = a_replica(model, node)
    for path, parts in (
        (REPLICAS, ["rows"]),
        (NODES, ["rows"]),
        ("/admin/catalog/model/", ["rows"]),
        ("/admin/catalog/key/", []),
        (of(replica), ["buttons", "replica"]),
        (f"{NODES}{node.pk}/change/", ["buttons", "node"]),
        (f"/admin/catalog/model/{model.pk}/change/", ["buttons", "state", "replicas", "differences"]),
        (f"/admin/catalog/model/{model.pk}/why/", ["why"]),
        ("/admin/", ["overview", "events"]),
    ):
        html = page(admin, path)
        assert re.findall(r'data-live="([^"]+)"', html) == parts, path
        assert '<script type="module" src="/static/nodes/live.js"></script>' in html


@pytest.mark.parametrize(
    ("takes", "names"),
    [
        ("", ["cordoned", "drained", "free"]),
        ("all", ["free"]),
        ("nothing-new", ["cordoned"]),
        ("leaving", ["drained"]),
        ("rubbish", ["cordoned", "drained", "free"]),
    ],
)
def test_nodes_are_narrowed_by_what_is_placed_there(admin: Client, takes: str, names: list[str]) -> None:
    a_node("free")
    a_node("cordoned", is_cordoned=True)
    a_node("drained", is_cordoned=True, is_draining=True)
    answer = admin.get(f"{NODES}?takes={takes}")
    assert [node.name for node in answer.context["cl"].result_list] == names
    assert "By what is placed there" in said(admin, NODES)


def test_a_node_out_of_contact_is_not_asked_for_a_log(admin: Client) -> None:
    node = a_node()
    Node.objects.filter(pk=node.pk).update(seen_at=Now() - timedelta(hours=1))
    assert "gpu-01 is out of contact" in said(admin, of(a_replica(a_model(), node)))


def test_what_engines_and_agents_write_is_shown_as_text(admin: Client) -> None:
    node = a_node(problem="<b>no</b>\x1b[31mred")
    replica = a_replica(a_model(), node, "failed", gpu=None, reason="<script>x</script>\x07")
    for path in (f"{REPLICAS}?shown=all", of(replica), NODES):
        html = page(admin, path)
        assert "<script>x" not in html
        assert "<b>no</b>" not in html
        assert "\x07" not in html
        assert "\x1b" not in html
    assert "\\x1b[31mred" in page(admin, NODES)


def test_a_replica_is_stopped_after_asking_with_the_reason_kept(admin: Client) -> None:
    replica, other = (a_replica(a_model(name), a_node(name)) for name in ("one", "two"))
    chosen = {"action": "stop", "_selected_action": [str(replica.pk)]}
    assert "Stop these?" in admin.post(REPLICAS, chosen).content.decode()
    replica.refresh_from_db()
    assert replica.wanted == "run"
    answer = admin.post(REPLICAS, chosen | {"confirmed": "yes", "why": "it babbles"}, follow=True)
    assert "1 of 1 replica told to stop." in answer.content.decode()
    replica.refresh_from_db()
    other.refresh_from_db()
    assert (replica.wanted, replica.wanted_why, other.wanted) == ("stop", "it babbles", "run")
    event = Event.objects.get(kind="replica")
    assert (event.by, event.door, event.verb, event.why) == ("alice", "admin", "stop", "it babbles")


def test_the_page_of_a_replica_offers_to_stop_it_even_when_it_has_failed(admin: Client) -> None:
    replica = a_replica(a_model(), a_node(), "failed", gpu=None)
    assert f'<form method="post" action="{REPLICAS}?shown=all">' in page(admin, of(replica))
    chosen = {"action": "stop", "_selected_action": [str(replica.pk)], "confirmed": "yes"}
    admin.post(f"{REPLICAS}?shown=all", chosen)
    replica.refresh_from_db()
    assert replica.wanted == "stop"


def test_what_is_stopped_already_is_not_counted(admin: Client) -> None:
    replica = a_replica(a_model(), a_node(), wanted="stop")
    chosen = {"action": "stop", "_selected_action": [str(replica.pk)], "confirmed": "yes"}
    assert "0 of 1 replica told to stop." in admin.post(REPLICAS, chosen, follow=True).content.decode()


def test_who_may_only_look_cannot_stop_or_cordon(client: Client) -> None:
    replica, looker = a_replica(a_model(), a_node()), viola()
    client.force_login(looker)
    assert "Stop the selected" not in page(client, REPLICAS)
    client.post(REPLICAS, {"action": "stop", "_selected_action": [str(replica.pk)], "confirmed": "yes"})
    client.post(NODES, {"action": "cordon", "_selected_action": [Node.objects.get().pk], "confirmed": "yes"})
    replica.refresh_from_db()
    assert (replica.wanted, Node.objects.get().is_cordoned) == ("run", False)
    looker.user_permissions.add(Permission.objects.get(codename="change_replica"))
    client.post(REPLICAS, {"action": "stop", "_selected_action": [str(replica.pk)], "confirmed": "yes"})
    replica.refresh_from_db()
    assert replica.wanted == "stop"


def test_nothing_is_edited_here(admin: Client) -> None:
    replica = a_replica(a_model(), a_node())
    assert admin.post(of(replica), {"state": "failed"}).status_code == 403
    assert admin.get(f"{REPLICAS}add/").status_code == 403
    assert admin.get(f"{REPLICAS}{replica.pk}/delete/").status_code == 403
    assert admin.get(f"{NODES}add/").status_code == 403


# --- nodes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("age_s", "badge"),
    [
        pytest.param(1, '<span class="badge good">fresh</span>', id="heard from a second ago"),
        pytest.param(30, '<span class="badge warn">suspect</span>', id="silent for half a minute"),
        pytest.param(600, '<span class="badge bad">lost</span>', id="silent for ten minutes"),
        pytest.param(None, '<span class="badge ">never</span>', id="never heard from"),
    ],
)
def test_a_nodes_state_follows_its_silence(admin: Client, age_s: int | None, badge: str) -> None:
    node = a_node()
    Node.objects.filter(pk=node.pk).update(
        seen_at=None if age_s is None else Now() - timedelta(seconds=age_s)
    )
    assert badge in page(admin, NODES)


def test_a_node_says_what_is_free_and_who_has_the_rest(admin: Client) -> None:
    node = a_node(gpus=3)
    replica = a_replica(a_model(), node, gpu=1)
    Orphan.objects.create(
        replica="12345678-0000-0000-0000-000000000000", node=node, why="?", gpus=["gpu-01-gpu-2"]
    )
    assert "1 of 3 sim" in said(admin, NODES)
    text = said(admin, f"{NODES}{node.pk}/change/")
    assert str(replica) in text
    assert "orphan 12345678" in text
    assert "zone=a" in text


def test_a_node_is_cordoned_and_uncordoned_after_asking(admin: Client) -> None:
    node = a_node()
    chosen = {"_selected_action": [node.pk], "confirmed": "yes"}
    answer = admin.post(NODES, chosen | {"action": "cordon", "why": "new fans"}, follow=True)
    assert "1 of 1 node cordoned." in answer.content.decode()
    assert "cordoned by alice: new fans" in said(admin, NODES)
    assert (
        "1 of 1 node uncordoned."
        in admin.post(NODES, chosen | {"action": "uncordon"}, follow=True).content.decode()
    )
    assert [event.verb for event in Event.objects.filter(kind="node")] == ["uncordon", "cordon"]


def test_the_history_of_a_node_and_of_a_replica_is_their_events(admin: Client) -> None:
    node = a_node()
    replica = a_replica(a_model(), node)
    for path, row in ((NODES, node), (REPLICAS, replica)):
        action = "cordon" if row is node else "stop"
        admin.post(path, {"action": action, "_selected_action": [str(row.pk)], "confirmed": "yes"})
        answer = admin.get(f"{path}{row.pk}/history/")
        assert [event.verb for event in answer.context["page"]] == [action]


def test_orphans_are_listed_with_why(admin: Client) -> None:
    Orphan.objects.create(
        replica="12345678-0000-0000-0000-000000000000", node=a_node(), why="Its model is unknown here."
    )
    assert "Its model is unknown here." in said(admin, "/admin/nodes/orphan/")


def test_an_orphan_is_stopped_by_whoever_may_stop_replicas(client: Client) -> None:
    id = "12345678-0000-0000-0000-000000000000"
    orphan, looker = Orphan.objects.create(replica=id, node=a_node(), why="?"), viola()
    client.force_login(looker)
    chosen = {"action": "stop", "_selected_action": [str(orphan.pk)], "confirmed": "yes", "why": "nobody's"}

    def stop() -> str:
        return client.post("/admin/nodes/orphan/", chosen, follow=True).content.decode()

    stop()
    assert not Replica.objects.exists()
    looker.user_permissions.add(Permission.objects.get(codename="change_replica"))
    assert "1 of 1 orphan told to stop." in stop()
    assert "0 of 1 orphan told to stop." in stop()
    stopped = Replica.objects.get()
    assert (str(stopped.pk), stopped.state, stopped.wanted_why) == (id, "stopped", "nobody's")
    assert "gpu-01 ran it, and nothing here accounted for it" in said(client, of(stopped))
