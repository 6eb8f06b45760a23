"""The reconciler's commands at the shell: what will be done and why, and the word that lets it be done."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db.models.functions import Now

from catalog.models import Event, Model
from nodes import lease
from nodes.models import Cluster, Held, Lease, Node, Orphan, Replica, Roll
from tests.cast import a_model, a_node, a_replica, edited

pytestmark = [pytest.mark.django_db, pytest.mark.one_database]


@pytest.fixture(autouse=True)
def a_pass_was_just_made(db: None) -> None:
    Lease.objects.create(name=lease.NAME, expires_at=Now())


def manage(*words: Any) -> str:
    said = io.StringIO()
    call_command(*map(str, words), stdout=said, stderr=said, no_color=True)
    return said.getvalue()


def refusal(*words: Any) -> str:
    with pytest.raises(CommandError) as no:
        manage(*words)
    return str(no.value)


# --- plan and why ---------------------------------------------------------------------------------


def test_plan_tells_what_the_next_pass_would_do_and_does_nothing() -> None:
    a_replica(a_model(scaling={"min": 3, "max": 3}), a_node())
    heading, short, start = manage("plan").splitlines()
    assert heading.split() == ["WHAT", "OF", "WHERE", "WHY"]
    assert short.split(maxsplit=3)[:3] == ["1", "short", "tiny"]
    assert short.endswith("0 of 1 node: 1 lacks 1 free sim")
    assert start.split(maxsplit=5) == [
        "start", "tiny/default", "gpu-01", "(1", "GPU)", "3 wanted, 1 there before it",
    ]  # fmt: skip
    assert Replica.objects.count() == 1


def test_plan_tells_scripts_every_line() -> None:
    a_replica(a_model(scaling={"min": 2, "max": 2}), a_node())
    told = json.loads(manage("plan", "--json"))
    assert (told["acts"], told["paused"], told["alarm"], told["obstacles"]) == (True, False, "", [])
    assert told["counts"]["start"] == sum(told["counts"].values()) == 1
    (item,) = told["items"]
    assert (item["bucket"], item["model"], item["nodes"], item["gpus"], item["replica"]) == (
        "start", "tiny", ["gpu-01"], ["gpu-01-gpu-1"], None,
    )  # fmt: skip


def test_a_plan_with_nothing_in_it_says_so() -> None:
    a_replica(a_model(), a_node())
    assert manage("plan") == "Nothing is to be done: all is as wanted, or on its way there.\n"


def test_what_keeps_the_plan_from_being_done_comes_first() -> None:
    a_model()
    a_node()
    manage("reconcile_pause", "--why", "new switches")
    Lease.objects.all().delete()
    notes = manage("plan").splitlines()[:2]
    assert notes[0] == "Note: no pass has been made yet; see to it that a worker runs, and one with --beat."
    assert notes[1].startswith("Note: nothing is started or stopped: shell:")
    assert "has paused the reconciler (new switches); manage.py reconcile_resume" in notes[1]


def test_why_tells_what_is_amiss_and_what_every_node_says() -> None:
    a_model(scaling={"min": 1, "max": 1})
    a_node(gpus=0)
    a_node("gpu-02", is_cordoned=True)
    assert manage("why", "tiny").splitlines() == [
        'model "tiny" does not run as wanted: 0 of 1 ready:',
        "  - 1 of 1 replica cannot be started: 0 of 2 nodes: 1 cordoned, 1 lacks 1 free sim.",
        "",
        "What each node says to one replica more:",
        "PROFILE  NODE    SAYS",
        "default  gpu-01  lacks 1 free sim",
        "default  gpu-02  cordoned",
    ]
    told = json.loads(manage("why", "tiny", "--json"))
    assert (told["as_wanted"], told["ready"], told["wanted"]) == (False, 0, 1)
    assert told["profiles"][0]["nodes"][1] == {"node": "gpu-02", "reason": "cordoned"}


def test_why_of_what_is_as_wanted_says_that() -> None:
    a_replica(a_model(), a_node())
    first = manage("why", "tiny").splitlines()[0]
    assert first == 'model "tiny" runs as wanted: 1 of 1 ready, each as the catalog has it.'
    assert json.loads(manage("why", "tiny", "--json"))["as_wanted"] is True
    assert refusal("why", "x") == 'model "x" is not in the catalog; check the spelling'


# --- roll -----------------------------------------------------------------------------------------


def test_a_roll_is_begun_seen_and_ended() -> None:
    model = a_model()
    a_replica(model, a_node())
    assert manage("roll", "tiny") == "Nothing of tiny is stale, so there is nothing to roll.\n"
    assert manage("roll", "tiny", "--cancel") == "tiny is not being rolled.\n"
    assert not Roll.objects.exists()
    edited(model, args=["--fast"])
    said = "Rolling tiny, one replica after another; manage.py why tells how it goes.\n"
    assert manage("roll", "tiny", "--why", "new arguments") == said
    assert Roll.objects.get().why == "new arguments"
    assert "it is being rolled, by shell:" in manage("why", "tiny")
    assert "rolled by shell:" in manage("plan")
    assert manage("roll", "tiny", "--cancel") == "The roll of tiny ends here.\n"
    assert [event.verb for event in Event.objects.filter(kind="model").order_by("id")][-2:] == [
        "roll",
        "cancel roll",
    ]
    Roll.objects.create(model=model, by="ann", halted="The first one failed.")
    edited(model)
    assert manage("roll", "tiny") == "Nothing of tiny is stale, so there is nothing to roll.\n"
    assert not Roll.objects.exists(), "one that had halted is over with that"
    assert refusal("roll", "x") == 'model "x" is not in the catalog; check the spelling'


# --- nodes and replicas ---------------------------------------------------------------------------


def test_a_node_is_drained_and_taken_back() -> None:
    a_replica(a_model(), a_node())
    said = manage("node_drain", "gpu-01", "--why", "new fans")
    assert said == (
        "Draining gpu-01; 1 replica is there still, and manage.py plan tells what becomes of them.\n"
    )
    assert manage("node_drain", "gpu-01").startswith("gpu-01 is draining already; 1 replica is")
    line = manage("nodes").splitlines()[1]
    assert "fresh, draining" in line
    assert "new fans" in line
    assert json.loads(manage("nodes", "--json"))[0]["draining"] is True
    assert "gpu-01 is draining" in manage("plan")
    manage("node_uncordon", "gpu-01")
    assert Node.objects.get().is_draining is False
    assert manage("node_drain", "gpu-01").startswith("Draining gpu-01")
    assert refusal("node_drain", "x") == 'There is no node "x"; manage.py nodes tells which there are.'


def test_a_sick_card_is_told_with_what_is_wrong() -> None:
    node = a_node(gpus=2)
    node.report["gpus"][1] |= {"is_healthy": False, "sickness": "it no longer answers"}
    node.save()
    assert "GPU 1: it no longer answers" in manage("nodes")


def test_a_replica_is_stopped_by_the_first_digits_of_its_id() -> None:
    model, node = a_model(), a_node()
    replica = a_replica(model, node)
    short = str(replica.pk)[:8]
    assert manage("replica_stop", short, "--why", "it hangs") == f"Told tiny/default {short} to stop.\n"
    replica.refresh_from_db()
    assert (replica.wanted, replica.wanted_why) == ("stop", "it hangs")
    assert "stopped already, or about to be" in manage("replica_stop", str(replica.pk).upper())


def test_an_orphan_is_stopped_by_its_first_digits() -> None:
    orphan = Orphan.objects.create(replica="12345678-0000-0000-0000-000000000000", node=a_node(), why="?")
    assert manage("replica_stop", "1234") == f"Told {orphan.replica} on gpu-01 to stop.\n"
    assert Replica.objects.get().state == "stopped"
    assert "stopped already, or about to be" in manage("replica_stop", "12345678")


@pytest.mark.parametrize(
    ("id", "says"),
    [
        pytest.param("abc", '"abc" is no replica\'s id: give its first digits, 4 or more', id="too short"),
        pytest.param("../..", "is no replica's id", id="no digits"),
        pytest.param("\0\0\0\0", "is no replica's id", id="NUL"),
        pytest.param("00000000", 'There is no replica "00000000"; manage.py replicas --all', id="nobody's"),
        pytest.param("abcd", '"abcd" begins the ids of several replicas (abcd', id="two of them"),
    ],
)
def test_a_replica_that_cannot_be_told_is_not_stopped(id: str, says: str) -> None:
    model, node = a_model(), a_node()
    for number in range(2):
        a_replica(model, node, gpu=number, id=f"abcd{number}000-0000-0000-0000-000000000000")
    assert says in refusal("replica_stop", id)
    assert not Replica.objects.exclude(wanted="run").exists()


def test_of_two_ids_that_begin_alike_the_one_that_runs_is_meant() -> None:
    model, node = a_model(), a_node()
    alive = a_replica(model, node, id="abcd1000-0000-0000-0000-000000000000")
    a_replica(model, node, "failed", gpu=None, id="abcd2000-0000-0000-0000-000000000000")
    manage("replica_stop", "abcd")
    assert str(Replica.objects.get(wanted="stop").pk) == alive.pk


def test_replicas_that_are_stale_are_told_alone() -> None:
    model, node = a_model(), a_node()
    a_replica(model, node)
    assert manage("replicas", "--stale") == "No replica is stale.\n"
    assert manage("replicas", "--stale", "--model", "tiny") == 'No replica of "tiny" is stale.\n'
    a_replica(a_model("other"), node, gpu=1)
    edited(model, weight=2)
    assert manage("replicas", "--stale") == "No replica is stale.\n"
    edited(model, tp=2)
    assert [told["model"] for told in json.loads(manage("replicas", "--stale", "--json"))] == ["tiny"]


class Watched(io.StringIO):
    """A terminal whose owner presses Ctrl-C after so many tables."""

    tables = 0

    def isatty(self) -> bool:
        return True

    def flush(self) -> None:
        self.tables += 1
        if self.tables == 3:
            raise KeyboardInterrupt


def test_replicas_are_watched_until_somebody_has_seen_enough() -> None:
    replica = a_replica(a_model(), a_node())
    screen = Watched()
    call_command("replicas", "--watch", "0.01", stdout=screen, no_color=True)
    shown = screen.getvalue().split("\x1b[H\x1b[J")
    assert len(shown) == 3
    assert all(str(replica.pk)[:8] in table for table in shown)


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "often", "1e9"])
def test_what_is_no_time_between_two_looks_is_refused(seconds: str) -> None:
    assert "is not a number of seconds above 0 and up to 3600" in refusal("replicas", f"--watch={seconds}")


# --- the reconciler -------------------------------------------------------------------------------


def test_the_reconciler_is_paused_and_resumed() -> None:
    assert manage("reconcile_resume") == "It was not paused.\n"
    assert manage("reconcile_pause", "--why", "a") == "Paused; manage.py reconcile_resume ends it.\n"
    assert manage("reconcile_pause") == "Paused already.\n"
    assert Cluster.this().paused_why == "a"
    assert manage("reconcile_resume", "--why", "b") == "It acts again.\n"
    verbs = [(event.verb, event.why) for event in Event.objects.filter(kind="cluster").order_by("id")]
    assert verbs == [("pause", "a"), ("resume", "b")]


def test_what_is_held_is_shown_and_then_allowed() -> None:
    assert manage("reconcile_allow") == "Nothing is held back.\n"
    replica = a_replica(a_model(), a_node())
    Held.objects.create(replica=replica, wanted="drain", why="the model is off (max 0)")
    told = manage("reconcile_allow", "--dry-run")
    assert told.splitlines()[1].split(maxsplit=3)[2:] == ["drain", "the model is off (max 0)"]
    assert Held.objects.exists()
    assert manage("reconcile_allow", "--why", "meant") == f"{told}Allowed: 1 replica ends now.\n"
    replica.refresh_from_db()
    assert (replica.wanted, Held.objects.count()) == ("drain", 0)
    assert Event.objects.get(verb="allow").why == "meant"


def test_what_people_typed_is_shown_as_text() -> None:
    a_model("a\u00a0b", scaling={"min": 1, "max": 1})
    a_node("gpu\u202e01", gpus=0)
    manage("reconcile_pause", "--why", "\x1b[31mred")
    for words in (("plan",), ("why", "a\u00a0b"), ("nodes",)):
        told = manage(*words)
        assert not {"\x1b", "\u202e", "\u00a0"} & set(told), words
    assert "\\x1b[31mred" in manage("plan")


COMMANDS: list[Callable[[], tuple[str, ...]]] = [
    lambda: ("why", "tiny"),
    lambda: ("roll", "tiny"),
    lambda: ("node_drain", "gpu-01"),
    lambda: ("replica_stop", str(Replica.objects.get().pk)),
    lambda: ("reconcile_pause",),
]


@pytest.mark.parametrize("words", COMMANDS)
def test_a_model_of_an_older_law_stands_in_nobodys_way(words: Callable[[], tuple[str, ...]]) -> None:
    a_replica(a_model(), a_node())
    Model.objects.get().profiles.update(engine="warp")
    assert manage(*words())
    assert 'engine "warp" is not known' in manage("plan")
    assert 'engine "warp" is not known' in manage("why", "tiny")
