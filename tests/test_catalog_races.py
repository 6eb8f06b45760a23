"""Two operators at once, each with a connection of their own: one is served, the other is told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from django.db import connection
from django.test import Client

from catalog.actions import add_model, edit_model, remove_model
from catalog.models import Event, Model, Name
from catalog.reading import CatalogError
from catalog.source import PathFacts
from catalog.spec import ModelSpec
from tests.cast import alice
from tests.hub_server import Reply, running_hub
from tests.test_door_same_sentence import DOORS, form
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)

AskPaths = Callable[[str, ModelSpec], Sequence[PathFacts]]


def model(name: str, **fields: Any) -> dict[str, Any]:
    """A model whose source is asked about: there a test can wait, between the two looks at the law."""
    profile = {"name": "p", "engine": "vllm", "gpu_class": "h100"}
    return {"name": name, "source": f"/models/{name}", "profiles": [profile]} | fields


def add(raw: dict[str, Any], ask_paths: AskPaths) -> object:
    return add_model(raw, by="ann", door="api", ask_paths=ask_paths, after_change=int)


def edit(name: str, raw: dict[str, Any], ask_paths: AskPaths) -> object:
    return edit_model(name, raw, by="bob", door="admin", ask_paths=ask_paths, after_change=int)


def at_once(*acts: Callable[[AskPaths], object]) -> list[str]:
    """Does all of it in as many threads, each of which has judged its change before any writes one. What each
    was refused with, or an empty text."""
    judged = threading.Barrier(len(acts))

    def ask_paths(path: str, spec: ModelSpec) -> Sequence[PathFacts]:
        assert not connection.in_atomic_block
        judged.wait(10)
        return []

    def outcome(act: Callable[[AskPaths], object]) -> str:
        try:
            act(ask_paths)
        except CatalogError as no:
            return str(no)
        finally:
            connection.close()
        return ""

    with ThreadPoolExecutor(len(acts)) as threads:
        return list(threads.map(outcome, acts))


def alone(path: str, spec: ModelSpec) -> Sequence[PathFacts]:
    return []


def test_of_two_models_that_want_one_alias_one_gets_it() -> None:
    said = at_once(
        lambda ask: add(model("one", aliases=["chat"]), ask),
        lambda ask: add(model("two", aliases=["chat"]), ask),
    )
    (no,) = filter(None, said)
    assert no in (
        'alias "chat" is claimed by both "one" and "two"',
        'alias "chat" is claimed by both "two" and "one"',
    )
    winner = Model.objects.get()
    assert Name.objects.get(name="chat").model == winner
    assert [event.subject for event in Event.objects.all()] == [winner.name]


def test_of_two_models_of_one_name_one_is_added() -> None:
    said = at_once(lambda ask: add(model("one"), ask), lambda ask: add(model("one"), ask))
    assert sorted(said) == ["", 'model "one" is in the catalog already; edit it, or choose another name']
    assert Model.objects.count() == 1


def test_an_alias_and_a_name_race_for_one_row() -> None:
    said = at_once(lambda ask: add(model("chat"), ask), lambda ask: add(model("one", aliases=["chat"]), ask))
    (no,) = filter(None, said)
    assert no == 'model "one": alias "chat" collides with another model name'
    assert Name.objects.filter(name="chat").count() == 1


def test_two_models_that_exchange_an_alias_leave_no_deadlock() -> None:
    for name in ("one", "two"):
        add(model(name, aliases=[f"{name}-alias"]), alone)
    said = at_once(
        lambda ask: edit("one", model("one", aliases=["two-alias"], source="/models/new"), ask),
        lambda ask: edit("two", model("two", aliases=["one-alias"], source="/models/new"), ask),
    )
    assert all("is claimed by both" in no for no in said if no)
    assert sorted(Name.objects.filter(is_canonical=True).values_list("name", flat=True)) == ["one", "two"]


def test_of_two_edits_of_one_model_one_is_told_that_it_changed() -> None:
    add(model("one"), alone)
    said = at_once(
        lambda ask: edit("one", model("one", source="/models/ours", description="ours"), ask),
        lambda ask: edit("one", model("one", source="/models/theirs", description="theirs"), ask),
    )
    changed = 'model "one" was changed by somebody else just now; look again, and repeat the change'
    assert sorted(said) == ["", changed]
    row = Model.objects.get()
    assert row.source == f"/models/{row.description}"
    assert Event.objects.filter(verb="edit").count() == 1


def test_a_fallback_that_is_removed_meanwhile_is_missed() -> None:
    add(model("one"), alone)

    def remove_first(path: str, spec: ModelSpec) -> Sequence[PathFacts]:
        remove_model("one", by="cat", door="api", after_change=int)
        return []

    with pytest.raises(CatalogError, match=r'^model "two": fallback "one" is not in the catalog$'):
        add(model("two", fallbacks=["one"]), remove_first)
    assert not Model.objects.exists()


@pytest.mark.parametrize("door", DOORS)
def test_a_hub_that_hangs_holds_up_nobody_else(
    settings: Any, door: Callable[[Client, dict[str, Any]], list[str]]
) -> None:
    answer = threading.Event()
    client = Client()
    client.force_login(alice())

    def through_the_door() -> list[str]:
        try:
            return door(client, form("slow", source="org/slow"))
        finally:
            connection.close()

    with running_hub() as hub, ThreadPoolExecutor(1) as threads:
        settings.LLMGW_HUB_ENDPOINT, settings.LLMGW_HUB_TIMEOUT_S = hub.url, 1.5
        hub.replies["/api/models/org/slow"] = Reply(drip=lambda wire: answer.wait(10))
        waiting: Future[list[str]] = threads.submit(through_the_door)
        try:
            wait_until(lambda: hub.asked, "the hub to be asked")
            add(model("quick"), alone)
            assert not waiting.done()
            (sentence,) = waiting.result(10)
        finally:
            answer.set()
    assert "could not ask the hub" in sentence
    assert [row.name for row in Model.objects.all()] == ["quick"]
