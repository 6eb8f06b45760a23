"""Recorded failures of real engines, and the sentence that saves an operator from reading them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.engines.causes import classify, telling_line
from nodes.protocol import FAILURE_KINDS

TESTS = Path(__file__).parent
RECORDED = TESTS.parent / "nodes" / "agent" / "sim" / "recorded"  # the sim engine says them again

RECORDINGS = {
    "badarg": (
        "bad_argument",
        "configuration",
        (
            "llama-server does not know the argument --no-such-flag; correct the profile's args for "
            "this version."
        ),
    ),
    "notls": (
        "no_tls",
        "node",
        (
            "This build of llama-server speaks no TLS, which --engine-tls asks for; put one that was built "
            "with OpenSSL on the node, or start its agent without --engine-tls."
        ),
    ),
    "badval": (
        "bad_argument",
        "configuration",
        ("llama-server cannot read the value of --ctx-size (stoi); correct the profile's args."),
    ),
    "portinuse": (
        "bind_failed",
        "transient",
        (
            "llama-server cannot listen on 127.0.0.1:18080, which is in use or not an address of this "
            "node; another port is tried."
        ),
    ),
    "badhost": (
        "bind_failed",
        "transient",
        (
            "llama-server cannot listen on 10.99.99.99:18081, which is in use or not an address of this"
            " node; another port is tried."
        ),
    ),
    "missing": (
        "model_path_missing",
        "node",
        (
            "llama-server cannot open /nope/missing.gguf (No such file or directory); check the model's"
            " source on this node."
        ),
    ),
    "garbage": (
        "corrupt_weights",
        "configuration",
        (
            "The weights are no whole GGUF file (invalid magic characters); fetch them again or correct"
            " the model's source."
        ),
    ),
    "empty": (
        "corrupt_weights",
        "configuration",
        (
            "The weights are no whole GGUF file (failed to read magic); fetch them again or correct the"
            " model's source."
        ),
    ),
    "nomodel_dir": (
        "corrupt_weights",
        "configuration",
        (
            "The weights are no whole GGUF file (failed to read magic); fetch them again or correct the"
            " model's source."
        ),
    ),
    "truncated": (
        "corrupt_weights",
        "configuration",
        (
            "The weights are no whole GGUF file (failed to read key-value pairs); fetch them again or "
            "correct the model's source."
        ),
    ),
}


@pytest.mark.parametrize("name", sorted(path.stem for path in RECORDED.glob("llamacpp/*.log")))
def test_a_recorded_failure_of_llama_server_has_its_sentence(name: str) -> None:
    found = classify("llamacpp", (RECORDED / f"llamacpp/{name}.log").read_text(errors="replace"), 1)
    assert (found.cause, found.kind, found.sentence) == RECORDINGS[name]


VLLM_RECORDINGS = {
    "portinuse": ("port_in_use", "transient", "The engine's port is in use on this node"),
    "badarg": ("bad_argument", "configuration", "(unrecognized arguments: --no-such-flag); correct"),
    "toolparser_bad": ("bad_argument", "configuration", "no tool-call parser nope; correct"),
    "bad_template": (
        "bad_chat_template",
        "configuration",
        "no chat template where --chat-template says",
    ),
    "missing_path": ("model_path_missing", "node", "finds nothing at /nope/model; check"),
    "hub_offline": ("not_cached_offline", "configuration", "wants more than is in the model's source"),
    "unknown_arch": ("unknown_arch", "configuration", "does not know the model type foo; put a newer"),
    "corrupt_weights": (
        "corrupt_weights",
        "configuration",
        "(Error while deserializing header: incomplete metadata, file not fully covered); fetch it again",
    ),
    "kv_too_small": ("kv_too_small", "configuration", "leave no memory for the KV cache"),
    "maxlen_too_big": ("ctx_too_long", "configuration", "A context of 4096 tokens is more than the 512"),
    "engine_died": ("engine_died", "transient", "vllm's engine core ended without a word of its own"),
}


@pytest.mark.parametrize(
    "log",
    [*sorted(RECORDED.glob("vllm/*.log")), TESTS / "data" / "engines" / "vllm" / "engine_died.log"],
    ids=lambda log: log.stem,
)
def test_a_recorded_failure_of_vllm_has_its_sentence(log: Path) -> None:
    found = classify("vllm", log.read_text(errors="replace"), 1)
    cause, kind, words = VLLM_RECORDINGS[log.stem]
    assert (found.cause, found.kind) == (cause, kind)
    assert words in found.sentence


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
    "heads that tp does not divide": (
        "vllm",
        "ValueError: Total number of attention heads (4) must be divisible by tensor parallel size (3).",
        "tp_indivisible",
        "configuration",
    ),
    "heads that tp does not divide, to sglang": (
        "sglang",
        "AssertionError: 40 is not divisible by 3",
        "tp_indivisible",
        "configuration",
    ),
    "fewer cards than asked for": (
        "vllm",
        "ValueError: World size (4) is larger than the number of available GPUs (2) in this node.",
        "too_few_gpus",
        "configuration",
    ),
    "a context that the cache does not hold": (
        "vllm",
        (
            "ValueError: To serve at least one request with the models's max seq len (32768), (4.00 GiB KV "
            "cache is needed, which is larger than the available KV cache memory (1.50 GiB)."
        ),
        "kv_too_small",
        "configuration",
    ),
    "weights that fill sglang's card": (
        "sglang",
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.",
        "kv_too_small",
        "configuration",
    ),
    "a card that something else holds": (
        "vllm",
        "ValueError: Free memory on device cuda:0 (3.1/79.1 GiB) on startup is less than desired GPU memory",
        "gpu_busy",
        "node",
    ),
    "a host that does not hold vllm's cache": (
        "vllm",
        "ValueError: Available memory on node 0 (3.1/17.2 GiB) on kv cache allocation is less than requested",
        "host_oom",
        "capacity",
    ),
    "a card that ran full": (
        "sglang",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate",
        "gpu_oom",
        "capacity",
    ),
    "a context beyond the model's, to sglang": (
        "sglang",
        "ValueError: context_length (65536) is greater than the derived context_length (32768).",
        "ctx_too_long",
        "configuration",
    ),
    "an option that sglang does not have": (
        "sglang",
        "sglang serve: error: unrecognized arguments: --nope",
        "bad_argument",
        "configuration",
    ),
    "a node without a driver": ("vllm", "RuntimeError: Failed to infer device type", "no_gpu", "node"),
    "a card that is too old": (
        "vllm",
        "CUDA error: no kernel image is available for execution",
        "gpu_unsupported",
        "node",
    ),
    "shared memory that is too small": ("vllm", "posix_fallocate failed: -28", "shm_small", "node"),
    "ranks that do not find each other": (
        "vllm",
        "RuntimeError: Gloo connectFullMesh failed with",
        "net_iface",
        "node",
    ),
    "ranks that are late": (
        "sglang",
        "torch.distributed.DistStoreError: Timed out",
        "dist_timeout",
        "transient",
    ),
    "cards that do not talk to each other": (
        "vllm",
        "RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO)",
        "nccl",
        "transient",
    ),
    "a core that takes its time": (
        "vllm",
        "TimeoutError: Timed out waiting for engine core processes to start.",
        "start_timeout",
        "transient",
    ),
    "a core that says what ended it": (
        "vllm",
        (
            "(Worker pid=4239) ERROR 11-30 11:04:44 [multiproc_executor.py:1063] RuntimeError: Unsupported "
            "CPU attention configuration\n"
            "(APIServer pid=2960) ERROR 11-30 11:04:44 [async_llm.py:906] "
            "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue."
        ),
        "engine_died",
        "transient",
    ),
    "a model behind a licence": (
        "vllm",
        "OSError: You are trying to access a gated repo.",
        "gated_repo",
        "configuration",
    ),
    "a repository that is not there": (
        "sglang",
        "huggingface_hub.errors.RepositoryNotFoundError: 404",
        "repo_not_found",
        "configuration",
    ),
    "a folder without a config": (
        "vllm",
        "ValueError: Invalid repository ID or local directory specified",
        "no_config",
        "configuration",
    ),
    "an architecture that vllm has not": (
        "vllm",
        "ValueError: Model architectures ['FooForCausalLM'] are not supported for now.",
        "unknown_arch",
        "configuration",
    ),
    "a folder without weights": (
        "vllm",
        "RuntimeError: Cannot find any model weights with `/w`",
        "no_weights",
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


def test_the_sim_engine_is_read_as_the_one_whose_words_it_says() -> None:
    words = "sim: speaks as llamacpp did\nerror: invalid argument: --x"
    assert classify("sim", words, 1) == classify("llamacpp", words, 1)
    assert classify("vllm", words, 1).cause == "unknown", "no other engine speaks for another"


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
        ("ValueError: so\n    raise RuntimeError(\nINFO: 500 Internal Server Error", "ValueError: so"),
        ("(Worker pid=7) ERROR 11-30 05:26:03 [core.py:9] RuntimeError: kaput\nbye", "RuntimeError: kaput"),
        ("Traceback (most recent call last):\n", "Traceback (most recent call last):"),
        ("x" * 500, "x" * 299 + "…"),
        ("fail\x1b[31mure", "fail\N{REPLACEMENT CHARACTER}[31mure"),
    ],
    ids=["an empty log", "the last line", "a line that tells of an error", "a line without its prefix",
         "an exception before what only sounds like one", "a line of a worker",
         "a lone traceback", "a long line", "a line with colours"],
)  # fmt: skip
def test_the_most_telling_line_is_found(tail: str, line: str) -> None:
    assert telling_line(tail) == line


@given(st.sampled_from(["llamacpp", "sim", "vllm", "sglang"]), st.text(), st.none() | st.integers(-64, 255))
def test_every_end_has_one_line_of_a_known_kind(engine: str, tail: str, exit_code: int | None) -> None:
    signal = -exit_code if exit_code is not None and exit_code < 0 else None
    found = classify(engine, tail, exit_code, signal)
    assert found.kind in FAILURE_KINDS
    assert found.sentence.isprintable()
    assert found.sentence.endswith(".")
    assert found.cause
