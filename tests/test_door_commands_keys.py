"""`manage.py key_create`: a key that ends when it was said to."""

from __future__ import annotations

import io
import json
from datetime import datetime, timedelta

import pytest
from django.core.management import CommandError, call_command

from catalog.models import Event, Key
from tests.cast import alice

pytestmark = pytest.mark.django_db


def made(*options: str) -> Key:
    alice()
    told = io.StringIO()
    call_command("key_create", "ci", "--user", "alice", "--json", *options, stdout=told)
    answer = json.loads(told.getvalue())
    key = Key.objects.get(pk=answer["id"])
    assert key.expires_at == (answer["expires_at"] and datetime.fromisoformat(answer["expires_at"]))
    return key


def test_a_key_lasts_unless_it_was_said_when_it_ends() -> None:
    assert made().expires_at is None


def test_a_key_ends_when_it_was_said_to() -> None:
    key = made("--expires-in", "720h", "--why", "trial")
    assert key.expires_at is not None
    assert key.expires_at - key.created_at == timedelta(days=30)
    assert Event.objects.get(verb="mint").why == "trial"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("30d", "expires_in must be a duration in h, m, s or ms, such as 1h30m, 1.5s or 300ms"),
        ("0s", "expires_in must be above 0, such as 720h; leave it out for a key that lasts"),
        ("-1h", "expires_in must be above 0, such as 720h; leave it out for a key that lasts"),
    ],
    ids=["days", "no time at all", "a time before"],
)
def test_what_is_no_time_is_refused(text: str, says: str) -> None:
    with pytest.raises(CommandError, match=f"^{says}$"):
        made(f"--expires-in={text}")
    assert not Key.objects.exists()
