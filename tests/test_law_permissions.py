"""Who may do what: each role at each route of REST and of the admin, with each method."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import Group, Permission, User
from django.db import transaction
from django.test import Client

from catalog.actions import mint_key
from catalog.models import Event, Key, Model
from llmgw.docs import schema
from nodes import jobs
from nodes.joining import mint_join_token
from nodes.models import Cluster, Job, JoinToken, Replica, Webhook, Weights
from nodes.webhooks import add_webhook
from tests.cast import PROFILE, a_model, a_node, a_replica, alice, edited, model_form
from tests.rest_client import Api, sentence

pytestmark = [pytest.mark.django_db, pytest.mark.one_database]

ROLES = ("viewer", "operator", "admin")


def member(role: str, **fields: Any) -> User:
    user = User.objects.create_user(**{"username": role, "password": "a long one", "is_staff": True} | fields)
    user.groups.add(Group.objects.get(name=role))
    return user


@pytest.fixture
def things() -> dict[str, Any]:
    """One of each, and somebody for each role."""
    model = a_model(profiles=[PROFILE | {"env": {"A": "open-to-some"}}])
    replica = a_replica(model, a_node())
    weights = Weights.objects.create(node=replica.ranks.get().node, key="0" * 32, repo="org/m", revision="c")
    people = {role: member(role) for role in ROLES} | {"superuser": alice()}
    token, _ = mint_join_token(by="alice", door="command")
    job = jobs.ask(Job.Kind.BENCH, model, by="alice", door="command")
    event = Event.objects.first().pk
    webhook, _ = add_webhook("pager", "https://pager.invalid/hook/t0ken", by="alice", door="command")
    rows = {
        "webhook": webhook,
        "replica": replica,
        "model": model,
        "token": token,
        "weights": weights,
        "job": job,
    }
    return {name: row.pk for name, row in rows.items()} | {"event": event} | people


# --- REST -----------------------------------------------------------------------------------------

# Method, address, body, the least role that may, and what it is answered.
REST: list[tuple[str, str, Any, str, int]] = [
    ("GET", "/api/models", None, "viewer", 200),
    ("GET", "/api/models/{name}", None, "viewer", 200),
    ("POST", "/api/models", model_form("new"), "operator", 201),
    ("PUT", "/api/models/{name}", model_form(), "operator", 200),
    ("PATCH", "/api/models/{name}", {"description": "new"}, "operator", 200),
    ("DELETE", "/api/models/{name}", None, "operator", 204),
    ("POST", "/api/models/{name}/check", {}, "operator", 200),
    ("POST", "/api/models/{name}/roll", {}, "operator", 200),
    ("POST", "/api/models/{name}/bench", {"options": {"seed": -1}}, "operator", 400),
    ("POST", "/api/models/{name}/engine_check", {}, "operator", 202),
    ("GET", "/api/models/{name}/profiles/{profile}", None, "viewer", 200),
    ("GET", "/api/models/{name}/why", None, "viewer", 200),
    ("GET", "/api/models/{name}/series", None, "viewer", 200),
    ("GET", "/api/keys", None, "viewer", 200),
    ("GET", "/api/keys/{id}", None, "viewer", 200),
    ("POST", "/api/keys", {"name": "k"}, "operator", 201),
    ("PATCH", "/api/keys/{id}", {"concurrency": 1}, "operator", 200),
    ("DELETE", "/api/keys/{id}", None, "operator", 204),
    ("GET", "/api/nodes", None, "viewer", 200),
    ("GET", "/api/nodes/{name}", None, "viewer", 200),
    ("GET", "/api/nodes/{name}/series", None, "viewer", 200),
    ("POST", "/api/nodes/{name}/cordon", {}, "operator", 200),
    ("POST", "/api/nodes/{name}/uncordon", {}, "operator", 200),
    ("POST", "/api/nodes/{name}/drain", {}, "operator", 200),
    ("DELETE", "/api/nodes/{name}", None, "admin", 409),
    ("GET", "/api/join-tokens", None, "viewer", 200),
    ("GET", "/api/join-tokens/{id}", None, "viewer", 200),
    ("POST", "/api/join-tokens", {"name": "gpu-02"}, "admin", 201),
    ("DELETE", "/api/join-tokens/{id}", None, "admin", 204),
    ("GET", "/api/weights", None, "viewer", 200),
    ("GET", "/api/weights/{id}", None, "viewer", 200),
    ("POST", "/api/weights", {"model": "tiny", "node": "gpu-01"}, "operator", 400),
    ("DELETE", "/api/weights/{id}", None, "operator", 503),
    ("GET", "/api/jobs", None, "viewer", 200),
    ("GET", "/api/jobs/{id}", None, "viewer", 200),
    ("DELETE", "/api/jobs/{id}", None, "operator", 202),
    ("GET", "/api/webhooks", None, "viewer", 200),
    ("GET", "/api/webhooks/{id}", None, "viewer", 200),
    ("POST", "/api/webhooks", {"name": "night", "url": "https://pager.invalid/"}, "admin", 201),
    ("PATCH", "/api/webhooks/{id}", {"paused": True}, "admin", 200),
    ("POST", "/api/webhooks/{id}/test", {}, "admin", 200),
    ("DELETE", "/api/webhooks/{id}", None, "admin", 204),
    ("GET", "/api/replicas", None, "viewer", 200),
    ("GET", "/api/replicas/{id}", None, "viewer", 200),
    ("GET", "/api/replicas/{id}/log", None, "viewer", 503),
    ("DELETE", "/api/replicas/{id}", None, "operator", 202),
    ("GET", "/api/overview", None, "viewer", 200),
    ("GET", "/api/plan", None, "viewer", 200),
    ("GET", "/api/series", None, "viewer", 200),
    ("GET", "/api/usage", None, "viewer", 200),
    ("GET", "/api/reconciler", None, "viewer", 200),
    ("POST", "/api/reconciler/pause", {}, "operator", 200),
    ("POST", "/api/reconciler/resume", {}, "operator", 200),
    ("POST", "/api/reconciler/allow", {}, "operator", 200),
    ("POST", "/api/reconciler/outrank", {}, "operator", 200),
    ("GET", "/api/events", None, "viewer", 200),
    ("GET", "/api/events/{id}", None, "viewer", 200),
]


def test_the_table_has_every_operation() -> None:
    operations = {(method.upper(), path) for path, each in schema()["paths"].items() for method in each}
    assert operations == {(method, path) for method, path, *_ in REST}


@pytest.mark.parametrize(
    ("method", "path", "body", "least", "answer"),
    [pytest.param(*row, id=f"{row[0]} {row[1]}") for row in REST],
)
def test_rest_is_open_to_those_who_may(
    things: dict[str, Any], method: str, path: str, body: Any, least: str, answer: int
) -> None:
    client, may = Client(), {*ROLES[ROLES.index(least) :], "superuser"}
    for who, user in (*_people(things), ("an inference key", things["superuser"])):
        with transaction.atomic():
            key = None
            headers = {}
            if user is not None:
                scope = "inference" if who == "an inference key" else "manage"
                key, text = mint_key("k", user=user, scope=scope, by="alice", door="command")
                headers = {"Authorization": f"Bearer {text}"}
            url = _filled(path, things, key.pk if key else "x")
            content = "" if body is None else json.dumps(body)
            got = client.generic(method, url, content, content_type="application/json", headers=headers)
            wanted = 401 if user is None else answer if who in may else 403
            assert got.status_code == wanted, f"{who}: {got.content!r}"
            transaction.set_rollback(True)


def _people(things: dict[str, Any]) -> Iterator[tuple[str, User | None]]:
    yield "nobody", None
    yield "a member who is no staff", member("admin", username="no staff", is_staff=False)
    yield "staff without a role", User.objects.create_user("no role", is_staff=True)
    for role in (*ROLES, "superuser"):
        yield role, things[role]


def _filled(path: str, things: dict[str, Any], key: str) -> str:
    of = path.split("/")[2]
    name = "tiny" if of == "models" else "gpu-01"
    key_of = {
        "keys": key,
        "replicas": things["replica"],
        "events": things["event"],
        "join-tokens": things["token"],
        "weights": things["weights"],
        "jobs": things["job"],
        "webhooks": things["webhook"],
    }
    return path.replace("{name}", name).replace("{profile}", "default").replace("{id}", str(key_of.get(of)))


@pytest.mark.parametrize("path", ["", "models", "keys", "schema", "docs"])
def test_a_session_opens_what_a_key_does(things: dict[str, Any], path: str) -> None:
    client = Client()
    for who, user in _people(things):
        if user is not None:
            client.force_login(user)
        got = client.get(f"/api/{path}").status_code
        needs_no_role = path in ("", "schema", "docs")
        if user is None:
            assert got in (401, 302), who
        elif not user.is_staff:
            assert got == (302 if path == "docs" else 403), who  # a page leads to its login
        else:
            assert got == (403 if who == "staff without a role" and not needs_no_role else 200), who


def test_a_viewer_sees_no_environment_and_nobody_a_secret(things: dict[str, Any]) -> None:
    for role, sees in (("viewer", False), ("operator", True), ("admin", True), ("superuser", True)):
        api = Api(things[role])
        told = json.dumps([api("GET", path)[1] for path in ("models", "replicas", "events")])
        assert ("open-to-some" in told) is sees, role


# --- the admin ------------------------------------------------------------------------------------

# Address and the least role that may: looking (GET), and what a POST would do.
PAGES: list[tuple[str, str, str]] = [
    ("", "viewer", ""),
    ("catalog/model/", "viewer", ""),
    ("catalog/model/add/", "operator", "operator"),
    ("catalog/model/{model}/change/", "viewer", "operator"),
    ("catalog/model/{model}/delete/", "operator", "operator"),
    ("catalog/model/{model}/history/", "viewer", ""),
    ("catalog/model/{model}/bench/", "viewer", "operator"),
    ("catalog/model/{model}/bench/plots/", "viewer", ""),
    ("catalog/key/", "viewer", ""),
    ("catalog/key/add/", "operator", "operator"),
    ("catalog/event/", "viewer", ""),
    ("catalog/event/{event}/change/", "viewer", ""),
    ("nodes/cluster/", "viewer", ""),
    ("nodes/node/", "viewer", ""),
    ("nodes/job/", "viewer", ""),
    ("nodes/job/{job}/change/", "viewer", ""),
    ("nodes/weights/", "viewer", ""),
    ("nodes/weights/{weights}/change/", "viewer", ""),
    ("nodes/webhook/", "viewer", ""),
    ("nodes/webhook/add/", "admin", "admin"),
    ("nodes/webhook/{webhook}/change/", "viewer", "admin"),
    ("nodes/jointoken/", "viewer", ""),
    ("nodes/jointoken/add/", "admin", "admin"),
    ("nodes/jointoken/{token}/change/", "viewer", ""),
    ("nodes/replica/", "viewer", ""),
    ("nodes/replica/{replica}/change/", "viewer", ""),
    ("nodes/orphan/", "viewer", ""),
    ("nodes/usage/", "viewer", ""),
    ("playground/", "operator", ""),
    ("playground/key/", "", "operator"),
    ("auth/user/", "admin", ""),
    ("auth/user/add/", "admin", "admin"),
    ("auth/user/{viewer.pk}/change/", "admin", "admin"),
    ("auth/user/{viewer.pk}/password/", "admin", "admin"),
    ("auth/user/{viewer.pk}/delete/", "admin", "admin"),
    ("auth/group/", "admin", ""),
    ("auth/group/add/", "admin", "admin"),
]


def test_the_table_has_every_list_of_the_admin() -> None:
    lists = {f"{model._meta.app_label}/{model._meta.model_name}/" for model in admin.site._registry}
    assert lists <= {path for path, *_ in PAGES}


@pytest.mark.parametrize(
    ("path", "looks", "changes"), [pytest.param(*row, id=row[0] or "the first page") for row in PAGES]
)
def test_the_admin_is_open_to_those_who_may(
    things: dict[str, Any], path: str, looks: str, changes: str
) -> None:
    url, client = f"/admin/{path.format(**things)}", Client()
    for who, user in _people(things):
        if user is not None:
            client.force_login(user)
        for method, least in (("GET", looks), ("POST", changes)):
            if not least:
                continue
            got = client.generic(method, url, b"", content_type="application/x-www-form-urlencoded")
            if user is None or not user.is_staff:
                assert got.status_code == 302, (who, method)
                assert got["Location"].startswith("/admin/login/"), (who, method)
                continue
            may = {*ROLES[ROLES.index(least) :], "superuser"}
            is_first_page = not path  # whoever is staff sees it; what it lists is what they may
            wanted = {200} if who in may or is_first_page else {403, 404}  # what one may not see is not there
            assert got.status_code in wanted, (who, method)


@pytest.mark.parametrize(
    ("page", "action", "least"),
    [
        ("catalog/model/", "remove", "operator"),
        ("catalog/key/", "revoke", "operator"),
        ("catalog/model/", "roll", "operator"),
        ("nodes/cluster/", "pause", "operator"),
        ("nodes/node/", "cordon", "operator"),
        ("nodes/node/", "drain", "operator"),
        ("nodes/node/", "uncordon", "operator"),
        ("nodes/job/", "stop", "operator"),
        ("nodes/webhook/", "pause", "admin"),
        ("nodes/webhook/", "remove", "admin"),
        ("nodes/jointoken/", "revoke", "admin"),
        ("nodes/replica/", "stop", "operator"),
        ("nodes/replica/", "check_engine", "operator"),
        ("catalog/model/", "check_engine", "operator"),
    ],
)
def test_actions_are_for_those_who_may(things: dict[str, Any], page: str, action: str, least: str) -> None:
    client, may = Client(), {*ROLES[ROLES.index(least) :], "superuser"}
    rows = {
        "catalog/model/": Model,
        "catalog/key/": Key,
        "nodes/replica/": Replica,
        "nodes/cluster/": Cluster,
        "nodes/job/": Job,
        "nodes/webhook/": Webhook,
        "nodes/jointoken/": JoinToken,
    }
    Cluster.this()
    edited(Model.objects.get(), tp=2)
    for who in (*ROLES, "superuser"):
        with transaction.atomic():
            mint_key("k", user=things[who], scope="manage", by="alice", door="command")
            client.force_login(things[who])
            chosen = [str(row.pk) for row in (rows[page] if page in rows else _nodes()).objects.all()]
            told = {"action": action, "_selected_action": chosen, "confirmed": "yes", "why": "a test"}
            client.post(f"/admin/{page}", told)
            assert Event.objects.filter(why="a test").exists() is (who in may and action != "uncordon"), who
            transaction.set_rollback(True)


def _nodes() -> Any:
    return Replica._meta.get_field("ranks").related_model._meta.get_field("node").related_model


# --- people ---------------------------------------------------------------------------------------


def as_user(user: User) -> Client:
    client = Client()
    client.force_login(user)
    return client


def form_of(user: User, **fields: Any) -> dict[str, Any]:
    return {
        "username": user.username,
        "is_active": "on",
        "is_staff": "on",
        "groups": [group.pk for group in user.groups.all()],
    } | fields


def test_an_admin_makes_people_and_gives_them_roles(things: dict[str, Any]) -> None:
    client = as_user(things["admin"])
    made = {
        "username": "otto",
        "usable_password": "true",
        "password1": "a long secret",
        "password2": "a long secret",
    }
    assert client.post("/admin/auth/user/add/", made).status_code == 302
    otto = User.objects.get(username="otto")
    roles = [Group.objects.get(name=name).pk for name in ROLES]
    client.post(f"/admin/auth/user/{otto.pk}/change/", form_of(otto, groups=roles))
    assert otto.groups.count() == 3
    events = Event.objects.filter(kind="user", subject="otto").order_by("id")
    assert [(event.verb, event.by, event.door) for event in events] == [
        ("add", "admin", "admin"),
        ("edit", "admin", "admin"),
    ]
    assert "a long secret" not in json.dumps(list(events.values("detail")))


def test_an_admin_makes_nobody_a_superuser(things: dict[str, Any]) -> None:
    for user in (things["admin"], things["viewer"]):
        permissions = [Permission.objects.get(codename="delete_session").pk]
        form = form_of(user, is_superuser="on", user_permissions=permissions)
        as_user(things["admin"]).post(f"/admin/auth/user/{user.pk}/change/", form)
        user.refresh_from_db()
        assert not user.is_superuser
        assert not user.user_permissions.exists()


@pytest.mark.parametrize("page", ["change/", "password/", "delete/"])
def test_an_admin_leaves_alone_whoever_may_more(things: dict[str, Any], page: str) -> None:
    boss = things["superuser"]
    form = form_of(boss, is_active="", password1="a long secret", password2="a long secret", post="yes")
    assert as_user(things["admin"]).post(f"/admin/auth/user/{boss.pk}/{page}", form).status_code == 403
    was = boss.password
    boss.refresh_from_db()
    assert (boss.is_active, boss.password) == (True, was)


def test_an_admin_gives_no_group_more_than_they_have(things: dict[str, Any]) -> None:
    client = as_user(things["admin"])
    beyond, within = (Permission.objects.get(codename=name) for name in ("delete_session", "view_node"))
    client.post("/admin/auth/group/add/", {"name": "sly", "permissions": [beyond.pk]})
    assert not Group.objects.filter(name="sly").exists()
    client.post("/admin/auth/group/add/", {"name": "lookers", "permissions": [within.pk]})
    assert Event.objects.get(kind="group").subject == "lookers"
    powerful = Group.objects.create(name="powerful")
    powerful.permissions.add(beyond)
    assert client.post(f"/admin/auth/group/{powerful.pk}/change/", {"name": "x"}).status_code == 403
    viewer = things["viewer"]
    client.post(f"/admin/auth/user/{viewer.pk}/change/", form_of(viewer, groups=[powerful.pk]))
    assert [group.name for group in viewer.groups.all()] == ["viewer"]


def test_a_key_of_somebody_gone_opens_nothing(things: dict[str, Any]) -> None:
    api = Api(things["operator"])
    client = as_user(things["admin"])
    form = form_of(things["operator"])
    del form["is_active"]
    client.post(f"/admin/auth/user/{things['operator'].pk}/change/", form)
    assert sentence(api("GET", "models"))[0] == 401
