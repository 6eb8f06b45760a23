"""The commands at the shell: what they print, and that a refusal is a sentence."""

from __future__ import annotations

import io
import json
import stat
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from django.test.utils import CaptureQueriesContext

from catalog.hiding import HIDDEN
from catalog.keys import KeyText
from catalog.models import Event, Key, Model
from nodes.models import Node, Unplaced
from tests.cast import PROFILE, a_model, a_node, a_replica, alice, edited

pytestmark = pytest.mark.django_db

SIM = ("--source", "sim/tiny", "--engine", "sim", "--gpu-class", "sim")


def manage(*words: Any) -> str:
    """What the command prints, its warnings included."""
    said = io.StringIO()
    call_command(*map(str, words), stdout=said, stderr=said, no_color=True)
    return said.getvalue()


def refusal(*words: Any) -> str:
    with pytest.raises(CommandError) as no:
        manage(*words)
    return str(no.value)


# --- models ---------------------------------------------------------------------------------------


def test_model_add_makes_one_profile_from_its_options() -> None:
    printed = manage(
        *("model_add", "tiny", *SIM, "--tp", "2", "--min", "1", "--max", "2", "--alias", "small"),
        *("--context-length", "4096", "--capability", "tools", "--why", "for the trial"),
        *("--profile", "name=wide", "--profile", "args=--delay", "--profile", "args=--b=c"),
        *("--profile", "env.A=1", "--profile", "node_selector.zone=a", "--profile", "startup_timeout=90s"),
    )
    assert printed.startswith("Added tiny (kept running: 1 to 2).\n")
    spec = Model.objects.get().spec
    (profile,) = spec.profiles
    assert (profile.name, profile.tp, profile.args, dict(profile.env)) == (
        "wide",
        2,
        ("--delay", "--b=c"),
        {"A": "1"},
    )
    assert (spec.aliases, spec.context_length, spec.capabilities.tools) == (("small",), 4096, True)
    event = Event.objects.get(verb="add")
    assert (event.by[:6], event.door, event.why) == ("shell:", "command", "for the trial")


def test_model_add_tells_scripts_what_rest_tells() -> None:
    told = json.loads(manage("model_add", "tiny", *SIM, "--max", "1", "--json"))
    assert told["profiles"][0]["name"] == "default"
    assert told["status"]["scaling"] == "on demand, up to 1, unloaded after 15m idle"


def test_a_model_that_is_added_without_scaling_is_said_to_be_off() -> None:
    printed = manage("model_add", "tiny", *SIM)
    assert printed.startswith("Added tiny (off; without --min or --max nothing runs).\n")


def test_model_add_warns_and_adds() -> None:
    printed = manage("model_add", "tiny", *SIM, "--max", "1", "--idle-timeout", "10s")
    assert "warning: " in printed
    assert Model.objects.get().idle_timeout_ns == 10_000_000_000


@pytest.mark.parametrize(
    ("words", "says"),
    [
        pytest.param(("--tp", "two"), "tp must be a whole number, not a text", id="a word for a number"),
        pytest.param(("--profile", "tp"), 'the profile setting "tp" is not key=value', id="no equals sign"),
        pytest.param(
            ("--tp", "2", "--profile", "tp=4"), "--tp and --profile tp= say the same thing", id="said twice"
        ),
        pytest.param(("--profile", "tpp=4"), 'unknown key "tpp"; did you mean tp?', id="a mispelt key"),
        pytest.param(("--min", "3", "--max", "1"), "scaling max 1 is below min 3", id="max below min"),
        pytest.param(("--capability", "flight"), 'unknown key "flight"', id="an unknown capability"),
    ],
)
def test_model_add_refuses_in_one_sentence_and_saves_nothing(words: tuple[str, ...], says: str) -> None:
    assert says in refusal("model_add", "tiny", *SIM, *words)
    assert not Model.objects.exists()
    assert not Event.objects.exists()


def test_model_add_says_every_fault() -> None:
    said = refusal("model_add", "tiny", *SIM, "--min", "3", "--max", "1", "--profile", "priority=high")
    assert len(said.splitlines()) == 2


def test_model_remove_removes_and_says_so() -> None:
    a_model()
    assert manage("model_remove", "tiny", "--why", "over") == "Removed tiny.\n"
    assert Event.objects.get(verb="remove").why == "over"
    assert refusal("model_remove", "tiny") == 'model "tiny" is not in the catalog; check the spelling'


def test_models_prints_a_table() -> None:
    model = a_model()
    a_replica(model, a_node())
    edited(model, tp=2)
    Unplaced.objects.create(model=model, missing=1, why="0 of 1 node: 1 lacks 2 free sim")
    a_model("off", scaling={})
    assert manage("models").splitlines() == [
        "MODEL  SCALING               READY   STALE  SOURCE",
        "tiny   kept running: 1 to 2  1 of 2  1      found",
        "off    off                   0 of 0  -      found",
        "tiny is 1 short: 0 of 1 node: 1 lacks 2 free sim",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_tables_fit_a_terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    model = a_model("org/a-model-with-a-name-of-some-length")
    node = a_node("gpu-01.cluster.example.org", problem="Its agent answered with a status of 502.")
    a_replica(model, node, reason="it fetches its weights: 12.3 of 140.0 GB, 4 minutes left")
    alice()
    manage("key_create", "for a script that somebody runs at night", "--user", "alice")
    for command in ("models", "replicas", "nodes", "key_list"):
        terminal = Terminal()
        call_command(command, stdout=terminal, no_color=True)
        lines = terminal.getvalue().splitlines()
        assert max(map(len, lines)) <= 80, lines
        _, *rows = manage(command).splitlines()
        letters = Counter("".join("".join(rows).split()).replace("-", ""))
        assert letters <= Counter(terminal.getvalue())  # moved or wrapped, and nothing cut


def test_models_plain_prints_the_catalog() -> None:
    a_model()
    assert manage("models", "--plain") == (
        "tiny (min 1, max 2)\n default              sim        sim          tp=1 nodes=1 priority=0\n"
    )


def test_an_empty_catalog_says_what_to_do() -> None:
    assert manage("models") == "The catalog is empty; manage.py model_add adds a model.\n"
    assert manage("models", "--plain") == ""
    assert json.loads(manage("models", "--json")) == []


# --- replicas -------------------------------------------------------------------------------------


def test_replicas_says_what_is_stale_and_how() -> None:
    model = a_model()
    replica = a_replica(model, a_node(), reason="serving")
    assert manage("replicas").splitlines() == [
        "REPLICA   MODEL/PROFILE  NODE    PORT   STATE  CHANGED    STALE  REASON",
        f"{str(replica.pk)[:8]}  tiny/default   gpu-01  18001  ready  5 min ago  -      serving",
    ]
    edited(model, tp=2, env={"HF_TOKEN": "abracadabra"})
    assert "stale profile (tp, gpus_per_node, env)" in manage("replicas")
    told = manage("replicas", "--diff")
    assert "FIELD          WAS      IS NOW" in told
    assert "tp             1        2" in told
    assert f"env            not set  HF_TOKEN={HIDDEN}" in told
    (as_json,) = json.loads(manage("replicas", "--json"))
    assert (as_json["stale_profile"], as_json["restart_needed"]) == (True, True)
    assert "abracadabra" not in manage("replicas", "--json")


def test_replicas_that_are_over_are_told_when_asked_for() -> None:
    a_replica(a_model(), a_node(), "failed", gpu=None, reason="no\nspace\x07 left")
    assert manage("replicas") == "No replica runs, or is on its way.\n"
    assert "no\\nspace\\x07 left" in manage("replicas", "--all")
    assert manage("replicas", "--model", "other") == 'No replica of "other" runs, or is on its way.\n'
    assert manage("replicas", "--all", "--model", "other") == 'No replica of "other" is known.\n'


def test_lists_take_the_same_number_of_queries_however_long_they_are() -> None:
    def queries() -> list[int]:
        counts = []
        for command in ("models", "replicas", "nodes"):
            with CaptureQueriesContext(connection) as seen:
                manage(command)
            counts.append(len(seen))
        return counts

    a_replica(a_model("first"), a_node("gpu-00"))
    few = queries()
    for number in range(1, 6):
        a_replica(a_model(f"model-{number}"), a_node(f"gpu-0{number}"))
    assert queries() == few


# --- nodes ----------------------------------------------------------------------------------------


def test_node_add_writes_a_secret_file_and_says_what_to_run(tmp_path: Path) -> None:
    file = tmp_path / "identity.json"
    printed = manage("node_add", "gpu-07", "--address", "http://10.0.0.7:8378", "--write", file)
    assert "python -m nodes.agent --identity" in printed
    assert "--listen 10.0.0.7:8378" in printed
    identity = json.loads(file.read_text())
    assert identity["node"] == str(Node.objects.get().uuid)
    assert identity["token"] not in printed
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [file]

    manage("node_add", "gpu-07", "--address", "http://10.0.0.8:8378", "--write", file)
    assert json.loads(file.read_text())["node"] == identity["node"]
    assert Node.objects.get().address == "http://10.0.0.8:8378"


def test_node_add_refuses_what_is_no_address_and_no_folder(tmp_path: Path) -> None:
    said = refusal("node_add", "gpu-07", "--address", "10.0.0.7", "--write", tmp_path / "x")
    assert "such as http://10.0.0.7:8378" in said
    said = refusal("node_add", "gpu-07", "--address", "http://a:1", "--write", tmp_path / "no" / "x")
    assert "make it first" in said
    said = refusal("node_add", "gpu-07", "--address", "http://a:1", "--write", tmp_path)
    assert "could not be written: it is no file" in said
    said = refusal("node_add", "gpu-07", "--address", "http://a:1", "--write", tmp_path / ("x" * 300))
    assert "could not be written" in said
    assert list(tmp_path.iterdir()) == []
    assert not Node.objects.exists()
    assert not Event.objects.exists()


def test_nodes_prints_a_table() -> None:
    assert manage("nodes") == "There is no node yet; manage.py node_add adds one.\n"
    a_replica(a_model(), a_node())
    heading, line = manage("nodes").splitlines()
    assert heading.split() == ["NODE", "STATE", "SEEN", "GPUS", "FREE", "ENGINES", "ADDRESS", "NOTE"]
    assert line.split()[0:2] == ["gpu-01", "fresh"]
    assert "1 of 2" in line
    assert json.loads(manage("nodes", "--json"))[0]["gpus_free"] == 1


def test_a_node_is_cordoned_and_uncordoned() -> None:
    a_node()
    assert manage("node_cordon", "gpu-01", "--why", "new fans") == "Cordoned gpu-01.\n"
    assert manage("node_cordon", "gpu-01") == "gpu-01 is cordoned already.\n"
    assert "fresh, cordoned" in manage("nodes")
    assert "new fans" in manage("nodes")
    assert manage("node_uncordon", "gpu-01") == "Uncordoned gpu-01.\n"
    assert manage("node_uncordon", "gpu-01") == "gpu-01 is not cordoned.\n"
    assert [event.verb for event in Event.objects.filter(kind="node")] == ["uncordon", "cordon"]
    assert refusal("node_cordon", "x") == 'There is no node "x"; manage.py nodes tells which there are.'


# --- keys -----------------------------------------------------------------------------------------


def test_a_key_is_made_listed_and_revoked() -> None:
    assert "manage.py key_create makes one" in manage("key_list")
    alice()
    made = json.loads(manage("key_create", "laptop", "--user", "alice", "--scope", "manage", "--json"))
    assert KeyText.parse(made["key"]) is not None
    listed = manage("key_list")
    assert listed.splitlines()[1].split()[:4] == [made["id"], "laptop", "alice", "manage"]
    assert made["key"] not in listed
    assert manage("key_revoke", made["id"]) == f"Revoked {made['id']}.\n"
    assert "There is no live key" in refusal("key_revoke", made["id"])
    assert Key.objects.get().revoked_at is not None


def test_the_text_of_a_key_is_alone_on_the_output() -> None:
    alice()
    out, err = io.StringIO(), io.StringIO()
    call_command("key_create", "laptop", "--user", "alice", stdout=out, stderr=err)
    assert KeyText.parse(out.getvalue().strip()) is not None
    assert "shown this once" in err.getvalue()
    assert Key.objects.get().scope == "inference"


def test_a_key_for_nobody_is_refused() -> None:
    assert refusal("key_create", "laptop", "--user", "bob").startswith('There is no user "bob"')
    assert not Key.objects.exists()


def test_hostile_names_cannot_move_the_cursor() -> None:
    a_model("a\u00a0b", profiles=[PROFILE])
    assert "a\\xa0b" in manage("models")
