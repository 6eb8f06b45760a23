"""Two operators at once, each with a connection of their own: one is served, the other is told."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.db import connection, connections, transaction
from django.test import Client

from catalog.actions import add_model, edit_key, edit_model, mint_key, remove_model, revoke_key
from catalog.models import Event, Key, Model, Name
from catalog.parts import Limits
from catalog.reach import Reach
from catalog.reading import CatalogError
from catalog.source import PathFacts
from catalog.spec import Catalog, ModelSpec
from tests.cast import alice
from tests.doors import (
    BASE,
    DOORS,
    Said,
    admin_add,
    catalog_import,
    model_add,
    rest_patch,
    rest_post,
    rest_put,
)
from tests.hub_server import Hub, Reply, listing, running_hub
from tests.test_door_same_sentence import form
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


# --- keys -----------------------------------------------------------------------------------------


def a_key() -> Key:
    told: dict[str, Any] = {"by": "alice", "door": "command"}
    return mint_key("k", user=alice(), scope="inference", reach={"models": ["one"]}, **told)[0]


def edit_reach(key: Key, patch: dict[str, Any], **how: Any) -> object:
    return edit_key(key.pk, patch, by="bob", door="api", **how)


def test_two_edits_of_one_key_are_both_kept_unless_each_has_read_it_before() -> None:
    add(model("one"), alone)
    key = a_key()
    together = [{"concurrency": 2}, {"requests_per_minute": 60}]
    assert at_once(*(lambda _, patch=patch: edit_reach(key, patch) for patch in together)) == ["", ""]
    assert Key.objects.get().reach == Reach(("one",), Limits(60, 0, 2))
    seen = Key.objects.get().revision
    patches: list[dict[str, Any]] = [{"concurrency": 3}, {"concurrency": 4}]
    said = at_once(*(lambda _, patch=patch: edit_reach(key, patch, expected=seen) for patch in patches))
    assert sorted(map(bool, said)) == [False, True]
    assert f'key "{key.pk}" was changed by bob since you read it;' in "".join(said)
    assert Event.objects.filter(kind="key", verb="edit").count() == 3


def test_a_key_that_is_revoked_and_edited_at_once_is_revoked() -> None:
    add(model("one"), alone)
    key = a_key()
    at_once(
        lambda _: edit_reach(key, {"concurrency": 2}),
        lambda _: revoke_key(key.pk, by="ann", door="admin"),
    )
    row = Key.objects.get()
    assert row.revoked_at is not None
    verbs = list(Event.objects.filter(kind="key").order_by("id").values_list("verb", flat=True))
    assert verbs in (["mint", "edit", "revoke"], ["mint", "revoke"])
    assert (row.concurrency == 2) is ("edit" in verbs)


def test_a_model_that_goes_while_a_key_is_to_open_it_is_in_no_list() -> None:
    add(model("one"), alone)
    add(model("two"), alone)
    key = a_key()
    at_once(
        lambda _: edit_reach(key, {"models": ["one", "two"]}),
        lambda _: remove_model("two", by="ann", door="admin", after_change=int),
    )
    assert Key.objects.get().reach == Reach(("one",))
    assert not Model.objects.filter(name="two").exists()


# --- through several doors at once ----------------------------------------------------------------


@pytest.fixture
def hub(settings: Any) -> Iterator[Hub]:
    with running_hub() as hub:
        settings.LLMGW_HUB_ENDPOINT, settings.HF_TOKEN = hub.url, ""
        yield hub


def meet(hub: Hub, *repos: str) -> Callable[[], object]:
    """Has the hub answer about none of these before it was asked about all, and whoever calls what this
    returns has come as well: by then every change was judged once, and none was written."""
    judged = threading.Barrier(len(repos))

    def answer(repo: str) -> Callable[[Any], object]:
        body = json.dumps(listing(repo, "model.safetensors")).encode()
        return lambda wire: (judged.wait(20), wire.write(body))

    for repo in repos:
        hub.replies[f"/api/models/{repo}"] = Reply(drip=answer(repo))
    return lambda: judged.wait(20)


def together(*acts: Callable[[], Any]) -> list[Any]:
    """What each of the acts answers, done in threads that each have a connection of their own."""

    def in_thread(act: Callable[[], Any]) -> Any:
        try:
            return act()
        finally:
            connection.close()

    with ThreadPoolExecutor(len(acts)) as threads:
        return list(threads.map(in_thread, acts))


def clients(count: int) -> list[Client]:
    user = alice()
    made = [Client() for _ in range(count)]
    for each in made:
        each.force_login(user)
    return made


def is_lawful() -> bool:
    return Catalog.load([row.spec.as_dict() for row in Model.objects.all()]) is not None


def test_one_alias_that_every_door_claims_goes_to_one(hub: Hub) -> None:
    for name in ("by-put", "by-patch"):
        add(model(name), alone)
    doors: dict[str, Callable[[Client, dict[str, Any]], Said]] = {
        "by-admin": admin_add,
        "by-post": rest_post,
        "by-shell": model_add,
        "by-file": catalog_import,
        "by-put": lambda client, raw: rest_put(client, raw, "by-put"),
        "by-patch": lambda client, raw: rest_patch(client, raw, "by-patch"),
    }
    meet(hub, *(f"org/{name}" for name in doors))

    def claim(name: str, client: Client) -> Callable[[], Said]:
        return lambda: doors[name](client, form(name, aliases=["chat"], source=f"org/{name}"))

    said = dict(zip(doors, together(*map(claim, doors, clients(len(doors)))), strict=True))
    winner = Name.objects.get(name="chat").model.name
    assert said.pop(winner).refusals == []
    for loser, no in said.items():
        assert no.refusals == [f'alias "chat" is claimed by both "{winner}" and "{loser}"']
    assert Event.objects.filter(revision__gt=2).count() == 1
    assert is_lawful()


def test_a_model_is_renamed_onto_a_name_that_is_taken_meanwhile(hub: Hub) -> None:
    add(model("old"), alone)
    meet(hub, "org/renamed", "org/added")
    first, second = clients(2)
    renamed, added = together(
        lambda: rest_patch(first, {"name": "new", "source": "org/renamed"}, "old"),
        lambda: rest_post(second, form("new", source="org/added")),
    )
    taken = ['model "new" is in the catalog already; edit it, or choose another name']
    assert sorted([renamed.refusals, added.refusals]) == [[], taken]
    names = ["new"] if renamed.refusals == [] else ["old", "new"]
    assert [row.name for row in Model.objects.all()] == names
    assert is_lawful()


def test_a_model_is_removed_or_fallen_back_to_and_never_both(hub: Hub) -> None:
    add(model("one"), alone)
    come = meet(hub, "org/two", "org/nobody-asks-about")
    first, second = clients(2)

    def remove() -> int:
        come()
        return int(second.delete("/api/models/one").status_code)

    added, status = together(
        lambda: rest_post(first, form("two", fallbacks=["one"], source="org/two")), remove
    )
    assert (added.refusals, status) in (
        ([], 409),
        (['model "two": fallback "one" is not in the catalog'], 204),
    )
    assert is_lawful()


def test_of_two_patches_of_one_version_one_is_told_what_the_other_did(hub: Hub) -> None:
    row: Any = add(model("one"), alone)
    meet(hub, "org/a", "org/b")
    first, second = clients(2)

    def patch(client: Client, source: str) -> Any:
        headers = {"If-Match": f'"{row.model.revision}"'}
        body = json.dumps({"source": source})
        return client.patch("/api/models/one", body, content_type="application/json", headers=headers)

    answers = together(lambda: patch(first, "org/a"), lambda: patch(second, "org/b"))
    done, refused = sorted(answers, key=lambda answer: answer.status_code)
    assert (done.status_code, refused.status_code) == (200, 412)
    no = refused.json()["errors"][0]
    assert no["sentence"].startswith('model "one" was changed by alice since you read it;')
    assert Model.objects.get().source == done.json()["source"]
    assert Event.objects.filter(verb="edit").count() == 1


def test_an_edit_of_a_model_that_is_removed_meanwhile_says_so(hub: Hub) -> None:
    add(model("one"), alone)
    come = meet(hub, "org/a", "org/nobody-asks-about")
    first, second = clients(2)
    asked = ThreadPoolExecutor(1)
    with asked:
        editing = asked.submit(together, lambda: rest_patch(first, {"source": "org/a"}, "one"))
        wait_until(lambda: hub.asked, "the hub to be asked")
        assert second.delete("/api/models/one").status_code == 204
        come()
        ((refusals, _),) = editing.result(20)
    assert refusals == [
        'model "one" was removed by somebody else just now; add it anew if it is still wanted'
    ]
    assert not Model.objects.exists()


@pytest.mark.parametrize(
    ("overtake", "says"),
    [
        pytest.param(
            lambda: edit("one", model("one", description="theirs"), alone),
            'model "one" was changed by somebody else just now; look again, and repeat the change',
            id="by an edit",
        ),
        pytest.param(
            lambda: remove_model("one", by="cat", door="api", after_change=int),
            'model "one" was removed by somebody else just now; add it anew if it is still wanted',
            id="by a removal",
        ),
    ],
)
def test_a_removal_that_is_overtaken_takes_nothing(overtake: Callable[[], object], says: str) -> None:
    add(model("one"), alone)
    has_read = threading.Event()

    def watch(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.startswith("BEGIN") or "catalog_revision" in sql:
            has_read.set()  # and waits from here on for whoever holds the revision
        return execute(sql, params, many, context)

    def remove() -> str:
        try:
            with connection.execute_wrapper(watch):
                remove_model("one", by="ann", door="api", after_change=int)
        except CatalogError as no:
            return str(no)
        finally:
            connection.close()
        return ""

    with ThreadPoolExecutor(1) as threads:
        with transaction.atomic():
            overtake()
            removing = threads.submit(remove)
            assert has_read.wait(20)
        assert removing.result(20) == says


@pytest.mark.parametrize("door", DOORS)
def test_a_hub_that_hangs_holds_up_nobody_else(settings: Any, door: str) -> None:
    add(model(BASE), alone)
    answer = threading.Event()
    (client,) = clients(1)

    def through_the_door() -> Said:
        return DOORS[door](client, form("slow", source="org/slow"))

    with running_hub() as hub, ThreadPoolExecutor(1) as threads:
        settings.LLMGW_HUB_ENDPOINT, settings.LLMGW_HUB_TIMEOUT_S = hub.url, 1.5
        hub.replies["/api/models/org/slow"] = Reply(drip=lambda wire: answer.wait(10))
        waiting = threads.submit(together, through_the_door)
        try:
            wait_until(lambda: hub.asked, "the hub to be asked")
            add(model("quick"), alone)
            assert not waiting.done()
            (said,) = waiting.result(10)
        finally:
            answer.set()
    assert "could not ask the hub" in said.refusals[0]
    assert [row.name for row in Model.objects.all()] == [BASE, "quick"]


def test_nobody_who_waits_for_a_hub_holds_a_connection(settings: Any) -> None:
    """A hundred who wait would take all that PostgreSQL has."""
    mine = connections["default"]
    add(model(BASE), alone)
    assert mine.connection is not None
    held: list[bool] = []
    with running_hub() as hub:
        settings.LLMGW_HUB_ENDPOINT = hub.url
        hub.replies["/api/models/org/m"] = Reply(drip=lambda wire: held.append(mine.connection is not None))
        DOORS["POST"](clients(1)[0], form("m", source="org/m"))
    assert held == [False]
