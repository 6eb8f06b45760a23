"""What becomes of an engine's bytes: names echoed, streams cut into events, errors in one shape."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.gateway import answers
from llmgw.gateway.answers import Echo, EventStream


def _pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    at = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:end] for start, end in itertools.pairwise(at)]


def _echoed(data: bytes, cuts: list[int], served: str = "org/Model-8B", wanted: str = "fast") -> bytes:
    echo = Echo(served, wanted)
    return b"".join(echo.feed(piece) for piece in _pieces(data, cuts)) + echo.finish()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(b'{"model":"org/Model-8B"}', b'{"model":"fast"}', id="without a space"),
        pytest.param(b'{"model" : "org/Model-8B"}', b'{"model" : "fast"}', id="with spaces"),
        pytest.param(
            b'{"model":"org/Model-8B-v2"}', b'{"model":"org/Model-8B-v2"}', id="a longer name stays"
        ),
        pytest.param(b'{"model_x":"org/Model-8B"}', b'{"model_x":"org/Model-8B"}', id="another field stays"),
        pytest.param(
            json.dumps({"content": 'say "model":"org/Model-8B"'}).encode(),
            json.dumps({"content": 'say "model":"org/Model-8B"'}).encode(),
            id="what the model says stays",
        ),
    ],
)
def test_the_name_in_an_answer_is_the_one_the_client_used(before: bytes, after: bytes) -> None:
    assert _echoed(before, []) == after


@pytest.mark.parametrize(
    "wanted",
    [
        pytest.param('a "quoted" one', id="quotes"),
        pytest.param("back\\1slash\\g<1>", id="what a pattern would take for a group"),
        pytest.param("größe", id="letters beyond ASCII"),
    ],
)
def test_any_name_is_echoed_as_it_was_written(wanted: str) -> None:
    echoed = _echoed(b'{"model":"org/Model-8B"}', [], wanted=wanted)
    assert json.loads(echoed) == {"model": wanted}


@pytest.mark.parametrize("ascii_only", [pytest.param(True, id="escaped"), pytest.param(False, id="as UTF-8")])
def test_an_engines_name_is_recognised_in_both_ways_to_write_it(ascii_only: bool) -> None:
    data = json.dumps({"model": "größe"}, ensure_ascii=ascii_only).encode()
    assert _echoed(data, [], served="größe") == b'{"model": "fast"}'


@given(st.lists(st.integers(0, 10_000)))
def test_the_echo_does_not_depend_on_how_the_bytes_arrive(cuts: list[int]) -> None:
    data = b'{"mo":"m","x":"a \\"model\\":","model": "org/Model-8B"},{"model":"org/Model-8","model":"'
    assert _echoed(data, cuts) == _echoed(data, [])


def test_an_event_is_not_kept_back_for_a_name_that_is_whole() -> None:
    echo = Echo("org/Model-8B", "fast")
    assert echo.feed(b'data: {"model":"org/Model-8B"}\n\n') == b'data: {"model":"fast"}\n\n'


# --- streams ------------------------------------------------------------------------------

STREAM = b': ping\n\ndata: {"a":1}\n\ndata: {"b":"data: [DONE]"}\r\n\r\ndata: [DONE]\n\n'


@given(st.lists(st.integers(0, 1000)))
def test_a_stream_leaves_in_whole_events_and_unchanged(cuts: list[int]) -> None:
    stream, sent = EventStream(), b""
    for piece in _pieces(STREAM, cuts):
        events = stream.feed(piece)
        assert events == b"" or events.endswith((b"\n\n", b"\r\n\r\n"))
        sent += events
    assert sent + stream.finish() == STREAM
    assert stream.is_done
    assert not stream.has_error


def test_what_a_model_says_does_not_end_its_stream() -> None:
    stream = EventStream()
    stream.feed(b'data: {"content":"data: [DONE]"}\n\n')
    stream.feed(b'data: {"content":"\\ndata: {\\"error\\": 1}"}\n\n')
    assert not stream.is_done
    assert not stream.has_error


def test_half_an_event_is_never_passed_on() -> None:
    stream = EventStream()
    assert stream.feed(b'data: {"a":1}\n\ndata: {"b"') == b'data: {"a":1}\n\n'
    assert stream.finish() == b""
    assert not stream.is_done


def test_a_last_word_without_its_empty_line_still_counts() -> None:
    stream = EventStream()
    assert stream.feed(b"data: [DONE]\n") == b""
    assert stream.finish() == b"data: [DONE]\n\n"
    assert stream.is_done


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(b'data: {"error":{"message":"Context size has been exceeded."}}\n\n', id="llama.cpp"),
        pytest.param(b'data: {"error": {"message": "EngineCore encountered an issue"}}\n\n', id="vllm"),
    ],
)
def test_an_error_inside_a_stream_is_seen(event: bytes) -> None:
    stream = EventStream()
    assert stream.feed(event) == event
    assert stream.has_error


def test_an_event_without_end_is_not_collected_for_ever() -> None:
    stream = EventStream()
    with pytest.raises(answers.NotAStream, match="without end"):
        stream.feed(b"x" * (answers.EVENT_LIMIT_BYTES + 1))


def test_a_cut_stream_ends_with_an_event_in_openais_shape() -> None:
    event = answers.error_event(answers.cut_short("m", "closed the connection"))
    assert event.startswith(b"data: {")
    assert event.endswith(b"}\n\n")
    error = json.loads(event[6:])["error"]
    assert error["code"] == "stream_cut"
    assert 'model "m" ends unfinished, because its replica closed the connection' in error["message"]


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
    ("body", "is_answer"),
    [
        pytest.param(b' {"id":1}\n', True, id="an object"),
        pytest.param(b"", False, id="nothing"),
        pytest.param(b'{"id":1', False, id="half of one"),
        pytest.param(b"<html></html>", False, id="a page"),
    ],
)
def test_only_a_whole_object_is_a_plain_answer(body: bytes, is_answer: bool) -> None:
    assert answers.is_an_answer(body) is is_answer
