"""A whole catalog at once: told apart, refused with every reason, or written whole."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import IntegrityError, connection

from catalog.actions import Imported, add_model, edit_model, read_catalog, remove_model
from catalog.importing import ImportRefused
from catalog.models import Event, Fallback, Model, Name, Profile, Revision, Tombstone
from catalog.reading import CatalogError
from catalog.spec import Catalog, ModelSpec
from tests.cast import a_model, a_node, a_replica, nobody_is_asked
from tests.importing import everything, form, imported, profile, refused

pytestmark = pytest.mark.django_db


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


# --- what a file changes ------------------------------------------------------------------------


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


# --- refusals -----------------------------------------------------------------------------------


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


# --- two at once --------------------------------------------------------------------------------


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


# --- taking away --------------------------------------------------------------------------------


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
