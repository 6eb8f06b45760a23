"""What the sim engine does wrong when it is told to: real processes that fail as real engines did."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from nodes.agent.sim.options import read_options
from nodes.agent.sim.recordings import recordings
from nodes.engines.causes import classify
from tests.agent_process import ROOT, AgentProcess, Stream, ask, assignment
from tests.sim_process import KEY, Sim, running_sim, starting_sim
from tests.waiting import wait_until

QUICK = ("--ttft", "1ms", "--tpot", "5ms")


def stream(sim: Sim, max_tokens: int = 400) -> Stream:
    return Stream(sim.port, max_tokens=max_tokens, model="my-model", key=KEY)


# --- what it is told ------------------------------------------------------------------------------------

WRONG = {
    "a duration that is none": (["--ttft", "soon"], "must be a duration in h, m, s or ms"),
    "a negative duration": (["--tpot=-1s"], "'-1s' is not from 0s to 24h"),
    "a load for ever": (["--load-time", "25h"], "'25h' is not from 0s to 24h"),
    "no slot at all": (["--max-num-seqs", "0"], "'0' is not a whole number from 1 to 65536"),
    "a context beyond all": (["--context-length", "9" * 30], "is not a whole number from 1 to 1048576"),
    "a port that is none": (["--port", "70000"], "is not a whole number from 1 to 65535"),
    "an abbreviation": (["--context", "7"], "unrecognized arguments: --context 7"),
    "a recording that is not there": (["--fail-load-as", "vllm/nope"], "invalid choice: 'vllm/nope'"),
    "a file of the node for a recording": (["--fail-load-as", "../../etc/passwd"], "invalid choice"),
    "two ways for the load to fail": (
        ["--fail-load", "x", "--fail-load-as", "vllm/badarg"],
        "--fail-load and --fail-load-as both say how the load fails; give one.",
    ),
    "a gang without a place to meet": (["--nnodes", "2"], "needs --master-addr and --master-port"),
    "a rank beyond its gang": (["--node-rank", "1"], "--node-rank 1 is not among 0 to 0; see --nnodes."),
    "a crash of some kind but never": (["--crash-how", "kill"], "--crash-how needs --crash-after"),
    "a crash of no kind": (["--crash-after", "1", "--crash-how", "softly"], "invalid choice: 'softly'"),
    "workers beyond number": (["--workers", "9"], "'9' is not a whole number from 0 to 8"),
    "workers that stay": (["--workers", "1", "--workers-outlive", "1h"], "'1h' is not from 0s to 10m"),
    "no workers that stay": (["--workers-outlive", "1s"], "--workers-outlive needs --workers"),
    "memory that grows too fast": (["--memory-growth", "257"], "is not a whole number from 1 to 256"),
    "memory that grows too far": (
        ["--memory-growth", "1", "--memory-growth-limit", "4097"],
        "is not a whole number from 1 to 4096",
    ),
}


@pytest.mark.parametrize(("wrong", "words"), WRONG.values(), ids=WRONG)
def test_what_it_is_told_wrongly_is_refused_with_a_sentence(
    wrong: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        read_options(["--model", "m", "--port", "1", *wrong], key="")
    told = capsys.readouterr().err
    assert "sim: error: " in told
    assert words in told
    assert classify("sim", told, 2).cause == "bad_argument"


def test_its_help_names_every_bound_and_recording(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_options(["--help"], key="")
    told = " ".join(capsys.readouterr().out.split())
    for words in (*recordings(), "0 to 8", "1 to 256 MiB", "1 to 4096 MiB", "up to 10m", "1 to 1048576"):
        assert words in told


# --- a load that fails ----------------------------------------------------------------------------------


def test_a_load_fails_with_the_words_it_was_given() -> None:
    with starting_sim("--fail-load", "no luck") as sim:
        assert sim.process.wait(20) == 1
        assert sim.words.endswith("no luck\n")


@pytest.mark.parametrize("name", recordings())
def test_a_load_that_fails_as_a_real_engine_did_is_told_like_the_real_one(name: str) -> None:
    engine = name.partition("/")[0]
    real = (ROOT / "nodes" / "agent" / "sim" / "recorded" / f"{name}.log").read_text()
    with starting_sim("--fail-load-as", name) as sim:
        code = sim.process.wait(20)
        assert sim.words.endswith(real.rstrip("\n") + "\n")
        assert classify("sim", sim.words, code) == classify(engine, real, code)
        assert classify("sim", sim.words, code).cause != "unknown"


def test_a_usage_error_of_vllms_has_its_code() -> None:
    with starting_sim("--fail-load-as", "vllm/badarg") as sim:
        assert sim.process.wait(20) == 2


def test_nothing_listens_while_it_loads_and_it_can_be_stopped_then() -> None:
    with starting_sim("--load-time", "10m") as sim:
        wait_until(lambda: "loading" in sim.words, "the load to begin", timeout_s=20)
        assert not sim.is_up
        sim.process.terminate()
        assert sim.process.wait(10) == 0


def test_a_port_that_is_taken_is_told_as_such() -> None:
    with running_sim() as first, starting_sim("--port", str(first.port)) as second:
        code = second.process.wait(20)
        assert classify("sim", second.words, code).cause == "port_in_use"


# --- answers that go wrong ------------------------------------------------------------------------------


def test_answers_stall_while_everything_else_goes_on() -> None:
    with running_sim(*QUICK, "--stall-after", "5") as sim:
        assert sim.complete(max_tokens=4).status == 200, "a probe's few tokens are answered"
        first = stream(sim)
        wait_until(lambda: len(tokens_of(first)) == 5, "five tokens")
        second = asked(sim, max_tokens=1)
        wait_until(lambda: sim.metric("vllm:num_requests_running") == 2, "both to run")
        assert sim.metric("vllm:generation_tokens_total") == 4 + 5
        assert sim.is_up
        assert len(tokens_of(first)) == 5
        second.close()
        first.leave()
        wait_until(lambda: sim.metric("vllm:num_requests_running") == 0, "the slots to be free")


def test_a_process_hangs_with_its_port_open_and_heeds_no_signal_but_kill() -> None:
    with starting_sim(*QUICK, "--hang-after", "5") as sim:
        sim.wait_until_up()
        first = stream(sim)
        wait_until(lambda: len(tokens_of(first)) == 5, "five tokens")
        with pytest.raises(TimeoutError):
            urllib.request.urlopen(f"{sim.url}/health", timeout=0.5)
        sim.process.terminate()
        with pytest.raises(TimeoutError):
            urllib.request.urlopen(f"{sim.url}/health", timeout=0.5)
        assert sim.process.poll() is None
        sim.process.kill()
        assert not first.finish()


@pytest.mark.parametrize(
    ("how", "code", "cause"), [("exit", 1, "unknown"), ("kill", -signal.SIGKILL, "killed")], ids=str
)
def test_a_crash_cuts_its_streams(how: str, code: int, cause: str) -> None:
    with starting_sim(*QUICK, "--crash-after", "5", "--crash-how", how) as sim:
        sim.wait_until_up()
        assert sim.complete(max_tokens=4).status == 200
        cut = stream(sim)
        assert not cut.finish()
        assert len(tokens_of(cut)) <= 5
        assert sim.process.wait(10) == code
        found = classify("sim", sim.words, code, signal.SIGKILL if code < 0 else None)
        assert found.cause == cause
        assert "crashed on command after 5 tokens" in found.sentence


def test_when_its_core_dies_streams_end_as_vllms_do_and_the_exit_looks_well() -> None:
    options = ("--max-num-seqs", "2", "--crash-after", "60", "--crash-how", "core")
    with starting_sim("--ttft", "1ms", "--tpot", "20ms", *options) as sim:
        sim.wait_until_up()
        with contextlib.closing(asked(sim, max_tokens=300)) as plain:
            first = stream(sim)
            with contextlib.closing(asked(sim, max_tokens=1, stream=True)) as waiting:
                assert first.finish(), "vllm ends even such a stream with [DONE]"
                error = json.loads(first.lines[-2].removeprefix("data: "))["error"]
                assert (error["type"], error["code"]) == ("InternalServerError", 500)
                assert 0 < len(tokens_of(first)) <= 60
                for connection in (plain, waiting):
                    answer = connection.getresponse()
                    assert answer.status == 500
                    assert json.loads(answer.read())["error"] == error
            assert ask(f"{sim.url}/health").status == 503
            assert sim.complete().status == 500
        assert sim.process.wait(10) == 0
        assert classify("sim", sim.words, 0) == classify(
            "vllm", "EngineDeadError: EngineCore encountered an issue.", 0
        )


# --- what is left of it ---------------------------------------------------------------------------------


def test_its_workers_end_with_it_when_it_is_stopped() -> None:
    with running_sim("--workers", "2") as sim:
        assert len(sim.group) == 3
    assert sim.group == []


@pytest.mark.parametrize("is_crash", [True, False], ids=["its own crash", "a kill"])
def test_its_workers_survive(is_crash: bool) -> None:
    with starting_sim(*QUICK, "--workers", "2", "--crash-after", "5") as sim:
        sim.wait_until_up()
        if is_crash:
            stream(sim).finish()
        else:
            sim.process.kill()
        sim.process.wait(10)
        left = sim.group
        assert len(left) == 2
        assert all(b"VLLM_API_KEY" in Path(f"/proc/{pid}/environ").read_bytes() for pid in left)
        os.kill(left[0], signal.SIGTERM)
        wait_until(lambda: sim.group == left[1:], "a worker to heed TERM")


def test_its_workers_do_not_survive_for_ever() -> None:
    with starting_sim("--workers", "1", "--workers-outlive", "300ms") as sim:
        sim.wait_until_up()
        sim.process.kill()
        sim.process.wait(10)
        wait_until(lambda: sim.group == [], "its worker to end")


def test_its_memory_grows_up_to_its_limit() -> None:
    def resident_mib(sim: Sim) -> int:
        status = Path(f"/proc/{sim.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) // 1024

    with running_sim() as still, running_sim("--memory-growth", "200", "--memory-growth-limit", "60") as sim:
        base = resident_mib(still)
        wait_until(lambda: resident_mib(sim) - base > 50, "its memory to grow")
        sim.complete(max_tokens=30)
        assert resident_mib(sim) - base < 75
        assert sim.is_up


# --- as an agent sees it --------------------------------------------------------------------------------


def test_an_agent_tells_the_cause_and_ends_what_survives(tmp_path: Path) -> None:
    with AgentProcess(tmp_path) as agent:
        load = assignment("--fail-load-as", "vllm/kv_too_small", gpus=["sim-0"])
        agent.put(load)
        crash = agent.run(
            *QUICK, "--workers", "2", "--crash-after", "5", "--crash-how", "kill", gpus=["sim-1"]
        )
        failed = agent.wait_for(load["replica"], "failed")
        assert (failed["cause"], failed["kind"]) == ("kv_too_small", "configuration")
        assert len(agent.engines()) == 3
        Stream(crash["port"], max_tokens=400).finish()
        assert agent.wait_for(crash["replica"], "failed")["cause"] == "killed"
        assert agent.engines() == []


def tokens_of(stream: Stream) -> list[str]:
    """Those that have come."""
    choices = [json.loads(line[6:]).get("choices") for line in list(stream.lines) if line[6:7] == "{"]
    return [each[0]["delta"]["content"] for each in choices if each and each[0]["delta"].get("content")]


def asked(sim: Sim, **body: Any) -> http.client.HTTPConnection:
    """A completion that is on its way; whoever wants the answer reads it."""
    connection = http.client.HTTPConnection("127.0.0.1", sim.port, timeout=20)
    body = {"model": "my-model", "prompt": "hi", **body}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Authorization": f"Bearer {KEY}"})
    return connection
