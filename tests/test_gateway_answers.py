"""What an engine's "no" means, and what its answer cost."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llmgw.gateway import answers
from llmgw.gateway.answers import Tokens, tokens_of

# --- errors -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "body", "is_another"),
    [
        pytest.param(401, {"error": "Unauthorized"}, True, id="vllm does not know our key"),
        pytest.param(
            401, {"error": {"message": "Invalid API Key"}}, True, id="llama.cpp does not know our key"
        ),
        pytest.param(
            404,
            {
                "error": {
                    "message": "The model `m` does not exist.",
                    "type": "NotFoundError",
                    "param": "model",
                }
            },
            True,
            id="vllm serves another model",
        ),
        pytest.param(404, {"detail": "Not Found"}, False, id="vllm does not serve the path"),
        pytest.param(404, {"error": {"message": "File Not Found"}}, False, id="llama.cpp does not, either"),
        pytest.param(400, {"error": {"message": "too long"}}, False, id="the client is at fault"),
        pytest.param(500, {"error": {"message": "broken"}}, False, id="the engine is at fault"),
    ],
)
def test_a_wrong_engine_is_told_from_a_right_one_that_says_no(
    status: int, body: dict[str, object], is_another: bool
) -> None:
    assert answers.is_another_model(status, json.dumps(body).encode()) is is_another


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        pytest.param(
            400,
            {
                "error": {
                    "message": "too long",
                    "type": "exceed_context_size_error",
                    "code": 400,
                    "n_ctx": 2048,
                }
            },
            (400, "too long", "exceed_context_size_error", "engine_error", None),
            id="llama.cpp: a number for a code",
        ),
        pytest.param(
            400,
            {"object": "error", "message": "no", "type": "BadRequest", "param": "n", "code": "bad"},
            (400, "no", "BadRequest", "bad", "n"),
            id="sglang: flat",
        ),
        pytest.param(
            503,
            {
                "error": {
                    "message": "The engine is currently busy",
                    "type": "Service Unavailable",
                    "code": 503,
                }
            },
            (503, "The engine is currently busy", "Service Unavailable", "engine_error", None),
            id="vllm: busy",
        ),
    ],
)
def test_an_engines_error_keeps_its_status_and_words(
    status: int, body: dict[str, object], expected: tuple[object, ...]
) -> None:
    refused = answers.engine_error(status, json.dumps(body).encode(), "m")
    assert (refused.status, refused.message, refused.kind, refused.code, refused.param) == expected


@pytest.mark.parametrize(
    ("message", "is_too_long"),
    [
        pytest.param(
            "The input (600 tokens) is longer than the model's context length (512 tokens).",
            True,
            id="sglang: the prompt",
        ),
        pytest.param(
            "Requested token count exceeds the model's maximum context length of 512 tokens.",
            True,
            id="sglang: prompt and answer",
        ),
        pytest.param("'context' is not a valid role", False, id="something else"),
    ],
)
def test_what_does_not_fit_has_one_name_whoever_says_so(message: str, is_too_long: bool) -> None:
    body = json.dumps({"object": "error", "message": message, "code": 400}).encode()
    expected = "context_length_exceeded" if is_too_long else "engine_error"
    assert answers.engine_error(400, body, "m").code == expected


@pytest.mark.parametrize(
    ("status", "body"),
    [
        pytest.param(500, b"<html>Internal Server Error</html>", id="a page"),
        pytest.param(500, b"", id="nothing"),
        pytest.param(400, b"[1]", id="JSON of another shape"),
        pytest.param(400, b"[" * 100_000, id="JSON that goes on inwards"),
        pytest.param(302, b'{"message": "over there"}', id="a redirect"),
    ],
)
def test_what_is_no_error_in_a_known_shape_becomes_a_502_without_its_text(status: int, body: bytes) -> None:
    refused = answers.engine_error(status, body, "m")
    assert (refused.status, refused.code) == (502, "engine_unreadable")
    assert "html" not in refused.message


def test_an_engines_words_are_bounded() -> None:
    body = json.dumps({"error": {"message": "x" * 100_000}}).encode()
    assert len(answers.engine_error(400, body, "m").message) == answers.ERROR_TEXT_LIMIT


@pytest.mark.parametrize(
    ("status", "message", "is_clients"),
    [
        pytest.param(500, "image input is not supported - hint: ...", True, id="llama.cpp: an image"),
        pytest.param(500, "Context size has been exceeded.", True, id="llama.cpp: others took the room"),
        pytest.param(501, "This server does not support embeddings.", True, id="llama.cpp: embeddings"),
        pytest.param(500, "EngineCore encountered an issue", False, id="vllm's core is dead"),
        pytest.param(502, "image input is not supported", False, id="a proxy's word is not the engine's"),
    ],
)
def test_a_clients_fault_is_not_held_against_an_engine_that_reports_it_as_its_own(
    status: int, message: str, is_clients: bool
) -> None:
    body = json.dumps({"error": {"message": message}}).encode()
    assert answers.is_clients_fault(status, body) is is_clients


@pytest.mark.parametrize(
    ("error", "status"),
    [
        pytest.param({"error": {"code": 400}}, 400, id="a status"),
        pytest.param({"error": {"code": "context"}}, 500, id="a word"),
        pytest.param({"error": "broken"}, 500, id="a sentence"),
        pytest.param({"object": "error", "code": 503}, 503, id="sglang: flat"),
        pytest.param({"error": {"code": 200}}, 500, id="a success"),
    ],
)
def test_an_error_in_a_stream_has_the_status_that_it_would_have_had(
    error: dict[str, Any], status: int
) -> None:
    assert answers.status_in(error) == status


# --- tokens -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "tokens"),
    [
        pytest.param(
            {"usage": {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13}},
            Tokens(9, None, 4),
            id="chat",
        ),
        pytest.param(
            {
                "usage": {
                    "prompt_tokens": 9,
                    "completion_tokens": 4,
                    "prompt_tokens_details": {"cached_tokens": 8},
                }
            },
            Tokens(9, 8, 4),
            id="chat, partly cached",
        ),
        pytest.param({"usage": {"prompt_tokens": 9, "total_tokens": 9}}, Tokens(9), id="embeddings"),
        pytest.param(
            {
                "response": {
                    "usage": {
                        "input_tokens": 9,
                        "output_tokens": 4,
                        "input_tokens_details": {"cached_tokens": 8},
                    }
                }
            },
            Tokens(9, 8, 4),
            id="the last event of a response",
        ),
        pytest.param(
            {"message": {"usage": {"input_tokens": 1, "cache_read_input_tokens": 8, "output_tokens": 1}}},
            Tokens(9, 8, 1),
            id="Anthropic's first event, whose input is without what was cached",
        ),
        pytest.param(
            {"choices": [], "timings": {"cache_n": 24, "prompt_n": 5, "predicted_n": 6, "prompt_ms": 348.7}},
            Tokens(29, 24, 6),
            id="llama.cpp's last event, where nobody asked for usage",
        ),
        pytest.param(
            {"usage": {"prompt_tokens": 9}, "timings": {"cache_n": 1, "prompt_n": 1}},
            Tokens(9),
            id="usage beside timings",
        ),
        pytest.param({"usage": None}, Tokens(), id="not yet"),
        pytest.param({"usage": {"prompt_tokens": True, "completion_tokens": -1}}, Tokens(), id="no numbers"),
        pytest.param({"usage": {"prompt_tokens_details": []}}, Tokens(), id="another shape"),
        pytest.param({"timings": {"cache_n": 24}}, Tokens(None, 24), id="half a count"),
        pytest.param({"timings": [1]}, Tokens(), id="timings of another shape"),
    ],
)
def test_tokens_are_what_the_engine_says(answer: dict[str, Any], tokens: Tokens) -> None:
    assert tokens_of(answer) == tokens


def test_what_came_last_counts_and_what_came_once_stays() -> None:
    assert Tokens(9, 8, 1).or_else(Tokens(completion=5)) == Tokens(9, 8, 5)
