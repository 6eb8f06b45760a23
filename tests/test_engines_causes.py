"""Recorded failures of real engines, and the sentence that saves an operator from reading them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.engines.causes import classify, telling_line
from nodes.protocol import FAILURE_KINDS

RECORDED = Path(__file__).parent / "data" / "engines" / "llamacpp"

RECORDINGS = {
    "exit_badarg": (
        "bad_argument",
        "configuration",
        (
            "llama-server does not know the argument --no-such-flag; correct the profile's args for "
            "this version."
        ),
    ),
    "exit_badval": (
        "bad_argument",
        "configuration",
        ("llama-server cannot read the value of --ctx-size (stoi); correct the profile's args."),
    ),
    "exit_portinuse": (
        "bind_failed",
        "transient",
        (
            "llama-server cannot listen on 127.0.0.1:18080, which is in use or not an address of this "
            "node; another port is tried."
        ),
    ),
    "exit_badhost": (
        "bind_failed",
        "transient",
        (
            "llama-server cannot listen on 10.99.99.99:18081, which is in use or not an address of this"
            " node; another port is tried."
        ),
    ),
    "exit_missing": (
        "model_path_missing",
        "node",
        (
            "llama-server cannot open /nope/missing.gguf (No such file or directory); check the model's"
            " source on this node."
        ),
    ),
    "exit_garbage": (
        "corrupt_weights",
        "configuration",
        (
            "The weights are no whole GGUF file (invalid magic characters); fetch them again or correct"
            " the model's source."
        ),
    ),
    "exit_empty": (
        "corrupt_weights",
        "configuration",
        (
            "The weights are no whole GGUF file (failed to read magic); fetch them again or correct the"
            " model's source."
        ),
    ),
    "exit_nomodel_dir": (
        "corrupt_weights",
        "configuration",
        (
            "The weights are no whole GGUF file (failed to read magic); fetch them again or correct the"
            " model's source."
        ),
    ),
    "exit_truncated": (
        "corrupt_weights",
        "configuration",
        (
            "The weights are no whole GGUF file (failed to read key-value pairs); fetch them again or "
            "correct the model's source."
        ),
    ),
}


@pytest.mark.parametrize("name", sorted(path.stem for path in RECORDED.glob("*.stderr")))
def test_a_recorded_failure_of_llama_server_has_its_sentence(name: str) -> None:
    found = classify("llamacpp", (RECORDED / f"{name}.stderr").read_text(errors="replace"), 1)
    assert (found.cause, found.kind, found.sentence) == RECORDINGS[name]


LINES = {
    "a card that is too small": (
        "llamacpp",
        (
            "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 9000.00 MiB on device 0: "
            "cudaMalloc failed: out of memory"
        ),
        "gpu_oom",
        "capacity",
    ),
    "a host that is too small": (
        "llamacpp",
        "llama_kv_cache: failed to allocate buffer for kv cache",
        "host_oom",
        "capacity",
    ),
    "an architecture of tomorrow": (
        "llamacpp",
        "E llama_model_load: error loading model: unknown model architecture: 'gemma9'",
        "unknown_arch",
        "configuration",
    ),
    "a chat template that is none": (
        "llamacpp",
        "E srv: failed to initialize chat template",
        "bad_chat_template",
        "configuration",
    ),
    "a port that the sim engine finds taken": (
        "sim",
        "sim: cannot listen on 127.0.0.1:18000: Address already in use",
        "port_in_use",
        "transient",
    ),
    "an option that the sim engine does not have": (
        "sim",
        "usage: sim\nsim: error: unrecognized arguments: --nope",
        "bad_argument",
        "configuration",
    ),
    "the kernel's word for out of memory": ("sim", "Killed", "killed", "transient"),
    "a build for another processor": ("llamacpp", "Illegal instruction (core dumped)", "killed", "node"),
}


@pytest.mark.parametrize(("engine", "line", "cause", "kind"), LINES.values(), ids=LINES)
def test_a_known_line_wins_over_the_last_one(engine: str, line: str, cause: str, kind: str) -> None:
    found = classify(engine, f"loading\n{line}\n0.00.1 I srv: cleaning up before exit...\n", 1)
    assert (found.cause, found.kind) == (cause, kind)


@pytest.mark.parametrize(
    ("exit_code", "signal", "words"),
    [
        (0, None, "The engine exited with code 0, having last said"),
        (7, None, "The engine exited with code 7, having last said"),
        (None, None, "The engine exited with a code that nobody saw"),
        (-9, 9, "The engine was ended by SIGKILL (by hand, or because the node ran out of memory)"),
        (-11, 11, "The engine was ended by SIGSEGV, having last said"),
        (-40, 40, "The engine was ended by signal 40"),
        (-4, 4, "The engine needs processor instructions that this node lacks"),
    ],
    ids=str,
)
def test_an_unknown_end_is_told_by_code_signal_and_words(
    exit_code: int | None, signal: int | None, words: str
) -> None:
    assert classify("sim", "I say hello\n", exit_code, signal).sentence.startswith(words)


def test_a_line_of_another_engine_is_not_taken_for_this_ones() -> None:
    assert classify("sim", "error: invalid argument: --x", 1).cause == "unknown"


@pytest.mark.parametrize(
    ("tail", "line"),
    [
        ("", ""),
        ("one\ntwo\n\n", "two"),
        ("ValueError: no\nbye\n", "ValueError: no"),
        ("0.00.004.724 E llama: failed to load model\n0.00.005.039 E srv: exiting due to model loading error",
         "llama: failed to load model"),
        ("(Worker pid=7) ERROR 11-30 05:26:03 [core.py:9] RuntimeError: kaput\nbye", "RuntimeError: kaput"),
        ("Traceback (most recent call last):\n", "Traceback (most recent call last):"),
        ("x" * 500, "x" * 299 + "…"),
        ("fail\x1b[31mure", "fail\N{REPLACEMENT CHARACTER}[31mure"),
    ],
    ids=["an empty log", "the last line", "a line that tells of an error", "a line without its prefix",
         "a line of a worker", "a lone traceback", "a long line", "a line with colours"],
)  # fmt: skip
def test_the_most_telling_line_is_found(tail: str, line: str) -> None:
    assert telling_line(tail) == line


@given(st.sampled_from(["llamacpp", "sim", "vllm"]), st.text(), st.none() | st.integers(-64, 255))
def test_every_end_has_one_line_of_a_known_kind(engine: str, tail: str, exit_code: int | None) -> None:
    signal = -exit_code if exit_code is not None and exit_code < 0 else None
    found = classify(engine, tail, exit_code, signal)
    assert found.kind in FAILURE_KINDS
    assert found.sentence.isprintable()
    assert found.sentence.endswith(".")
    assert found.cause
