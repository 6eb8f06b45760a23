"""Sources asked about again: by a person, who may pin, and in passing by the loop."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connections
from django.db.models.functions import Now

from catalog.actions import Outcome, add_model, check_model, check_source, edit_model, recheck_sources
from catalog.models import Event, Model, Revision
from catalog.reading import CatalogError
from catalog.source import PathFacts
from catalog.spec import ModelSpec
from catalog.tasks import recheck
from nodes.protocol import Launch
from nodes.stale import judge
from tests.hub_server import COMMIT, Hub, Reply, listing, running_hub
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db

REPO = "org/real"
INFO = f"/api/models/{REPO}"
NEWER = "b" * 40
HOUR = 3600.0
PROFILE = {"name": "p", "engine": "vllm", "gpu_class": "any"}


def model(name: str = "real", source: str = REPO, engine: str = "vllm", **fields: Any) -> dict[str, Any]:
    return {"name": name, "source": source, "profiles": [PROFILE | {"engine": engine}]} | fields


def nobody_is_asked(path: str, spec: ModelSpec) -> Sequence[PathFacts]:
    raise AssertionError(f"the nodes were asked about {path}")


COMMON: dict[str, Any] = {"ask_paths": nobody_is_asked, "after_change": int}


def add(raw: dict[str, Any], **options: Any) -> Model:
    return add_model(raw, **COMMON | {"by": "ann", "door": "command", "why": "a test"} | options).model


def check(name: str = "real", **options: Any) -> Outcome:
    return check_model(name, **COMMON | {"by": "bob", "door": "admin"} | options)


def recheck_all(limit: int = 10, older_than_s: float = HOUR, **options: Any) -> int:
    return recheck_sources(limit, older_than_s, **{"ask_paths": nobody_is_asked} | options)


def age(seconds: float = 2 * HOUR, *names: str) -> None:
    """Let the checks of these models, or of all, be so old."""
    rows = Model.objects.filter(name__in=names) if names else Model.objects.all()
    then = Now() - timedelta(seconds=seconds)
    rows.filter(source_asked_at__isnull=False).update(source_asked_at=then)
    rows.filter(source_checked_at__isnull=False).update(source_checked_at=then)


def is_later(one: datetime | None, other: datetime | None) -> bool:
    return one is not None and other is not None and one > other


def row(name: str = "real") -> Model:
    return Model.objects.get(name=name)


@pytest.fixture(autouse=True)
def hub(settings: Any) -> Iterator[Hub]:
    with running_hub() as running:
        settings.LLMGW_HUB_ENDPOINT, settings.HF_TOKEN, settings.LLMGW_HUB_TIMEOUT_S = running.url, "", 10
        yield running


@pytest.fixture
def real(hub: Hub) -> Model:
    """A model that was found."""
    hub.has_repository(REPO, "a.safetensors")
    return add(model())


def moves_on(hub: Hub, *files: str) -> None:
    """The branch has a new commit; the old one is still there."""
    hub.has_repository(REPO, *(files or ("a.safetensors", "b.safetensors")), sha=NEWER)
    hub.has_repository(REPO, "a.safetensors", revision=COMMIT)


def error(status: int, code: str) -> Reply:
    return Reply(status, {"error": "no"}, {"X-Error-Code": code})


# --- by a person ----------------------------------------------------------------------------------


def test_a_check_records_what_is_found_and_leaves_what_is_wanted(hub: Hub, real: Model) -> None:
    age()
    before, revision = row(), Revision.current()
    hub.has_repository(REPO, "a.safetensors", "b.safetensors")
    outcome = check(why="a look")
    after = outcome.model
    assert after.source_facts["bytes"] == 2000
    assert is_later(after.source_checked_at, before.source_checked_at)
    assert (after.revision, after.changed_at, after.spec) == (before.revision, before.changed_at, before.spec)
    assert Revision.current() == revision
    event = Event.objects.first()
    assert (event.verb, event.subject, event.by, event.door, event.why) == (
        "check", "real", "bob", "admin", "a look",
    )  # fmt: skip
    assert event.revision == 0
    assert event.detail["source_check"]["code"] == "found"


def test_a_check_asks_now_whatever_was_answered_a_moment_ago(hub: Hub, real: Model, settings: Any) -> None:
    settings.LLMGW_HUB_CACHE_S = 60
    assert check_source(real.spec, ask_paths=nobody_is_asked).level == "ok"
    hub.replies[INFO] = error(404, "RepoNotFound")
    assert check_source(real.spec, ask_paths=nobody_is_asked).level == "ok"
    assert check().finding.code == "not_found"


def test_a_source_that_vanished_is_refused_and_what_was_pinned_is_kept(hub: Hub, real: Model) -> None:
    hub.replies[INFO] = error(404, "RepoNotFound")
    outcome = check()
    assert outcome.finding.is_refused
    after = outcome.model
    assert (after.source_state, after.source_revision) == ("refuse", COMMIT)
    assert f'has no repository "{REPO}"' in after.source_sentence
    assert after.source_facts["bytes"] == 1000
    assert Event.objects.first().detail["changed"] == [
        {"field": "source_state", "was": "ok", "now": "refuse"}
    ]
    hub.has_repository(REPO, "a.safetensors")
    assert check().model.source_state == "ok"


def test_a_hub_that_does_not_answer_leaves_the_last_finding_and_says_so_once(hub: Hub, real: Model) -> None:
    age()
    before = row()
    hub.replies[INFO] = Reply(503, {})
    for _ in range(2):
        assert check().finding.code == "unreachable"
        after = row()
        assert (after.source_state, after.source_checked_at) == ("ok", before.source_checked_at)
        why = f"{hub.url}: it answers with status 503"
        assert after.source_sentence == f"{before.source_sentence}; it could not be asked again since: {why}"
        assert is_later(after.source_asked_at, before.source_asked_at)
    hub.has_repository(REPO, "a.safetensors")
    assert check().model.source_sentence == before.source_sentence
    assert "last_sentence" not in row().source_facts


def test_a_branch_that_moved_on_is_told_and_nothing_else_changes(hub: Hub, real: Model) -> None:
    moves_on(hub)
    outcome = check()
    assert (outcome.finding.level, outcome.finding.code) == ("warn", "moved_on")
    after = outcome.model
    assert (after.source_state, after.source_revision, after.revision) == ("warn", COMMIT, real.revision)
    assert COMMIT[:12] in after.source_sentence
    assert NEWER[:12] in after.source_sentence
    assert after.source_facts["newest_commit"] == NEWER
    assert after.source_facts["bytes"] == 1000  # of the pinned commit, which launches fetch


def test_a_source_that_names_its_commit_cannot_move_on(hub: Hub) -> None:
    hub.has_repository(REPO, "a.safetensors", revision=COMMIT)
    add(model(source=f"{REPO}@{COMMIT}"))
    hub.has_repository(REPO, "a.safetensors", sha=NEWER)
    assert check().finding.code == "found"


def test_a_pinned_commit_that_is_gone_is_refused(hub: Hub, real: Model) -> None:
    hub.has_repository(REPO, "a.safetensors", sha=NEWER)
    hub.replies[f"{INFO}/revision/{COMMIT}"] = error(404, "RevisionNotFound")
    outcome = check()
    assert (outcome.finding.level, outcome.finding.code) == ("refuse", "commit_gone")
    assert (outcome.model.source_revision, outcome.model.source_facts["bytes"]) == (COMMIT, 1000)


def test_pinning_takes_the_new_commit_and_makes_what_runs_stale(hub: Hub, real: Model) -> None:
    moves_on(hub)
    outcome = check(pin=True, why="the fix")
    after = outcome.model
    assert outcome.finding.code == "found"
    assert (after.source_revision, after.source_state, after.source_facts["bytes"]) == (NEWER, "ok", 2000)
    assert after.revision == Revision.current() > real.revision
    event = Event.objects.first()
    assert (event.verb, event.why, event.revision) == ("pin", "the fix", after.revision)
    assert event.detail["changed"] == [{"field": "source_revision", "was": COMMIT, "now": NEWER}]
    spec = after.spec
    launch = Launch(
        model="real",
        source=REPO,
        revision=COMMIT,
        profile=spec.profiles[0].as_dict(),
        fingerprint=spec.profiles[0].fingerprint(),
    )
    staleness = judge(
        launch.fingerprint, launch, spec.profiles[0], spec, source_revision=after.source_revision
    )
    assert staleness.stale_launch
    assert check().finding.code == "found"


def test_pinning_what_is_pinned_changes_nothing(hub: Hub, real: Model) -> None:
    assert check(pin=True).model.revision == real.revision
    assert Event.objects.first().verb == "check"


def path_is_there(path: str, spec: ModelSpec) -> Sequence[PathFacts]:
    return [PathFacts("a", True, "file", 5, ("q.gguf",))]


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        pytest.param(
            model(source="/models/q.gguf", engine="llamacpp"),
            'model "real": source "/models/q.gguf" has no commit that could be pinned;'
            " check it without pinning",
            id="a path",
        ),
        pytest.param(
            model(engine="sim") | {"profiles": [PROFILE | {"engine": "sim"}]},
            'model "real": every profile is simulated; no weights are read',
            id="a model that only simulates",
        ),
        pytest.param(
            model(source="org/gone"),
            'model "real": source "org/gone" is not found or private (asked with no token, as HF_TOKEN is'
            " not set); check the spelling, or set HF_TOKEN to one that may read it",
            id="a source that is not there",
        ),
    ],
)
def test_what_cannot_be_pinned_is_not(raw: dict[str, Any], sentence: str) -> None:
    add(raw, skip_source_check=True)
    before = Model.objects.values().get()
    with pytest.raises(CatalogError) as refused:
        check(pin=True, ask_paths=path_is_there)
    assert str(refused.value) == sentence
    assert Model.objects.values().get() == before
    assert not Event.objects.exclude(verb="add").exists()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nobody", 'model "nobody" is not in the catalog; check the spelling'),
        ("chat", 'model "chat" is an alias; name the model, "real"'),
    ],
)
def test_only_a_model_is_checked(hub: Hub, name: str, sentence: str) -> None:
    hub.has_repository(REPO, "a.safetensors")
    add(model(aliases=["chat"]))
    with pytest.raises(CatalogError) as refused:
        check(name)
    assert str(refused.value) == sentence


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("pin", [False, True], ids=["checking", "pinning"])
def test_what_was_changed_while_the_hub_was_asked_is_left_as_the_other_said(hub: Hub, pin: bool) -> None:
    hub.has_repository(REPO, "a.safetensors")
    add(model())
    moves_on(hub)

    def overtake(out: Any) -> None:
        edit_model("real", model(description="theirs"), **COMMON | {"by": "eve", "door": "api"})
        connections.close_all()
        out.write(json.dumps(listing(REPO, "a.safetensors", sha=NEWER)).encode())

    hub.replies[INFO] = Reply(drip=overtake)
    with pytest.raises(CatalogError, match="was changed by somebody else while its source was asked about"):
        check(pin=pin)
    after = row()
    assert (after.description, after.source_state, after.source_revision) == ("theirs", "ok", COMMIT)
    assert set(Event.objects.values_list("verb", flat=True)) == {"add", "edit"}


def test_whoever_acts_on_the_catalog_is_woken(
    hub: Hub, real: Model, django_capture_on_commit_callbacks: Any
) -> None:
    woken: list[str] = []
    with django_capture_on_commit_callbacks(execute=True):
        check(after_change=lambda: woken.append("woken"))
    assert woken == ["woken"]


# --- by the loop ----------------------------------------------------------------------------------


def test_only_old_checks_are_made_again(hub: Hub, real: Model) -> None:
    assert recheck_all() == 0
    age()
    assert recheck_all() == 1
    assert recheck_all() == 0
    assert len(hub.asked) == 2


def test_moments_that_the_database_wrote_itself_are_compared_as_moments(hub: Hub, real: Model) -> None:
    for _ in range(2):  # on SQLite a moment that it wrote is another text than the same one from here
        wait_until(lambda: recheck_all(older_than_s=0.001) == 1, "the check is old")
    assert len(hub.asked) == 3


def test_the_oldest_are_asked_first_and_only_so_many(hub: Hub) -> None:
    for number in range(4):
        hub.has_repository(f"org/m{number}", "a.safetensors")
        add(model(f"m{number}", f"org/m{number}"))
        age((4 - number) * 2 * HOUR, f"m{number}")
    hub.asked.clear()
    assert recheck_all(limit=2) == 2
    assert recheck_all(limit=1) == 1
    assert [path.split("?")[0] for path, _ in hub.asked] == [f"/api/models/org/m{n}" for n in range(3)]


def test_a_model_that_only_simulates_is_not_asked_about() -> None:
    add(model() | {"profiles": [PROFILE | {"engine": "sim"}]})
    age()
    assert recheck_all() == 0


def test_what_stayed_as_it_was_leaves_no_event(hub: Hub, real: Model) -> None:
    age()
    before = row()
    recheck_all()
    after = row()
    assert is_later(after.source_checked_at, before.source_checked_at)
    assert (after.revision, after.source_sentence) == (before.revision, before.source_sentence)
    assert Event.objects.count() == 1


def test_a_source_that_vanished_is_noticed_and_one_that_came_back_too(hub: Hub, real: Model) -> None:
    hub.replies[INFO] = error(401, "RepoNotFound")
    age()
    recheck_all()
    after = row()
    assert (after.source_state, after.source_revision, after.revision) == ("refuse", COMMIT, real.revision)
    event = Event.objects.first()
    assert (event.verb, event.by, event.door, event.subject) == ("check", "", "loop", "real")
    assert event.detail["changed"] == [{"field": "source_state", "was": "ok", "now": "refuse"}]
    assert event.detail["source_check"]["code"] == "not_found_or_private"
    hub.has_repository(REPO, "a.safetensors")
    age()
    recheck_all()
    assert row().source_state == "ok"
    assert Event.objects.count() == 3


def test_a_branch_that_moved_on_is_noticed_once(hub: Hub, real: Model) -> None:
    moves_on(hub)
    for _ in range(2):
        age()
        recheck_all()
    after = row()
    assert (after.source_state, after.source_revision, after.revision) == ("warn", COMMIT, real.revision)
    assert Event.objects.filter(door="loop").count() == 1


def test_an_unreachable_hub_makes_nothing_vanish_and_is_asked_once_a_time(hub: Hub, real: Model) -> None:
    hub.has_repository("org/next", "a.safetensors")
    add(model("next", "org/next"))
    age()
    hub.replies = dict.fromkeys(hub.replies, Reply(500, {}))
    hub.asked.clear()
    assert recheck_all() == 1
    assert len(hub.asked) == 1
    after = row()
    assert after.source_state == "ok"
    assert "could not be asked again since" in after.source_sentence
    assert not Event.objects.filter(door="loop").exists()
    recheck_all()
    assert hub.asked[-1][0].startswith("/api/models/org/next")  # the other one's turn


def test_a_path_is_asked_of_the_nodes(hub: Hub) -> None:
    add(model(source="/models/q.gguf", engine="llamacpp"), ask_paths=path_is_there)
    age()
    assert recheck_all(ask_paths=lambda *_: [PathFacts("a", None)]) == 1
    assert (row().source_state, row().source_facts["nodes"]) == ("ok", ["a"])
    age()
    assert recheck_all(ask_paths=lambda *_: [PathFacts("a", False)]) == 1
    assert (row().source_state, row().source_facts["nodes"]) == ("refuse", [])
    age()
    assert recheck_all(ask_paths=path_is_there) == 1
    assert "missing_on" not in row().source_facts


def test_a_check_that_was_skipped_is_made_up_for(hub: Hub) -> None:
    add(model(), skip_source_check=True)
    assert recheck_all() == 1
    assert (row().source_state, row().source_skipped_by) == ("refuse", "ann")
    hub.has_repository(REPO, "a.safetensors")
    age()
    assert recheck_all() == 1
    after = row()
    assert (after.source_state, after.source_skipped_by, after.source_revision) == ("ok", "", COMMIT)
    assert [event.detail["changed"][0]["now"] for event in Event.objects.filter(door="loop")] == [
        "ok",
        "refuse",
    ]


def test_what_nobody_has_ever_answered_is_asked_again_sooner() -> None:
    add(model(source="/models/q.gguf", engine="llamacpp"), ask_paths=lambda *_: [])
    assert row().source_checked_at is None
    assert recheck_all() == 0
    age(700)
    assert recheck_all(ask_paths=path_is_there) == 1
    assert row().source_state == "ok"
    age(700)
    assert recheck_all() == 0


@pytest.mark.django_db(transaction=True)
def test_two_that_recheck_at_once_never_ask_about_the_same(hub: Hub) -> None:
    for number in range(6):
        hub.has_repository(f"org/m{number}", "a.safetensors")
        add(model(f"m{number}", f"org/m{number}"))
    age()
    hub.asked.clear()
    both = threading.Barrier(2)
    counts: list[int] = []

    def run() -> None:
        both.wait()
        try:
            counts.append(recheck_all())
        finally:
            connections.close_all()

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(counts) == 6
    assert len(hub.asked) == len(set(hub.asked)) == 6


@pytest.mark.django_db(transaction=True)
def test_the_loop_says_nothing_of_a_model_that_a_person_has_just_checked(hub: Hub) -> None:
    hub.has_repository(REPO, "a.safetensors")
    add(model())
    age()

    def overtake(out: Any) -> None:
        hub.has_repository(REPO, "a.safetensors")
        check()
        connections.close_all()
        out.write(json.dumps(listing(REPO, "README.md")).encode())

    hub.replies[INFO] = Reply(drip=overtake)
    assert recheck_all() == 0
    assert row().source_state == "ok"
    assert not Event.objects.filter(door="loop").exists()


@pytest.mark.django_db(transaction=True)
def test_the_loop_says_nothing_of_a_model_that_a_person_has_just_edited(hub: Hub) -> None:
    hub.has_repository(REPO, "a.safetensors")
    add(model())
    age()

    def overtake(out: Any) -> None:
        edit_model("real", model(description="theirs"), **COMMON | {"by": "eve", "door": "api"})
        connections.close_all()
        out.write(json.dumps(listing(REPO, "README.md")).encode())

    hub.replies[INFO] = Reply(drip=overtake)
    assert recheck_all() == 0
    assert (row().source_state, row().description) == ("ok", "theirs")
    assert not Event.objects.filter(door="loop").exists()


def test_the_task_asks_about_a_few(hub: Hub, real: Model) -> None:
    age(7 * HOUR)
    recheck()
    assert len(hub.asked) == 2


def test_the_beat_knows_the_task_and_no_message_of_it_lasts(settings: Any) -> None:
    entry = settings.CELERY_BEAT_SCHEDULE["recheck"]
    assert entry["task"] == recheck.name
    assert entry["options"]["expires"] == entry["schedule"] == recheck.expires == 60
    assert recheck.acks_late is False  # a hub may be slower than the broker is patient


# --- offline --------------------------------------------------------------------------------------


def test_offline_nothing_goes_out_and_what_was_found_stays_found(
    hub: Hub, real: Model, settings: Any
) -> None:
    settings.LLMGW_OFFLINE = True
    hub.asked.clear()
    added = add(model("late", "org/late"))
    assert added.source_state == "warn"
    assert "nodes must hold its weights already" in added.source_sentence
    assert (added.source_checked_at, added.source_revision) == (None, "")
    age()
    assert check().finding.code == "offline"
    assert row().source_state == "ok"
    assert row().source_sentence.endswith("could not be asked again since: llmgw is offline (LLMGW_OFFLINE)")
    recheck_all()
    with pytest.raises(CatalogError, match="was not looked up, as llmgw is offline"):
        check(pin=True)
    assert hub.asked == []


def test_offline_the_nodes_are_asked_all_the_same(settings: Any) -> None:
    settings.LLMGW_OFFLINE = True
    assert (
        add(model(source="/models/q.gguf", engine="llamacpp"), ask_paths=path_is_there).source_state == "ok"
    )


# --- at the shell ---------------------------------------------------------------------------------


def run(*args: str) -> tuple[str, str]:
    """What model_check printed, and with what it ended."""
    out = StringIO()
    try:
        call_command("model_check", *args, stdout=out)
    except CommandError as error:
        return out.getvalue(), str(error)
    return out.getvalue(), ""


def test_the_command_says_a_line_a_model_and_what_could_be_set(hub: Hub, real: Model) -> None:
    hub.has_repository(REPO, "a.safetensors", gguf={"context_length": 8192})
    printed, problem = run("real")
    own = "the model's own context length is 8192 tokens; set context_length to it, or to less"
    assert printed.splitlines() == [
        f'ok      model "real": source "{REPO}" found at commit {COMMIT[:12]}, 0.0 GB in 1 file',
        f'propose model "real": {own}',
        'propose model "real" profile "p": the weights take 0.0 GB; set min_disk_gb to 1, or to more',
    ]
    assert problem == ""
    assert Event.objects.first().by.startswith("shell:")


def test_the_command_checks_all_and_ends_badly_where_one_is_refused(hub: Hub, real: Model) -> None:
    add(model("lost", "org/lost"), skip_source_check=True)
    printed, problem = run("--all")
    assert [line.split()[0] for line in printed.splitlines()] == ["ok", "propose", "refuse"]
    assert problem == "1 of 2 sources is refused."


def test_the_command_goes_on_after_a_name_that_nobody_has(hub: Hub, real: Model) -> None:
    printed, problem = run("nobody", "real")
    assert printed.startswith("ok ")
    assert problem == 'model "nobody" is not in the catalog; check the spelling'


def test_the_command_pins(hub: Hub, real: Model) -> None:
    moves_on(hub)
    assert run("real")[0].startswith('warn    model "real": source "org/real" has moved on from commit')
    assert run("real", "--pin")[0].startswith("ok ")
    assert row().source_revision == NEWER


def test_the_command_speaks_json(hub: Hub, real: Model) -> None:
    moves_on(hub, "README.md")
    printed, problem = run("real", "--json")
    (told,) = json.loads(printed)
    assert (told["model"], told["level"], told["code"]) == ("real", "warn", "moved_on")
    assert (told["state"], told["revision"]) == ("warn", COMMIT)
    assert told["facts"]["newest_commit"] == NEWER
    assert "holds no weights" in told["facts"]["also"][0]
    assert [proposal["field"] for proposal in told["proposals"]] == ["min_disk_gb"]
    assert problem == ""


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ([], "Name the models to check, or give --all, and not both."),
        (["real", "--all"], "Name the models to check, or give --all, and not both."),
        (["--all", "--pin"], "Each model is pinned by its name: leave out --all, or --pin."),
    ],
)
def test_the_command_is_told_what_it_is_to_do(args: list[str], sentence: str) -> None:
    assert run(*args) == ("", sentence)
