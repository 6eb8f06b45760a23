"""Benches of a real sim engine: what they find, what is said where none can be, and that nothing goes on."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.test import Client

from catalog.models import Event, Key, Model, Profile
from catalog.reading import CatalogError
from catalog.spec import ModelSpec
from nodes import jobs
from nodes.bench.asks import Ask, Lengths, Row, arrivals
from nodes.bench.figures import Figures, Outcome, Times
from nodes.bench.prompts import Prompts
from nodes.bench.weighing import build_of
from nodes.benching import ask_bench, carry_out
from nodes.conversation import cluster_keys
from nodes.generator import Aim, Generator
from nodes.jobs import Progress
from nodes.measured import curves_of, run_as_dict, runs_of, weighing_of
from nodes.models import Job, Rank, Replica
from tests.agent_process import ROOT
from tests.cast import a_model, a_node, a_replica, alice, viola
from tests.pages import text_of
from tests.rest_client import Api
from tests.services import free_port
from tests.sim_process import Sim, running_sim, starting_sim
from tests.waiting import wait_until

NAME = "my-model"  # that the sim serves
REPLICA = uuid.UUID("0ddba11a-0000-4000-8000-000000000001")
SLOTS, TTFT_S, TPOT_S, TOKENS = 16, 0.02, 0.004, 11
SIM = (
    *("--ttft", "20ms", "--tpot", "4ms"),
    *("--max-num-seqs", str(SLOTS), "--no-enable-prefix-caching"),
)
SHORT = {
    "distribution": "fixed", "prompt_tokens": 16, "output_tokens": TOKENS,
    "step": "1s", "warmup": "1s", "start_rate": 100, "max_rate": 100,
}  # fmt: skip
SLO = {"TTFTp99": "2s", "TPOTp99": "500ms"}
WORDS: dict[str, Any] = {"by": "alice", "door": "command"}


def key_of_replica() -> str:
    return cluster_keys()[0].replica_key(str(REPLICA), 1)


@pytest.fixture(scope="module")
def sim() -> Iterator[Sim]:
    """It knows the key of the one replica that there is in each test."""
    with running_sim(*SIM, key=key_of_replica()) as sim:
        yield sim


def is_free(sim: Sim) -> bool:
    return sim.metric("vllm:num_requests_running") == 0 == sim.metric("vllm:num_requests_waiting")


# --- the generator ----------------------------------------------------------------------------------


def test_each_request_is_told_by_its_tokens(sim: Sim) -> None:
    asks = arrivals(50, 1.0, Lengths("uniform", 40, 8, 0.5), Random(1).random)
    with Generator(Aim(sim.url, key_of_replica())) as generator:
        volley = generator.begin(asks, Prompts(NAME, "a", 0.0).body)
        assert volley.wait(20)
    assert [each.problem for each in volley.outcomes] == [""] * len(asks)
    told = {each.number: each for each in volley.outcomes}
    for ask in asks:
        outcome = told[ask.number]
        assert outcome.output_tokens == ask.row.output_tokens
        assert 0 <= outcome.prompt_tokens - ask.row.prompt_tokens <= 8, "a word is a token; a chat adds a few"
        assert None not in (outcome.first_s, outcome.last_s)
        assert outcome.due_s <= outcome.sent_s <= (outcome.first_s or 0) <= (outcome.last_s or 0)
        assert outcome.ttft_s >= TTFT_S
    assert volley.open_dues_s() == []


@pytest.mark.parametrize(
    ("aim", "says"),
    [
        pytest.param(lambda sim: Aim(sim.url, "wrong"), "status 401: Unauthorized", id="another key"),
        pytest.param(lambda sim: Aim("http://127.0.0.1:9", ""), "it refused the connection", id="nobody"),
        pytest.param(
            lambda sim: Aim(sim.url.replace("http", "https"), ""),
            "its certificate is not trusted",
            id="no TLS",
        ),
    ],
)
def test_what_goes_wrong_is_said_of_each_request(sim: Sim, aim: Callable[[Sim], Aim], says: str) -> None:
    asks = [Ask(number, 0.0, Row(4, 2)) for number in range(3)]
    with Generator(aim(sim)) as generator:
        volley = generator.begin(asks, Prompts(NAME, "a", 0.0).body)
        assert volley.wait(20)
    assert [each.problem for each in volley.outcomes] == [says] * 3


def test_what_is_left_is_closed_and_the_engine_is_free(sim: Sim) -> None:
    asks = [Ask(number, 0.0, Row(4, 400)) for number in range(10)]
    with Generator(Aim(sim.url, key_of_replica())) as generator:
        late = Ask(10, 3_600.0, Row(4, 2))
        volley = generator.begin([*asks, late], Prompts(NAME, "b", 0.0).body)
        wait_until(lambda: sim.metric("vllm:num_requests_running") == 10, "ten requests to run")
        volley.cut()
        assert volley.wait(5), "the one that is due in an hour is not waited for"
        assert len(volley.open_dues_s()) == 10
        wait_until(lambda: is_free(sim), "the engine to be free")
        again = generator.begin(asks, Prompts(NAME, "c", 0.0).body)
        wait_until(lambda: sim.metric("vllm:num_requests_running") == 10, "ten requests to run")
    wait_until(lambda: is_free(sim), "the engine to be free")
    assert again.outcomes == []
    assert all(thread.name != "bench" for thread in threading.enumerate())


def test_another_generator_sees_the_same(sim: Sim) -> None:
    ours, theirs = seen_by_both(sim, rate=30, lasting_s=2.0)
    assert ours.ttft.p50_s == pytest.approx(theirs[0].p50_s, rel=0.3), (
        "beside other tests; make soak is strict"
    )
    assert ours.tpot.p50_s == pytest.approx(theirs[1].p50_s, rel=0.3)


def seen_by_both(
    sim: Sim, *, rate: float, lasting_s: float, rounds: int = 1
) -> tuple[Figures, tuple[Times, Times]]:
    """The same load from our generator and from one that shares no line with it, in turns, so that what else
    the machine does befalls both."""
    seen: list[Outcome] = []
    theirs: list[tuple[float, float]] = []
    for number in range(rounds):
        asks = arrivals(rate, lasting_s, Lengths("fixed", 16, TOKENS), Random(number).random, first=len(seen))
        with Generator(Aim(sim.url, key_of_replica())) as generator:
            volley = generator.begin(asks, Prompts(NAME, "d", 0.0).body)
            assert volley.wait(lasting_s + 30)
        seen += volley.outcomes
        theirs += independently(sim, [ask.due_s for ask in asks])
    assert not any(each.problem for each in seen)
    ours = Figures.of(rate, seen, since_s=0, until_s=lasting_s)
    return ours, (Times.of(ttft_s for ttft_s, _ in theirs), Times.of(tpot_s for _, tpot_s in theirs))


def independently(sim: Sim, dues_s: list[float]) -> list[tuple[float, float]]:
    """TTFT from the intended arrival, and time per token: a thread for each request, and http.client."""
    seen: list[tuple[float, float]] = []
    host = urlsplit(sim.url)
    headers = {"Authorization": f"Bearer {key_of_replica()}", "Content-Type": "application/json"}
    began_s = time.monotonic() + 0.2

    def ask(number: int, due_s: float) -> None:
        text = f"{number:>6} says hello to all of us, as they do each day and night at ten past eight"
        body = {"model": NAME, "prompt": text, "max_tokens": TOKENS, "stream": True}
        connection = http.client.HTTPConnection(host.hostname or "", host.port)
        connection.connect()
        time.sleep(max(began_s + due_s - time.monotonic(), 0))
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        lines = ((time.monotonic(), line) for line in connection.getresponse())
        moments = [at_s for at_s, line in lines if b'"text": "' in line and b'"text": ""' not in line]
        connection.close()
        seen.append((moments[0] - began_s - due_s, (moments[-1] - moments[0]) / (TOKENS - 1)))

    threads = [threading.Thread(target=ask, args=each) for each in enumerate(dues_s)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seen


# --- as a job ---------------------------------------------------------------------------------------


def ready(sim: Sim, **fields: Any) -> Model:
    """A model whose replica is that engine."""
    model = a_model(NAME, **{"slo": SLO} | fields)
    node = a_node(address="http://127.0.0.1:8378")
    replica = a_replica(model, node, id=REPLICA)
    Rank.objects.filter(replica=replica).update(port=urlsplit(sim.url).port)
    return model


def benched(
    model: Model, on_progress: Callable[[Progress], None] = lambda progress: None, **more: Any
) -> Job:
    job = ask_bench(model, SHORT | more, **WORDS)
    ended = jobs.run(job.pk, carry_out, on_progress=on_progress)
    assert ended is not None
    return ended


@pytest.mark.one_database
@pytest.mark.django_db
def test_a_bench_says_what_held_and_on_what(sim: Sim) -> None:
    model = ready(sim)
    heard: list[Progress] = []
    job = benched(model, heard.append)
    assert (job.state, job.problem) == ("done", "")
    assert job.result["rate"] == 100
    assert (job.result["is_confirmed"], job.result["is_limit"]) == (True, False)
    assert job.result["says"] == (
        '"my-model" holds TTFT p99 within 2 s and TPOT p99 within 500 ms at 100 requests a second, the most '
        "that was tried; raise max_rate to find where it ends."
    )
    assert (job.engine, job.engine_version, job.gpu) == ("sim", "1", "Sim")
    assert job.fingerprint == model.profiles.get().fingerprint
    step, confirmed = job.result["steps"]
    assert confirmed["measured_s"] == 3 * step["measured_s"]
    assert step["ttft"]["p50_ms"] >= TTFT_S * 1_000
    assert step["tpot"]["p50_ms"] == pytest.approx(TPOT_S * 1_000, rel=0.3)
    assert (step["failed"], step["cached_part"]) == (0, 0.0), "no prompt was asked before"
    assert {each["say"] for each in heard} >= {"step 1: 100 requests/s", "confirming 100 requests/s"}
    assert heard[-1]["answered"] > 0
    [run] = runs_of(NAME)
    assert run_as_dict(run)["best"] == confirmed
    drawn = curves_of(NAME, model.spec.slo)
    assert drawn["x"]["values"] == [100]
    assert [line["label"] for line in drawn["plots"][0]["lines"]] == [
        f"{str(run.pk)[:8]} default",
        "promised",
    ]
    assert key_of_replica() not in json.dumps(jobs.job_as_dict(job))
    assert is_free(sim)


@pytest.mark.one_database
@pytest.mark.django_db
def test_a_bench_that_is_stopped_leaves_nothing_running(sim: Sim) -> None:
    def stop(progress: Progress) -> None:
        if progress["say"].startswith("step"):
            jobs.stop(Job.objects.get().pk, by="alice", why="enough", door="admin")

    job = benched(ready(sim), stop, step="10s")
    assert (job.state, job.problem) == ("stopped", "stopped by alice: enough")
    assert job.result["says"].startswith("It ended early, and nothing had held yet")
    wait_until(lambda: is_free(sim), "the engine to be free")
    assert all(thread.name != "bench" for thread in threading.enumerate())


@pytest.mark.one_database
@pytest.mark.django_db
def test_an_engine_that_dies_ends_the_bench_with_what_was_measured() -> None:
    with starting_sim(*SIM, key=key_of_replica()) as sim:
        sim.wait_until_up()

        def kill(progress: Progress) -> None:
            if progress["say"].startswith("confirming"):
                sim.process.kill()

        job = benched(ready(sim), kill)
    assert job.state == "failed"
    assert job.problem.startswith(
        f"The replica {str(REPLICA)[:8]} answers no more (it refused the connection)"
    )
    assert [step["holds"] for step in job.result["steps"]] == [True]
    assert job.result["says"].startswith("It ended early, and up to 100 requests a second held")


@pytest.mark.one_database
@pytest.mark.django_db
def test_the_key_of_a_bench_through_the_gateway_ends_with_it(sim: Sim, settings: Any) -> None:
    settings.LLMGW_GATEWAY_URL = sim.url  # which knows no key of ours
    alice()
    job = benched(ready(sim), through="gateway")
    assert job.problem == (
        "No request of the warm-up was answered (status 401: Unauthorized); manage.py why my-model tells how "
        "its replicas are."
    )
    key = Key.objects.get()
    assert key.revoked_at is not None
    assert Job.objects.get().key == key, "so that it ends, too, where whoever carries the bench out is killed"
    assert (key.scope, key.opens_all, [each.name for each in key.opened.all()]) == (
        "inference",
        False,
        [NAME],
    )
    assert key.expires_at is not None
    assert (key.expires_at - key.created_at).total_seconds() <= 4 * 3_600


# --- what is in the way -----------------------------------------------------------------------------


def nothing_is_ready() -> Model:
    model = a_model(slo=SLO)
    a_replica(model, a_node(), "starting", id=REPLICA)
    return model


def ready_with_a_context_of(tokens: int) -> Model:
    model = a_model(slo=SLO, context_length=4_000)
    Rank.objects.filter(replica=a_replica(model, a_node())).update(context_length=tokens or None)
    return model


def asked_by_nobody_with_rights() -> Model:
    viola()
    return ready_with_a_context_of(0)


GATEWAY = {"through": "gateway"}
HERE = {"address": "http://127.0.0.1:8000"}
WIDE = {"rows": [Row(40, 10), Row(2_000, 100)]}
NO: list[Any] = [
    ("off", lambda: a_model(slo=SLO, scaling={"min": 0, "max": 0}), {}, {}, 'The model "tiny" is off'),
    ("no SLO", a_model, {}, {}, 'The model "tiny" promises nothing that could be held; give it an SLO'),
    ("embeddings", lambda: a_model(slo=SLO, capabilities={"embeddings": True}), {}, {}, "makes embeddings"),
    ("none is ready", nothing_is_ready, {}, {}, 'No replica of "tiny" is ready; manage.py why tiny tells'),
    (
        "this one is not",
        nothing_is_ready,
        {},
        {"replica": REPLICA},
        'replica 0ddba11a of "tiny" is not ready',
    ),
    ("no such profile", nothing_is_ready, {}, {"profile": "x"}, 'has no profile "x"; choose among default'),
    (
        "both ways",
        nothing_is_ready,
        GATEWAY,
        {"profile": "default"},
        "Through the gateway requests go to any",
    ),
    (
        "no address",
        nothing_is_ready,
        GATEWAY,
        {},
        "Where the gateway listens is not known; set LLMGW_GATEWAY",
    ),
    ("no URL", nothing_is_ready, GATEWAY, {"address": "ftp://x"}, '"ftp://x" is no address of a gateway'),
    ("no port", nothing_is_ready, GATEWAY, {"address": "http://x:99999"}, "is no address of a gateway"),
    (
        "nobody whose key it could be",
        asked_by_nobody_with_rights,
        GATEWAY,
        HERE,
        "A key belongs to a user, and there is none who may do everything; make one (manage.py",
    ),
    (
        "a dataset that no worker has",
        lambda: a_model(slo=SLO),
        {"dataset": "x.jsonl"},
        {},
        "bench from a shell where it is (manage.py bench tiny --dataset FILE), or leave it out.",
    ),
    (
        "too long for the context",
        lambda: ready_with_a_context_of(0),
        {"prompt_tokens": 3_900, "output_tokens": 101},
        {},
        "is 4000 tokens, which has no room for a prompt of 3900 tokens and an answer of 101; ask for fewer.",
    ),
    (
        "a row too long for the context that the engine tells",
        lambda: ready_with_a_context_of(2_048),
        {"dataset": "x.jsonl"},
        WIDE,
        'an answer of 100; leave such rows out of the dataset "x.jsonl".',
    ),
    ("a bad option", lambda: a_model(slo=SLO), {"step": "never"}, {}, "the bench: step must be a duration"),
]


@pytest.mark.one_database
@pytest.mark.django_db
@pytest.mark.parametrize(
    ("given", "options", "more", "says"), [pytest.param(*each, id=name) for name, *each in NO]
)
def test_what_is_in_the_way_is_said(
    given: Callable[[], Model], options: dict[str, Any], more: dict[str, Any], says: str
) -> None:
    with pytest.raises(CatalogError) as refused:
        ask_bench(given(), options, **more, **WORDS)
    assert says in str(refused.value)
    assert not Job.objects.exists()


@pytest.mark.django_db
def test_a_model_has_one_bench_at_a_time(sim: Sim) -> None:
    model = ready(sim)
    first = ask_bench(model, SHORT, **WORDS)
    with pytest.raises(CatalogError) as refused:
        ask_bench(model, SHORT, **WORDS)
    assert str(refused.value) == (
        f'The bench of "my-model" that "alice" asked for is queued; wait until it is over, or stop it '
        f"(manage.py job_stop {str(first.pk)[:8]})."
    )


@pytest.mark.one_database
@pytest.mark.django_db
def test_what_is_gone_when_a_worker_comes_to_it_is_said(sim: Sim) -> None:
    model = ready(sim)
    job = ask_bench(model, SHORT, **WORDS)
    Replica.objects.update(state="starting")
    ended = jobs.run(job.pk, carry_out)
    assert ended.problem.startswith('The replica 0ddba11a of "my-model" is not ready')
    Replica.objects.update(state="ready")
    of_a_shell = ask_bench(model, SHORT | {"dataset": "x.jsonl"}, rows=[Row(4, 2)], **WORDS)
    told = jobs.run(of_a_shell.pk, carry_out)
    assert told.problem.startswith('The dataset "x.jsonl" is read by the shell that carries the bench out')


# --- at the doors -----------------------------------------------------------------------------------


def said_by(*words: str, capsys: Any) -> str:
    call_command("bench", *words)
    out: str = capsys.readouterr().out
    return out


@pytest.mark.one_database
@pytest.mark.django_db
def test_ctrl_c_stops_the_command_and_all_that_it_asked(sim: Sim, capsys: Any) -> None:
    ready(sim)

    def interrupt() -> None:
        wait_until(lambda: not is_free(sim), "requests to run")
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(CommandError, match=r"^Stopped; nothing of it goes on\.") as stopped:
        call_command("bench", NAME, "--start-rate", "50", "--output-tokens", "200", "--ttft-p99", "1h")
    thread.join()
    assert stopped.value.returncode == 130
    assert "warming up" in capsys.readouterr().err
    job = Job.objects.get()
    assert job.state == "stopped"
    assert job.problem.endswith(": Ctrl-C")
    wait_until(lambda: is_free(sim), "the engine to be free")
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.one_database
@pytest.mark.django_db
@pytest.mark.parametrize(
    ("content", "says"),
    [
        pytest.param(None, "cannot be read: No such file or directory.", id="absent"),
        pytest.param(b"\xff\xfe", "is no text in UTF-8; give lines of JSON.", id="no text"),
        pytest.param(
            b"{}", 'Line 1 of the dataset "d.jsonl" cannot be used: its output_tokens', id="no rows"
        ),
    ],
)
def test_a_dataset_that_cannot_be_used_is_said(content: bytes | None, says: str, tmp_path: Path) -> None:
    a_model(slo=SLO)
    path = tmp_path / "d.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CommandError) as refused:
        call_command("bench", "tiny", "--dataset", str(path))
    assert says in str(refused.value)


@pytest.mark.one_database
@pytest.mark.django_db
def test_a_dataset_without_an_end_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nodes.management.commands.bench.DATASET_LIMIT_BYTES", 1_000)
    a_model(slo=SLO)
    with pytest.raises(CommandError, match="is larger than 256 MiB; give a smaller one"):
        call_command("bench", "tiny", "--dataset", "/dev/zero")


@pytest.mark.one_database
@pytest.mark.django_db
def test_a_text_of_a_dataset_may_hold_all_that_json_lets_it(tmp_path: Path) -> None:
    """Of the two lines, which a mark of UTF-8 precedes, the second alone is none."""
    a_model(slo=SLO)
    path = tmp_path / "d.jsonl"
    said = "a\u2028b\u0085c\x7f"
    row = {"messages": [{"role": "user", "content": said}], "output_tokens": 9}
    path.write_text(f"{json.dumps(row, ensure_ascii=False)}\r\n{{", "utf-8-sig")
    with pytest.raises(CommandError, match="Line 2 of the dataset"):
        call_command("bench", "tiny", "--dataset", str(path))


def measured(model: Model, profile: str, rate: float, **more: Any) -> Job:
    """As a bench leaves it."""
    spec: ModelSpec = model.spec
    times = {f"p{level}_ms": 10.0 for level in (50, 90, 95, 99)}
    step = {
        "rate": rate, "measured_s": 20, "requests": 100, "failed": 0, "output_tokens_per_s": 9.0,
        "ttft": times, "tpot": times, "holds": True, "why": "", "is_cut": False,
    }  # fmt: skip
    result = {
        "through": "replica", "replica": str(REPLICA), "profile": profile, "rate": rate, "says": "It held.",
        "build": build_of(spec.profile(profile)), "promise": {"ttft_p99_ms": 1.0, "tpot_p99_ms": 1.0},
        "steps": [step], "is_limit": True,
    }  # fmt: skip
    job = Job(kind="bench", model=model, model_name=model.name, by="alice", state="done", result=result)
    job.asked_at = model.changed_at + timedelta(seconds=Job.objects.count())
    for name, value in ({"options": {"dataset": "<script>"}, "ended_at": model.changed_at} | more).items():
        setattr(job, name, value)
    job.save()
    return job


def two_profiles() -> Model:
    profiles = [{"name": name, "engine": "sim", "gpu_class": name} for name in ("small", "large")]
    return a_model(slo=SLO, profiles=profiles)


def weights_of(model: Model) -> dict[str, float]:
    return dict(Profile.objects.filter(model=model).values_list("name", "weight"))


@pytest.mark.django_db
def test_weights_are_shown_and_then_set(capsys: Any) -> None:
    model = two_profiles()
    measured(model, "small", 10)
    unbounded = measured(model, "large", 99)
    Job.objects.filter(pk=unbounded.pk).update(result=unbounded.result | {"is_limit": False})
    assert "only small was measured under this load" in said_by("tiny", "--runs", capsys=capsys)
    measured(model, "large", 45)
    shown = said_by("tiny", "--runs", capsys=capsys)
    assert "large" in shown
    assert shown.splitlines()[-2].split() == ["large", "large", "45", "1", "4.5"]
    assert weights_of(model) == {"small": 1, "large": 1}, "nothing is set by looking"
    assert "Set; requests follow at once." in said_by("tiny", "--runs", "--apply", capsys=capsys)
    assert weights_of(model) == {"small": 1, "large": 4.5}
    event = Event.objects.filter(verb="edit").get()
    assert event.why == "measured by bench"
    assert "They have these weights." in said_by("tiny", "--runs", "--apply", capsys=capsys)
    told = json.loads(said_by("tiny", "--runs", "--json", capsys=capsys))
    assert [each["weight"] for each in told["weights"]["profiles"]] == [1, 4.5]
    assert [each["rate"] for each in told["runs"]] == [45, 99, 10]


@pytest.mark.django_db
def test_the_last_runs_say_which_weights_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nodes.measured.WEIGHED", 2)
    model = two_profiles()
    for hour, (profile, rate) in enumerate((("small", 10), ("large", 45), ("large", 60))):
        measured(model, profile, rate, ended_at=model.changed_at + timedelta(hours=hour))
    assert weighing_of(model).says.startswith("Of tiny only large was measured under this load")
    measured(model, "small", 20, ended_at=model.changed_at + timedelta(hours=4))
    assert [each.weight for each in weighing_of(model).proposals] == [1, 3]


@pytest.mark.django_db
def test_the_page_asks_for_a_bench_and_sets_what_it_showed(sim: Sim) -> None:
    model = ready(sim)
    path = f"/admin/catalog/model/{model.pk}/bench/"
    client = Client()
    client.force_login(alice())
    refused = client.post(path, {"distribution": "fixed", "step": "never", "start_rate": "9999"})
    assert b"step must be a duration" in refused.content
    assert b"start_rate is above 5000" in refused.content
    assert client.post(path, {"distribution": "fixed", "seed": "7"}).status_code == 302
    job = Job.objects.get()
    assert (job.state, job.options["seed"], job.by, job.replica) == ("queued", 7, "alice", REPLICA)
    shown = client.get(path).content.decode()
    assert "waits for a worker" in shown
    assert f"/admin/nodes/job/{job.pk}/change/" in shown
    client.logout()
    client.force_login(viola())
    assert "Run the bench" not in client.get(path).content.decode()


@pytest.mark.django_db
def test_the_page_shows_runs_and_sets_their_weights() -> None:
    model = two_profiles()
    measured(model, "small", 10)
    measured(model, "large", 20, problem="<b>\x1b[31m", gpu="<script>")
    path = f"/admin/catalog/model/{model.pk}/bench/"
    client = Client()
    client.force_login(alice())
    shown = client.get(path).content.decode()
    assert "It held." in shown
    assert "<script>" not in shown.replace("<script src", "").replace("<script type", "")
    sign = shown.partition('name="apply" value="')[2].partition('"')[0]
    assert sign.endswith("large=2")
    job = text_of(client.get(f"/admin/nodes/job/{Job.objects.first().pk}/change/").content.decode())
    assert "100 - 10 ms 10 ms 10 ms" in job
    assert job.partition("Beside other runs")[1]
    plots = client.get(f"{path}plots/").json()
    assert plots["x"] == {"label": "load", "unit": "requests/s", "values": [10, 20]}
    assert client.post(path, {"apply": sign + "0"}).status_code == 302
    assert weights_of(model) == {"small": 1, "large": 1}, "it was not what the page had shown"
    assert client.post(path, {"apply": sign}).status_code == 302
    assert weights_of(model) == {"small": 1, "large": 2}


@pytest.mark.django_db
def test_rest_asks_for_a_bench(sim: Sim) -> None:
    ready(sim)
    api = Api(alice())
    answer = api.ask("POST", f"models/{NAME}/bench", {"options": {"seed": 3}, "why": "the demo"})
    told = answer.json()
    assert (answer.status_code, told["state"], told["why"]) == (202, "queued", "the demo")
    assert told["options"]["seed"] == 3
    assert answer["Location"].endswith(f"/api/jobs/{told['id']}")
    assert api("POST", f"models/{NAME}/bench")[0] == 409
    for body, field in (
        ({"replica": "x"}, "replica"),
        ({"options": []}, ""),
        ({"options": {"seed": "x"}}, "seed"),
        ({"options": {"dataset": "/etc/passwd"}}, "dataset"),
    ):
        status, told = api("POST", f"models/{NAME}/bench", body)
        assert (status, told["errors"][0]["field"]) == (400, field)


# --- for as long as it takes ------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.one_database
@pytest.mark.django_db
def test_a_bench_finds_what_an_engine_can_do() -> None:
    """Within a tenth, where slots and times say how much that is; and percentiles as another sees them:
    within 5 % in the middle, and 15 % at the end."""
    slots, tokens = 32, 41
    most = slots / (0.1 + 0.02 * (tokens - 1))
    options = (
        "--ttft",
        "100ms",
        "--tpot",
        "20ms",
        "--max-num-seqs",
        str(slots),
        "--no-enable-prefix-caching",
    )
    with running_sim(*options, key=key_of_replica()) as sim:
        load = {"distribution": "fixed", "prompt_tokens": 16, "output_tokens": tokens}
        model = ready(sim)
        search = {"start_rate": 8, "max_rate": 500, "step": "20s", "warmup": "2s", "ttft_p99": "1s"}
        job = ask_bench(model, load | search, **WORDS)
        ended = jobs.run(job.pk, carry_out)
        print(f"\nat most {most:.1f} requests/s: {ended.result['says']}")
        assert ended.result["rate"] == pytest.approx(most * 0.94, rel=0.1), "a wait of 900 ms takes off 6 %"
        ours, (ttft, tpot) = seen_by_both(sim, rate=20, lasting_s=5, rounds=10)
    for name, mine, theirs in (("TTFT", ours.ttft, ttft), ("TPOT", ours.tpot, tpot)):
        for level, one, other, within in (
            ("p50", mine.p50_s, theirs.p50_s, 0.05),
            ("p99", mine.p99_s, theirs.p99_s, 0.15),
        ):
            assert one is not None
            assert other is not None
            print(f"{name} {level}: {one * 1_000:.2f} ms, and {other * 1_000:.2f} ms by the other")
            assert one == pytest.approx(other, rel=within), (name, level)


@pytest.mark.soak
def test_the_generator_adds_less_than_a_millisecond() -> None:
    """To the time to the first token, at 200 requests a second: the engine here answers at once."""
    port = free_port()
    command = [sys.executable, "-m", "tests.bench.stub_engine", str(port)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as engine:
        try:
            assert engine.stdout is not None
            engine.stdout.readline()
            asks = arrivals(200, 10.0, Lengths(), Random(1).random)
            with Generator(Aim(f"http://127.0.0.1:{port}", "key")) as generator:
                volley = generator.begin(asks, Prompts("bench", "e", 0.0).body)
                assert volley.wait(60)
        finally:
            engine.kill()
    found = Figures.of(200, volley.outcomes, since_s=2, until_s=10)
    assert (found.failed, found.requests) == (0, sum(ask.due_s >= 2 for ask in asks))
    assert found.ttft.p50_s is not None
    print(f"\nTTFT p50 of an engine that answers at once: {found.ttft.p50_s * 1_000:.2f} ms")
    assert found.ttft.p50_s < 0.001
