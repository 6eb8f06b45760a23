"""A whole catalog at once: exported, imported, told apart, refused with every reason, or written whole."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import IntegrityError, connection, connections
from django.test.utils import CaptureQueriesContext

from catalog.actions import (
    Imported,
    SourcesRefused,
    add_model,
    edit_model,
    import_catalog,
    read_catalog,
    remove_model,
)
from catalog.files import FORMATS
from catalog.importing import ImportRefused
from catalog.models import Event, Fallback, Model, Name, Profile, Revision, Tombstone
from catalog.reading import CatalogError
from catalog.source import PathFacts
from catalog.spec import Catalog, ModelSpec
from tests.bench.catalog import LISTS, cost_of_look
from tests.bench.catalog import main as bench_main
from tests.cast import PROFILE, a_model, a_node, a_replica, alice, model_form, nobody_is_asked
from tests.hub_server import Reply, running_hub
from tests.test_catalog_spec import ACCEPTED

pytestmark = pytest.mark.django_db


def imported(*raws: object, **told: Any) -> Imported:
    common: dict[str, Any] = {"by": "ann", "door": "command", "ask_paths": nobody_is_asked}
    return import_catalog(raws, **{"prune": False, "is_trial": False, "after_change": int} | common | told)


def refused(*raws: object, **told: Any) -> list[tuple[int | None, str]]:
    before = everything()
    with pytest.raises(ImportRefused) as no:
        imported(*raws, **told)
    assert everything() == before
    return [(each.number, each.fault.sentence) for each in no.value.placed]


def manage(*words: object) -> str:
    said = io.StringIO()
    call_command(*map(str, words), stdout=said, stderr=said, no_color=True)
    return said.getvalue()


def refusal(*words: object) -> list[str]:
    before = everything()
    with pytest.raises(CommandError) as no:
        manage(*words)
    assert everything() == before
    return str(no.value).splitlines()


def everything() -> list[list[dict[str, Any]]]:
    tables = (Model, Name, Profile, Fallback, Tombstone, Event, Revision)
    return [list(table.objects.order_by("pk").values()) for table in tables]


def form(name: str, **fields: Any) -> dict[str, Any]:
    return model_form(name, **fields)


@pytest.fixture
def exported(tmp_path: Path) -> Any:
    def write(text: str, ending: str = "yaml") -> Path:
        path = tmp_path / f"catalog.{ending}"
        path.write_text(text)
        return path

    return write


# --- there and back -------------------------------------------------------------------------------


@pytest.mark.one_database
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("vector", ACCEPTED)
def test_what_is_exported_and_imported_is_what_was(
    vector: dict[str, Any], format: str, exported: Any
) -> None:
    why = {"skip_source_check": True, "why": "no hub here"}
    assert imported(*vector["models"], **why).unchanged == 0
    as_it_was, catalog = manage("models", "--plain"), read_catalog().models
    assert as_it_was == vector["text"]
    path = exported(
        manage("catalog_export", "--format", format, "--with-secrets").partition("warning")[0], format
    )

    before = everything()
    assert manage("catalog_import", path, "--prune").startswith("Nothing to change")
    assert everything() == before

    Model.objects.all().delete()
    manage("catalog_import", path, "--skip-source-check", "--why", "no hub here")
    assert manage("models", "--plain") == as_it_was
    assert read_catalog().models == catalog


def test_it_is_the_same_as_adding_one_after_another() -> None:
    raws = [
        form("one", aliases=["uno", "eins"], description="two\nlines", slo={"TTFTp99": "1s"}),
        form("two", fallbacks=["uno"], capabilities={"tools": True}, context_length=4096),
    ]
    for raw in raws:
        add_model(raw, by="ann", door="command", ask_paths=nobody_is_asked, after_change=int)
    unlike = ("id", "created_at", "changed_at", "revision", "source_checked_at", "source_asked_at")
    names = ("name", "is_canonical", "position", "model__name")

    def rows() -> list[Any]:
        models = [
            {key: value for key, value in row.items() if key not in unlike}
            for row in Model.objects.order_by("pk").values()
        ]
        profiles = list(Profile.objects.order_by("pk").values_list("name", "model__name", "fingerprint"))
        fallbacks = list(Fallback.objects.order_by("pk").values_list("name", "model__name", "position"))
        return [models, profiles, fallbacks, list(Name.objects.order_by("pk").values_list(*names))]

    added = rows()
    Model.objects.all().delete()
    imported(*raws)
    assert rows() == added


# --- what a file changes --------------------------------------------------------------------------


def test_models_are_added_changed_and_left(settings: Any) -> None:
    a_model("stays", aliases=["here"])
    a_model("changes", fallbacks=["here"])
    a_model("is-not-in-it")
    raws = [
        form("new", fallbacks=["newer"]),
        form("changes", scaling={"max": 3}, aliases=["c"]),
        form("stays", aliases=["here"]),
        form("newer"),
    ]
    told = imported(*raws, why="spring", file="catalog.yaml")
    assert [model.name for model in told.added] == ["new", "newer"]
    assert [each.name for each in told.changed] == ["changes"]
    assert (told.removed, told.kept, told.unchanged) == ((), ("is-not-in-it",), 1)
    assert [model.name for model in read_catalog().models] == [
        "stays",
        "changes",
        "is-not-in-it",
        "new",
        "newer",
    ]
    assert read_catalog().resolve("changes") == ModelSpec.load(raws[1])
    assert read_catalog().resolve("new") == ModelSpec.load(raws[0])


def test_every_model_has_its_event_and_all_have_one_revision() -> None:
    a_model("changes")
    a_model("goes")
    a_model("stays")
    before = Revision.current()
    imported(
        form("changes", context_length=4096),
        form("new"),
        form("stays"),
        prune=True,
        why="spring",
        file="catalog.yaml",
    )
    events = {event.subject: event for event in Event.objects.filter(revision__gt=before)}
    assert {name: event.verb for name, event in events.items()} == {
        "changes": "edit",
        "new": "add",
        "goes": "remove",
    }
    assert {(event.by, event.door, event.why, event.kind) for event in events.values()} == {
        ("ann", "command", "spring", "model")
    }
    assert {event.detail["file"] for event in events.values()} == {"catalog.yaml"}
    assert {event.revision for event in events.values()} == {before + 1} == {Revision.current()}
    assert events["new"].subject_key == str(Model.objects.get(name="new").pk)
    assert events["changes"].detail["changed"] == [{"field": "context_length", "was": None, "now": 4096}]
    assert events["new"].detail["model"]["name"] == events["new"].subject
    assert events["goes"].detail["model"]["name"] == "goes"
    revisions = dict(Model.objects.values_list("name", "revision"))
    assert revisions["changes"] == revisions["new"] == before + 1 > revisions["stays"]
    assert list(Tombstone.objects.values_list("name", "revision")) == [("goes", before + 1)]


def test_a_name_that_is_back_leaves_its_grave() -> None:
    a_model("goes")
    remove_model("goes", by="ann", door="command", after_change=int)
    assert Tombstone.objects.exists()
    imported(form("goes"))
    assert not Tombstone.objects.exists()


def test_rows_that_stay_as_they_are_are_left_untouched() -> None:
    a_model("m", profiles=[profile("a"), profile("b"), profile("c")])
    before = {row.name: row for row in Profile.objects.all()}
    created_at = Model.objects.get().created_at
    imported(form("m", profiles=[profile("c"), profile("b", tp=2), profile("d")]))
    after = {row.name: row for row in Profile.objects.order_by("position")}
    assert list(after) == ["c", "b", "d"]
    assert (after["c"].pk, after["c"].fingerprint) == (before["c"].pk, before["c"].fingerprint)
    assert after["b"].pk == before["b"].pk
    assert after["b"].fingerprint != before["b"].fingerprint
    assert Model.objects.get().created_at == created_at


def test_a_running_replica_is_left_alone(settings: Any) -> None:
    model = a_model()
    replica = a_replica(model, a_node())
    imported(form("tiny", profiles=[profile("default", args=["--delay"])]))
    replica.refresh_from_db()
    assert (replica.wanted, replica.state) == ("run", "ready")
    assert replica.profile == Profile.objects.get()
    assert replica.fingerprint != replica.profile.fingerprint


def profile(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "engine": "sim", "gpu_class": "sim"} | fields


NAMES: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "two models exchange an alias": (
        [form("a", aliases=["x"]), form("b", aliases=["y"])],
        [form("a", aliases=["y"]), form("b", aliases=["x"])],
    ),
    "an alias moves while others fall back to it": (
        [form("a", aliases=["x", "z"]), form("b"), form("c", fallbacks=["x"])],
        [form("a", aliases=["z"]), form("b", aliases=["x"]), form("c", fallbacks=["x"])],
    ),
    "a model becomes an alias of a new one": (
        [form("a", aliases=["x"]), form("c", fallbacks=["a"])],
        [form("b", aliases=["a", "x"]), form("c", fallbacks=["a"])],
    ),
    "an alias becomes a model": (
        [form("a", aliases=["x", "y"]), form("c", fallbacks=["x"])],
        [form("a", aliases=["y"]), form("x"), form("c", fallbacks=["x"])],
    ),
    "a model goes whose alias another takes": (
        [form("a", aliases=["x"]), form("b")],
        [form("b", aliases=["x"])],
    ),
    "aliases change places": (
        [form("a", aliases=["x", "y", "z"])],
        [form("a", aliases=["z", "x", "y"])],
    ),
    "fallbacks go round in the file": (
        [form("a"), form("b", fallbacks=["a"])],
        [form("a", fallbacks=["n"]), form("b"), form("n", fallbacks=["b", "a"])],
    ),
    "models that fall back to each other go together": (
        [form("a", fallbacks=["b"]), form("b", fallbacks=["a"]), form("c")],
        [form("c")],
    ),
}


@pytest.mark.parametrize(("before", "after"), NAMES.values(), ids=NAMES)
def test_names_move_between_models_of_one_file(
    before: list[dict[str, Any]], after: list[dict[str, Any]]
) -> None:
    imported(*before)
    imported(*after, prune=True)
    wanted = Catalog.load(after)
    now = read_catalog()
    assert {model.name: model for model in now.models} == {model.name: model for model in wanted.models}
    names = {name for model in wanted.models for name in (model.name, *model.aliases)}
    assert {row.name for row in Name.objects.all()} == names


# --- refusals -------------------------------------------------------------------------------------


def test_all_faults_of_all_models_are_told_with_their_places() -> None:
    a_model("kept", aliases=["k"], fallbacks=[])
    told = refused(
        form("fine"),
        form("a", profiles=[profile("p", tp="two"), profile("p")]),
        form("fine"),
        {"name": "b"},
        7,
        form("c", aliases=["k", "fine"]),
    )
    assert told == [
        (1, 'model "a" profile "p": tp must be a whole number, not a text'),
        (1, 'model "a": profile "p" is declared twice'),
        (2, 'model "fine" is declared twice'),
        (3, 'model "b": source is required'),
        (3, 'model "b": at least one profile is required'),
        (4, "the model: it must be a map of fields, not a number"),
        (5, 'alias "k" is claimed by both "kept" and "c"'),
        (5, 'model "c": alias "fine" collides with another model name'),
    ]


FIRST = "change that model's fallbacks first"
BESIDE: dict[str, tuple[list[dict[str, Any]], bool, list[tuple[int | None, str]]]] = {
    "an alias that a model beside the file has": (
        [form("new", aliases=["k"])],
        False,
        [(0, 'alias "k" is claimed by both "kept" and "new"')],
    ),
    "a name that a model beside the file has as its alias": (
        [form("k")],
        False,
        [(0, 'model "kept": alias "k" collides with another model name')],
    ),
    "a fallback to nobody": (
        [form("new", fallbacks=["nobody"])],
        False,
        [(0, 'model "new": fallback "nobody" is not in the catalog')],
    ),
    "a fallback to what the file removes": (
        [form("new", fallbacks=["k"])],
        True,
        [(0, 'model "new": fallback "k" is not in the catalog')],
    ),
    "an alias goes that a model beside the file falls back to": (
        [form("used")],
        False,
        [
            (0, f'model "used": alias "u" cannot be removed: model "kept" falls back to it; {FIRST}'),
        ],
    ),
    "itself": (
        [form("new", fallbacks=["n"], aliases=["n"])],
        False,
        [(0, 'model "new": fallback "n" is the model itself; name another model')],
    ),
}


@pytest.mark.parametrize(("raws", "prune", "told"), BESIDE.values(), ids=BESIDE)
def test_the_law_is_judged_over_the_catalog_that_would_be(
    raws: list[dict[str, Any]], prune: bool, told: list[tuple[int | None, str]]
) -> None:
    a_model("used", aliases=["u"])
    a_model("kept", aliases=["k"], fallbacks=["u"])
    assert refused(*raws, prune=prune) == told


def test_a_fallback_to_a_model_that_cannot_be_read_is_no_second_fault() -> None:
    assert [number for number, _ in refused(form("a", fallbacks=["b"]), form("b", tp=1))] == [1]


def test_what_is_only_scaled_is_not_refused_for_something_else() -> None:
    row = a_model("old")
    Profile.objects.filter(model=row).update(args=["--port", "80"])
    raw = form("old", profiles=[profile("default", args=["--port", "80"])])
    assert [model.name for model in imported(raw | {"scaling": {}}, form("new")).added] == ["new"]
    assert Model.objects.get(name="old").scaling_max == 0
    ((_, sentence),) = refused(raw | {"context_length": 1})
    assert sentence.startswith('model "old" profile "default": argument "--port" is set by llmgw')


def test_a_circle_of_fallbacks_is_allowed_and_said() -> None:
    raws = [form("a", aliases=["x"], fallbacks=["c", "b"]), form("b", fallbacks=["x"]), form("c")]
    told = imported(*raws, form("leads-there", fallbacks=["a"]))
    ways = [warning.partition("(")[2].partition(")")[0] for warning in told.warnings]
    assert ways == ['"a" -> "b" -> "a"', '"b" -> "a" -> "b"']


@pytest.mark.django_db(transaction=True)
def test_a_fault_within_the_transaction_leaves_everything_as_it_was() -> None:
    a_model("changes", aliases=["x"])
    a_model("goes")
    before = everything()
    with connection.cursor() as cursor:  # the last that is written are the events
        cursor.execute("CREATE UNIQUE INDEX one_of_each ON catalog_event (verb, revision)")
    try:
        with pytest.raises(IntegrityError):
            imported(form("changes"), form("n1"), form("n2"), prune=True)
    finally:
        with connection.cursor() as cursor:
            cursor.execute("DROP INDEX one_of_each")
    assert everything() == before


def test_nobody_is_woken_for_nothing(django_capture_on_commit_callbacks: Any) -> None:
    woken: list[str] = []
    told: dict[str, Any] = {"after_change": lambda: woken.append("woken")}
    for raws, is_trial, wakes in (([form("m")], True, 0), ([form("m")], False, 1), ([form("m")], False, 0)):
        woken.clear()
        with django_capture_on_commit_callbacks(execute=True):
            imported(*raws, is_trial=is_trial, **told)
        assert len(woken) == wakes


# --- two at once ----------------------------------------------------------------------------------


def test_what_somebody_changes_meanwhile_is_not_overwritten() -> None:
    a_model("m")

    def meanwhile(told: Imported) -> None:
        told_so = {"by": "bob", "door": "api", "ask_paths": nobody_is_asked, "after_change": int}
        edit_model("m", form("m", description="his"), **told_so)

    with pytest.raises(CatalogError, match=r"^the catalog was changed by somebody else just now"):
        imported(form("m", description="hers"), form("n"), before_change=meanwhile)
    assert [model.description for model in read_catalog().models] == ["his"]


def test_what_changes_beside_the_file_meanwhile_is_judged_again() -> None:
    def takes(name: str) -> Any:
        return lambda told: a_model(f"of-{name}", aliases=[name])

    imported(form("m"), before_change=takes("free"))
    assert [model.name for model in read_catalog().models] == ["of-free", "m"]
    with pytest.raises(ImportRefused, match=r'^alias "wanted" is claimed by both "of-wanted" and "n"$'):
        imported(form("n", aliases=["wanted"]), before_change=takes("wanted"))


# --- taking away ----------------------------------------------------------------------------------


def test_more_than_a_third_goes_only_with_a_second_word() -> None:
    imported(*[form(f"m{number}") for number in range(11)])
    rest = [form(f"m{number}") for number in range(4, 11)]
    says = "4 of 11 models would be removed, which is more than a third; check that the file is the whole"
    assert imported(*rest, prune=True, is_trial=True).sweeps.sentence.startswith(says)
    before = everything()
    with pytest.raises(CatalogError, match=f"^{says} catalog, and then say yes to it"):
        imported(*rest, prune=True)
    assert everything() == before
    imported(*rest, prune=True, is_sure=True)
    assert [model.name for model in read_catalog().models] == [raw["name"] for raw in rest]


def test_few_models_or_a_small_part_go_at_once() -> None:
    imported(*[form(f"m{number}") for number in range(12)])
    assert len(imported(*[form(f"m{number}") for number in range(8)], prune=True).removed) == 4
    Model.objects.filter(name__in=["m0", "m1", "m2", "m3", "m4"]).delete()
    assert len(imported(form("other"), prune=True).removed) == 3


def test_the_last_one_goes_only_with_a_second_word() -> None:
    imported(form("m"))
    with pytest.raises(CatalogError, match=r"^1 of 1 models would be removed"):
        imported(prune=True)
    assert imported(prune=True, is_sure=True).removed == ("m",)
    assert not imported(prune=True).changes_anything


# --- sources --------------------------------------------------------------------------------------


def real(name: str, **fields: Any) -> dict[str, Any]:
    vllm = {"name": "p", "engine": "vllm", "gpu_class": "h100"}
    return form(name, **{"source": f"/models/{name}", "profiles": [vllm]} | fields)


def on_gpu_01(path: str, spec: ModelSpec) -> Sequence[PathFacts]:
    return [PathFacts("gpu-01", "lost" not in path, "dir", 7, ("model.safetensors", "config.json"))]


def test_only_what_reads_otherwise_is_asked_about() -> None:
    asked: list[str] = []

    def ask(path: str, spec: ModelSpec) -> Sequence[PathFacts]:
        asked.append(path)
        return on_gpu_01(path, spec)

    imported(real("one"), real("two"), form("sim"), ask_paths=ask)
    assert sorted(asked) == ["/models/one", "/models/two"]
    asked.clear()
    described = real("one", description="changed")
    imported(described, real("two", source="/models/other"), real("three"), ask_paths=ask)
    assert sorted(asked) == ["/models/other", "/models/three"]
    rows = {row.name: row for row in Model.objects.all()}
    assert {row.source_state for row in rows.values()} == {"ok"}
    assert "/models/one" in rows["one"].source_sentence
    assert "/models/other" in rows["two"].source_sentence
    assert Event.objects.filter(subject="one").latest("id").detail["source_check"]["code"] == "recorded"


def test_what_is_known_of_a_source_is_held_against_an_edit_that_asks_about_none() -> None:
    imported(real("one"), ask_paths=on_gpu_01)
    Model.objects.update(source_facts={"context_length": 4096})
    (warning,) = imported(real("one", context_length=8192)).warnings
    assert warning.startswith(
        'model "one": context_length 8192 is above the 4096 that the model was made for'
    )


def test_sources_are_asked_about_side_by_side_and_bounded() -> None:
    together = threading.Barrier(8)
    running, most = [0], [0]
    lock = threading.Lock()

    def ask(path: str, spec: ModelSpec) -> Sequence[PathFacts]:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        together.wait(20)
        with lock:
            running[0] -= 1
        return on_gpu_01(path, spec)

    imported(*[real(f"m{number}") for number in range(16)], ask_paths=ask)
    assert most == [8]


def test_every_refused_source_is_told_at_once_and_nothing_is_saved() -> None:
    with pytest.raises(SourcesRefused) as no:
        imported(real("lost-1"), real("found"), real("lost-2"), ask_paths=on_gpu_01)
    assert [(each.number, each.fault.field) for each in no.value.placed] == [(0, "source"), (2, "source")]
    says = 'model "lost-1": source "/models/lost-1" is not on the node gpu-01'
    assert no.value.placed[0].fault.sentence.startswith(says)
    assert not Model.objects.exists()


def test_a_hub_that_is_silent_is_not_waited_for_again_and_again(settings: Any) -> None:
    settings.LLMGW_HUB_TIMEOUT_S = 0.5
    with running_hub() as hub:
        settings.LLMGW_HUB_ENDPOINT = hub.url
        for number in range(100):
            path = f"/api/models/org/m{number}"
            hub.replies[path] = Reply(drip=lambda _: hub.is_closing.wait(20))
        names = [f"m{number}" for number in range(100)]
        forms = [real(name, source=f"org/{name}") for name in names]
        with pytest.raises(SourcesRefused) as no:
            imported(*forms, real("lost"), real("found"), ask_paths=on_gpu_01)
        assert len(hub.asked) <= 16
    told = {fault.model: (fault.code, fault.sentence) for fault in no.value.faults}
    assert list(told) == [*names, "lost"]
    assert {code for code, _ in told.values()} == {"unreachable", "unasked", "path_missing"}
    assert told["m99"][1] == (
        'model "m99": source "org/m99" was not asked about, as the hub did not answer for another model just'
        " now; repeat this once the hub answers"
    )


def test_a_check_is_skipped_only_for_a_reason() -> None:
    says = "the source check is skipped only for a reason; say why, for the history to keep"
    assert refused(real("lost"), skip_source_check=True) == [(0, f'model "lost": {says}')]
    told = imported(real("lost"), skip_source_check=True, why="copied tonight")
    assert told.warnings == ('model "lost": source "/models/lost" was not checked, on the word of ann',)
    row = Model.objects.get()
    assert (row.source_state, row.source_skipped_by) == ("", "ann")


@pytest.mark.django_db(transaction=True)
def test_threads_that_ask_leave_no_connection_behind() -> None:
    seen: list[Any] = []

    def ask(path: str, spec: ModelSpec) -> Sequence[PathFacts]:
        Model.objects.count()
        seen.append(connections["default"])
        return on_gpu_01(path, spec)

    imported(*[real(f"m{number}") for number in range(12)], ask_paths=ask)
    assert len(seen) == 12
    assert all(each.connection is None for each in seen)


# --- secrets --------------------------------------------------------------------------------------

SECRET = {"HF_TOKEN": "hf_" + "a" * 20, "PLAIN": "1"}


def test_secrets_are_exported_only_on_demand_and_stand_for_themselves(exported: Any) -> None:
    a_model("m", profiles=[profile("p", env=SECRET)])
    hidden = manage("catalog_export")
    assert SECRET["HF_TOKEN"] not in hidden
    assert "HF_TOKEN: (hidden)" in hidden
    assert "Secrets (1) are written as (hidden)" in hidden
    text = hidden.partition("Secrets (")[0]
    assert manage("catalog_import", exported(text)).startswith("Nothing to change")
    manage("catalog_import", exported(text.replace('PLAIN: "1"', 'PLAIN: "2"')))
    assert dict(read_catalog().models[0].profiles[0].env) == SECRET | {"PLAIN": "2"}
    shown = manage("catalog_export", "--with-secrets")
    assert f"HF_TOKEN: {SECRET['HF_TOKEN']}" in shown
    assert "warning: secrets (1) are in this file as plain text" in shown


def test_a_hidden_secret_that_stands_for_nothing_is_refused_with_its_line(exported: Any) -> None:
    a_model("m", profiles=[profile("p", env=SECRET)])
    text = manage("catalog_export").partition("Secrets (")[0].replace("name: m\n", "name: n\n")
    says = 'env "HF_TOKEN" is (hidden), which stands for nothing stored; type its value'
    (line,) = [number for number, each in enumerate(text.splitlines(), 1) if "env:" in each]
    assert refusal("catalog_import", exported(text)) == [f'line {line}: model "n" profile "p": {says}']


def test_a_difference_shows_no_secret(exported: Any) -> None:
    a_model("m", profiles=[profile("p", env=SECRET)])
    text = manage("catalog_export", "--with-secrets").partition("warning")[0]
    changed = text.replace(SECRET["HF_TOKEN"], "hf_" + "b" * 20)
    for words in (("--dry-run",), ("--dry-run", "--json"), ("--json",)):
        told = manage("catalog_import", exported(changed), *words)
        assert "(hidden)" in told
        assert "bbb" not in told + json.dumps([event.detail for event in Event.objects.all()])
        assert "aaa" not in told


# --- the commands ---------------------------------------------------------------------------------


def test_the_difference_comes_first_and_a_trial_changes_nothing(exported: Any) -> None:
    model = a_model("goes")
    a_replica(model, a_node())
    a_model("changes", aliases=["x"], profiles=[profile("p", env={"A": "1"}), profile("q"), profile("r")])
    text = json.dumps(
        [
            form("new", scaling={"max": 1}),
            form(
                "changes",
                scaling={"max": 1, "idle_timeout": "20m"},
                profiles=[profile("r"), profile("p", tp=2, env={"B": "2"}), profile("s", weight=2)],
            ),
        ]
    )
    path = exported(text, "json")
    before = everything()
    told = manage("catalog_import", path, "--dry-run", "--prune").splitlines()
    assert everything() == before
    difference = [
        "add new (on demand, up to 1, unloaded after 15m idle; default)",
        "change changes",
        '    aliases: ["x"] -> none',
        "    scaling.min: 1 -> none",
        "    scaling.max: 2 -> 1",
        '    scaling.idle_timeout: none -> "20m"',
        "    profile s: added",
        "    profile p: tp: 1 -> 2",
        "    profile p: gpus_per_node: 1 -> 2",
        '    profile p: env.A: "1" -> none',
        '    profile p: env.B: none -> "2"',
        "    profile q: removed",
        "    profiles in this order: r, p, s",
        "remove goes (1 of its replicas will stop)",
    ]
    summary = "Would add 1, change 1 and remove 1 models; 0 stay as they are. Nothing was changed."
    assert told[: len(difference) + 2] == [*difference, summary, ""]
    told = manage("catalog_import", path, "--prune").splitlines()
    assert told == [*difference, "Added 1, changed 1 and removed 1 models; 0 stayed as they were."]
    assert [row.name for row in Model.objects.all()] == ["changes", "new"]


def test_a_trial_tells_what_the_next_pass_would_make_of_the_file(exported: Any) -> None:
    node, rows = a_node(gpus=4), {name: a_model(name, scaling={"min": 1, "max": 1}) for name in "abc"}
    one, two, three = (a_replica(row, node, gpu=gpu) for gpu, row in enumerate(rows.values()))
    text = json.dumps(
        [
            model_form("a", scaling={"min": 1, "max": 1}, context_length=512),
            model_form("b", scaling={"min": 1, "max": 1}, profiles=[PROFILE | {"args": ["--ttft", "1ms"]}]),
            model_form("fits", scaling={"min": 1, "max": 1}),
            model_form("huge", scaling={"min": 1, "max": 1}, profiles=[PROFILE | {"tp": 8}]),
        ]
    )
    path = exported(text, "json")
    told = manage("catalog_import", path, "--dry-run", "--prune").partition("Nothing was changed.\n")[2]
    assert [" ".join(line.split()) for line in told.splitlines()] == [
        "",
        "Would be stale, and run on as started:",
        "REPLICA PROFILE NODE DIFFERS IN",
        f"{str(one.pk)[:8]} a/default gpu-01 context_length",
        f"{str(two.pk)[:8]} b/default gpu-01 args",
        "",
        "With it, the next pass would:",
        "WHAT OF WHERE WHY",
        "1 short huge - 0 of 1 node: 1 lacks 8 free sim",
        f'drain c/default {str(three.pk)[:8]} gpu-01 (1 GPU) model "c" was removed from the catalog',
        "start fits/default gpu-01 (1 GPU) 1 wanted, 0 there before it",
    ]
    in_json = manage("catalog_import", path, "--dry-run", "--prune", "--json")
    found = json.loads(in_json)["consequences"]
    assert [(each["model"], each["replica"]) for each in found["stale"]] == [
        ("a", str(one.pk)),
        ("b", str(two.pk)),
    ]
    assert [item["bucket"] for item in found["plan"]] == ["blocked", "drain", "start"]
    assert "consequences" not in json.loads(manage("catalog_import", path, "--prune", "--json"))


def test_models_beside_the_file_are_named(exported: Any) -> None:
    a_model("one")
    a_model("two")
    told = manage("catalog_import", exported("models: []")).splitlines()
    assert told == [
        "In the catalog and not in the file: one, two. They stay; --prune removes them.",
        "Nothing to change: the catalog has all 0 models as the file has them.",
    ]


def test_scripts_are_told_in_json(exported: Any) -> None:
    a_model("m")
    a_model("beside")
    text = json.dumps([form("m", context_length=1), form("new", scaling={"max": 1, "idle_timeout": "1s"})])
    said = io.StringIO()
    call_command("catalog_import", str(exported(text)), "--json", stdout=said, stderr=io.StringIO())
    told = json.loads(said.getvalue())
    assert told == {
        "dry_run": False,
        "added": ["new"],
        "changed": [
            {
                "name": "m",
                "changed": [{"field": "context_length", "was": None, "now": 1}],
                "profiles_changed": {},
                "profiles_added": [],
                "profiles_removed": [],
            }
        ],
        "removed": [],
        "not_in_file": ["beside"],
        "unchanged": 0,
        "warnings": told["warnings"],
    }
    assert "is under a minute" in told["warnings"][0]


def test_refusals_have_lines_and_are_all_told(exported: Any) -> None:
    text = "models:\n- name: a\n  source: sim/x\n- name: b\n  surce: x\n"
    assert refusal("catalog_import", exported(text)) == [
        'line 2: model "a": at least one profile is required',
        'line 5: model "b": unknown key "surce"; did you mean source?',
        'line 4: model "b": source is required',
        'line 4: model "b": at least one profile is required',
    ]


def test_many_refusals_end_somewhere(exported: Any) -> None:
    text = json.dumps([{"name": f"m{number}"} for number in range(2_000)])
    told = refusal("catalog_import", exported(text, "json"))
    assert len(told) == 101
    assert told[-1] == "... and 901 more."


def test_refused_sources_say_how_to_go_on(exported: Any, settings: Any) -> None:
    settings.LLMGW_HUB_ENDPOINT = "http://127.0.0.1:9"
    text = json.dumps([real("m", source="org/m")], indent=1)
    first, hint = refusal("catalog_import", exported(text, "json"))
    assert first.startswith('line 4: model "m": source "org/m": could not ask the hub')
    assert hint == "Nothing was saved; --skip-source-check --why REASON saves it all the same."


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    assert refusal("catalog_import", path) == [
        f'"{path}" cannot be read: No such file or directory; check the path.'
    ]
    assert refusal("catalog_import", "a\0b") == [
        '"a\\x00b" cannot be read: embedded null byte; check the path.'
    ]


def test_a_file_that_cannot_be_read_names_all_its_lines(exported: Any) -> None:
    on, anchor = refusal("catalog_import", exported("models:\n- name: on\n  a: &x 1\n"))
    assert on.startswith("line 2: on is true or false to one reader of YAML")
    assert anchor == "line 3: the anchor &x is not read; remove it"


def test_what_is_piped_in_is_read(monkeypatch: Any) -> None:
    content = io.TextIOWrapper(io.BytesIO(json.dumps([form("m")]).encode()))
    monkeypatch.setattr("sys.stdin", content)
    assert manage("catalog_import", "-").endswith(
        "Added 1, changed 0 and removed 0 models; 0 stayed as they were.\n"
    )
    assert Event.objects.get().detail["file"] == "-"


def test_a_third_of_the_catalog_wants_yes(exported: Any) -> None:
    imported(*[form(f"m{number}") for number in range(4)])
    path = exported("models: []")
    (sentence,) = refusal("catalog_import", path, "--prune")
    assert sentence.startswith("4 of 4 models would be removed")
    assert f"warning: {sentence}" in manage("catalog_import", path, "--prune", "--dry-run")
    assert manage("catalog_import", path, "--prune", "--yes").endswith("0 stayed as they were.\n")
    assert not Model.objects.exists()


HOSTILE = ["a/b", "a b", "名前", "<b>m</b>", "x" * 200, "'; DROP TABLE", "{{7*7}}", "-", "~", "no"]


@pytest.mark.parametrize("format", FORMATS)
def test_names_of_all_kinds_go_there_and_back(format: str, exported: Any) -> None:
    imported(*[form(name) for name in HOSTILE])
    text = manage("catalog_export", "--format", format)
    Model.objects.all().delete()
    manage("catalog_import", exported(text, format))
    assert [model.name for model in read_catalog().models] == HOSTILE


def test_two_thousand_aliases_are_no_matter() -> None:
    aliases = [f"a{number}" for number in range(2_000)]
    imported(form("m", aliases=aliases))
    assert list(read_catalog().models[0].aliases) == aliases
    imported(form("m", aliases=aliases[1000:]), form("n", aliases=aliases[:1000]))
    assert read_catalog().resolve("a0").name == "n"


# --- speed ----------------------------------------------------------------------------------------


def many(count: int, **fields: Any) -> list[dict[str, Any]]:
    profiles = [profile(name) for name in ("p", "q", "r")]
    return [form(f"m{each}", aliases=[f"a{each}"], profiles=profiles, **fields) for each in range(count)]


def queries_of(*raws: object, **told: Any) -> int:
    with CaptureQueriesContext(connection) as queries:
        imported(*raws, **told)
    return len(queries)


def test_queries_do_not_grow_with_models() -> None:
    """But for statements that are full: SQLite takes a thousand values in one, and here gets 200 models."""
    room = 25 if connection.vendor == "sqlite" else 0
    a_model("there")
    assert queries_of(*many(1)) == 15
    assert queries_of(*many(200)) <= 15 + room
    assert queries_of(*many(200)) == 4
    assert queries_of(*many(1, description="other")) == 12
    assert queries_of(*many(200, description="other")) <= 12 + room
    removing = queries_of(*many(199), prune=True)
    assert queries_of(prune=True, is_sure=True) <= removing + 25  # Django deletes a hundred rows at a time
    assert not Model.objects.exists()


@pytest.mark.parametrize("address", LISTS.values(), ids=LISTS)
def test_what_a_list_asks_of_the_database_does_not_grow_with_models(address: str, settings: Any) -> None:
    settings.ALLOWED_HOSTS = ["127.0.0.1"]
    ada = alice()
    counts = []
    for count in (1, 10, 150):
        imported(*many(count))
        counts.append(cost_of_look(address, ada)["queries"])
    assert counts[0] == counts[1] == counts[2] > 0


@pytest.mark.soak
@pytest.mark.one_database
def test_the_bench_runs(capfd: Any) -> None:
    bench_main(["--json", "--models", "12", "--database", "sqlite"])
    told = json.loads(capfd.readouterr().out)
    assert told["models"] == 12
    numbers = told["databases"]["sqlite"]
    assert all(seconds > 0 for seconds in numbers["seconds"].values())
    for looks in numbers["looks"].values():
        assert list(looks) == ["10", "100", "12"]
        assert len({look["queries"] for look in looks.values()}) == 1
