"""REST: keys are made, seen and revoked by whoever may, and reach no further than who asks for them."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Group, Permission, User
from django.db.models.functions import Now

from catalog.models import Event, Key
from tests.cast import alice
from tests.rest_client import Api, field, sentence

pytestmark = pytest.mark.django_db


def member(role: str, name: str = "") -> User:
    user = User.objects.create_user(name or role, is_staff=True)
    user.groups.add(Group.objects.get(name=role))
    return user


def test_a_key_is_shown_once_and_opens_until_it_is_revoked() -> None:
    api = Api(member("operator"))
    answer = api.ask("POST", "keys", {"name": "ci", "scope": "manage", "why": "for the pipeline"})
    made = json.loads(answer.content)
    assert (answer.status_code, answer["Cache-Control"]) == (201, "no-store")
    assert (made["name"], made["user"], made["scope"], made["state"]) == ("ci", "operator", "manage", "live")
    assert made["expires_at"] is None
    event = Event.objects.get(verb="mint", by="operator")
    assert (event.subject, event.door, event.why) == (made["id"], "api", "for the pipeline")

    theirs = Api(User.objects.get())
    theirs.text = made["key"]
    assert theirs("GET", answer["Location"].partition("/api/")[2]) == (
        200,
        {key: value for key, value in made.items() if key != "key"},
    )
    assert made["key"] not in json.dumps([api("GET", "keys"), api("GET", "events")])
    assert theirs("DELETE", f"keys/{made['id']}?why=leaked") == (204, None)
    assert theirs("GET", "keys")[0] == 401
    assert Event.objects.get(verb="revoke").why == "leaked"
    assert api("GET", f"keys/{made['id']}")[1]["state"] == "revoked"
    assert api("DELETE", f"keys/{made['id']}") == (204, None)
    assert Event.objects.filter(verb="revoke").count() == 1


def test_a_key_ends_when_it_was_said_to() -> None:
    api = Api(member("operator"))
    _, made = api("POST", "keys", {"name": "trial", "scope": "manage", "expires_in": "720h"})
    key: Any = Key.objects.get(pk=made["id"])
    assert key.expires_at - key.created_at == timedelta(days=30)
    Key.objects.filter(pk=key.pk).update(expires_at=Now())
    assert api("GET", f"keys/{key.pk}")[1]["state"] == "expired"
    assert [each["id"] for each in api("GET", "keys?state=expired")[1]["results"]] == [key.pk]


@pytest.mark.parametrize(
    ("body", "where", "says"),
    [
        pytest.param(
            {},
            "name",
            "a key needs a name of at most 200 visible characters, telling what it is for",
            id="no name",
        ),
        pytest.param({"name": "a\nb"}, "name", "a key needs a name", id="a name of two lines"),
        pytest.param(
            {"name": 7}, "name", "the body: name must be a text, not a number", id="a number for a name"
        ),
        pytest.param([], "", "the body: it must be a map of fields, not a list", id="a list"),
        pytest.param(
            {"name": "k", "scopes": "manage"},
            "scopes",
            'the body: unknown key "scopes"; did you mean scope?',
            id="an unknown key",
        ),
        pytest.param(
            {"name": "k", "scope": "root"},
            "scope",
            'scope "root" is not known; choose inference or manage or metrics',
            id="an unknown scope",
        ),
        pytest.param(
            {"name": "k", "expires_in": "30d"},
            "expires_in",
            "the body: expires_in must be a duration in h, m, s or ms, such as 1h30m, 1.5s or 300ms",
            id="days",
        ),
        pytest.param(
            {"name": "k", "expires_in": "0"},
            "expires_in",
            "expires_in must be above 0, such as 720h; leave it out for a key that lasts",
            id="no time at all",
        ),
        pytest.param(
            {"name": "k", "user": "nobody"},
            "user",
            'the body: there is no user "nobody"; check the spelling',
            id="of nobody",
        ),
    ],
)
def test_what_is_no_key_is_refused_at_its_field(body: Any, where: str, says: str) -> None:
    answer = Api(member("admin"))("POST", "keys", body)
    assert field(answer)[:2] == (400, where)
    assert sentence(answer)[1].startswith(says)
    assert Key.objects.count() == 1


def test_whoever_may_have_their_own_keys_alone_does_not_see_others() -> None:
    other, api = Api(alice()), Api(member("operator"))
    assert [each["id"] for each in api("GET", "keys")[1]["results"]] == [api.key.pk]
    unknown = (404, f'there is no key "{other.key.pk}"; GET /api/keys lists them')
    assert sentence(api("GET", f"keys/{other.key.pk}")) == unknown
    assert sentence(api("DELETE", f"keys/{other.key.pk}")) == unknown
    assert other.key.pk not in json.dumps(api("GET", "events?kind=key")[1])
    other.key.refresh_from_db()
    assert other.key.revoked_at is None


@pytest.mark.parametrize("name", ["alice", "nobody"])
def test_whoever_may_make_their_own_keys_alone_does_not_learn_who_there_is(name: str) -> None:
    alice()
    answer = Api(member("operator"))("POST", "keys", {"name": "k", "user": name})
    says = "you may make keys for yourself alone; leave the user out, or name yourself"
    assert field(answer) == (400, "user", "permission")
    assert sentence(answer) == (400, says)


def test_an_admin_makes_and_revokes_keys_of_others() -> None:
    member("operator")
    api = Api(member("admin"))
    status, made = api("POST", "keys", {"name": "theirs", "user": "operator", "scope": "manage"})
    assert (status, made["user"]) == (201, "operator")
    assert made["id"] in json.dumps(api("GET", "keys?user=operator")[1])
    assert made["id"] in json.dumps(api("GET", "events?kind=key")[1])
    assert api("DELETE", f"keys/{made['id']}")[0] == 204


def test_a_key_can_do_no_more_than_who_made_it() -> None:
    alice()
    api = Api(member("admin"))
    answer = api("POST", "keys", {"name": "k", "user": "alice", "scope": "manage"})
    says = 'a key that manages may do what "alice" may, which is more than you may;'
    assert sentence(answer) == (400, f"{says} let them make it, or make one whose scope is inference")
    assert api("POST", "keys", {"name": "k", "user": "alice", "scope": "inference"})[0] == 201


def test_a_key_made_with_a_key_does_not_outlive_it() -> None:
    api = Api(member("operator"), expires_in_ns=3600 * 10**9)
    for expires_in in ({}, {"expires_in": "2h"}):
        answer = api("POST", "keys", {"name": "k"} | expires_in)
        assert field(answer) == (400, "expires_in", "range")
        assert sentence(answer)[1].startswith("a key made with a key ends no later than that one, at ")
    assert api("POST", "keys", {"name": "k", "expires_in": "30m"})[0] == 201
    assert Key.objects.count() == 2


def test_a_key_that_reads_metrics_is_made_by_whoever_sees_what_all_keys_used() -> None:
    assert Api(member("operator"))("POST", "keys", {"name": "scrapes", "scope": "metrics"})[0] == 201
    maker = User.objects.create_user("maker", is_staff=True)
    maker.user_permissions.set(Permission.objects.filter(codename__in=("add_key", "view_usage")))
    answer = Api(maker)("POST", "keys", {"name": "scrapes", "scope": "metrics"})
    assert field(answer) == (400, "scope", "permission")
    says = "a key that reads /metrics tells what all keys are used for, and you may see your own alone;"
    assert sentence(answer) == (400, f"{says} ask an operator for it")
