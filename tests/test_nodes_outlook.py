"""What the next pass would do, read from rows: the pass then does it, and nothing is written for it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.db.models.functions import Now
from django.test.utils import CaptureQueriesContext

from catalog.models import Model
from nodes import lease
from nodes.actions import pause
from nodes.models import Demand, Gateway, Lease, Load, Node, Orphan, Replica
from nodes.outlook import Outlook, preview_change, preview_plan
from nodes.snapshot import PRESSED
from tests.cast import a_model, a_node, a_replica, edited
from tests.fake_agent import FakeAgent, gpus
from tests.passes import HOLDER, add_model, edit_profile, one_pass


def lines(outlook: Outlook) -> list[str]:
    return [f"{item.bucket} {item.model}" for item in outlook.items]


@pytest.mark.django_db(transaction=True)
def test_what_it_tells_is_what_the_pass_does(agent_of: Callable[..., FakeAgent]) -> None:
    agent_of(gpus=gpus(2))
    first = add_model("first", low=2, high=2)
    one_pass()
    add_model("second")
    Model.objects.filter(pk=first.pk).update(scaling_min=1, scaling_max=1)
    told = preview_plan()
    assert lines(told) == ["blocked second", "drain first"]
    assert (told.acting.obstacles, told.plan.acts) == ((), True)
    done = one_pass()
    assert done.plan.drain == told.plan.drain
    assert done.plan.blocked == told.plan.blocked
    one_pass()
    assert lines(preview_plan()) == []


@pytest.mark.django_db(transaction=True)
def test_it_writes_nothing_and_takes_the_same_queries_however_much_there_is(
    agent_of: Callable[..., FakeAgent],
) -> None:
    agent_of(gpus=gpus(4))

    def queries() -> int:
        with CaptureQueriesContext(connection) as seen:
            preview_plan()
        texts = [query["sql"] for query in seen.captured_queries]
        assert all(text.startswith("SELECT") for text in texts), texts
        return len(texts)

    add_model("m0", low=2, high=3)
    one_pass()
    model = Model.objects.get()
    Demand.objects.create(gateway=Gateway.objects.create(), model=model, waiting=9, asked_at=Now())
    Replica.objects.create(launch={"model": "m0"}, model=model, state="failed")
    few = queries()
    assert not Load.objects.exists(), "it is pressed, which only a pass keeps"
    for number in range(1, 4):
        add_model(f"m{number}", low=2, high=2)
    one_pass()
    Replica.objects.filter(model__name="m1").update(state="failed")
    assert queries() == few
    one_pass()
    assert Load.objects.get(model=model).level == PRESSED


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("ago_s", "says"),
    [
        pytest.param(None, "no pass has been made yet; ", id="never"),
        pytest.param(600, "no pass has been made for 10 min; ", id="long ago"),
        pytest.param(1, "", id="a second ago"),
        pytest.param(-20, "", id="one is at work"),
    ],
)
def test_a_reconciler_that_is_not_there_is_told(ago_s: int | None, says: str) -> None:
    if ago_s is not None:
        Lease.objects.create(name=lease.NAME, expires_at=Now() - timedelta(seconds=ago_s))
    obstacles = preview_plan().acting.obstacles
    assert [each.startswith(says) for each in obstacles] == ([True] if says else [])


@pytest.mark.django_db
def test_nobody_is_lost_for_a_silence_in_which_nobody_listened(settings: Any) -> None:
    a_replica(a_model(), a_node())
    Node.objects.update(seen_at=Now() - timedelta(seconds=settings.LLMGW_LOST_AFTER_S + 60))
    assert lines(preview_plan()) == []
    Lease.objects.create(name=lease.NAME, expires_at=Now())
    assert "lost tiny" in lines(preview_plan())


@pytest.mark.django_db
def test_a_pause_and_its_reason_stand_in_the_way() -> None:
    Lease.objects.create(name=lease.NAME, holder=HOLDER, expires_at=Now())
    a_model()
    pause(by="ann", why="new switches", door="command")
    outlook = preview_plan()
    (says,) = outlook.acting.obstacles
    assert says == (
        "nothing is started or stopped: ann has paused the reconciler (new switches); "
        "manage.py reconcile_resume lets it act again"
    )
    model = outlook.model("tiny")
    assert model is not None
    assert outlook.why(model).amiss[0] == says


@pytest.mark.django_db
def test_an_orphan_is_told_of_and_adopted_once_its_model_is_back() -> None:
    node = a_node()
    replica = a_replica(a_model(), node)
    launch = replica.launch
    Orphan.objects.create(replica=replica.pk, node=node, why="?", gpus=["gpu-01-gpu-0"], launch=launch)
    replica.ranks.get().claims.all().delete()
    replica.ranks.all().delete()
    replica.delete()
    Model.objects.all().delete()
    assert lines(preview_plan()) == ["orphan tiny"]
    assert [item.bucket for item in preview_change("tiny", a_model().spec).items] == []
    assert lines(preview_plan()) == ["adopt tiny"]


@pytest.mark.django_db
def test_a_change_is_looked_at_before_it_is_made() -> None:
    model, node = a_model(), a_node()
    replica = a_replica(model, node)
    spec = model.spec
    edited(model, tp=2)
    wanted = Model.objects.get().spec
    edited(model)
    found = preview_change("tiny", wanted)
    assert [each.replica for each in found.stale] == [str(replica.pk)]
    assert not preview_change("tiny", spec)
    assert [item.bucket for item in preview_change("tiny", None).items] == ["drain"]
    assert not preview_change("nobody", None)
    new = preview_change("other", spec)
    assert [(item.bucket, item.model, item.nodes) for item in new.items] == [("start", "tiny", ("gpu-01",))]


@pytest.mark.django_db(transaction=True)
def test_a_stale_replica_is_a_reason_and_a_moved_one_is_none(agent_of: Callable[..., FakeAgent]) -> None:
    agent_of()
    model = add_model()
    one_pass()
    edit_profile(model, tp=2, gpus_per_node=2)
    outlook = preview_plan()
    found = outlook.model("m")
    assert found is not None
    assert "is stale" in outlook.why(found).amiss[0]
    edit_profile(model, tp=1, gpus_per_node=1)
    again = preview_plan()
    same = again.model("m")
    assert same is not None
    assert again.why(same).is_as_wanted
