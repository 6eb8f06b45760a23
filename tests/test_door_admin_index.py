"""The admin's first page and what all its pages share: what needs a person, titles, and how one logs in."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Permission
from django.db import connection
from django.db.models.functions import Now
from django.test import Client
from django.test.utils import CaptureQueriesContext

from nodes import lease
from nodes.actions import pause
from nodes.attention import LINES_LIMIT
from nodes.models import Cluster, Held, Lease, Node, Orphan, Replica, Roll, Unplaced
from tests.cast import a_model, a_node, a_replica, alice, edited, viola

pytestmark = [pytest.mark.django_db, pytest.mark.one_database]

INDEX = "/admin/"


@pytest.fixture(autouse=True)
def a_pass_was_just_made(db: None) -> None:
    Lease.objects.create(name=lease.NAME, expires_at=Now())


@pytest.fixture
def admin(client: Client) -> Client:
    client.force_login(alice())
    return client


def needs(client: Client) -> str:
    html = client.get(INDEX).content.decode()
    section = re.search(r'<section class="needs".*?</section>', html, re.DOTALL)
    assert section is not None
    return section[0]


def test_where_all_is_well_nothing_needs_a_person(admin: Client) -> None:
    a_replica(a_model(), a_node())
    assert "Nothing now." in needs(admin)


def test_the_first_page_says_what_needs_a_person_with_the_way_to_it(admin: Client) -> None:
    model, node = a_model(), a_node()
    a_replica(model, node)
    edited(model, tp=2)
    other = a_model("other")
    failed = a_replica(other, node, "failed", gpu=None, reason="out of <memory>")
    Unplaced.objects.create(model=other, missing=2, why="0 of 1 node: 1 lacks 2 free sim")
    silent = a_node("gpu-02", seen_at=None)
    orphan = Orphan.objects.create(
        replica="12345678-0000-0000-0000-000000000000", node=node, why="Its model is unknown here."
    )
    html = needs(admin)
    for badge, page, why in (
        ("2 short", f"catalog/model/{other.pk}/", "0 of 1 node: 1 lacks 2 free sim"),
        ("never", f"nodes/node/{silent.pk}/", "Its agent does not answer."),
        ("failed", f"nodes/replica/{failed.pk}/", "5 min ago: out of &lt;memory&gt;"),
        ("1 stale", f"catalog/model/{model.pk}/", "the page of the model says how it differs"),
        ("orphan", f"nodes/orphan/{orphan.pk}/", "Its model is unknown here."),
    ):
        (line,) = [row for row in html.split("<tr>") if f">{badge}</span>" in row]
        assert f'href="/admin/{page}change/"' in line
        assert why in line


def line_with(html: str, badge: str) -> str:
    (line,) = [row for row in html.split("<tr>") if f">{badge}</span>" in row]
    return line


def test_a_reconciler_that_does_not_act_comes_first(admin: Client) -> None:
    model = a_model()
    replica = a_replica(model, a_node())
    Unplaced.objects.create(model=model, missing=0, why="it breaks the law")
    pause(by="ann", why="new <switches>", door="command")
    Cluster.objects.update(alarm="4 of 5 ready replicas would stop at once")
    Held.objects.create(replica=replica, wanted="drain", why="too many")
    Lease.objects.all().delete()
    html = needs(admin)
    words = re.findall('<span class="badge [a-z]*">([^<]*)</span>', html)
    assert words == ["nobody looks", "1 held", "paused", "blocked"]
    for word, says in (
        ("nobody looks", "no pass has been made yet; see to it that a worker runs"),
        ("1 held", "4 of 5 ready replicas would stop at once"),
        ("paused", "ann has paused the reconciler (new &lt;switches&gt;); manage.py reconcile_resume"),
        ("blocked", "it breaks the law"),
    ):
        assert says in line_with(html, word)
    assert 'href="/admin/nodes/cluster/"' in line_with(html, "paused")
    Held.objects.all().delete()
    assert ">alarm</span>" in needs(admin)


def test_what_is_under_way_on_a_persons_word_is_shown_apart(admin: Client) -> None:
    model, node = (
        a_model(),
        a_node(is_cordoned=True, is_draining=True, cordoned_by="ann", cordoned_why="fans"),
    )
    a_replica(model, node)
    halted = Roll.objects.create(model=a_model("other"), by="bob", halted="The first one failed.")
    Roll.objects.create(model=model, by="bob", why="wider", asked_at=Now() - timedelta(minutes=5))
    html = admin.get(INDEX).content.decode()
    shown, under_way = needs(admin), html.partition('id="under-way"')[2]
    assert "The first one failed." in line_with(shown, "roll halted")
    assert f'href="/admin/catalog/model/{halted.model_id}/change/"' in line_with(shown, "roll halted")
    assert "for 5 min by bob: wider" in line_with(under_way, "rolling")
    assert "by ann: fans" in line_with(under_way, "draining, 1 left")
    Replica.objects.update(state="stopped")
    assert ">drained</span>" in admin.get(INDEX).content.decode()
    Roll.objects.all().delete()
    Node.objects.update(is_draining=False)
    assert 'id="under-way"' not in admin.get(INDEX).content.decode()


def test_an_old_or_acknowledged_failure_and_a_mild_difference_need_nobody(admin: Client) -> None:
    model = a_model()
    a_replica(model, a_node())
    edited(model, weight=2)
    failed = a_replica(a_model("other"), a_node("gpu-02"), "failed", gpu=None)
    assert ">failed</span>" in needs(admin)
    for dealt_with in ({"wanted": "stop"}, {"wanted": "run", "state_since": Now() - timedelta(days=1)}):
        Replica.objects.filter(pk=failed.pk).update(**dealt_with)
        assert "Nothing now." in needs(admin)


def test_what_failed_of_a_model_that_was_removed_since_needs_nobody(admin: Client) -> None:
    failed = a_replica(a_model("other"), a_node("gpu-02"), "failed", gpu=None)
    assert ">failed</span>" in needs(admin)
    Replica.objects.filter(pk=failed.pk).update(model=None)
    assert "Nothing now." in needs(admin)


def test_what_failed_before_its_profile_was_edited_needs_nobody(admin: Client) -> None:
    model = a_model("other")
    a_replica(model, a_node("gpu-02"), "failed", gpu=None)
    assert ">failed</span>" in needs(admin)
    edited(model, tp=2)
    assert "Nothing now." in needs(admin)


def test_failures_of_one_profile_are_one_line(admin: Client) -> None:
    model, node = a_model(), a_node()
    for minutes in (9, 7, 8):
        failed = a_replica(model, node, "failed", gpu=None, reason=f"{minutes} ago")
        Replica.objects.filter(pk=failed.pk).update(state_since=Now() - timedelta(minutes=minutes))
    assert "7 min ago: 7 ago" in line_with(needs(admin), "3 failed")
    assert "8 ago" not in needs(admin)


def test_the_way_to_the_rest_of_what_failed_leads_to_it(admin: Client) -> None:
    node = a_node()
    for number in range(LINES_LIMIT + 1):
        a_replica(a_model(f"model-{number}"), node, "failed", gpu=None)
    (way,) = re.findall(r'href="([^"]+)">all of them<', needs(admin))
    listed = admin.get(way.replace("&amp;", "&")).content.decode()
    assert all(f"model-{number}/default" in listed for number in range(LINES_LIMIT + 1))


def test_the_first_page_is_short_and_takes_the_same_queries_whatever_is_wrong(admin: Client) -> None:
    def queries() -> int:
        with CaptureQueriesContext(connection) as seen:
            needs(admin)
        return len(seen)

    def a_trouble(number: int) -> None:
        model = a_model(f"model-{number}")
        a_replica(model, a_node(f"gpu-{number}", seen_at=None))
        edited(model, tp=2)
        Unplaced.objects.create(model=model, missing=1, why="no room")
        Roll.objects.create(model=model, by="ann", halted="It failed." if number % 2 else "")
        draining = a_node(f"gpu-1{number}", is_cordoned=True, is_draining=True)
        a_replica(model, draining, gpu=1)

    a_trouble(0)
    a_trouble(1)
    needs(admin)
    few = queries()
    for number in range(2, LINES_LIMIT + 3):
        a_trouble(number)
    assert queries() == few + 4  # whatever has changed is read once, all of it together
    assert queries() == few
    html = needs(admin)
    assert html.count(">1 short</span>") == LINES_LIMIT
    assert ">3 more</span>" in html
    assert 'href="/admin/catalog/model/?state=short">all of them<' in html
    assert 'href="/admin/catalog/model/?state=stale">all of them<' in html


def test_everybody_sees_what_they_may_look_at(client: Client) -> None:
    model = a_model()
    Unplaced.objects.create(model=model, missing=1, why="no room")
    a_node("gpu-02", seen_at=None)
    looker = viola()
    looker.user_permissions.set(Permission.objects.filter(codename="view_node"))
    client.force_login(looker)
    html = needs(client)
    assert "gpu-02" in html
    assert "no room" not in html


@pytest.mark.parametrize(
    ("page", "title"),
    [
        ("catalog/model/", "Models"),
        ("catalog/key/", "API keys"),
        ("catalog/event/", "Events"),
        ("nodes/cluster/", "Reconciler"),
        ("nodes/replica/", "Replicas"),
        ("nodes/node/", "Nodes"),
        ("nodes/orphan/", "Orphans"),
        ("auth/user/", "Users"),
    ],
)
def test_a_list_is_called_by_what_is_in_it(admin: Client, page: str, title: str) -> None:
    html = admin.get(f"/admin/{page}").content.decode()
    assert f"<title>{title} | llmgw</title>" in re.sub(r"\s+(?=<|\|)|(?<=>)\s+", "", html).replace(
        "| ", " | "
    )
    assert f"<h1>{title}</h1>" in html


def test_apps_are_called_alike_and_users_come_last(admin: Client) -> None:
    answer: Any = admin.get(INDEX)
    names = [str(app["name"]) for app in answer.context["app_list"]]
    assert names == ["Catalog", "Nodes", "Authentication and Authorization"]
    assert "View site" not in answer.content.decode()


def test_moments_are_sortable_and_to_the_second(admin: Client) -> None:
    a_model()
    html = admin.get("/admin/catalog/event/").content.decode()
    assert re.search(r">\d{4}-\d\d-\d\d \d\d:\d\d:\d\d</a>", html)


def test_passwords_are_not_guessed_for_long(client: Client) -> None:
    alice()
    for _ in range(10):
        answer = client.post("/admin/login/", {"username": "alice", "password": "x"})
    assert answer.status_code == 429
    assert "wait for five minutes, then try again" in answer.content.decode()
    assert client.get(INDEX).status_code == 302


def test_a_node_with_a_problem_is_shown_though_it_was_just_heard_from(admin: Client) -> None:
    node = a_node(problem="The agent of gpu-01 refused the token.")
    Node.objects.filter(pk=node.pk).update(seen_at=Now())
    assert "refused the token" in needs(admin)
