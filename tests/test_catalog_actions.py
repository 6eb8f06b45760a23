"""The verbs of the catalog on a real database, and a real hub where they ask one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import IntegrityError, connection, transaction
from django.test.utils import CaptureQueriesContext
from hypothesis import HealthCheck, given, settings

from catalog.actions import (
    ChangedSince,
    Outcome,
    SourceRefused,
    add_model,
    check_source,
    edit_model,
    mint_key,
    patch_model,
    read_catalog,
    remove_model,
    revoke_key,
)
from catalog.actions.models import change
from catalog.keys import KeyText
from catalog.models import Event, Key, Model, Name, Profile, Revision, Tombstone
from catalog.reading import CatalogError
from catalog.source import PathFacts
from catalog.spec import ModelSpec
from tests.hub_server import COMMIT, Hub, running_hub
from tests.test_catalog_patching import MODELS

pytestmark = pytest.mark.django_db

SIM = {"name": "p", "engine": "sim", "gpu_class": "sim"}


def model(name: str = "m", **fields: Any) -> dict[str, Any]:
    return {"name": name, "source": "sim/m", "profiles": [SIM]} | fields


def nobody_is_asked(path: str, spec: ModelSpec) -> Sequence[PathFacts]:
    raise AssertionError(f"the nodes were asked about {path}")


COMMON: dict[str, Any] = {"ask_paths": nobody_is_asked, "after_change": int}


def add(raw: object, **options: Any) -> Outcome:
    return add_model(raw, **COMMON | {"by": "ann", "door": "command"} | options)


def edit(name: str, raw: object, **options: Any) -> Outcome:
    return edit_model(name, raw, **COMMON | {"by": "bob", "door": "api"} | options)


def remove(name: str) -> None:
    remove_model(name, by="cat", door="admin", after_change=int)


def refusal(act: Callable[..., Any], *args: Any, **options: Any) -> str:
    """The sentence with which the verb refuses, having changed nothing."""
    before = state()
    with pytest.raises((CatalogError, SourceRefused)) as refused:
        act(*args, **options)
    assert state() == before
    return str(refused.value)


def state() -> list[Any]:
    return [
        list(table.objects.order_by("pk").values())
        for table in (Model, Name, Profile, Event, Revision, Tombstone)
    ]


@pytest.fixture(autouse=True)
def hub(settings: Any) -> Iterator[Hub]:
    with running_hub() as running:
        settings.LLMGW_HUB_ENDPOINT, settings.HF_TOKEN, settings.LLMGW_HUB_TIMEOUT_S = running.url, "", 10
        yield running


# --- adding ---------------------------------------------------------------------------------------

WHOLE = {
    "name": "chat",
    "aliases": ["b", "a"],
    "description": "ünïcode <b> & more",
    "source": "/models/q.gguf",
    "profiles": [
        {"name": "gpu", "engine": "vllm", "gpu_class": "h100", "tp": 2, "args": ["--x", ""],
         "env": {"B": "", "A": "1"}, "node_selector": {"zone": "a"}, "weight": 0.30000000000000004,
         "priority": -5, "startup_timeout": "5m"},
        {"name": "cpu", "engine": "llamacpp", "min_memory_gb": 4, "min_disk_gb": 9},
    ],
    "scaling": {"min": 1, "max": 3, "idle_timeout": "1h30m"},
    "fallbacks": ["other-alias", "other", "other"],
    "routing_profile": "prefix",
    "slo": {"ttft_p99": "300ms", "tpot_p99": "50ms"},
    "context_length": 8192,
    "max_output": 512,
    "capabilities": {"tools": True, "vision": True, "embeddings": True},
}  # fmt: skip


def test_a_model_is_read_back_as_it_was_given() -> None:
    add(model("other", aliases=["other-alias"]))
    row = add(WHOLE, skip_source_check=True, why="later").model
    assert read_catalog().resolve("a") == row.spec == ModelSpec.load(WHOLE)
    assert ModelSpec.load(row.spec.as_text_dict()) == row.spec
    assert [profile.fingerprint for profile in row.profiles.all()] == [
        each.fingerprint() for each in row.spec.profiles
    ]


def test_reading_the_catalog_takes_the_same_queries_for_one_model_and_for_five() -> None:
    counts = []
    for number in range(5):
        add(model(f"m{number}", aliases=[f"a{number}"]))
        with CaptureQueriesContext(connection) as queries:
            assert len(read_catalog().models) == number + 1
        counts.append(len(queries))
    assert set(counts) == {4}


def test_adding_tells_who_what_why_and_moves_the_revision(django_capture_on_commit_callbacks: Any) -> None:
    before = Revision.current()
    called: list[str] = []
    with django_capture_on_commit_callbacks(execute=True):
        outcome = add(model(), why="a try", after_change=lambda: called.append("woken"))
        assert called == []
    assert called == ["woken"]
    assert outcome.model.revision == Revision.current() == before + 1
    assert outcome.finding.code == "simulated"
    event = Event.objects.get()
    assert (event.by, event.door, event.verb, event.kind, event.subject, event.why) == (
        "ann", "command", "add", "model", "m", "a try",
    )  # fmt: skip
    assert event.detail["model"]["name"] == "m"


def test_a_wake_up_that_fails_does_not_undo_what_was_said(
    django_capture_on_commit_callbacks: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def broker_is_down() -> None:
        raise ConnectionError("no broker")

    with django_capture_on_commit_callbacks(execute=True):
        add(model(), after_change=broker_is_down)
    assert Model.objects.get().name == "m"
    assert "no broker" in caplog.text


def test_a_secret_in_the_environment_is_not_written_into_the_event() -> None:
    row = add(model(profiles=[SIM | {"env": {"HF_TOKEN": "hf_planted"}}])).model
    edit("m", model(profiles=[SIM | {"env": {"HF_TOKEN": "hf_planted-too"}}]))
    assert row.spec.profiles[0].env == {"HF_TOKEN": "hf_planted"}
    assert "hf_planted" not in repr(list(Event.objects.values()))


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (model("m"), 'model "m" is in the catalog already; edit it, or choose another name'),
        (model("m-chat"), 'model "m": alias "m-chat" collides with another model name'),
        (model("n", aliases=["m"]), 'model "n": alias "m" collides with another model name'),
        (model("n", aliases=["m-chat"]), 'alias "m-chat" is claimed by both "m" and "n"'),
        (model("n", fallbacks=["nobody"]), 'model "n": fallback "nobody" is not in the catalog'),
        (model("n", source=""), 'model "n": source is required'),
        ([], "the model: it must be a map of fields, not a list"),
    ],
)
def test_a_model_that_breaks_the_law_is_not_saved(raw: Any, sentence: str) -> None:
    add(model("m", aliases=["m-chat"]))
    assert refusal(add, raw, skip_source_check=True, why="later") == sentence


def test_the_law_comes_before_the_question_to_the_hub(hub: Hub) -> None:
    add(model("m"))
    refusal(add, model("m", source="org/x", profiles=[SIM | {"engine": "vllm"}]))
    assert hub.asked == []


@pytest.mark.parametrize("raw", [{"name": "m", "is_canonical": False}, {"name": "new", "is_canonical": True}])
def test_the_database_itself_refuses_a_name_twice(raw: dict[str, Any]) -> None:
    row = add(model()).model
    with pytest.raises(IntegrityError), transaction.atomic():
        Name.objects.create(model=row, **raw)


# --- the source check -----------------------------------------------------------------------------

REAL = model("real", source="org/real", profiles=[SIM | {"engine": "vllm"}])
LOCAL = model("local", source="/models/q.gguf", profiles=[{"name": "p", "engine": "llamacpp"}])


def test_a_checked_source_is_recorded_with_its_commit(hub: Hub) -> None:
    hub.has_repository("org/real", "a.safetensors")
    row = add(REAL).model
    assert (row.source_state, row.source_revision, row.source_skipped_by) == ("ok", COMMIT, "")
    assert row.source_facts["bytes"] == 1000
    assert row.source_checked_at is not None
    assert COMMIT[:12] in row.source_sentence


def test_a_refused_source_is_not_saved() -> None:
    assert refusal(add, REAL).startswith('model "real": source "org/real" is not found or private')


def test_a_refused_source_is_saved_on_somebodys_word_and_that_is_recorded(hub: Hub) -> None:
    outcome = add(REAL, skip_source_check=True, why="the mirror comes tomorrow")
    assert outcome.finding.code == "skipped"
    assert hub.asked == []
    assert (outcome.model.source_state, outcome.model.source_skipped_by) == ("", "ann")
    event = Event.objects.get()
    assert event.why == "the mirror comes tomorrow"
    assert event.detail["source_check"]["skipped"] is True


@pytest.mark.parametrize("why", ["", "  \n"], ids=["nothing", "blanks"])
def test_a_check_is_skipped_only_for_a_reason(hub: Hub, why: str) -> None:
    sentence = 'model "real": the source check is skipped only for a reason; say why, for the history to keep'
    assert refusal(add, REAL, skip_source_check=True, why=why) == sentence
    hub.has_repository("org/real", "a.safetensors")
    add(REAL)
    assert refusal(edit, "real", REAL | {"source": "org/b"}, skip_source_check=True, why=why) == sentence
    assert edit("real", REAL | {"scaling": {"max": 4}}, skip_source_check=True, why=why).finding.level == "ok"


def test_an_edit_of_something_else_asks_nobody_again(hub: Hub) -> None:
    hub.has_repository("org/real", "a.safetensors")
    add(REAL)
    hub.replies.clear()
    outcome = edit("real", REAL | {"scaling": {"max": 4}})
    assert len(hub.asked) == 1
    assert outcome.model.source_revision == COMMIT
    assert (outcome.finding.level, outcome.finding.code) == ("ok", "recorded")


@pytest.mark.parametrize(
    "change", [{"source": "org/other"}, {"profiles": [SIM | {"engine": "sglang"}]}], ids=["source", "engine"]
)
def test_an_edit_of_what_is_read_asks_again(hub: Hub, change: dict[str, Any]) -> None:
    hub.has_repository("org/real", "a.safetensors")
    add(REAL)
    hub.replies.clear()
    assert "is not found or private" in refusal(edit, "real", REAL | change)
    assert edit("real", REAL | change, skip_source_check=True, why="later").model.source_skipped_by == "bob"


def test_a_skipped_check_is_made_up_for_without_standing_in_the_way(hub: Hub) -> None:
    add(REAL, skip_source_check=True, why="later")
    row = edit("real", REAL | {"description": "still missing"}).model
    assert (row.description, row.source_state, row.source_skipped_by) == ("still missing", "refuse", "ann")
    hub.has_repository("org/real", "a.safetensors")
    row = edit("real", REAL | {"description": "there now"}).model
    assert (row.source_state, row.source_skipped_by, row.source_revision) == ("ok", "", COMMIT)


def test_a_path_is_asked_of_the_nodes() -> None:
    asked: list[str] = []

    def ask(path: str, spec: ModelSpec) -> list[PathFacts]:
        asked.append(f"{path} for {spec.name}")
        return [PathFacts("a", False)]

    assert "is not on the node a" in refusal(add, LOCAL, ask_paths=ask)
    assert asked == ["/models/q.gguf for local"]
    assert add(LOCAL, ask_paths=lambda *_: []).finding.code == "path_unasked"


def test_one_place_checks_sources_for_everybody(hub: Hub) -> None:
    hub.has_repository("org/real", "README.md")
    assert check_source(ModelSpec.load(REAL), ask_paths=nobody_is_asked).code == "no_weights"
    malformed = ModelSpec.load(REAL | {"source": "real"})
    assert check_source(malformed, ask_paths=nobody_is_asked).code == "malformed"


# --- editing --------------------------------------------------------------------------------------


def test_an_edit_makes_the_model_what_was_said_whole() -> None:
    add(model("other", aliases=["other-alias"]))
    add(model("chat", aliases=["a", "gone"]))
    edit("chat", WHOLE, skip_source_check=True, why="later")
    assert read_catalog().resolve("chat") == ModelSpec.load(WHOLE)
    edit("chat", model("chat"))
    assert read_catalog().resolve("chat") == ModelSpec.load(model("chat"))
    assert read_catalog().names == ["chat", "other"]


def test_profiles_keep_their_rows_by_name_whatever_their_order() -> None:
    names = ("a", "b", "c")
    before = {
        row.name: row
        for row in add(model(profiles=[SIM | {"name": name} for name in names])).model.profiles.all()
    }
    edit("m", model(profiles=[SIM | {"name": "d"}, SIM | {"name": "c"}, SIM | {"name": "a", "priority": 5}]))
    after = {row.name: row for row in Profile.objects.order_by("position")}
    assert list(after) == ["d", "c", "a"]
    assert (after["c"].pk, after["a"].pk) == (before["c"].pk, before["a"].pk)
    assert after["c"].fingerprint == before["c"].fingerprint
    assert (
        after["a"].fingerprint
        == ModelSpec.load(model(profiles=[SIM | {"name": "a", "priority": 5}])).profiles[0].fingerprint()
    )


def test_an_event_tells_an_edit_field_by_field() -> None:
    add(model(profiles=[SIM, SIM | {"name": "old"}]))
    edit(
        "m",
        model(description="d", profiles=[SIM | {"args": ["--slow"]}, SIM | {"name": "new"}]),
        why="slower",
    )
    event = Event.objects.get(verb="edit")
    assert (event.by, event.door, event.subject, event.why) == ("bob", "api", "m", "slower")
    assert event.detail["changed"] == [{"field": "description", "was": None, "now": "d"}]
    assert event.detail["profiles_changed"] == {"p": [{"field": "args", "was": None, "now": ["--slow"]}]}
    assert (event.detail["profiles_added"], event.detail["profiles_removed"]) == (["new"], ["old"])


def test_a_model_can_be_renamed_and_keep_its_old_name_as_an_alias() -> None:
    pk = add(model("old")).model.pk
    add(model("user", fallbacks=["old"]))
    row = edit("old", model("new", aliases=["old"])).model
    assert row.pk == pk
    assert [(each.name, each.is_canonical) for each in row.names.all()] == [("new", True), ("old", False)]
    assert Tombstone.objects.get().name == "old"
    edit("new", model("old", aliases=["new"]))
    assert list(Tombstone.objects.values_list("name", flat=True)) == ["new"]


@pytest.mark.parametrize(
    ("act", "args", "sentence"),
    [
        (remove, ["m"], 'model "m": alias "m-chat" cannot be removed: model "user" falls back to it;'),
        (
            edit,
            ["m", model("m")],
            'model "m": alias "m-chat" cannot be removed: model "user" falls back to it;',
        ),
        (edit, ["user", model("m")], 'model "m" is in the catalog already; edit it, or choose another name'),
        (
            edit,
            ["user", model("user", aliases=["m"])],
            'model "user": alias "m" collides with another model name',
        ),
        (edit, ["nobody", model("nobody")], 'model "nobody" is not in the catalog; check the spelling'),
        (edit, ["m-chat", model("m")], 'model "m-chat" is an alias; name the model, "m"'),
        (remove, ["a\0b"], 'model "a\\x00b" is not in the catalog; check the spelling'),
    ],
)
def test_a_change_that_breaks_the_law_changes_nothing(
    act: Callable[..., Any], args: list[Any], sentence: str
) -> None:
    add(model("m", aliases=["m-chat"]))
    add(model("user", fallbacks=["m-chat"]))
    assert refusal(act, *args).startswith(sentence)


def test_a_name_that_is_a_fallback_cannot_be_renamed_away() -> None:
    add(model("m"))
    add(model("user", fallbacks=["m"]))
    assert 'model "user" falls back to it' in refusal(edit, "m", model("n"))


def test_an_edit_that_was_overtaken_while_the_nodes_were_asked_is_refused() -> None:
    add(LOCAL, skip_source_check=True, why="later")

    def overtake(path: str, spec: ModelSpec) -> list[PathFacts]:
        edit("local", LOCAL | {"description": "theirs"}, skip_source_check=True, why="later")
        return []

    with pytest.raises(CatalogError, match=r'^model "local" was changed by somebody else just now;'):
        edit("local", LOCAL | {"description": "ours"}, ask_paths=overtake)
    assert Model.objects.get().description == "theirs"


def test_what_a_constraint_refuses_is_told_in_the_words_of_the_law() -> None:
    add(model("m", aliases=["m-chat"]))
    add(model("user", fallbacks=["m-chat"]))
    late = ModelSpec.load(model("n", aliases=["m-chat"]))
    with (
        pytest.raises(CatalogError, match=r'^alias "m-chat" is claimed by both "m" and "n"$'),
        change(late, int),
    ):
        Name.objects.create(name="m-chat", model=Model.objects.get(name="user"))
    row = Model.objects.get(name="m")
    with pytest.raises(CatalogError, match=r'model "user" falls back to it'), change(None, int, row):
        Name.objects.filter(name="m").update(name="m-chat")
    with pytest.raises(IntegrityError), change(ModelSpec.load(model("n")), int):
        Profile.objects.create(model=row, name="", fingerprint="")


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(MODELS, MODELS)
def test_an_edit_and_its_way_back_leave_the_rows_as_they_were(first: ModelSpec, second: ModelSpec) -> None:
    with transaction.atomic():
        others = {name for spec in (first, second) for name in spec.fallbacks}
        add(model("another", aliases=sorted(others)))
        unchecked: dict[str, Any] = {"skip_source_check": True, "why": "a law"}
        row = add(first.as_text_dict(), **unchecked).model
        before = contents(row)
        edit(first.name, second.as_text_dict(), **unchecked)
        assert contents(row)[0] == second
        assert edit(second.name, first.as_text_dict(), **unchecked).model.pk == row.pk
        assert contents(row) == before
        transaction.set_rollback(True)


def contents(row: Model) -> tuple[Any, ...]:
    """All that is kept of a model, whichever its rows."""
    row = Model.objects.get(pk=row.pk)
    names = list(row.names.values_list("name", "position", "is_canonical"))
    fallbacks = list(row.fallbacks.values_list("name", "position"))
    profiles = list(row.profiles.values_list("name", "position", "fingerprint"))
    return row.spec, names, fallbacks, profiles


def test_an_edit_that_changes_nothing_leaves_no_trace() -> None:
    add(model())
    before = state()
    assert edit("m", model()).changes == {}
    assert state() == before


def test_a_trial_judges_and_asks_and_saves_nothing(hub: Hub) -> None:
    hub.has_repository("org/real", "model.safetensors", "config.json")
    add(REAL, skip_source_check=True, why="a try")
    before = state()
    outcome = edit("real", REAL | {"description": "d"}, is_trial=True)
    assert outcome.changes["changed"] == [{"field": "description", "was": None, "now": "d"}]
    assert (outcome.finding.level, outcome.trial.description, outcome.model.description) == ("ok", "d", "")
    assert "source is required" in refusal(edit, "real", REAL | {"source": ""}, is_trial=True)
    remove_model("real", is_trial=True, by="cat", door="admin", after_change=int)
    assert state() == before


def test_an_edit_of_what_was_read_long_ago_is_refused_with_who_changed_it() -> None:
    read = add(model()).model.revision
    edit("m", model(description="ours"))
    for act in (edit, patch_model):
        with pytest.raises(ChangedSince, match=r'^model "m" was changed by bob since you read it;') as no:
            act("m", model(description="theirs"), expected=read, **COMMON | {"by": "ann", "door": "api"})
        assert [event.detail["changed"][0]["now"] for event in no.value.events] == ["ours"]
    with pytest.raises(ChangedSince):
        remove_model("m", expected=read, by="ann", door="api", after_change=int)
    edit("m", model(description="theirs"), expected=Model.objects.get().revision)


def test_a_circle_of_fallbacks_is_allowed_and_said() -> None:
    add(model("a", aliases=["a-alias"]))
    assert add(model("b", fallbacks=["a-alias"])).warnings == ()
    add(model("c", fallbacks=["b"]))
    (said,) = edit("a", model("a", aliases=["a-alias"], fallbacks=["c"])).warnings
    assert said.startswith('model "a": its fallbacks lead back to it ("a" -> "c" -> "b" -> "a");')
    (said,) = edit("b", model("b2", aliases=["b"], fallbacks=["a"])).warnings
    assert '("b2" -> "a" -> "c" -> "b2")' in said


# --- removing -------------------------------------------------------------------------------------


def test_removing_leaves_a_tombstone_and_an_event_and_nothing_else() -> None:
    add(model("m", aliases=["m-chat"]))
    remove("m")
    assert [Model.objects.count(), Name.objects.count(), Profile.objects.count()] == [0, 0, 0]
    assert Tombstone.objects.get().revision == Revision.current()
    event = Event.objects.get(verb="remove")
    assert (event.by, event.door, event.subject, event.detail["model"]["aliases"]) == (
        "cat",
        "admin",
        "m",
        ["m-chat"],
    )


def test_a_name_that_comes_back_leaves_no_tombstone_behind() -> None:
    add(model())
    remove("m")
    add(model())
    assert not Tombstone.objects.exists()


# --- keys -----------------------------------------------------------------------------------------


def test_a_key_is_shown_once_and_kept_as_a_digest(settings: Any) -> None:
    user = User.objects.create_user("ann")
    row, text = mint_key("laptop", user=user, scope=Key.Scope.INFERENCE, by="ann", door="command")
    key = KeyText.parse(text)
    assert key is not None
    assert key.id == row.pk
    assert key.matches(row.digest, settings.LLMGW_KEY_PEPPER)
    assert row.revision == Revision.current()
    assert key.secret not in repr(list(Key.objects.values())) + repr(list(Event.objects.values()))
    assert Event.objects.get().verb == "mint"


@pytest.mark.parametrize("name", ["", " ", "x" * 201, "a\nb", "a\0"])
def test_a_key_needs_a_name_that_can_be_read(name: str) -> None:
    user = User.objects.create_user("ann")
    with pytest.raises(CatalogError, match=r"^a key needs a name"):
        mint_key(name, user=user, scope=Key.Scope.INFERENCE, by="ann", door="command")
    assert not Key.objects.exists()


def test_a_key_is_revoked_once_for_good() -> None:
    user = User.objects.create_user("ann")
    row, _ = mint_key("laptop", user=user, scope=Key.Scope.INFERENCE, by="ann", door="command")
    assert revoke_key(row.pk, by="bob", door="admin", why="lost")
    row.refresh_from_db()
    assert row.revoked_at is not None
    assert row.revision == Revision.current()
    assert not revoke_key(row.pk, by="bob", door="admin")
    assert not revoke_key("nobody", by="bob", door="admin")
    assert Event.objects.filter(verb="revoke").count() == 1
