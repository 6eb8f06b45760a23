"""Engine checks through every door: asked for, carried out, kept, and shown as badges."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib import request

import pytest
from django.core.management import CommandError, call_command
from django.test import Client

from catalog.actions import edit_model
from catalog.models import Event, Model
from nodes import checking, jobs, tasks
from nodes.exposition import read_samples
from nodes.models import EngineCheck, Job, Rank, Replica
from nodes.origins import origin_of
from nodes.showing import check_of_model, check_of_replica, models_with_replicas, replicas
from tests.cast import PROFILE, a_model, a_node, a_replica, alice, model_form, nobody_is_asked
from tests.rest_client import Api, sentence
from tests.sim_thread import ABLE, serving
from tests.waiting import wait_until

pytestmark = [pytest.mark.django_db, pytest.mark.one_database]

CLAIMS = {"capabilities": {"tools": True, "vision": True}, "context_length": 4096}


@contextmanager
def running(*options: str, **model: Any) -> Iterator[Replica]:
    """A replica whose engine is there."""
    replica = a_replica(a_model(**(CLAIMS | model)), a_node(address="http://127.0.0.1:8378"))
    origin = origin_of(replica)
    assert origin is not None
    with serving(*ABLE, *options, key=origin.key, model="tiny") as sim:
        Rank.objects.filter(replica=replica).update(port=sim.port)
        yield replica


def edited(**fields: Any) -> None:
    form, told = model_form(**(CLAIMS | fields)), {"by": "alice", "door": "command", "after_change": int}
    edit_model("tiny", form, ask_paths=nobody_is_asked, **told)


def says() -> list[str]:
    row = models_with_replicas().get(name="tiny")
    return [each.says for each in check_of_model(row).badges]


def told(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


# --- at the shell ---------------------------------------------------------------------------------


def test_a_check_says_what_an_engine_does_and_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    with running() as replica:
        call_command("engine_check", "tiny", "--why", "a new driver")
    lines = told(capsys).splitlines()
    assert lines[0] == f"tiny, replica {str(replica.pk)[:8]}, sim 1 on 1 sim:"
    assert lines[1].split() == ["CHECK", "CLAIMED", "VERDICT", "WHAT", "IT", "DOES"]
    assert len(lines) == 17
    assert all("yes      verified" in line for line in lines[2:] if not line.startswith("embeddings"))
    assert "embeddings                      no       not claimed, works  64 dimensions" in lines[14]
    row = EngineCheck.objects.get()
    assert (row.engine, row.engine_version, row.gpu) == ("sim", "1", "1 sim")
    assert (row.fingerprint, row.replica) == (replica.fingerprint, replica.pk)
    job = Job.objects.get()
    assert (job.pk, job.state, job.fingerprint) == (row.job, "done", replica.fingerprint)
    assert Event.objects.get(verb="engine check").why == "a new driver"
    assert says() == [
        "engine: verified less than an hour ago on sim 1",
        "tools: verified less than an hour ago on sim 1",
        "vision: verified less than an hour ago on sim 1",
        "embeddings: not claimed, works less than an hour ago on sim 1",
    ]
    call_command("models")
    assert "engine: verified less than an hour ago on sim 1; tools: verified" in told(capsys)


def test_what_is_claimed_and_fails_is_an_error_and_a_badge(capsys: pytest.CaptureFixture[str]) -> None:
    with running("--lie", "stop", "--lie", "arguments"):
        with pytest.raises(CommandError) as no:
            call_command("engine_check", "tiny", "--json")
        found = {each["check"]: each for each in json.loads(told(capsys))["result"]["findings"]}
    assert str(no.value) == (
        "4 of 15 checks failed: stop text, tools, where the model chooses, tools, where one is required, "
        "tools, where one is named."
    )
    assert (found["stop"]["works"], found["stop"]["verdict"]) == (False, "claimed, failed")
    assert says()[:2] == [
        "stop text: claimed, failed less than an hour ago on sim 1",
        "tools: claimed, failed less than an hour ago on sim 1",
    ]


def test_a_model_that_was_never_checked_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    a_model(**CLAIMS)
    assert says() == ["engine: never checked", "tools: never checked", "vision: never checked"]
    call_command("models")
    assert told(capsys).splitlines()[1].endswith("never checked")


def test_a_check_of_a_profile_that_was_edited_is_older_and_a_new_one_takes_its_place() -> None:
    with running() as replica:
        call_command("engine_check", "tiny")
        row = replicas().get(pk=replica.pk)
        assert check_of_replica(row).badges[1].says == "tools: verified less than an hour ago on sim 1"
        edited(profiles=[PROFILE | {"args": ["--ttft", "1ms"]}])
        model = models_with_replicas().get()
        badges = check_of_model(model).badges
        assert badges[0].says == "engine: verified on an older profile, less than an hour ago"
        assert all(each.is_older for each in badges)
        assert check_of_replica(replicas().get(pk=replica.pk)).badges[0].is_older is False, (
            "it runs as checked"
        )
        Replica.objects.update(fingerprint=model.profiles.all()[0].fingerprint)
        call_command("engine_check", "tiny")
    assert EngineCheck.objects.count() == 2
    assert says()[0] == "engine: verified less than an hour ago on sim 1"


def test_the_verdict_follows_what_is_claimed_now() -> None:
    with running(capabilities={}) as replica:
        call_command("engine_check", "tiny", "--replica", str(replica.pk)[:8])
    assert says()[1] == "tools: not claimed, works less than an hour ago on sim 1"
    edited()
    assert says()[1] == "tools: verified less than an hour ago on sim 1"


# --- what cannot be asked -------------------------------------------------------------------------


def loading() -> str:
    a_replica(a_model(), a_node(), state="starting")
    return ""


def off() -> str:
    a_model(scaling={"min": 0, "max": 0})
    return ""


def stopped() -> str:
    return str(a_replica(a_model(), a_node(), state="stopped").pk)


def without_a_port() -> str:
    a_replica(a_model(), a_node())
    Rank.objects.update(port=None)
    return str(Replica.objects.get().pk)


def of_another() -> str:
    a_model()
    return str(a_replica(a_model("other"), a_node()).pk)


def unknown() -> str:
    a_model()
    return "00000000-0000-4000-8000-000000000000"


REFUSED = {
    loading: (
        'Model "tiny" has no replica that is ready (1 on the way); manage.py why tells what it waits for.'
    ),
    off: (
        'Model "tiny" is off, and no engine runs that could be asked; turn it on (scaling.max above 0) first.'
    ),
    stopped: (
        "The replica tiny/default {short} is stopped, and only one that is ready can be asked; choose "
        "another (manage.py replicas --model tells), or wait until it is."
    ),
    without_a_port: (
        "The replica tiny/default {short} tells no port at which its engine could be asked; manage.py "
        "replicas tells what has become of it."
    ),
    of_another: 'Model "tiny" has no replica "{id}"; manage.py replicas --model tells which it has.',
    unknown: 'Model "tiny" has no replica "{id}"; manage.py replicas --model tells which it has.',
}


@pytest.mark.parametrize("situation", REFUSED, ids=lambda each: each.__name__)
def test_what_cannot_be_asked_is_refused_in_a_sentence_at_every_door(situation: Any) -> None:
    replica = situation()
    wanted = REFUSED[situation].format(id=replica, short=replica[:8])
    api = Api(alice())
    assert (
        sentence(api("POST", "models/tiny/engine_check", {"replica": replica} if replica else {}))[1]
        == wanted
    )
    if situation is not unknown:
        with pytest.raises(CommandError) as no:
            call_command("engine_check", "tiny", *(["--replica", replica] if replica else []))
        assert str(no.value) == wanted
    assert not Job.objects.exists()


def test_a_model_that_is_not_there_and_a_patience_that_is_none() -> None:
    with pytest.raises(CommandError, match='model "nope" is not in the catalog'):
        call_command("engine_check", "nope")
    a_model()
    for patience in ("0s", "2h", "soon"):
        with pytest.raises(CommandError, match="--patience"):
            call_command("engine_check", "tiny", "--patience", patience)
    assert Api(alice())("POST", "models/tiny/engine_check", {"replica": 7})[0] == 400


def test_two_checks_of_a_model_at_once_are_refused() -> None:
    with running():
        api = Api(alice())
        assert api("POST", "models/tiny/engine_check", {})[0] == 202
        status, says = sentence(api("POST", "models/tiny/engine_check", {}))
        assert (status, says.partition(" that ")[0]) == (409, 'The engine check of "tiny"')


# --- by a worker ----------------------------------------------------------------------------------


def test_a_worker_carries_out_what_rest_asked_for() -> None:
    with running() as replica:
        api = Api(alice())
        answer = api.ask("POST", "models/tiny/engine_check", {"replica": str(replica.pk), "why": "new"})
        job = answer.json()
        assert (answer.status_code, job["state"], job["replica"]) == (202, "queued", str(replica.pk))
        tasks.run_job(job["id"])
        assert answer["Location"].endswith(f"/api/jobs/{job['id']}")
        found = api("GET", f"jobs/{job['id']}")[1]
    assert (found["state"], found["progress"]["part"], found["engine"]) == ("done", 1.0, "sim")
    assert found["progress"]["say"] == "15 checks, 0 failed"
    status = api("GET", "models/tiny")[1]["status"]["engine_check"]
    assert (status["job"], status["older"], status["profile"]) == (job["id"], False, "default")
    assert status["badges"][1] == {
        "about": "tools",
        "verdict": "verified",
        "says": "tools: verified less than an hour ago on sim 1",
    }
    assert api("GET", f"replicas/{replica.pk}")[1]["engine_check"]["engine_version"] == "1"


def ended(job: Job) -> tuple[str, str]:
    tasks.run_job(str(job.pk))
    job.refresh_from_db()
    return job.state, job.problem


def test_a_replica_that_dies_meanwhile_ends_the_check_and_nothing_is_kept_of_it() -> None:
    with running("--crash-after", "40", "--crash-how", "core") as replica:
        job = checking.ask_check(replica.model, by="alice", door="api")
        assert ended(job)[0] == "failed"
    assert job.problem == (
        f"The replica {replica} is not healthy any more: its engine answers with status 503, while it was "
        "asked for stop text; manage.py replicas tells what has become of it."
    )
    assert [each["check"] for each in job.result["findings"]] == ["health", "name", "chat", "stream"]
    assert not EngineCheck.objects.exists()


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ("stopped", 'Model "tiny" has no replica that is ready (none on the way); manage.py why tells'),
        ("gone", 'The model "tiny" is not in the catalog any more; choose another.'),
    ],
)
def test_what_changes_before_a_worker_comes_is_told(state: str, problem: str) -> None:
    replica = a_replica(a_model(), a_node())
    job = checking.ask_check(replica.model, by="alice", door="api")
    if state == "gone":
        Model.objects.all().delete()
    else:
        Replica.objects.update(state="stopped")
    assert ended(job)[1].startswith(problem)


def test_a_check_is_stopped_while_it_waits_for_an_answer() -> None:
    with running("--stall-after", "1") as replica:
        job = checking.ask_check(replica.model, by="alice", door="api")

        def report(progress: jobs.Progress) -> bool:
            return progress["say"] != "asks for chat"

        with pytest.raises(jobs.JobStopped) as stopped:
            checking.carry_out(job, report)
    assert [each["check"] for each in stopped.value.result["findings"]] == ["health"]


# --- in the admin ---------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_command_with_what_was_found(
    number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a bench's: no traceback, and a job that is over at once."""
    before = signal.getsignal(number)
    with running("--stall-after", "2") as replica:
        origin = origin_of(replica)
        assert origin is not None
        metrics = request.Request(f"{origin.url}/metrics", headers={"Authorization": f"Bearer {origin.key}"})

        def is_chatting() -> bool:
            with request.urlopen(metrics, timeout=5) as answer:
                samples = read_samples(answer.read().decode(), frozenset({"vllm:num_requests_running"}))
            return any(sample.value for sample in samples)

        def interrupt() -> None:
            wait_until(is_chatting, "the check to ask for a chat")
            os.kill(os.getpid(), number)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(CommandError, match=r"^It was stopped by ") as stopped:
            call_command("engine_check", "tiny")
        thread.join()
    assert stopped.value.returncode == 130
    assert f"replica {str(replica.pk)[:8]}" in told(capsys)
    assert Job.objects.get().state == "stopped"
    assert signal.getsignal(number) is before


def test_the_admin_asks_for_checks_and_shows_what_they_found() -> None:
    client = Client()
    client.force_login(alice())
    with running("--lie", "vision") as replica:
        page = client.get(f"/admin/catalog/model/{replica.model_id}/change/").content.decode()
        assert "tools: never checked" in page
        assert "Check the engine" in page
        for where, pk in (("catalog/model", replica.model_id), ("nodes/replica", replica.pk)):
            form = {"action": "check_engine", "_selected_action": [str(pk)], "confirmed": "yes", "why": "w"}
            answer = client.post(f"/admin/{where}/", form, follow=True)
            assert "engine check asked for" in answer.content.decode()
            job = Job.objects.filter(state="queued").get()
            tasks.run_job(str(job.pk))
        page = client.get(f"/admin/nodes/job/{job.pk}/change/").content.decode()
        assert "shown blue, it said &quot;red&quot;" in page
    for where, pk in (("catalog/model", replica.model_id), ("nodes/replica", replica.pk)):
        page = client.get(f"/admin/{where}/{pk}/change/").content.decode()
        assert '<span class="badge bad">vision: claimed, failed less than an hour ago on sim 1</span>' in page
