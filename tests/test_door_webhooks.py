"""Webhooks at each door: added with a secret that is shown once, tried, paused, removed; their paths are for
those who may change them."""

from __future__ import annotations

import io
import ipaddress
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test import Client

from catalog.models import Event
from nodes.models import Webhook
from nodes.webhooks import add_webhook
from tests.cast import alice, viola
from tests.pages import page, text_of
from tests.rest_client import Api, field, sentence
from tests.webhook_receiver import Receiver

pytestmark = [pytest.mark.django_db, pytest.mark.one_database]

LIST, ADD = "/admin/nodes/webhook/", "/admin/nodes/webhook/add/"


@pytest.fixture
def receiver(settings: Any) -> Iterator[Receiver]:
    settings.LLMGW_WEBHOOK_NETWORKS = [ipaddress.ip_network("127.0.0.0/8")]
    settings.LLMGW_WEBHOOK_TIMEOUT_S = 1
    with Receiver() as receiver:
        yield receiver


def run(monkeypatch: pytest.MonkeyPatch, *words: str, typed: str = "") -> str:
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    said = io.StringIO()
    call_command(*words, stdout=said, stderr=io.StringIO())
    return said.getvalue()


def test_rest_adds_tries_changes_and_removes_one(receiver: Receiver) -> None:
    api = Api(alice())
    answer = api.ask("POST", "webhooks", {"name": "pager", "url": receiver.url, "kinds": ["unplaced"]})
    made = json.loads(answer.content)
    path = f"webhooks/{made['id']}"
    assert (answer.status_code, answer["Cache-Control"]) == (201, "no-store")
    assert answer["Location"].endswith(f"/api/{path}")
    assert (made["url"], made["kinds"], made["state"]) == (receiver.url, ["unplaced"], "live")
    status, told = api("POST", f"{path}/test", {"why": "is it there?"})
    assert (status, told["delivery"], told["status"], told["problem"]) == (200, "delivered", 200, "")
    assert receiver.received[0].is_signed_with(made["secret"])
    status, whole = api("PATCH", path, {"paused": True, "kinds": []})
    assert (status, whole["state"], whole["kinds"]) == (200, "paused", [])
    assert [each["kind"] for each in whole["deliveries"]] == ["test"]
    assert "secret" not in whole
    assert api("GET", "webhooks")[1]["results"] == [
        {name: value for name, value in whole.items() if name != "deliveries"}
    ]
    assert api("GET", "webhooks?paused=false")[1]["results"] == []
    assert api("DELETE", path)[0] == 204
    assert sentence(api("GET", path)) == (
        404,
        f'there is no webhook "{made["id"]}"; GET /api/webhooks lists them',
    )


def test_rest_refuses_what_cannot_be(receiver: Receiver, settings: Any) -> None:
    api = Api(alice())
    sound = {"name": "pager", "url": receiver.url}
    assert api("POST", "webhooks", sound)[0] == 201
    assert field(api("POST", "webhooks", sound)) == (409, "name", "in_use")
    assert field(api("POST", "webhooks", {**sound, "name": "x", "url": "pager"})) == (400, "url", "invalid")
    assert field(api("POST", "webhooks", {**sound, "colour": "red"}))[:2] == (400, "colour")
    assert sentence(api("GET", "webhooks/nonsense"))[0] == 404
    settings.LLMGW_WEBHOOK_NETWORKS = []
    assert field(api("POST", "webhooks", {**sound, "name": "x"})) == (400, "url", "private")


def test_who_may_not_change_one_sees_its_host_alone(receiver: Receiver) -> None:
    add_webhook("pager", receiver.url, by="alice", door="command")
    api, client = Api(viola()), Client()
    client.force_login(api.key.user)
    pk = Webhook.objects.get().pk
    host = receiver.url.removesuffix("hook/t0ken") + "..."
    assert api("GET", "webhooks")[1]["results"][0]["url"] == host
    assert api("GET", f"webhooks/{pk}")[1]["url"] == host
    for shown in (
        page(client, LIST),
        page(client, f"{LIST}{pk}/change/"),
        page(client, f"{LIST}{pk}/history/"),
    ):
        assert "t0ken" not in shown
    boss = Client()
    boss.force_login(alice())
    assert "t0ken" in page(boss, f"{LIST}{pk}/change/")
    assert "t0ken" not in page(boss, LIST)


def test_the_admin_adds_one_and_shows_its_secret_once(receiver: Receiver) -> None:
    client = Client()
    client.force_login(alice())
    assert "Save shows the secret" in page(client, ADD)
    answer = client.post(ADD, {"name": "pager", "url": receiver.url, "kinds": ["node_lost"], "why": "nights"})
    webhook = Webhook.objects.get()
    assert (webhook.name, webhook.kinds, webhook.by) == ("pager", ["node_lost"], "alice")
    secret = answer.content.decode().partition('<pre class="secret">')[2].partition("</pre>")[0]
    assert "no-store" in answer["Cache-Control"]
    change = f"{LIST}{webhook.pk}/change/"
    told = {"action": "try_out", "_selected_action": str(webhook.pk), "confirmed": "yes", "why": "a try"}
    said = text_of(client.post(LIST, told, follow=True).content.decode())
    assert "1 of 1 webhook took a test notice." in said
    assert receiver.received[0].is_signed_with(secret)
    receiver.status = 500
    said = text_of(client.post(LIST, told, follow=True).content.decode())
    assert "0 of 1 webhook took a test notice." in said
    assert "The webhook &quot;pager&quot; did not take it. It answered 500: ok." in said
    shown = text_of(page(client, change))
    assert "It answered 500: ok." in shown
    assert secret not in shown
    answer = client.post(change, {"name": "night", "url": receiver.url, "kinds": []})
    assert answer.status_code == 302
    webhook.refresh_from_db()
    assert (webhook.name, webhook.kinds) == ("night", [])
    client.post(LIST, told | {"action": "pause"})
    assert "Resume" in page(client, change)
    client.post(LIST, told | {"action": "remove"})
    assert not Webhook.objects.exists()


def test_the_admin_tries_all_that_are_chosen_at_the_same_time(receiver: Receiver, settings: Any) -> None:
    settings.LLMGW_WEBHOOK_TIMEOUT_S = 0.4
    client = Client()
    client.force_login(alice())
    told = {"by": "alice", "door": "command"}
    with Receiver(hangs=True) as hanging:
        for number in range(6):
            add_webhook(f"hanging {number}", hanging.url, **told)
        add_webhook("pager", receiver.url, **told)
        pks = [str(pk) for pk in Webhook.objects.values_list("pk", flat=True)]
        began_s = time.monotonic()
        asked = {"action": "try_out", "_selected_action": pks, "confirmed": "yes"}
        said = text_of(client.post(LIST, asked, follow=True).content.decode())
        took_s = time.monotonic() - began_s
    assert "1 of 7 webhooks took a test notice." in said
    assert took_s < 4 * 0.4, "one after another takes six times as long as one"
    assert {each.deliveries.get().problem for each in Webhook.objects.all()} == {
        "",
        "It did not answer within 0.4 s.",
    }


def test_the_admin_shows_a_refusal_at_its_field(receiver: Receiver) -> None:
    client = Client()
    client.force_login(alice())
    add_webhook("pager", receiver.url, by="alice", door="command")
    answer = client.post(ADD, {"name": "pager", "url": receiver.url})
    assert dict(answer.context["adminform"].form.errors) == {
        "name": ['there is a webhook "pager" already; give another name']
    }
    answer = client.post(ADD, {"name": "x", "url": "https://10.0.0.1/", "kinds": ["rain"]})
    assert {*answer.context["adminform"].form.errors} == {"kinds"}
    answer = client.post(ADD, {"name": "x", "url": "https://10.0.0.1/"})
    assert {*answer.context["adminform"].form.errors} == {"url"}


def test_a_command_edits_pauses_and_resumes_one(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    add_webhook("pager", receiver.url, kinds=["stale"], by="alice", door="command")
    other = f"{receiver.url}/other"
    words = ("--name", "night", "--url", "--all-kinds", "--pause", "--why", "the shift")
    said = run(monkeypatch, "webhook_edit", "pager", *words, typed=f"{other}\n")
    assert said.startswith("Changed pager:\nFIELD ")
    assert [line.split()[0] for line in said.splitlines()[2:]] == ["name", "url", "kinds", "paused"]
    webhook = Webhook.objects.get()
    assert (webhook.name, webhook.url, webhook.kinds, webhook.is_paused) == ("night", other, [], True)
    event = Event.objects.get(verb="edit", kind="webhook")
    assert (event.door, event.why) == ("command", "the shift")
    assert run(monkeypatch, "webhook_edit", "night", "--pause") == "Nothing of night changes.\n"
    told = json.loads(run(monkeypatch, "webhook_edit", "night", "--resume", "--kinds", "stale", "--json"))
    assert (told["state"], told["kinds"], told["url"]) == ("live", ["stale"], other)
    for no, says in (
        (["--kinds", "rain"], 'kind "rain" is not known'),
        (["--url"], "must begin with https://"),
        (["--name", " "], "a webhook needs a name"),
        (["--pause", "--resume"], "not allowed with"),
    ):
        with pytest.raises(CommandError, match=says):
            run(monkeypatch, "webhook_edit", "night", *no, typed="pager\n")


def test_commands_add_list_try_and_remove_one(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "There is no webhook" in run(monkeypatch, "webhook_list")
    made = json.loads(
        run(monkeypatch, "webhook_add", "pager", "--kinds", "stale", "--json", typed=f"{receiver.url}\n")
    )
    assert "pager  live   0        0          0         " in run(monkeypatch, "webhook_list")
    assert "pager took it, and answered 200." in run(monkeypatch, "webhook_test", "pager")
    assert receiver.received[0].is_signed_with(made["secret"])
    receiver.status = 404
    with pytest.raises(CommandError, match=r"pager did not take it. It answered 404: ok\."):
        run(monkeypatch, "webhook_test", made["id"])
    told = json.loads(run(monkeypatch, "webhook_list", "--json"))
    assert [(each["name"], each["kinds"]) for each in told] == [("pager", ["stale"])]
    assert run(monkeypatch, "webhook_remove", "pager") == "Removed pager.\n"
    with pytest.raises(CommandError, match='There is no webhook "pager"'):
        run(monkeypatch, "webhook_remove", "pager")
    with pytest.raises(CommandError, match="must begin with https://"):
        run(monkeypatch, "webhook_add", "pager", typed="pager\n")
    secret = run(monkeypatch, "webhook_add", "pager", typed=receiver.url).strip()
    assert secret.startswith("whsec_")
