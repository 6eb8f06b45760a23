"""The commands at the shell: what they print, and that a refusal is a sentence."""

from __future__ import annotations

import io
import json
import re
import stat
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from django.test.utils import CaptureQueriesContext

from catalog.differences import MODEL_KEYS, PROFILE_KEYS
from catalog.durations import MILLISECOND
from catalog.hiding import HIDDEN
from catalog.keys import KeyText
from catalog.models import Event, Key, Model, Profile
from catalog.parts import LIMIT_KEYS, TIMEOUT_KEYS
from nodes.models import Node, Unplaced
from tests.cast import PROFILE, a_model, a_node, a_replica, alice, edited

pytestmark = [pytest.mark.django_db, pytest.mark.one_database]

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
            ("--tp", "2", "--profile", "tp=4"), 'the profile setting "tp" is given twice', id="said twice"
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
    assert manage("model_remove", "tiny", "--why", "over") == "Removed tiny; nothing of it runs.\n"
    assert Event.objects.get(verb="remove").why == "over"
    assert refusal("model_remove", "tiny") == 'model "tiny" is not in the catalog; check the spelling'


def test_model_remove_tells_what_stops_and_can_be_tried() -> None:
    model = a_model()
    short = str(a_replica(model, a_node()).pk)[:8]
    a_replica(model, a_node("gpu-02"), "failed", gpu=None)
    a_model("user", fallbacks=["tiny"])
    no = 'model "tiny" cannot be removed: model "user" falls back to it; change that model\'s fallbacks first'
    assert refusal("model_remove", "tiny", "--dry-run") == no
    manage("model_edit", "user", "--fallbacks")
    assert manage("model_remove", "tiny", "--dry-run").splitlines() == [
        "Would remove tiny.",
        "",
        "With it, the next pass would:",
        "WHAT   OF                     WHERE           WHY",
        f"drain  tiny/default {short}  gpu-01 (1 GPU)  " + 'model "tiny" was removed from the catalog',
    ]
    assert Model.objects.filter(name="tiny").exists()
    assert manage("model_remove", "tiny").startswith("Removed tiny; these replicas")


# --- a model from all its options, and back -------------------------------------------------------

# Every field of a model, and every setting of a profile, at a value that is not the usual one.
WHOLE = (
    *("--description", "a trial", "--alias", "small", "--alias", "least", "--min", "1", "--max", "3"),
    *("--idle-timeout", "1h30m", "--fallback", "other", "--routing-profile", "prefix"),
    *("--ttft-p99", "300ms", "--tpot-p99", "50ms", "--context-length", "8192", "--max-output", "512"),
    *("--capability", "tools", "--capability", "vision", "--capability", "embeddings"),
    *("--requests-per-minute", "60", "--tokens-per-minute", "90000", "--concurrency", "4"),
    *("--over-max-output", "clamp", "--timeout-hold", "5m", "--timeout-connect", "1s"),
    *("--timeout-first-byte", "2m", "--timeout-idle", "30s"),
    *("--profile", "wide", "engine=sim", "gpu_class=sim", "tp=4", "pp=2", "nodes=2", "gpus_per_node=4"),
    *("--profile", "wide", "args=--delay", "args=", "env.A=1", "env.B=", "node_selector.zone=a"),
    *("--profile", "wide", "min_memory_gb=4", "min_disk_gb=9", "weight=0.5", "priority=-5"),
    *("--profile", "wide", "startup_timeout=5m"),
)


def test_no_field_is_missing_at_the_shell() -> None:
    a_model("other")
    manage("model_add", "tiny", "--source", "sim/tiny", *WHOLE)
    form = Model.objects.get(name="tiny").spec.as_dict()
    assert set(form) == set(MODEL_KEYS)
    assert set(form["profiles"][0]) == set(PROFILE_KEYS)
    assert set(form["scaling"]) == {"min", "max", "idle_timeout"}
    assert set(form["limits"]) == {*LIMIT_KEYS, "over_max_output"}
    assert set(form["timeouts"]) == set(TIMEOUT_KEYS)
    assert form["slo"] == {"TTFTp99": 300 * MILLISECOND, "TPOTp99": 50 * MILLISECOND}
    assert form["capabilities"] == {"tools": True, "vision": True, "embeddings": True}
    assert form["profiles"][0]["args"] == ["--delay", ""]
    assert form["profiles"][0]["env"] == {"A": "1", "B": ""}


def test_model_edit_says_all_that_model_add_says_and_takes_it_back() -> None:
    a_model("other")
    manage("model_add", "tiny", "--source", "sim/tiny", *WHOLE)
    whole = Model.objects.get(name="tiny").spec
    manage("model_add", "plain", *SIM, "--profile", "name=wide")
    plain = Model.objects.get(name="plain").spec

    fields = (
        *("--description", "--min", "--max", "--idle-timeout", "--routing-profile", "--ttft-p99"),
        *("--tpot-p99", "--context-length", "--max-output", "--requests-per-minute", "--tokens-per-minute"),
        *("--concurrency", "--over-max-output", "--timeout-hold", "--timeout-connect"),
        *("--timeout-first-byte", "--timeout-idle"),
    )
    kept = ("name", "engine", "gpu_class")
    settings = [f"{key}=" for key in PROFILE_KEYS if key not in kept]
    manage(
        *("model_edit", "tiny", "--aliases", "--fallbacks", "--remove-capability", "tools"),
        *("--remove-capability", "vision", "--remove-capability", "embeddings"),
        *(word for field in fields for word in (field, "")),
        *("--profile", "wide", *settings),
    )
    assert Model.objects.get(name="tiny").spec == replace(plain, name="tiny")
    manage("model_edit", "tiny", *WHOLE)
    assert Model.objects.get(name="tiny").spec == whole


def test_model_edit_tells_field_by_field_and_what_becomes_stale() -> None:
    model = a_model(profiles=[PROFILE | {"env": {"HF_TOKEN": "abracadabra", "A": "1"}}])
    replica = a_replica(model, a_node())
    a_replica(model, a_node("gpu-02"), "failed", gpu=None)
    words = ("model_edit", "tiny", "--max", "4", "--tp", "2", "--profile", "env.A-", "env.HF_TOKEN=sesame")
    printed = manage(*words, "--why", "as ordered", "--dry-run").splitlines()
    told = [
        "FIELD                           WAS                     IS NOW",
        "scaling                         max=2                   max=4",
        "profile default: tp             1                       2",
        "profile default: gpus_per_node  1                       2",
        f"profile default: env            A=1, HF_TOKEN={HIDDEN}  HF_TOKEN={HIDDEN}",
        "1 replica becomes stale and runs on as started; manage.py replicas --diff tells what differs.",
        (
            'warning: model "tiny" profile "default": the value of "HF_TOKEN" is kept in the catalog as plain'
            " text; write secret:NAME and give NAME to the agents"
        ),
    ]
    assert printed == [
        "Would change tiny:",
        *told[:-2],
        "",
        "Would be stale, and run on as started:",
        "REPLICA   PROFILE  NODE    DIFFERS IN",
        f"{str(replica.pk)[:8]}  default  gpu-01  tp, gpus_per_node, env",
        told[-1],
    ]
    assert not Event.objects.filter(verb="edit").exists()
    assert manage(*words, "--why", "as ordered").splitlines() == ["Changed tiny:", *told]
    assert Event.objects.get(verb="edit").why == "as ordered"
    assert dict(Model.objects.get().spec.profiles[0].env) == {"HF_TOKEN": "sesame"}
    assert manage("model_edit", "tiny", "--max", "4").splitlines() == ["Nothing of tiny changes.", told[-1]]
    assert Event.objects.filter(verb="edit").count() == 1


def test_model_edit_tells_scripts() -> None:
    a_replica(a_model(), a_node())
    words = ("model_edit", "tiny", "--tp", "2", "--idle-timeout", "10s", "--json")
    said = io.StringIO()
    call_command(*words, "--dry-run", stdout=said, stderr=io.StringIO())
    told = json.loads(said.getvalue())
    assert (told["saved"], told["becoming_stale"]) == (False, 1)
    assert told["changes"]["profiles_changed"]["default"][0] == {"field": "tp", "was": 1, "now": 2}
    assert told["model"]["profiles"][0]["tp"] == 2
    assert "under a minute" in told["warnings"][0]
    said = io.StringIO()
    call_command(*words, stdout=said, stderr=io.StringIO())
    (turned,) = told.pop("consequences")["stale"]
    assert [each["field"] for each in turned["differences"]] == ["tp", "gpus_per_node"]
    assert json.loads(said.getvalue()) == told | {"saved": True}


def test_model_add_can_be_tried() -> None:
    a_node(gpus=1)
    words = ("model_add", "tiny", *SIM, "--min", "2", "--max", "2", "--dry-run")
    first, *rest = manage(*words).splitlines()
    assert first == "Would add tiny (kept running: 2)."
    assert rest == [
        "",
        "With it, the next pass would:",
        "WHAT     OF            WHERE           WHY",
        "1 short  tiny          -               0 of 1 node: 1 lacks 1 free sim",
        "start    tiny/default  gpu-01 (1 GPU)  2 wanted, 0 there before it",
    ]
    told = json.loads(manage(*words, "--json"))
    assert (told["saved"], told["model"]["name"]) == (False, "tiny")
    assert [item["bucket"] for item in told["consequences"]["plan"]] == ["blocked", "start"]
    assert refusal("model_add", "tiny", *SIM, "--min", "3", "--max", "1", "--dry-run")
    assert manage("model_add", "off", *SIM, "--dry-run").splitlines()[1:] == [
        "Nothing that runs, starts or waits would change."
    ]
    assert not Model.objects.exists()


def test_model_edit_keeps_names_in_order_and_adds_at_the_end() -> None:
    for name in ("a", "b"):
        a_model(name)
    a_model(aliases=["one", "two"], fallbacks=["a"])
    manage("model_edit", "tiny", "--alias", "three", "--alias", "one", "--remove-alias", "two")
    manage("model_edit", "tiny", "--fallback", "b")
    spec = Model.objects.get(name="tiny").spec
    assert (spec.aliases, spec.fallbacks) == (("one", "three"), ("a", "b"))
    manage("model_edit", "tiny", "--fallbacks", "b", "a", "--aliases", "four")
    spec = Model.objects.get(name="tiny").spec
    assert (spec.aliases, spec.fallbacks) == (("four",), ("b", "a"))


def test_model_edit_adds_removes_and_renames_profiles() -> None:
    a_model(profiles=[PROFILE, PROFILE | {"name": "slow"}])
    printed = manage(
        *("model_edit", "tiny", "--remove-profile", "slow", "--profile", "default", "name=fast"),
        *("--add-profile", "cheap", "engine=sim", "gpu_class=l4"),
    )
    assert [profile.name for profile in Model.objects.get().spec.profiles] == ["fast", "cheap"]
    assert "profile cheap    not set  added" in printed
    assert "profile slow     there    removed" in printed


def test_a_model_is_renamed_at_the_shell() -> None:
    a_model()
    manage("model_edit", "tiny", "--name", "small", "--alias", "tiny")
    spec = Model.objects.get().spec
    assert (spec.name, spec.aliases) == ("small", ("tiny",))
    assert refusal("model_edit", "tiny", "--max", "1") == 'model "tiny" is an alias; name the model, "small"'


@pytest.mark.parametrize(
    ("words", "says"),
    [
        pytest.param(
            ("--profile", "defautl", "tp=2"),
            'model "tiny" has no profile "defautl"; did you mean "default"? (--add-profile adds one)',
            id="a mispelt profile",
        ),
        pytest.param(
            ("--remove-profile", "x"),
            'model "tiny" has no profile "x"; it has "default", "slow"',
            id="a profile to remove that is not there",
        ),
        pytest.param(
            ("--tp", "2"),
            '"tp=2" could be for any of the profiles "default", "slow"; name the one you mean, as in'
            " --profile default tp=2",
            id="a setting that might be for two",
        ),
        pytest.param(
            ("--remove-profile", "default", "--remove-profile", "slow", "--tp", "2"),
            "no profile is left to change; --add-profile NAME KEY=VALUE adds one",
            id="a setting that is for none",
        ),
        pytest.param(
            ("--remove-alias", "x"), 'model "tiny" has no alias "x"; it has none', id="an alias to remove"
        ),
        pytest.param(
            ("--remove-profile", "default", "--remove-profile", "slow"),
            'model "tiny": at least one profile is required',
            id="every profile removed",
        ),
        pytest.param(
            ("--add-profile", "slow", "engine=sim", "gpu_class=sim"),
            'model "tiny": profile "slow" is declared twice',
            id="a profile added twice",
        ),
        pytest.param(("--source", ""), 'model "tiny": source is required', id="no source"),
    ],
)
def test_model_edit_refuses_in_one_sentence_and_saves_nothing(words: tuple[str, ...], says: str) -> None:
    a_model(profiles=[PROFILE, PROFILE | {"name": "slow"}])
    assert refusal("model_edit", "tiny", *words) == says
    assert not Event.objects.filter(verb="edit").exists()


def test_options_are_not_guessed_from_their_beginnings() -> None:
    a_model(aliases=["one"])
    assert "unrecognized arguments: --aliase two" in refusal("model_edit", "tiny", "--aliase", "two")


def test_models_prints_a_table() -> None:
    model = a_model()
    a_replica(model, a_node())
    edited(model, tp=2)
    Unplaced.objects.create(model=model, missing=1, why="0 of 1 node: 1 lacks 2 free sim")
    a_model("off", scaling={}, limits={"concurrency": 4})
    assert manage("models").splitlines() == [
        "MODEL  SCALING               READY   STALE  SOURCE  LIMITS     ENGINE CHECK",
        "tiny   kept running: 1 to 2  1 of 2  1      found   -          never checked",
        "off    off                   0 of 0  -      found   4 at once  never checked",
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


def test_a_model_of_an_older_law_is_listed_with_what_is_wrong_and_can_be_scaled() -> None:
    a_model()
    Profile.objects.update(args=["--port", "80"])
    says = (
        'model "tiny" profile "default": argument "--port" is set by llmgw (chosen on the node); leave it out'
    )
    assert manage("models").splitlines()[-1] == says
    assert json.loads(manage("models", "--json"))[0]["status"]["faults"] == [says]
    assert refusal("model_edit", "tiny", "--max", "3", "--description", "d") == says
    assert manage("model_edit", "tiny", "--max", "3").startswith("Changed tiny:")
    assert manage("model_edit", "tiny", "--min", "0", "--max", "0").startswith("Changed tiny:")
    assert manage("model_remove", "tiny") == "Removed tiny; nothing of it runs.\n"


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


def test_a_replica_that_starts_tells_how_long_it_may() -> None:
    a_replica(a_model(), a_node(), state="starting")
    assert re.search(r"starting, 1[45] min left +5 min ago", manage("replicas"))


def test_replicas_that_are_over_are_told_when_asked_for() -> None:
    a_replica(a_model(), a_node(), "failed", gpu=None, reason="no\nspace\x07 left")
    assert manage("replicas").splitlines() == [
        "No replica runs, or is on its way.",
        "Failed, and not shown: 1; --all shows them, and why.",
    ]
    assert "not shown" not in manage("replicas", "--all")
    assert "not shown" not in manage("replicas", "--model", "other")
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
    assert heading.split() == ["NODE", "STATE", "SEEN", "GPUS", "FREE", "RUNS", "ENGINES", "ADDRESS", "NOTE"]
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
    assert listed.splitlines()[1].split()[:5] == [made["id"], "laptop", "alice", "manage", "live"]
    assert made["key"] not in listed
    assert manage("key_revoke", made["id"]) == f"Revoked {made['id']}.\n"
    assert "There is no live key" in refusal("key_revoke", made["id"])
    assert json.loads(manage("key_list", "--json"))[0]["state"] == "revoked"
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
