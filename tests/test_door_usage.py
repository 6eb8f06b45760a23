"""Usage through its doors: the command, REST and the admin's page tell the same, to whom it may concern."""

from __future__ import annotations

import json
import uuid
from html import unescape
from io import StringIO
from typing import Any

import pytest
from django.contrib.auth.models import Group, Permission, User
from django.core.management import CommandError, call_command
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from catalog.models import Key, database_now
from nodes.models import Usage
from nodes.usage import add_lot
from tests.cast import alice
from tests.pages import page, text_of
from tests.rest_client import Api, sentence
from tests.stage import make_key, make_model
from tests.test_gateway_accounts import counted, passed

pytestmark = [pytest.mark.django_db, pytest.mark.one_database]

USAGE = "/admin/nodes/usage/"


@pytest.fixture
def keys() -> tuple[Key, Key]:
    """Ada has asked "tiny" twice, once in vain, and "huge" once; Bob has asked "tiny" three times."""
    make_model("tiny", "small")
    make_model("huge")
    (ada, _), (bob, _) = make_key("ada"), make_key("bob")
    used_by(ada, passed(key=ada.id), passed("huge", key=ada.id), failed(ada))
    used_by(bob, *[passed(key=bob.id)] * 3)
    return ada, bob


def failed(key: Key) -> Any:
    return passed(
        key=key.id, status=502, code="engine_unreachable", first_byte_at_s=None, completion_tokens=0
    )


def used_by(key: Key, *passages: Any) -> None:
    add_lot(uuid.uuid4(), 1, database_now().timestamp() - 120, counted(*passages))


def manage(*words: str) -> str:
    out = StringIO()
    call_command("usage", *words, stdout=out)
    return out.getvalue()


def requests_of(told: dict[str, Any]) -> dict[tuple[Any, ...], int]:
    return {(line["key_name"], line["model"]): line["requests"] for line in told["results"]}


# --- the command --------------------------------------------------------------------------


def test_the_command_prints_a_table_with_a_total(keys: tuple[Key, Key]) -> None:
    lines = [line.split() for line in manage().splitlines()]
    assert lines[0][:5] == ["KEY", "MODEL", "REQUESTS", "ERRORS", "LEFT"]
    assert [line[:4] for line in lines[1:]] == [
        ["bob", "tiny", "3", "0"],
        ["ada", "tiny", "2", "1"],
        ["ada", "huge", "1", "0"],
        ["total", "-", "6", "1"],
    ]
    assert {"450 ms", "499 ms"} <= {cell.strip() for cell in manage().splitlines()[1].split("  ")}


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--by", "model"], {(None, "tiny"): 5, (None, "huge"): 1}),
        (["--by", "key"], {("bob", None): 3, ("ada", None): 3}),
        (["--model", "small"], {("bob", "tiny"): 3, ("ada", "tiny"): 2}),
        (["--key", "ada"], {("ada", "tiny"): 2, ("ada", "huge"): 1}),
        (["--since", "1m"], {}),
        (["--since", "2160h"], {("bob", "tiny"): 3, ("ada", "tiny"): 2, ("ada", "huge"): 1}),
    ],
    ids=["by model", "by key", "of a model, by its alias", "of a key", "lately", "ever since it is kept"],
)
def test_what_scripts_are_told(keys: tuple[Key, Key], words: list[str], found: Any) -> None:
    assert requests_of(json.loads(manage("--json", *words))) == found


def test_a_key_is_found_by_its_id_too(keys: tuple[Key, Key]) -> None:
    assert requests_of(json.loads(manage("--json", "--key", keys[1].id))) == {("bob", "tiny"): 3}


def test_nothing_is_said_to_be_nothing() -> None:
    assert manage("--model", "tiny") == "Nothing was asked for in the last 24h, of what you ask about.\n"


WRONG = [
    ("since", "yesterday", "since must be a duration in h, m, s or ms, such as 1h30m, 1.5s or 300ms, and is"),
    ("since", "1s", "since must be from 1m to 2160h, which is kept, and is"),
    ("since", "2161h", "since must be from 1m to 2160h, which is kept, and is"),
]


@pytest.mark.parametrize(("name", "value", "says"), WRONG)
def test_what_cannot_be_asked_is_said_by_every_door(name: str, value: str, says: str) -> None:
    whole = f'{says} "{value}"'
    with pytest.raises(CommandError) as refusal:
        manage(f"--{name}", value)
    assert str(refusal.value) == whole
    answer = Api(alice())("GET", f"usage?{name}={value}")
    assert sentence(answer) == (400, whole)
    client = Client()
    client.force_login(User.objects.get())
    assert whole in unescape(text_of(page(client, f"{USAGE}?{name}={value}")))


# --- REST ---------------------------------------------------------------------------------


def test_rest_tells_it_all(keys: tuple[Key, Key]) -> None:
    status, told = Api(alice())("GET", "usage?model=tiny&by=model&since=1h")
    assert (status, told["since_s"], told["by"]) == (200, 3600, "model")
    [line] = told["results"]
    assert line["codes"] == {"engine_unreachable": 1}
    assert (line["key"], line["prompt_tokens"], line["cached_tokens"]) == (None, 500, 300)
    assert line["ttft_ms"]["p50"] == pytest.approx(500, rel=0.2)
    assert line["hold_ms"] == {"p50": None, "p99": None}
    assert {name: told["total"][name] for name in ("requests", "errors")} == {"requests": 5, "errors": 1}


@pytest.mark.parametrize(
    ("query", "code"),
    [("by=week", "unknown_choice"), ("untill=1h", "unknown_parameter"), ("key=a&key=b", "duplicate")],
)
def test_rest_refuses_what_it_does_not_know(query: str, code: str) -> None:
    status, told = Api(alice())("GET", f"usage?{query}")
    assert (status, told["errors"][0]["code"]) == (400, code)


def test_whoever_sees_their_own_alone_sees_their_own_alone(keys: tuple[Key, Key]) -> None:
    bob = keys[1].user
    bob.is_staff = True
    bob.save()
    bob.user_permissions.set(Permission.objects.filter(codename="view_usage"))
    assert requests_of(Api(bob)("GET", "usage")[1]) == {("bob", "tiny"): 3}
    assert requests_of(Api(bob)("GET", f"usage?key={keys[0].id}")[1]) == {}
    client = Client()
    client.force_login(bob)
    told = text_of(page(client, f"{USAGE}?by=key"))
    assert "of your own keys" in told
    assert "ada" not in told
    operator = User.objects.create_user("otto", is_staff=True)
    operator.groups.add(Group.objects.get(name="operator"))
    assert len(requests_of(Api(operator)("GET", "usage")[1])) == 3


# --- the admin ----------------------------------------------------------------------------


@pytest.fixture
def admin() -> Client:
    client = Client()
    client.force_login(alice())
    return client


def test_the_page_leads_from_a_model_to_who_used_it_and_on(admin: Client, keys: tuple[Key, Key]) -> None:
    first = page(admin, USAGE)
    assert "The last 24 hours." in text_of(first)
    assert "engine_unreachable 1" in text_of(first)
    assert 'href="?by=key&amp;model=tiny"' in first
    narrowed = page(admin, f"{USAGE}?model=tiny&by=key")
    assert "of the model tiny" in text_of(narrowed)
    assert f'href="?by=model&amp;key={keys[0].id}&amp;model=tiny"' in narrowed


def test_names_of_keys_are_text(admin: Client) -> None:
    key, _ = make_key("ada")
    Key.objects.update(name="<b>\u202e</b>")
    used_by(key, passed(key=key.id))
    told = page(admin, f"{USAGE}?by=key")
    assert "&lt;b&gt;" in told
    assert "\u202e" not in told
    assert "\u202e" not in page(admin, f"{USAGE}?model=%E2%80%AE")


def test_the_page_asks_as_often_however_much_there_is(admin: Client) -> None:
    def queries() -> int:
        with CaptureQueriesContext(connection) as context:
            page(admin, f"{USAGE}?by=both")
        return len(context)

    queries()  # what is asked once a process
    before = queries()
    for number in range(20):
        used_by(make_key("ada")[0], passed(f"model-{number}", key=str(number)))
    assert queries() == before


def test_no_row_has_a_page(admin: Client, keys: tuple[Key, Key]) -> None:
    row = Usage.objects.first()
    answer = admin.get(f"{USAGE}{row.pk}/change/")
    assert answer.status_code == 302
