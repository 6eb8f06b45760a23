"""Where a notice is posted to, and where never: what an operator typed leads nowhere else."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as example_settings
from hypothesis import strategies as st

from catalog.reading import CatalogError
from nodes.models import (
    Delivery,
    Webhook,
)
from nodes.notices import fault_of_address, fault_of_host, fault_of_url
from nodes.posting import Letter, post
from nodes.webhooks import (
    add_webhook,
    try_webhook,
)
from tests import raw_engine as raw
from tests.raw_engine import ENDS, OK, playing
from tests.webhook_receiver import LOOPBACK, Receiver, hook, let_in


@pytest.fixture
def receiver(settings: Any) -> Iterator[Receiver]:
    let_in(settings)
    with Receiver() as receiver:
        yield receiver


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("host", "says"),
    [
        ("127.0.0.1", "127.0.0.1 is a private address, and LLMGW_WEBHOOK_NETWORKS does not allow it"),
        ("localhost", "is a private address"),
        ("127.1", "127.0.0.1 is a private address"),
        ("2130706433", "127.0.0.1 is a private address"),
        ("0x7f.1", "127.0.0.1 is a private address"),
        ("[::1]", "::1 is a private address"),
        ("[::ffff:127.0.0.1]", "127.0.0.1 is a private address"),
        ("no-such-host.invalid", "It cannot be reached (its host's name is not known)."),
    ],
)
def test_nothing_is_posted_to_a_private_address(
    receiver: Receiver, settings: Any, host: str, says: str
) -> None:
    """Also where its name, or a way to write it, was let through when it was added."""
    webhook, _ = hook(receiver)
    Webhook.objects.update(url=receiver.url.replace("127.0.0.1", host))
    settings.LLMGW_WEBHOOK_NETWORKS = []
    settings.LLMGW_WEBHOOK_TIMEOUT_S = 5
    webhook.refresh_from_db()
    delivery = try_webhook(webhook, by="alice", door="command")
    assert says in delivery.problem
    assert delivery.state == Delivery.State.GIVEN_UP
    assert receiver.received == []


@pytest.mark.django_db
def test_a_redirect_is_not_followed(receiver: Receiver) -> None:
    with Receiver() as elsewhere:
        receiver.status, receiver.location = 307, elsewhere.url
        webhook, _ = hook(receiver)
        delivery = try_webhook(webhook, by="alice", door="command")
        assert delivery.problem == "It answered 307, and redirects are not followed."
        assert elsewhere.received == []


@pytest.mark.django_db
def test_little_of_an_answer_is_read(receiver: Receiver) -> None:
    receiver.status, receiver.answer = 500, b"x" * 50_000_000
    webhook, _ = hook(receiver)
    delivery = try_webhook(webhook, by="alice", door="command")
    assert len(delivery.problem) < 300


@pytest.mark.one_database
@pytest.mark.parametrize(
    ("answer", "says"),
    [
        pytest.param(b"\0\xff\x16\x03", "What it answered is no HTTP.", id="noise"),
        pytest.param(OK + b"X: " + b"y" * 100_000, "What it answered is no HTTP.", id="a header without end"),
        pytest.param(OK + b"X: \0\r\n\r\n", "What it answered is no HTTP.", id="a header that is none"),
        pytest.param(
            b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
            "It answered 101.",
            id="another protocol",
        ),
        pytest.param(
            b"HTTP/1.1 000 None\r\nContent-Length: 0\r\n\r\n", "It answered 0.", id="no status at all"
        ),
    ],
)
async def test_what_a_receiver_did_not_take_is_said_without_its_address(
    settings: Any, answer: bytes, says: str
) -> None:
    """Whoever may look at a webhook reads the sentence, and its address's path is for fewer eyes."""
    settings.LLMGW_WEBHOOK_NETWORKS = LOOPBACK
    async with playing(raw.says(answer, then=ENDS)) as receiver:
        letter = Letter(f"{receiver.target.origin}/hook/t0ken", b"{}", {})
        (told,) = await asyncio.to_thread(post, [letter])
    assert told.problem == says


@pytest.mark.one_database
@pytest.mark.parametrize(
    "address",
    [
        "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
        "255.255.255.255", "::", "fe80::1", "fe80::1%eth0", "fc00::1", "ff02::1", "64:ff9b::a00:1",
        "2002:a00:1::", "::ffff:169.254.169.254", "nonsense",
    ],
)  # fmt: skip
def test_private_addresses_are_known(address: str) -> None:
    assert fault_of_address(address, "https", [])


@pytest.mark.one_database
def test_addresses_of_the_world_are_reached_by_https_alone() -> None:
    for address in ("93.184.215.14", "2606:2800:220:1::1", "64:ff9b::5db8:d70e"):
        assert fault_of_address(address, "https", []) == ""
        assert "plain HTTP" in fault_of_address(address, "http", [])
    assert fault_of_address("10.1.2.3", "http", [ipaddress.ip_network("10.1.0.0/16")]) == ""


@pytest.mark.one_database
@example_settings(max_examples=50)
@given(st.text())
def test_no_url_is_a_fault_of_ours(text: str) -> None:
    for url in (text, f"https://{text}", f"https://host/{text}", f"https://host:{text}"):
        if not fault_of_url(url):
            fault_of_host(url, LOOPBACK)


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("told", "field", "says"),
    [
        ({"name": ""}, "name", "a webhook needs a name"),
        ({"name": "a\u202e"}, "name", "visible characters"),
        ({"url": "pager"}, "url", "must begin with https:// and a host"),
        ({"url": "ftp://host/"}, "url", "must begin with https:// and a host"),
        ({"url": "https://user:secret@host/"}, "url", "no user and no password"),
        ({"url": "https://host/#x"}, "url", "no fragment"),
        ({"url": "https://ho st/"}, "url", "visible ASCII"),
        ({"url": "https://[::1/"}, "url", "cannot be read"),
        ({"url": "https://host:99999/"}, "url", "cannot be read"),
        ({"url": "https://10.0.0.7/hook"}, "url", "is a private address"),
        ({"url": "https://localhost/hook"}, "url", "is a private address"),
        ({"url": "http://93.184.215.14/"}, "url", "use https"),
        ({"kinds": ["node_lost", "rain"]}, "kinds", 'kind "rain" is not known; these are: node_lost'),
    ],
)
def test_what_cannot_be_is_refused(told: dict[str, Any], field: str, says: str) -> None:
    sound: dict[str, Any] = {"name": "pager", "url": "https://93.184.215.14/hook"}
    with pytest.raises(CatalogError) as no:
        add_webhook(**sound | told, by="alice", door="command")
    assert [fault.field for fault in no.value.faults] == [field]
    assert says in str(no.value)
    assert "secret" not in str(no.value)
    assert not Webhook.objects.exists()
