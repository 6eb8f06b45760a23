"""Requests for a model that is not ready: they wake it, wait up to a bound, and are told for what."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from django.conf import settings as django_settings
from django.db import connection, transaction

from catalog.models import Model, Revision, Tombstone, database_now
from llmgw.gateway.holding import WAITING_LIMIT
from nodes.models import Demand, Gateway, Unplaced
from tests.stage import (
    MESSAGES,
    Play,
    change,
    make_key,
    make_model,
    make_replica,
    playing,
    playing_engine,
    saying,
    well_behaved,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def play() -> Iterator[Play]:
    with playing() as play:
        yield play


@pytest.fixture
def hasty(settings: Any) -> Iterator[Play]:
    """A gateway that holds requests for a moment only."""
    settings.LLMGW_HOLD_S = 0.3
    with playing() as play:
        yield play


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def _demand(model: Model) -> tuple[int, int] | None:
    return Demand.objects.filter(model=model).values_list("waiting", "in_flight").first()


def _wait_for_waiters(model: Model, count: int = 1) -> None:
    wait_until(lambda: (_demand(model) or (0, 0))[0] == count, f"{count} to wait for {model}")


@pytest.mark.parametrize("is_stream", [pytest.param(False, id="plain"), pytest.param(True, id="streamed")])
def test_a_request_for_a_sleeping_model_waits_and_is_answered_once_it_is_ready(
    play: Play, pool: ThreadPoolExecutor, is_stream: bool
) -> None:
    model = make_model("asleep", low=0)
    asked = pool.submit(play.chunks if is_stream else play.chat, model="asleep")
    _wait_for_waiters(model)
    replica = make_replica(model, None, state="starting")
    assert not play.engine.heard
    replica.ranks.update(port=play.engine.port)
    change(replica, state="ready")
    assert asked.result(10)
    wait_until(lambda: _demand(model) == (0, 0), "the demand to be settled")


def test_every_waiter_is_answered_as_it_asked_when_the_model_is_ready(
    play: Play, pool: ThreadPoolExecutor
) -> None:
    model = make_model("asleep", low=0)
    texts = [f"{number} " * 20_000 for number in range(5)]
    asked = [
        pool.submit(play.chat, model="asleep", messages=[{"role": "user", "content": text}]) for text in texts
    ]
    _wait_for_waiters(model, 5)
    make_replica(model, play.engine)
    assert all(each.result(10).choices for each in asked)
    assert sorted(heard.fields["messages"][0]["content"] for heard in play.engine.heard) == texts


def test_a_waiting_request_wakes_the_reconciler_after_its_demand_is_written(
    play: Play, pool: ThreadPoolExecutor
) -> None:
    broker = Path(django_settings.LLMGW_VAR) / "broker"
    before = set(broker.glob("*.msg"))
    model = make_model("asleep", low=0)
    asked = pool.submit(play.chat, model="asleep")
    wait_until(lambda: set(broker.glob("*.msg")) - before, "a tick to be sent")
    assert _demand(model) == (1, 0)
    make_replica(model, play.engine)
    asked.result(10)


@pytest.mark.parametrize(
    ("prepare", "code", "says"),
    [
        pytest.param(lambda model: None, "loading", "its load has not begun", id="nothing happened yet"),
        pytest.param(
            lambda model: make_replica(model, None, state="starting", reason="loading weights"),
            "loading",
            "starting: loading weights",
            id="a replica is starting",
        ),
        pytest.param(
            lambda model: Unplaced.objects.create(model=model, missing=1, why="0 of 1 nodes: 1 cordoned"),
            "unavailable",
            "0 of 1 nodes: 1 cordoned",
            id="nothing fits",
        ),
    ],
)
def test_who_waited_in_vain_is_told_for_what(hasty: Play, prepare: Any, code: str, says: str) -> None:
    model = make_model("asleep", low=0)
    prepare(model)
    refusal = hasty.refused(model="asleep")
    assert (refusal.status, refusal.body["code"]) == (503, code)
    assert says in refusal.body["message"]
    assert "retry-after" in refusal.headers
    wait_until(lambda: _demand(model) == (0, 0), "the waiter to be counted off")


# --- what they are told meanwhile ---------------------------------------------------------


@pytest.fixture
def told(settings: Any) -> Iterator[Play]:
    """A gateway that soon begins the streams that it holds, and says often what they wait for."""
    settings.LLMGW_HOLD_S = 3
    settings.LLMGW_GRACE_S, settings.LLMGW_COMMENT_S = 0.2, 0.1
    with playing() as play:
        yield play


def _stream_of(play: Play, model: str) -> Iterator[bytes]:
    """The head of an answer to a streamed chat, and its lines as they come."""
    body = json.dumps({"model": model, "messages": MESSAGES, "stream": True}).encode()
    with play.web.connection() as connection, connection.makefile("rb") as lines:
        connection.sendall(play.request(body, b"Content-Length: %d" % len(body), b"Connection: close"))
        yield lines.readline()
        for line in lines:
            if line.startswith((b":", b"data:", b"{")):
                yield line.strip()


def _set_fetched(replica: Any, done: int, total: int = 100) -> None:
    replica.ranks.update(done_bytes=done, total_bytes=total)


def test_a_stream_that_is_held_tells_how_far_its_model_is_and_then_goes_on(told: Play) -> None:
    model = make_model("asleep", low=0)
    replica = make_replica(model, None, state="fetching")
    _set_fetched(replica, 41)
    frames = _stream_of(told, "asleep")
    assert next(frames).startswith(b"HTTP/1.1 200")
    assert next(frames) == b": loading fetching 41%"
    _set_fetched(replica, 87)
    assert any(frame == b": loading fetching 87%" for frame in frames)
    replica.ranks.update(port=told.engine.port)
    change(replica, state="ready")
    rest = list(frames)
    assert any(b"Hello" in frame for frame in rest)
    assert b"data: [DONE]" in rest


def test_a_stream_that_was_held_in_vain_ends_with_an_error_and_never_as_if_it_were_done(told: Play) -> None:
    make_model("asleep", low=0)
    head, *frames = _stream_of(told, "asleep")
    assert head.startswith(b"HTTP/1.1 200")
    assert frames[0] == b": loading pending"
    error = json.loads(next(frame for frame in frames if frame.startswith(b"data:"))[6:])["error"]
    assert error["code"] == "loading"
    assert error["loading"]["state"] == "pending"
    assert not any(b"[DONE]" in frame for frame in frames)


def test_a_failure_within_the_grace_keeps_its_status(told: Play) -> None:
    model = make_model("broken", low=0)
    failed = make_replica(model, None, state="failed", reason="unknown flag --foo")
    change(failed, failure_kind="configuration")
    Unplaced.objects.create(model=model, missing=1, why='profile "default" failed: unknown flag --foo')
    assert next(_stream_of(told, "broken")).startswith(b"HTTP/1.1 503")


def test_a_plain_request_that_waited_in_vain_is_told_how_far_the_load_is(hasty: Play) -> None:
    model = make_model("asleep", low=0)
    replica = make_replica(model, None, state="fetching")
    _set_fetched(replica, 25)
    wait_until(
        lambda: hasty.refused(model="asleep").body["loading"]["progress"] == 0.25, "the table to tell of it"
    )
    loading = hasty.refused(model="asleep").body["loading"]
    assert loading["state"] == "fetching"
    assert loading["node"] == "here"
    assert loading["eta_seconds"] >= 0


# --- a replica that is not what the table says --------------------------------------------


def test_who_meets_a_last_replica_that_drains_waits_for_the_next(
    play: Play, pool: ThreadPoolExecutor
) -> None:
    play.engine.script = saying(503, {"error": {"message": "draining"}})
    change(play.replica, state="draining", wanted="drain")
    asked = pool.submit(play.chat)
    _wait_for_waiters(play.model)
    with playing_engine(play.thread, well_behaved) as next_engine:
        make_replica(play.model, next_engine)
        assert asked.result(10).choices


def test_an_engine_that_drains_before_the_table_says_so_is_left_for_the_next(
    play: Play, pool: ThreadPoolExecutor
) -> None:
    def leave_the_table() -> None:
        try:
            change(play.replica, state="draining", wanted="drain")
        finally:
            connection.close()  # it is this thread's own

    async def drains(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
        await asyncio.to_thread(leave_the_table)
        return web.json_response(
            {"error": {"message": "cannot schedule new futures after shutdown"}}, status=500
        )

    play.engine.script = drains
    asked = pool.submit(play.chat)
    _wait_for_waiters(play.model)
    assert len(play.engine.heard) == 1
    with playing_engine(play.thread, well_behaved) as next_engine:
        make_replica(play.model, next_engine)
        assert asked.result(10).choices


def test_an_engine_that_died_is_waited_for_and_the_reconciler_is_told_to_look(
    play: Play, pool: ThreadPoolExecutor
) -> None:
    broker = Path(django_settings.LLMGW_VAR) / "broker"
    play.thread.run(play.engine.close())
    before = set(broker.glob("*.msg"))
    asked = [pool.submit(play.chunks if each % 2 else play.chat) for each in range(6)]
    _wait_for_waiters(play.model, 6)
    wait_until(lambda: set(broker.glob("*.msg")) - before, "a tick to be sent")
    play.thread.run(play.engine.open())
    assert all(each.result(10) for each in asked), "nobody saw an error"
    wait_until(lambda: _demand(play.model) == (0, 0), "the demand to be settled")


def test_nobody_waits_for_what_only_an_edit_can_help(play: Play) -> None:
    model = make_model("broken", low=0)
    failed = make_replica(model, None, state="failed", reason="unknown flag --foo")
    change(failed, failure_kind="configuration")
    Unplaced.objects.create(model=model, missing=1, why='profile "default" failed: unknown flag --foo')
    refusal = play.refused(model="broken")
    assert (refusal.status, refusal.body["code"]) == (503, "unavailable")
    assert "unknown flag --foo" in refusal.body["message"]
    wait_until(lambda: _demand(model) == (0, 0), "the question to be recorded all the same")


def test_a_model_that_is_off_is_refused_at_once_and_for_good(play: Play) -> None:
    model = make_model("off", low=0, high=0)
    refusal = play.refused(model="off")
    assert (refusal.status, refusal.body["code"]) == (503, "off")
    assert "retry-after" not in refusal.headers
    assert "max 0" in refusal.body["message"]
    assert _demand(model) is None


def _remove(model: Model) -> None:
    with transaction.atomic():
        Tombstone.objects.create(name=model.name, revision=Revision.advance())
        model.delete()


def _add_anew(model: Model) -> None:
    with transaction.atomic():
        _remove(model)
        make_model(model.name, low=0)


@pytest.mark.parametrize(
    ("change_model", "status", "code"),
    [
        pytest.param(
            lambda model: change(model, scaling_max=0), 503, "off", id="it is switched off meanwhile"
        ),
        pytest.param(_remove, 404, "model_not_found", id="it is removed meanwhile"),
        pytest.param(_add_anew, 503, "model_replaced", id="it is removed and added anew meanwhile"),
    ],
)
def test_a_waiting_request_hears_at_once_that(
    play: Play, pool: ThreadPoolExecutor, change_model: Any, status: int, code: str
) -> None:
    model = make_model("asleep", low=0)
    asked = pool.submit(play.refused, model="asleep")
    _wait_for_waiters(model)
    change_model(model)
    refusal = asked.result(5)
    assert (refusal.status, refusal.body["code"]) == (status, code)


def test_a_waiting_request_hears_of_no_model_that_its_key_does_not_open(
    play: Play, pool: ThreadPoolExecutor
) -> None:
    model = make_model("asleep", low=0)
    make_model("asleep-2", low=0)
    with transaction.atomic():
        row, key = make_key(opens_all=False)
        row.opened.add(model)
    body = json.dumps({"model": "asleep", "messages": MESSAGES}).encode()
    asked = pool.submit(play.send, "POST", "/v1/chat/completions", body, Authorization=f"Bearer {key}")
    _wait_for_waiters(model)
    _remove(model)
    refusal = asked.result(5)
    assert (refusal.status, refusal.body["code"]) == (404, "model_not_found")
    assert "asleep-2" not in refusal.body["message"]


def test_a_client_that_stops_waiting_is_counted_off(play: Play) -> None:
    model = make_model("asleep", low=0)
    client = play.web.client(play.key).with_options(timeout=1)
    with client, pytest.raises(Exception, match="timed out"):
        client.chat.completions.create(model="asleep", messages=MESSAGES)
    wait_until(lambda: _demand(model) == (0, 0), "the waiter to be counted off")


def test_the_line_is_bounded(play: Play) -> None:
    model = make_model("asleep", low=0)
    body = json.dumps({"model": "asleep", "messages": MESSAGES}).encode()
    with contextlib.ExitStack() as stack:
        line = [stack.enter_context(play.web.connection()) for _ in range(WAITING_LIMIT)]
        for each in line:
            each.sendall(play.request(body))
        _wait_for_waiters(model, WAITING_LIMIT)
        refusal = play.refused(model="asleep")
        assert (refusal.status, refusal.body["code"]) == (503, "too_many_waiting")
        make_replica(model, play.engine)
        assert all(each.recv(1000).startswith(b"HTTP/1.1 200") for each in line)


# --- what the reconciler reads ------------------------------------------------------------


def test_a_gateway_writes_its_heartbeat_and_what_it_has_seen(play: Play) -> None:
    gateway = wait_until(Gateway.objects.first, "the gateway to write its row")
    assert gateway is not None
    first = gateway.heartbeat_at
    wait_until(lambda: Gateway.objects.get().heartbeat_at > first, "the next heartbeat")
    change(play.model, description="edited")
    revision = Model.objects.get().revision
    wait_until(lambda: Gateway.objects.get().seen_revision >= revision, "the edit to be seen", timeout_s=2)
    assert play.shown("tiny")["description"] == "edited"


def test_a_model_is_idle_from_its_last_answer_on_by_the_databases_clock(
    play: Play, pool: ThreadPoolExecutor
) -> None:
    may_end = asyncio.Event()

    async def takes_its_time(request: web.Request, fields: dict[str, Any]) -> web.StreamResponse:
        await may_end.wait()
        return await well_behaved(request, fields)

    play.engine.script = takes_its_time
    asked = pool.submit(play.chat)
    wait_until(lambda: _demand(play.model) == (0, 1), "the request to be counted")
    before = database_now()
    play.thread.loop.call_soon_threadsafe(may_end.set)
    asked.result(10)
    wait_until(lambda: _demand(play.model) == (0, 0), "the demand to be written")
    asked_at = Demand.objects.get().asked_at
    assert asked_at is not None
    assert before <= asked_at <= database_now()


def test_a_gateway_whose_row_was_removed_writes_everything_again(play: Play) -> None:
    play.chat()
    wait_until(lambda: _demand(play.model) == (0, 0), "the demand to be written")
    Gateway.objects.all().delete()
    wait_until(lambda: _demand(play.model) == (0, 0), "the demand to be written again")


def test_a_gateway_that_stops_leaves_no_waiters_and_its_memory() -> None:
    with playing() as play:
        play.chat()
    assert [(row.waiting, row.in_flight) for row in Demand.objects.all()] == [(0, 0)]
    assert Gateway.objects.count() == 1
