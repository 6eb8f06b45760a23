"""Notices: what is told once when a trouble begins and once when it is over, to whom, and where never to."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.db import OperationalError, connection
from django.db.models.functions import Now

from catalog.actions import mint_key, renew_playground_key
from catalog.durations import HOUR
from catalog.models import Event, Key
from catalog.reading import CatalogError
from nodes import lease, notices, noticing, tasks
from nodes.actions import pause, resume
from nodes.models import (
    Cluster,
    Delivery,
    EngineCheck,
    Lease,
    Node,
    Replica,
    Roll,
    Trouble,
    Unplaced,
    Webhook,
)
from nodes.notices import KINDS
from nodes.troubles import Found
from nodes.webhooks import (
    edit_webhook,
    pause_webhook,
    remove_webhook,
    resume_webhook,
    try_webhook,
)
from tests.cast import a_model, a_node, a_replica, alice, edited
from tests.waiting import wait_until
from tests.webhook_receiver import Receiver, hook, let_in


@pytest.fixture
def receiver(settings: Any) -> Iterator[Receiver]:
    let_in(settings)
    with Receiver() as receiver:
        yield receiver


def seen_lately() -> None:
    """As if a pass had just been made: its silence is no part of these tests."""
    Lease.objects.update_or_create(name=lease.NAME, defaults={"expires_at": Now()})


def lost(name: str = "gpu-07") -> Node:
    node = a_node(name, problem=f"The agent of {name} did not answer within 5 s.")
    Node.objects.filter(pk=node.pk).update(seen_at=Now() - timedelta(minutes=5))
    return node


def tell(*kinds: str) -> None:
    """As the task does, for as long as something changes at once."""
    seen_lately()
    noticing.look(kinds or tuple(KINDS))
    noticing.deliver()


def settle() -> None:
    """As if what is gone had been so for long enough."""
    Trouble.objects.exclude(gone_at=None).update(gone_at=Now() - noticing.SETTLED)


# --- one while it lasts, one when it ends ----------------------------------------------------------


@pytest.mark.django_db
def test_a_node_that_is_lost_and_back_is_told_twice(receiver: Receiver) -> None:
    webhook, secret = hook(receiver)
    node = lost()
    for _ in range(3):
        tell()
    assert receiver.told == [("node_lost", "begins", "gpu-07")]
    Node.objects.filter(pk=node.pk).update(seen_at=Now())
    for _ in range(3):
        tell()
    assert len(receiver.told) == 1, "it may be gone for a moment alone"
    settle()
    for _ in range(3):
        tell()
    assert receiver.told[1:] == [("node_lost", "over", "gpu-07")]
    first = receiver.received[0]
    assert first.is_signed_with(secret)
    assert not first.is_signed_with(secret + "x")
    assert first.json["sentence"] == "The agent of gpu-07 did not answer within 5 s."
    assert first.json["cluster"] == str(Cluster.this().uuid)
    assert first.headers["LLMGW-Notice"] == str(first.json["id"])
    assert not Trouble.objects.exists()
    webhook.refresh_from_db()
    assert (webhook.delivered, webhook.failed) == (2, 0)


@pytest.mark.django_db
def test_one_that_is_back_for_a_moment_alone_is_told_once(receiver: Receiver) -> None:
    hook(receiver)
    node = lost()
    tell()
    for seen_at in (Now(), Now() - timedelta(minutes=5)) * 2:
        Node.objects.filter(pk=node.pk).update(seen_at=seen_at)
        tell()
    assert receiver.told == [("node_lost", "begins", "gpu-07")]


@pytest.mark.django_db
def test_what_is_borne_with_is_told_once_it_has_lasted(receiver: Receiver) -> None:
    hook(receiver)
    model = a_model()
    want = Unplaced.objects.create(model=model, missing=1, why="0 of 1 nodes: 1 lacks a free sim")
    tell()
    assert receiver.told == []
    Trouble.objects.update(since=Now() - timedelta(minutes=3))
    tell()
    assert receiver.told == [("unplaced", "begins", "tiny")]
    want.delete()
    other = Unplaced.objects.create(model=a_model("small"), missing=1, why="no node")
    tell()
    other.delete()
    settle()
    tell()
    assert receiver.told[1:] == [("unplaced", "over", "tiny")], "nobody was told of the other"


def a_stale_one() -> str:
    model = a_model()
    a_replica(model, a_node())
    edited(model, args=["--x"])
    return "tiny"


def a_crash_loop() -> str:
    model, node = a_model(), a_node()
    for _ in range(5):
        a_replica(model, node, "failed", gpu=None, reason="it ended with exit code 1")
    return "tiny/default"


def a_halted_roll() -> str:
    Roll.objects.create(model=a_model(), by="alice", halted="the new replica failed")
    return "tiny"


def a_full_disk() -> str:
    node = a_node()
    Node.objects.filter(pk=node.pk).update(
        report={**node.report, "disk_total_bytes": 10**12, "disk_free_bytes": 10**10}
    )
    return "gpu-01"


def an_old_key() -> str:
    user, day_ns = alice(), 24 * HOUR
    made: dict[str, Any] = {"user": user, "scope": "inference", "by": "alice", "door": "command"}
    key, _ = mint_key("ci", expires_in_ns=6 * day_ns, **made)
    renew_playground_key(user, by="alice", door="admin")
    Key.objects.update(created_at=Now() - timedelta(days=30))
    mint_key("for an hour", expires_in_ns=HOUR, **made)
    mint_key("for long", expires_in_ns=90 * day_ns, **made)
    return str(key.pk)


def a_failed_check() -> str:
    model = a_model()
    told = {"model": model, "profile_name": "default", "engine": "sim", "replica": uuid4(), "job": uuid4()}
    works, fails = ({"check": "stop", "verdict": each} for each in ("verified", "claimed, failed"))
    EngineCheck.objects.create(fingerprint="0" * 16, findings=[fails], **told)  # of what it was before
    EngineCheck.objects.create(
        fingerprint=model.profiles.get().fingerprint, findings=[works, fails | {"check": "chat"}], **told
    )
    return "tiny/default"


def a_pause() -> str:
    pause(by="alice", door="command", why="a move")
    return "reconciler"


def an_alarm() -> str:
    Cluster.this()
    Cluster.objects.update(alarm="half of the nodes are silent")
    return "reconciler"


def a_rival() -> str:
    says = f"older (4) than one obeyed here (5); {lease.OUTRANK_COMMAND} has it obeyed again"
    a_replica(a_model(), a_node(), "starting", reason=says)
    return "reconciler"


TROUBLES = {
    notices.STALE: a_stale_one,
    notices.CRASH_LOOP: a_crash_loop,
    notices.ROLL_HALTED: a_halted_roll,
    notices.DISK_LOW: a_full_disk,
    notices.KEY_EXPIRING: an_old_key,
    notices.ENGINE_CHECK: a_failed_check,
    notices.PAUSED: a_pause,
    notices.ALARM: an_alarm,
    notices.OUTRANKED: a_rival,
}


@pytest.mark.django_db
@pytest.mark.parametrize("kind", TROUBLES)
def test_each_kind_is_seen(kind: str) -> None:
    seen_lately()
    noticing.look()
    assert not Trouble.objects.exists()
    subject = TROUBLES[kind]()
    noticing.look()
    found = list(Trouble.objects.values_list("kind", "subject", "sentence"))
    assert [each[:2] for each in found] == [(kind, subject)]
    assert found[0][2]


@pytest.mark.django_db
def test_a_reconciler_that_makes_no_pass_is_seen() -> None:
    noticing.look()
    assert list(Trouble.objects.values_list("kind", flat=True)) == [notices.SILENT]


def test_every_kind_is_looked_for_and_tested() -> None:
    assert {*TROUBLES, notices.NODE_LOST, notices.UNPLACED, notices.SILENT} == KINDS.keys()


@pytest.mark.django_db
def test_two_that_look_at_once_tell_once(receiver: Receiver) -> None:
    hook(receiver)
    lost()
    seen_lately()
    noticing.look()
    stale_rows = list(Trouble.objects.all())
    Trouble.objects.update(told_at=None)
    Delivery.objects.all().delete()
    noticing.look()
    for row in stale_rows:  # as the other saw it before
        row.told_at = None
        noticing._see(row.kind, Found(row.subject, row.sentence), row, row.since)
    assert Delivery.objects.count() == 1


@pytest.mark.django_db
def test_nothing_is_written_where_all_is_as_it_was(django_assert_num_queries: Any) -> None:
    lost()
    tell()
    events = Event.objects.count()
    before = list(Trouble.objects.values())
    tell()
    assert list(Trouble.objects.values()) == before
    assert Event.objects.count() == events


@pytest.mark.django_db
def test_so_many_queries_however_much_is_wrong(django_assert_max_num_queries: Any) -> None:
    for number in range(3):
        model = a_model(f"model-{number}")
        a_replica(model, a_node(f"node-{number}"))
        edited(model, args=["--x"])
    noticing.look()
    with django_assert_max_num_queries(40) as few:
        noticing.look()
    for number in range(3, 12):
        model = a_model(f"model-{number}")
        a_replica(model, a_node(f"node-{number}"))
        edited(model, args=["--x"])
    noticing.look()
    with django_assert_max_num_queries(40) as many:
        noticing.look()
    assert len(many) == len(few)


@pytest.mark.django_db(transaction=True)
def test_the_log_is_told_with_nothing_that_hides_in_it(caplog: pytest.LogCaptureFixture) -> None:
    node = lost("a\u202eb")
    Node.objects.filter(pk=node.pk).update(problem="one line\nERROR another")
    with caplog.at_level(logging.INFO, logger="llmgw.notices"):
        tell()
    told = [record.getMessage() for record in caplog.records if record.name == "llmgw.notices"]
    assert told == ["node_lost begins: a\\u202eb: one line\\nERROR another"]


# --- who is told ----------------------------------------------------------------------------------


@pytest.mark.django_db
def test_a_webhook_is_told_of_what_it_wants_and_while_it_is_not_paused(receiver: Receiver) -> None:
    hook(receiver, kinds=["unplaced"])
    other, _ = hook(receiver, "other")
    pause_webhook(other, by="alice", door="command")
    lost()
    tell()
    assert receiver.told == []
    resume_webhook(other, by="alice", door="command")
    tell()
    assert receiver.told == [], "it was paused when it began"
    Node.objects.update(seen_at=Now())
    tell()
    settle()
    tell()
    assert receiver.told == [("node_lost", "over", "gpu-07")]


@pytest.mark.django_db
def test_one_that_fails_is_tried_again_ever_later_and_then_given_up(receiver: Receiver) -> None:
    webhook, _ = hook(receiver)
    receiver.status, receiver.answer = 503, b"<b>later</b>\x00"
    lost()
    waits = []
    for _ in range(3):
        tell()
        delivery = Delivery.objects.annotate(now=Now()).get()
        waits.append(round((delivery.next_at - delivery.now).total_seconds()))
        assert noticing.deliver() == 0, "it is not due"
        Delivery.objects.update(next_at=Now())
    assert waits == [10, 20, 40]
    assert (delivery.tries, delivery.status) == (3, 503)
    assert delivery.problem == "It answered 503: <b>later</b>\\x00."
    webhook.refresh_from_db()
    assert (webhook.streak, webhook.failed, webhook.claimed_until) == (3, 3, None)
    Delivery.objects.update(made_at=Now() - timedelta(days=2))
    noticing.forget()
    assert Delivery.objects.get().state == Delivery.State.GIVEN_UP
    webhook.refresh_from_db()
    assert webhook.given_up == 1
    Delivery.objects.update(ended_at=Now() - timedelta(days=8))
    noticing.forget()
    assert not Delivery.objects.exists()


@pytest.mark.django_db
def test_one_that_is_never_taken_keeps_no_other(receiver: Receiver) -> None:
    hook(receiver)
    receiver.status = 400
    lost()
    tell()
    receiver.status = 200
    Delivery.objects.update(next_at=Now() - timedelta(seconds=1))
    lost("gpu-08")
    tell()
    assert [subject for _, _, subject in receiver.told] == ["gpu-07", "gpu-08", "gpu-07"]


@pytest.mark.django_db
def test_one_that_hangs_keeps_no_other_webhook_waiting(receiver: Receiver) -> None:
    hook(receiver)
    with Receiver(hangs=True) as hanging:
        webhook, _ = hook(hanging, "hanging")
        lost()
        began_s = time.monotonic()
        tell()
        assert receiver.told == [("node_lost", "begins", "gpu-07")]
        assert time.monotonic() - began_s < 3
        delivery = webhook.deliveries.get()
        assert (delivery.status, delivery.problem) == (None, "It did not answer within 0.5 s.")
        assert delivery.state == Delivery.State.WAITING


@pytest.mark.django_db
def test_nobody_posts_to_one_that_another_posts_to(receiver: Receiver) -> None:
    hook(receiver)
    lost()
    Webhook.objects.update(claimed_until=Now() + timedelta(seconds=1))
    tell()
    assert receiver.told == []
    Webhook.objects.update(claimed_until=Now() - timedelta(seconds=1))  # whoever had it has died
    assert noticing.deliver() == 1


@pytest.mark.django_db
def test_what_waits_is_bounded(receiver: Receiver) -> None:
    webhook, _ = hook(receiver)
    for number in range(5):
        noticing.hear([webhook], {"kind": "node_lost", "state": "begins", "subject": str(number)})
    noticing.forget(waiting_limit=3)
    waiting = webhook.deliveries.filter(state=Delivery.State.WAITING)
    assert sorted(each.body["subject"] for each in waiting) == ["2", "3", "4"]


@pytest.mark.django_db
def test_a_clock_that_is_set_back_keeps_nobody_from_being_told(receiver: Receiver) -> None:
    hook(receiver)
    model = a_model()
    Unplaced.objects.create(model=model, missing=1, why="no node")
    tell()
    ahead = Now() + timedelta(hours=2)
    Trouble.objects.update(since=ahead)
    tell()
    assert not Trouble.objects.filter(since__gt=Now())
    Trouble.objects.update(since=Now() - timedelta(minutes=3))
    seen_lately()
    noticing.look()
    Webhook.objects.update(claimed_until=ahead)
    Delivery.objects.update(next_at=ahead)
    receiver.status = 500
    assert noticing.deliver() == 0
    assert len(receiver.received) == 1, "what failed waits from the clock as it is now"
    receiver.status = 200
    Delivery.objects.update(next_at=Now())
    assert noticing.deliver() == 1


@contextmanager
def beside(post: Callable[[], object], hanging: Receiver) -> Iterator[None]:
    """What is done while this is posted to one that hangs."""

    def posts() -> None:
        try:
            post()
        finally:
            connection.close()

    posting = threading.Thread(target=posts)
    posting.start()
    wait_until(lambda: hanging.received, "a notice")
    yield
    posting.join(30)


@pytest.mark.django_db(transaction=True)
def test_who_tries_a_webhook_posts_to_it_alone(receiver: Receiver, settings: Any) -> None:
    receiver.hangs, settings.LLMGW_WEBHOOK_TIMEOUT_S = True, 1
    webhook, _ = hook(receiver)
    with beside(lambda: try_webhook(webhook, by="alice", door="command"), receiver):
        assert noticing.deliver() == 0
    assert len(receiver.received) == 1


@pytest.mark.django_db(transaction=True)
def test_of_one_that_is_removed_while_it_hangs_no_other_suffers(receiver: Receiver, settings: Any) -> None:
    settings.LLMGW_WEBHOOK_TIMEOUT_S = 1
    with Receiver(hangs=True) as hanging:
        gone, _ = hook(hanging, "a")
        webhook, _ = hook(receiver, "b")
        lost()
        noticing.look()
        with beside(noticing.deliver, hanging):
            remove_webhook(gone, by="alice", door="command")
    assert webhook.deliveries.get().state == Delivery.State.DELIVERED


@pytest.mark.django_db(transaction=True)
def test_of_one_that_is_removed_while_it_is_tried_the_answer_is_told(receiver: Receiver) -> None:
    receiver.hangs = True
    webhook, _ = hook(receiver)
    told: list[Delivery] = []
    with beside(lambda: told.append(try_webhook(webhook, by="alice", door="command")), receiver):
        remove_webhook(webhook, by="bob", door="admin")
    assert [each.problem for each in told] == ["It did not answer within 0.5 s."]
    assert not Delivery.objects.exists()
    for verb in (try_webhook, pause_webhook):
        with pytest.raises(CatalogError, match='"pager" was removed meanwhile;'):
            verb(webhook, by="alice", door="command")
    assert not remove_webhook(webhook, by="alice", door="command")


@pytest.mark.django_db
def test_what_was_taken_is_counted_and_written_down_or_neither(receiver: Receiver) -> None:
    """A database that goes away between the two leaves nothing to be made up for."""
    webhook, _ = hook(receiver)
    lost()
    seen_lately()
    noticing.look()

    def break_off(execute: Any, sql: str, *args: Any) -> Any:
        if sql.startswith('UPDATE "nodes_delivery"'):
            raise OperationalError
        return execute(sql, *args)

    with pytest.raises(OperationalError), connection.execute_wrapper(break_off):
        noticing.deliver()
    webhook.refresh_from_db()
    assert (webhook.delivered, webhook.deliveries.get().state) == (0, Delivery.State.WAITING)


# --- operators ------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_a_webhook_is_added_changed_and_removed_with_an_event_each(receiver: Receiver) -> None:
    webhook, secret = hook(receiver)
    assert secret.startswith("whsec_")
    with pytest.raises(CatalogError, match='there is a webhook "pager" already'):
        hook(receiver)
    assert not edit_webhook(webhook, kinds=[], by="alice", door="command")
    assert edit_webhook(webhook, kinds=["unplaced"], name="night", by="alice", door="command")
    assert try_webhook(webhook, by="alice", door="command").state == Delivery.State.DELIVERED
    assert receiver.told == [("test", "test", "night")]
    assert receiver.received[0].is_signed_with(secret), "a name is no part of it"
    lost()
    tell()
    assert remove_webhook(webhook, by="alice", door="command")
    assert not remove_webhook(webhook, by="alice", door="command")
    assert not Delivery.objects.exists()
    events = Event.objects.filter(kind="webhook").order_by("id")
    assert [event.verb for event in events] == ["add", "edit", "test", "remove"]
    told = str(list(events.values()))
    assert secret not in told
    assert "t0ken" not in told


@pytest.mark.django_db
def test_its_secret_is_kept_nowhere(receiver: Receiver) -> None:
    _, secret = hook(receiver)
    for kept in (Webhook, Delivery, Event, Trouble, Replica, Key):
        assert secret not in str(list(kept.objects.values()))
    assert secret != hook(receiver, "other")[1]


@pytest.mark.django_db
def test_the_tasks_do_it_and_two_of_them_post_at_once(receiver: Receiver, settings: Any) -> None:
    schedule = settings.CELERY_BEAT_SCHEDULE
    assert schedule["notice"]["task"] == tasks.notice.name
    assert schedule["forget notices"]["task"] == tasks.forget_notices.name
    hook(receiver)
    lost()
    seen_lately()
    assert all(tasks._posting.acquire(blocking=False) for _ in range(tasks.POSTING_AT_ONCE))
    tasks.notice()
    assert receiver.told == [], "both wait for webhooks that hang"
    tasks._posting.release(tasks.POSTING_AT_ONCE)
    tasks.notice()
    assert receiver.told == [("node_lost", "begins", "gpu-07")]
    Delivery.objects.update(ended_at=Now() - timedelta(days=8))
    tasks.forget_notices()
    assert not Delivery.objects.exists()


@pytest.mark.django_db
def test_a_pause_is_told_once_it_has_lasted_and_a_resume_ends_it(receiver: Receiver) -> None:
    hook(receiver)
    pause(by="alice", door="command", why="a move")
    tell()
    Trouble.objects.update(since=Now() - timedelta(minutes=16))
    tell()
    assert receiver.told == [("reconciler_paused", "begins", "reconciler")]
    assert "alice has paused the reconciler (a move)" in receiver.received[0].json["sentence"]
    resume(by="alice", door="command")
    tell()
    settle()
    tell()
    assert receiver.told[1:] == [("reconciler_paused", "over", "reconciler")]
