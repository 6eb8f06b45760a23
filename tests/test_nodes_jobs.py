"""Jobs: asked for once, claimed once, over in the end, whoever carries them out and however that ends."""

from __future__ import annotations

import io
import threading
import uuid
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.core.management.base import OutputWrapper
from django.db import connection
from django.db.models.functions import Now
from django.test import Client

from catalog.actions import mint_key, remove_model
from catalog.models import Event, Key, Model
from nodes import jobs, tasks
from nodes.management.meter import Meter
from nodes.models import Job
from tests.cast import a_model, alice
from tests.rest_client import Api, sentence

pytestmark = pytest.mark.django_db

BENCH, CHECK = Job.Kind.BENCH, Job.Kind.ENGINE_CHECK


def asked(model: Model, kind: Job.Kind = CHECK, **told: Any) -> Job:
    return jobs.ask(kind, model, by="alice", door="command", **told)


def state(job: Job) -> tuple[str, str]:
    job.refresh_from_db()
    return job.state, job.problem


# --- asked for ------------------------------------------------------------------------------------


def test_a_job_is_queued_and_its_asking_is_an_event() -> None:
    model = a_model()
    replica = uuid.uuid4()
    job = asked(model, replica=replica, options={"quick": True}, why="a new driver")
    assert (job.state, job.model_name, job.options, job.replica) == (
        "queued",
        "tiny",
        {"quick": True},
        replica,
    )
    event = Event.objects.get(verb="engine check")
    assert (event.kind, event.subject, event.by, event.why) == ("model", "tiny", "alice", "a new driver")
    assert event.detail == {"job": str(job.pk), "replica": str(replica)}


def test_a_model_has_one_live_job_of_a_kind() -> None:
    one, two = a_model("one"), a_model("two")
    first = asked(one)
    asked(one, BENCH)
    asked(two)
    with pytest.raises(jobs.JobRefused) as no:
        asked(one)
    short = str(first.pk)[:8]
    assert str(no.value) == (
        'The engine check of "one" that "alice" asked for is queued; wait until it is over, or stop it '
        f"(manage.py job_stop {short})."
    )
    assert Event.objects.filter(verb="engine check").count() == 2, "what was refused is no event"
    jobs.claim(first.pk)
    with pytest.raises(jobs.JobRefused, match="is running"):
        asked(one)
    jobs.finish(first.pk, {})
    assert asked(one).state == "queued"


def test_a_job_outlives_its_model() -> None:
    job = asked(a_model())
    jobs.claim(job.pk)
    remove_model("tiny", by="alice", why="", door="command", after_change=int)
    jobs.fail(job.pk, "It has no model any more.")
    assert state(job) == ("failed", "It has no model any more.")
    assert (job.model_id, job.model_name) == (None, "tiny")


@pytest.mark.django_db(transaction=True)
def test_of_a_model_that_is_removed_meanwhile_nothing_is_asked() -> None:
    model = a_model()
    remove_model("tiny", by="alice", why="", door="command", after_change=int)
    with pytest.raises(jobs.JobRefused, match='"tiny" is not in the catalog any more; choose another'):
        asked(model)
    assert not Job.objects.exists()


# --- carried out ----------------------------------------------------------------------------------


def test_a_job_is_claimed_once() -> None:
    job = asked(a_model())
    assert jobs.claim(job.pk) == job
    assert jobs.claim(job.pk) is None
    assert jobs.claim(uuid.uuid4()) is None


@pytest.mark.django_db(transaction=True)
def test_of_many_that_claim_at_once_one_gets_it_and_no_more_than_allowed_run() -> None:
    mine = [asked(a_model(f"m{number}")).pk for number in range(4)]
    got: list[Job] = []

    def claim_all() -> None:
        try:
            got.extend(filter(None, [jobs.claim(pk, at_once=2) for pk in mine]))
        finally:
            connection.close()

    threads = [threading.Thread(target=claim_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(got) == len({job.pk for job in got}) == 2


def works(job: Job, report: jobs.Report) -> Mapping[str, Any]:
    assert report({"part": 0.5, "say": "half"})
    jobs.describe(job.pk, fingerprint="f" * 16, engine="vllm", engine_version="0.32.0", gpu="h100")
    return {"found": 1}


def test_a_job_is_carried_out_to_its_end() -> None:
    job, told = asked(a_model()), list[Mapping[str, Any]]()
    ended = jobs.run(job.pk, works, on_progress=told.append)
    assert ended is not None
    assert (ended.state, ended.result, ended.problem) == ("done", {"found": 1}, "")
    assert told == [{"part": 0.5, "say": "half"}] == [ended.progress]
    assert (ended.engine, ended.engine_version, ended.gpu) == ("vllm", "0.32.0", "h100")
    assert ended.claimed_at is not None
    assert ended.ended_at is not None
    assert ended.ended_at >= ended.claimed_at >= ended.asked_at
    assert jobs.run(job.pk, works) is None, "it is over"


def fails(job: Job, report: jobs.Report) -> Mapping[str, Any]:
    raise jobs.JobFailed("The replica died.", {"found": 0})


def stops(job: Job, report: jobs.Report) -> Mapping[str, Any]:
    assert report({}), "nobody has asked for it yet"
    jobs.stop(job.pk, by="bob", why="too loud", door="api")
    assert not report({}), "somebody has"
    raise jobs.JobStopped({"found": 2})


def is_taken(job: Job, report: jobs.Report) -> Mapping[str, Any]:
    Job.objects.filter(pk=job.pk).update(heartbeat_at=Now() - timedelta(minutes=1))
    jobs.sweep()
    assert not report({})
    raise jobs.JobStopped


@pytest.mark.parametrize(
    ("runner", "end", "problem", "result"),
    [
        pytest.param(fails, "failed", "The replica died.", {"found": 0}, id="it failed"),
        pytest.param(stops, "stopped", "stopped by bob: too loud", {"found": 2}, id="it was stopped"),
        pytest.param(
            is_taken,
            "failed",
            "Its worker died, or lost the database; ask for it again.",
            {},
            id="taken away",
        ),
    ],
)
def test_how_a_job_ends(runner: jobs.Runner, end: str, problem: str, result: dict[str, Any]) -> None:
    job = asked(a_model())
    assert jobs.run(job.pk, runner) == job
    assert state(job) == (end, problem)
    assert job.result == result


@pytest.mark.parametrize(
    ("fault", "end", "problem"),
    [
        (KeyboardInterrupt, "stopped", "stopped by Ctrl-C"),
        (
            ZeroDivisionError,
            "failed",
            "It failed by a fault of llmgw's own (ZeroDivisionError); the log tells more.",
        ),
        (SystemExit, "failed", "It failed by a fault of llmgw's own (SystemExit); the log tells more."),
    ],
)
def test_a_job_is_over_whatever_is_raised(fault: type[BaseException], end: str, problem: str) -> None:
    def breaks(job: Job, report: jobs.Report) -> Mapping[str, Any]:
        raise fault

    job = asked(a_model())
    with pytest.raises(fault):
        jobs.run(job.pk, breaks)
    assert state(job) == (end, problem)


def test_a_worker_that_is_to_end_ends_its_job() -> None:
    is_leaving = threading.Event()

    def goes_on(job: Job, report: jobs.Report) -> Mapping[str, Any]:
        assert report({})
        is_leaving.set()
        assert not report({})
        raise jobs.JobStopped

    job = asked(a_model())
    jobs.run(job.pk, goes_on, is_leaving=is_leaving.is_set)
    assert state(job) == ("failed", "The worker that carried it out was told to end; ask for it again.")


# --- stopped --------------------------------------------------------------------------------------


def test_a_job_that_waits_is_stopped_at_once_and_one_that_is_over_is_not() -> None:
    job = asked(a_model())
    assert jobs.stop(job.pk, by="bob", door="admin")
    assert state(job) == ("stopped", "stopped by bob")
    assert not jobs.stop(job.pk, by="bob", door="admin")
    assert jobs.claim(job.pk) is None
    assert Event.objects.filter(verb="stop engine check", by="bob").count() == 1


# --- looked after ---------------------------------------------------------------------------------


def silent(job: Job, seconds: float) -> None:
    Job.objects.filter(pk=job.pk).update(heartbeat_at=Now() - timedelta(seconds=seconds))


@pytest.mark.parametrize(
    ("seconds", "is_stopped", "end"),
    [
        (jobs.SILENT_S - 5, False, "running"),
        (jobs.SILENT_S + 1, False, "failed"),
        (jobs.SILENT_S + 1, True, "stopped"),
    ],
    ids=["it lives", "it died", "it died after it was told to stop"],
)
def test_a_job_whose_worker_is_silent_is_over(seconds: float, is_stopped: bool, end: str) -> None:
    job = asked(a_model())
    jobs.claim(job.pk)
    if is_stopped:
        jobs.stop(job.pk, by="bob", door="admin")
    silent(job, seconds)
    assert jobs.sweep() == []
    assert state(job)[0] == end


def test_the_key_of_a_job_ends_with_it_though_its_worker_was_killed() -> None:
    job = asked(a_model(), BENCH)
    jobs.claim(job.pk)
    key, _ = mint_key("bench", user=alice(), scope=Key.Scope.INFERENCE, by="alice", door="bench")
    jobs.keep_key(job, key)
    jobs.sweep()
    key.refresh_from_db()
    assert key.revoked_at is None, "it goes on"
    silent(job, jobs.SILENT_S + 1)
    for _ in range(2):
        jobs.sweep()
    key.refresh_from_db()
    assert key.revoked_at is not None
    assert Event.objects.get(verb="revoke").why == "nobody carries it out any more"


def test_a_clock_that_is_set_back_ends_no_job_that_lives_and_keeps_none_that_died() -> None:
    job = asked(a_model())
    jobs.claim(job.pk)
    silent(job, -7_200)
    jobs.sweep()
    assert state(job)[0] == "running"
    assert not Job.objects.filter(heartbeat_at__gt=Now()), "from now on it may be silent for as long as any"


def test_what_waits_for_long_is_offered_again_oldest_first() -> None:
    mine = [asked(a_model(f"m{number}")) for number in range(jobs.AT_ONCE + 2)]
    assert jobs.sweep() == []
    for age, job in enumerate(mine):
        moment = Now() - timedelta(seconds=jobs.OFFER_AGAIN_S + 1 + age)
        Job.objects.filter(pk=job.pk).update(asked_at=moment)
    assert jobs.sweep() == [job.pk for job in reversed(mine)][: jobs.AT_ONCE]


def test_old_jobs_are_forgotten_and_so_are_too_many() -> None:
    model = a_model()
    over = [asked(model) for _ in range(1)]
    for _ in range(4):
        jobs.stop(over[-1].pk, by="bob", door="admin")
        over.append(asked(model))
    jobs.stop(over[-1].pk, by="bob", door="admin")
    live = asked(model)
    for age, job in enumerate(reversed(over)):
        Job.objects.filter(pk=job.pk).update(asked_at=Now() - timedelta(minutes=age))
    Job.objects.filter(pk=over[-1].pk).update(asked_at=Now() - jobs.KEEP - timedelta(hours=1))
    Job.objects.filter(pk=live.pk).update(asked_at=Now() - jobs.KEEP - timedelta(hours=1))
    jobs.sweep(keep_count=2)
    assert set(Job.objects.all()) == {live, over[-2], over[-3]}


# --- the doors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "says"),
    [(CHECK, 'Model "tiny" has no replica that is ready'), (BENCH, 'No replica of "tiny" is ready')],
)
def test_a_task_carries_out_the_job_by_its_kind(kind: Any, says: str) -> None:
    """Each has its own words for a model of which nothing runs."""
    job = asked(a_model(), kind)
    tasks.run_job(str(job.pk))
    tasks.run_job(str(job.pk))
    tasks.run_job(str(uuid.uuid4()))
    ended, problem = state(job)
    assert (ended, says in problem) == ("failed", True), problem


def test_rest_lists_shows_and_stops_jobs() -> None:
    api, job = Api(alice()), asked(a_model(), BENCH, why="a new driver")
    status, page = api("GET", "jobs?kind=bench&state=queued&model=tiny&search=alice")
    assert (status, [each["id"] for each in page["results"]]) == (200, [str(job.pk)])
    assert api("GET", "jobs?kind=engine_check")[1]["results"] == []
    status, told = api("GET", f"jobs/{job.pk}")
    assert (status, told["state"], told["why"], told["replica"]) == (200, "queued", "a new driver", None)
    status, told = api("DELETE", f"jobs/{job.pk}?why=enough")
    assert (status, told["state"], told["problem"]) == (202, "stopped", "stopped by alice: enough")
    assert api("DELETE", f"jobs/{job.pk}")[0] == 202
    unknown = "0" * 36
    assert sentence(api("GET", f"jobs/{unknown}")) == (
        404,
        f'there is no job "{unknown}"; GET /api/jobs lists them',
    )


def test_the_admin_shows_and_stops_jobs() -> None:
    client = Client()
    client.force_login(alice())
    job = asked(a_model("<i>"), why="<b>")
    jobs.claim(job.pk)
    jobs.report(job.pk, {"part": 0.25, "say": "</progress>asks"})
    page = client.get("/admin/nodes/job/").content.decode()
    assert '<progress max="1" value="0.250"></progress>' in page
    assert "&lt;/progress&gt;asks" in page
    told = {"action": "stop", "_selected_action": [str(job.pk)], "confirmed": "yes", "why": "enough"}
    client.post("/admin/nodes/job/", told)
    assert state(job) == ("running", "stopped by alice: enough")
    assert "stopping" in client.get(f"/admin/nodes/job/{job.pk}/change/").content.decode()


def test_a_shell_lists_and_stops_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    call_command("jobs")
    assert capsys.readouterr().out.startswith("There are no jobs;")
    job = asked(a_model())
    call_command("jobs", "--model", "tiny")
    assert f"{str(job.pk)[:8]}  engine_check  tiny   queued" in capsys.readouterr().out
    call_command("jobs", "--json")
    assert f'"id": "{job.pk}"' in capsys.readouterr().out
    call_command("job_stop", str(job.pk)[:8], "--why", "enough")
    assert capsys.readouterr().out == "Told it to stop: the engine check of tiny.\n"
    call_command("job_stop", str(job.pk))
    assert capsys.readouterr().out == "It is over, or about to be: the engine check of tiny.\n"


@pytest.mark.parametrize("text", ["", "x", "ffffffff", "%"])
def test_a_job_that_is_not_there_is_named(text: str) -> None:
    with pytest.raises(CommandError, match="There is no job"):
        call_command("job_stop", text)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def metered(out: io.StringIO) -> str:
    end = "ends, which takes many words to tell of"
    steps = ((0.0, "begins"), (0.5, "goes on"), (0.5, "goes on"), (1.0, end))
    with Meter(OutputWrapper(out), lambda progress: f"{progress['say']}; 7 open") as meter:
        for part, say in steps:
            meter.show({"part": part, "say": say})
    return out.getvalue()


def test_a_terminal_is_shown_a_bar_within_its_width_and_wiped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    *_, half, whole, wiped, after = metered(Terminal()).split("\r")
    assert half == "[############............] goes on; 7 open"
    assert whole == "[########################] ends, which takes many"
    assert (len(whole), wiped.strip(), len(wiped), after) == (49, "", 49, "")


def test_elsewhere_a_job_is_a_line_for_each_step() -> None:
    assert metered(io.StringIO()) == "begins\ngoes on\nends, which takes many words to tell of\n"
