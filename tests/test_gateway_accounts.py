"""Usage, from a request's end to the rows: counted, written once whatever happens, told and forgotten."""

from __future__ import annotations

import asyncio
import random
import threading
import uuid
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.db import OperationalError, connections
from django.db.models import Q, Sum
from hypothesis import given, settings
from hypothesis import strategies as st

from catalog.models import Name, database_now
from llmgw.celery import app
from llmgw.gateway.accounts import Accounts
from llmgw.gateway.passage import Passage
from nodes.models import Gateway, Usage
from nodes.tallies import OUTCOMES, Tally
from nodes.usage import KEEP_HOURS, KEEP_MINUTES, add_lot, ever, forget, used
from tests.stage import make_key, make_model

NOON_S = datetime(2026, 11, 30, 12, 0, tzinfo=UTC).timestamp()


def passed(model: str = "tiny", **told: Any) -> Passage:
    """A streamed chat of 11 tokens, the first after half a second and the last a second later."""
    usual: dict[str, Any] = {
        "endpoint": "/v1/chat/completions",
        "key": "k",
        "is_streamed": True,
        "sent_at_s": 100.1,
        "first_byte_at_s": 100.5,
        "ended_at_s": 101.5,
        "status": 200,
        "prompt_tokens": 100,
        "cached_tokens": 60,
        "completion_tokens": 11,
    }
    return Passage("req", 100.0, model=model, **usual | told)


def some(requests: int = 1, tokens: int = 0) -> Tally:
    tally = Tally()
    tally.requests, tally.completion_tokens = requests, tokens
    tally.observe("ttft", 0.5)
    return tally


def lot(requests: int = 1, *, key: str = "k", model: str = "tiny", outcome: str = "2xx") -> Any:
    return {(key, model, "/v1/chat/completions", outcome): some(requests)}


def requests_in(span: str) -> int:
    return Usage.objects.filter(span=span).aggregate(n=Sum("requests"))["n"] or 0


# --- counted ------------------------------------------------------------------------------


def counted(*passages: Passage, **bounds: int) -> dict[Any, Tally]:
    accounts = Accounts(uuid.uuid4(), lambda: None, **bounds)
    for passage in passages:
        accounts.close(passage)
    return accounts._counted


def test_a_request_is_counted_with_its_tokens_and_times() -> None:
    [(place, tally)] = counted(passed(held_s=0.05)).items()
    assert place == ("k", "tiny", "/v1/chat/completions", "2xx")
    assert (tally.prompt_tokens, tally.cached_tokens, tally.completion_tokens) == (100, 60, 11)
    lasted = {time: round(histogram.total_s, 6) for time, histogram in tally.times.items()}
    assert lasted == {"ttft": 0.5, "tpot": 0.1, "queue": 0.05, "hold": 0.05, "duration": 1.5}


@pytest.mark.parametrize(
    ("told", "outcome", "errors", "left", "codes"),
    [
        ({}, "2xx", 0, 0, {}),
        ({"status": 404, "code": "model_not_found"}, "4xx", 1, 0, {"model_not_found": 1}),
        ({"status": 502, "code": "engine_unreachable"}, "5xx", 1, 0, {"engine_unreachable": 1}),
        ({"code": "stream_cut"}, "5xx", 1, 0, {"stream_cut": 1}),
        ({"status": 499, "code": "client_left"}, "499", 0, 1, {}),
        ({"status": 0}, "499", 0, 1, {}),
        ({"status": 500, "code": "an engine's own\nwords"}, "5xx", 1, 0, {"other": 1}),
        ({"status": 500, "code": "x" * 61}, "5xx", 1, 0, {"other": 1}),
        ({"status": 500}, "5xx", 1, 0, {"other": 1}),
    ],
    ids=[
        "answered", "refused", "failed", "a stream that was cut", "left", "never answered",
        "words for a code", "a code without end", "no code",
    ],
)  # fmt: skip
def test_how_it_ended(told: Any, outcome: str, errors: int, left: int, codes: dict[str, int]) -> None:
    [(place, tally)] = counted(passed(**told)).items()
    assert place[3] == outcome
    assert outcome in OUTCOMES
    assert (tally.requests, tally.errors, tally.left, tally.codes) == (1, errors, left, codes)


@pytest.mark.parametrize(
    ("told", "times"),
    [
        ({"is_streamed": False}, {"queue", "duration"}),
        ({"completion_tokens": 1}, {"ttft", "queue", "duration"}),
        ({"sent_at_s": None, "first_byte_at_s": None, "status": 429}, {"duration"}),
    ],
    ids=["a plain answer comes whole", "one token has no gap", "refused before an engine had it"],
)
def test_only_times_that_there_were_are_counted(told: Any, times: set[str]) -> None:
    [tally] = counted(passed(**told)).values()
    assert set(tally.times) == times


def test_strange_keys_and_models_do_not_fill_the_memory() -> None:
    found = counted(*(passed(key=f"key-{number}") for number in range(100)), places_at_once=10)
    assert len(found) == 11
    assert found["", "tiny", "", "2xx"].requests == 90


# --- written ------------------------------------------------------------------------------


@pytest.mark.django_db
def test_a_lot_is_a_minute_an_hour_and_what_ever_was() -> None:
    key, _ = make_key("ada")
    add_lot(uuid.uuid4(), 1, NOON_S + 754, lot(3, key=key.id))
    add_lot(uuid.uuid4(), 1, NOON_S + 759, lot(4, key=key.id))
    rows = {row.span: row for row in Usage.objects.all()}
    assert {span: (row.begins_at.timestamp() - NOON_S, row.requests) for span, row in rows.items()} == {
        "minute": (720, 7),
        "hour": (0, 7),
        "ever": (-NOON_S, 7),
    }
    assert (rows["minute"].key, rows["minute"].key_name, rows["minute"].endpoint) == (key.id, "ada", "")
    assert (rows["ever"].key, rows["ever"].endpoint) == ("", "/v1/chat/completions")
    assert sum(rows["hour"].times["ttft"][1:]) == 2


@pytest.mark.django_db
def test_a_lot_that_is_tried_again_is_added_once() -> None:
    gateway = uuid.uuid4()
    for number in (1, 1, 2, 1, 2, 3):
        add_lot(gateway, number, NOON_S, lot(10**number))
    assert {requests_in(span) for span in ("minute", "hour", "ever")} == {10 + 100 + 1000}
    assert Gateway.objects.get().lots == 3


@pytest.mark.django_db
def test_two_gateways_number_their_own_lots() -> None:
    for gateway in (uuid.uuid4(), uuid.uuid4()):
        add_lot(gateway, 1, NOON_S, lot(5))
    assert requests_in("minute") == 10


@pytest.mark.django_db(transaction=True)
def test_gateways_that_write_at_once_add_up_and_never_wait_for_each_other() -> None:
    places = [(f"key-{key}", f"model-{model}") for key in range(4) for model in range(3)]
    failures: list[Exception] = []

    def gateway() -> None:
        own, dice = uuid.uuid4(), random.Random(threading.get_ident())
        try:
            for number in range(1, 9):
                chosen = dice.sample(places, 8)
                counted = {(key, model, "e", "2xx"): some(1, tokens=2) for key, model in chosen}
                add_lot(own, number, NOON_S, counted)
        except Exception as failure:
            failures.append(failure)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=gateway) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for span in ("minute", "hour", "ever"):
        sums = Usage.objects.filter(span=span).aggregate(r=Sum("requests"), t=Sum("completion_tokens"))
        assert sums == {"r": 4 * 8 * 8, "t": 2 * 4 * 8 * 8}


class Database:
    """The real one, with a way to it that breaks: it may refuse, or take a lot and lose the answer."""

    def __init__(self) -> None:
        self.mood = "well"
        self.clock_s: float | None = NOON_S

    def __call__(self, *lot: Any) -> None:
        if self.mood == "away":
            raise OperationalError("the connection was refused")
        add_lot(*lot)
        if self.mood == "mute":
            raise OperationalError("the connection was lost during commit")


@pytest.mark.django_db(transaction=True)
def test_nothing_is_lost_or_counted_twice_while_the_database_comes_and_goes() -> None:
    closed = asyncio.run(_come_and_go(Database(), random.Random(7)))
    for span in ("minute", "hour", "ever"):
        assert requests_in(span) == closed


async def _come_and_go(database: Database, dice: random.Random) -> int:
    accounts = Accounts(uuid.uuid4(), lambda: database.clock_s, flush_s=3600, add=database)
    await accounts.start()
    closed = 0
    for _ in range(60):
        for _ in range(dice.randrange(4)):
            accounts.close(passed(dice.choice(("tiny", "huge"))))
            closed += 1
        database.mood = dice.choice(("well", "away", "mute"))
        database.clock_s = None if dice.random() < 0.1 else NOON_S + dice.randrange(7200)
        await accounts.write()
    database.mood, database.clock_s = "well", NOON_S
    await accounts.stop()
    return closed


async def test_a_long_absence_of_the_database_costs_minutes_not_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    database = Database()
    database.mood = "away"
    accounts = Accounts(uuid.uuid4(), lambda: database.clock_s, flush_s=3600, add=database, lots_kept=5)
    for minute in range(50):
        database.clock_s = NOON_S + 60 * minute
        accounts.close(passed())
        await accounts.write()
    assert len(accounts._lots) == 5
    assert caplog.text.count("Usage cannot be written, and is kept") == 1
    await accounts.stop()
    assert "what 50 requests used is lost with this process" in caplog.text


# --- told ---------------------------------------------------------------------------------


@pytest.mark.django_db
@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.integers(0, 5000), st.sampled_from("ab"), st.sampled_from("xy")), max_size=6),
    st.integers(1, 5000),
)
def test_what_is_told_is_what_was_used_since_then(ended: list[tuple[int, str, str]], since: int) -> None:
    """Minutes ago are added up from minutes and hours, and nothing is counted twice where they meet."""
    Usage.objects.all().delete()
    now, gateway = datetime(2026, 11, 30, 12, 34, 56, tzinfo=UTC), uuid.uuid4()
    for number, (minutes, key, model) in enumerate(ended, 1):
        add_lot(gateway, number, now.timestamp() - 60 * minutes, lot(1, key=key, model=model))
    lines = used(now, timedelta(minutes=since))
    if since <= 48 * 60:
        wanted = [(key, model) for minutes, key, model in ended if minutes <= since]
    else:  # from the whole hour on
        wanted = [(key, model) for minutes, key, model in ended if (minutes + 25) // 60 <= (since + 25) // 60]
    assert {(line.key, line.model): line.tally.requests for line in lines} == {
        place: wanted.count(place) for place in wanted
    }
    assert sum(line.tally.requests for line in used(now, timedelta(minutes=since), by=("model",))) == len(
        wanted
    )
    of_a = used(now, timedelta(minutes=since), by=(), where=Q(key="a"))
    assert sum(line.tally.requests for line in of_a) == sum(key == "a" for key, _ in wanted)


@pytest.mark.django_db
def test_the_usage_of_what_is_gone_stays_and_its_counters_go() -> None:
    model, (key, _) = make_model("tiny"), make_key("ada")
    add_lot(uuid.uuid4(), 1, database_now().timestamp(), lot(3, key=key.id) | lot(2, model=""))
    assert {model: tally.requests for model, _, _, tally in ever()} == {"tiny": 3, "": 2}
    key.delete()
    Name.objects.all().delete()
    model.delete()
    [known, _] = used(database_now(), timedelta(hours=1))
    assert (known.key_name, known.model, known.tally.requests) == ("ada", "tiny", 3)
    assert {model: tally.requests for model, _, _, tally in ever()} == {"": 2}


# --- forgotten ----------------------------------------------------------------------------


@pytest.mark.django_db
def test_minutes_go_after_two_days_and_hours_after_ninety() -> None:
    now = database_now()
    for age in (timedelta(0), KEEP_MINUTES - timedelta(minutes=5), KEEP_MINUTES * 1.5, KEEP_HOURS * 1.01):
        add_lot(uuid.uuid4(), 1, (now - age).timestamp(), lot())
    assert forget() is False
    assert Usage.objects.filter(span="minute").count() == 2
    assert Usage.objects.filter(span="hour").count() == 3
    assert requests_in("ever") == 4  # no such model is left, but hours still tell of it
    Usage.objects.filter(span="hour").delete()
    forget()
    assert requests_in("ever") == 0


@pytest.mark.django_db
def test_it_is_forgotten_in_bites() -> None:
    long_ago = database_now() - KEEP_HOURS - timedelta(days=1)
    for minute in range(4):
        add_lot(uuid.uuid4(), 1, (long_ago + timedelta(minutes=minute)).timestamp(), lot())
    left = [Usage.objects.count()]
    while forget(bite=3):
        left.append(Usage.objects.count())
    assert all(before - after == 3 for before, after in pairwise(left))
    assert requests_in("minute") == requests_in("hour") == 0


@pytest.mark.django_db
def test_the_beat_has_it_forgotten() -> None:
    entry = django_settings.CELERY_BEAT_SCHEDULE["forget usage"]
    add_lot(uuid.uuid4(), 1, (database_now() - KEEP_HOURS - timedelta(days=1)).timestamp(), lot())
    app.tasks[entry["task"]].apply()
    assert requests_in("hour") == 0
    assert entry["options"]["expires"] <= entry["schedule"]
