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
from random import Random
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError

from catalog.models import Key, Model
from catalog.reading import CatalogError
from nodes import jobs
from nodes.bench.asks import Ask, Lengths, Row, arrivals
from nodes.bench.figures import Figures, Outcome, Times
from nodes.bench.prompts import Prompts
from nodes.benching import ask_bench, carry_out
from nodes.conversation import cluster_keys
from nodes.generator import Aim, Generator
from nodes.jobs import Progress
from nodes.measured import curves_of, run_as_dict, runs_of
from nodes.models import Job, Rank, Replica
from tests.agent_process import ROOT
from tests.cast import a_model, a_node, a_replica, alice, viola
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
            "it does not speak TLS",
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
