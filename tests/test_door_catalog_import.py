"""catalog_export and catalog_import: there and back, what is told before anything changes, and no secret."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command

from catalog.actions import read_catalog
from catalog.files import FORMATS
from catalog.models import Event, Model
from tests.cast import PROFILE, a_model, a_node, a_replica, model_form
from tests.importing import everything, form, imported, manage, profile, real, refusal
from tests.test_catalog_spec import ACCEPTED

pytestmark = [pytest.mark.django_db, pytest.mark.one_database]


@pytest.fixture
def exported(tmp_path: Path) -> Any:
    def write(text: str, ending: str = "yaml") -> Path:
        path = tmp_path / f"catalog.{ending}"
        path.write_text(text)
        return path

    return write


# --- there and back -----------------------------------------------------------------------------


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


# --- secrets ------------------------------------------------------------------------------------


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


# --- the commands -------------------------------------------------------------------------------


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
