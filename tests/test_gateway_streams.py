"""What becomes of a stream's bytes: cut into whole events, names echoed, usage seen, errors ending it."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.gateway import answers, streams
from llmgw.gateway.answers import Tokens
from llmgw.gateway.streams import Dialect, Echo, EventStream, dialect_of
from llmgw.gateway.surface import ENDPOINTS

CHAT = dialect_of(ENDPOINTS["/v1/chat/completions"])
RESPONSES = dialect_of(ENDPOINTS["/v1/responses"])
MESSAGES = dialect_of(ENDPOINTS["/v1/messages"])


def _pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    at = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:end] for start, end in itertools.pairwise(at)]


STREAM = b': ping\n\ndata: {"a":1}\n\ndata: {"b":"data: [DONE]"}\r\n\r\ndata: [DONE]\n\n'


@given(st.lists(st.integers(0, 1000)))
def test_a_stream_leaves_in_whole_events_and_unchanged(cuts: list[int]) -> None:
    stream, sent = EventStream(CHAT), b""
    for piece in _pieces(STREAM, cuts):
        events = stream.feed(piece)
        assert events == b"" or events.endswith((b"\n\n", b"\r\n\r\n"))
        sent += events
    assert sent + stream.finish() == STREAM
    assert stream.is_done
    assert stream.error is None


def test_what_a_model_says_does_not_end_its_stream() -> None:
    stream = EventStream(CHAT)
    stream.feed(b'data: {"content":"data: [DONE]"}\n\n')
    stream.feed(b'data: {"content":"\\ndata: {\\"error\\": {}}"}\n\n')
    stream.feed(b'data: {"choices":[],"error": null}\n\n')
    assert not stream.is_done
    assert stream.error is None


def test_half_an_event_is_never_passed_on() -> None:
    stream = EventStream(CHAT)
    assert stream.feed(b'data: {"a":1}\n\ndata: {"b"') == b'data: {"a":1}\n\n'
    assert stream.finish() == b""
    assert not stream.is_done


def test_a_last_word_without_its_empty_line_still_counts() -> None:
    stream = EventStream(CHAT)
    assert stream.feed(b"data: [DONE]\n") == b""
    assert stream.finish() == b"data: [DONE]\n\n"
    assert stream.is_done


def test_an_event_without_end_is_not_collected_for_ever() -> None:
    stream = EventStream(CHAT)
    with pytest.raises(streams.NotAStream, match="without end"):
        stream.feed(b"x" * (streams.EVENT_LIMIT_BYTES + 1))


SAID = [
    *(
        b'data: {"a":1}\n\n',
        b'data: {"usage":null}\n\n',
        b'event: x\ndata: {"a":1}\n\n',
        b'data: {"b"',
        b":1}\n\n",
    ),
    *(
        b": ping\n\n",
        b"data: {}\r\n\r\n",
        b"\n",
        b"data: [DONE]\n\n",
        b'data: {"usage":{"prompt_tokens":1}}\n\n',
    ),
    *(b'data: {"error":{}}\n\n', b"event: error\ndata: {}\n\n", b"event: response.completed\ndata: {}\n\n"),
    *(b'data: {"timings":{}}\n\n', b"event: response.failed\ndata: {}\n\n", b"event: message_stop\n\n"),
]


@given(st.sampled_from([CHAT, RESPONSES, MESSAGES]), st.lists(st.sampled_from(SAID), max_size=8))
def test_what_a_stream_lets_pass_would_have_left_it_as_it_is_and_told_nothing(
    dialect: Dialect, said: list[bytes]
) -> None:
    stream = EventStream(dialect, hides_usage=True)
    for piece in said:
        may_pass, before = stream.lets_pass(piece), dict(vars(stream))
        events = stream.feed(piece)
        if may_pass:
            assert (events, vars(stream)) == (piece, before)


def test_a_stream_that_goes_on_lets_words_pass() -> None:
    stream, word = EventStream(CHAT, hides_usage=True), b'data: {"choices":[1],"usage":null}\n\n'
    assert not stream.lets_pass(word)
    stream.feed(word)
    assert stream.lets_pass(word)
    assert stream.lets_pass(word + word)
    assert not stream.lets_pass(b": ping\n\n" + word)


@pytest.mark.parametrize(
    ("data", "has_content"),
    [
        pytest.param(b": ping\n\n", False, id="a comment"),
        pytest.param(b"data: [DONE]\n\n", False, id="the last word alone"),
        pytest.param(b'data: {"choices":[]}\n\n', True, id="a chunk"),
        pytest.param(b"event: message_start\ndata: {}\n\n", True, id="a named event"),
    ],
)
def test_a_stream_has_begun_once_it_says_something(data: bytes, has_content: bool) -> None:
    stream = EventStream(CHAT)
    stream.feed(data)
    assert stream.has_content is has_content


# --- its end ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dialect", "last"),
    [
        pytest.param(CHAT, b"data: [DONE]\n\n", id="chat"),
        pytest.param(
            RESPONSES, b'event: response.completed\ndata: {"type":"response.completed"}\n\n', id="responses"
        ),
        pytest.param(
            RESPONSES, b'event: response.incomplete\ndata: {"type":"response.incomplete"}\n\n', id="cut short"
        ),
        pytest.param(MESSAGES, b'event: message_stop\ndata: {"type":"message_stop"}\n\n', id="messages"),
    ],
)
def test_every_endpoint_has_its_last_word(dialect: Dialect, last: bytes) -> None:
    stream = EventStream(dialect)
    stream.feed(b'event: x\ndata: {"content":"message_stop response.completed"}\n\n')
    assert not stream.is_done
    assert stream.feed(last) == last
    assert stream.is_done


ERRORS = [
    pytest.param(CHAT, b'data: {"error":{"message":"no"}}\n\n', id="llama.cpp"),
    pytest.param(CHAT, b'data: {"error": {"message": "no"}}\n\n', id="vllm"),
    pytest.param(CHAT, b'data: {"object":"error","message":"no"}\n\n', id="sglang"),
    pytest.param(RESPONSES, b'event: error\ndata: {"type":"error","message":"no"}\n\n', id="responses"),
    pytest.param(
        RESPONSES, b'event: response.failed\ndata: {"type":"response.failed"}\n\n', id="a failed response"
    ),
    pytest.param(
        MESSAGES, b'event: error\ndata: {"type":"error","error":{"message":"no"}}\n\n', id="messages"
    ),
]


@pytest.mark.parametrize(("dialect", "event"), ERRORS)
def test_an_error_ends_a_stream_whatever_follows(dialect: Dialect, event: bytes) -> None:
    stream, word = EventStream(dialect), b'data: {"a":1}\n\n'
    assert stream.feed(word + event + word + b"data: [DONE]\n\n") == word
    assert stream.error == event
    assert not stream.is_done
    assert stream.finish() == b""


@pytest.mark.parametrize(
    ("dialect", "begins"),
    [
        pytest.param(CHAT, b"data: {", id="chat"),
        pytest.param(RESPONSES, b"event: error\ndata: {", id="responses"),
        pytest.param(MESSAGES, b'event: error\ndata: {"type":"error"', id="messages"),
    ],
)
def test_our_own_error_ends_a_stream_in_the_shape_of_its_endpoint(dialect: Dialect, begins: bytes) -> None:
    event = dialect.error_event(answers.cut_short("m", "closed the connection"))
    assert event.startswith(begins)
    assert event.endswith(b"}\n\n")
    error = streams.payload(event)["error"]
    assert error["code"] == "stream_cut"
    assert 'model "m" ends unfinished, because its replica closed the connection' in error["message"]
    stream = EventStream(dialect)
    stream.feed(event)
    assert stream.error == event, "a gateway behind this one sees it, too"


# --- usage --------------------------------------------------------------------------------

WORD = b'data: {"choices":[{"delta":{"content":"a \\"usage\\":{}"}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4}}\n\n'
LAST = b'data: {"choices":[{"text":""}],"usage":{"prompt_tokens":9,"completion_tokens":5}}\n\n'
DONE = b"data: [DONE]\n\n"


@given(st.lists(st.integers(0, 1000)), st.booleans())
def test_an_event_that_has_usage_alone_is_seen_and_hidden_from_who_did_not_ask(
    cuts: list[int], hides: bool
) -> None:
    stream, sent = EventStream(CHAT, hides_usage=hides), b""
    for piece in _pieces(WORD + USAGE + DONE, cuts):
        sent += stream.feed(piece)
    assert sent == (WORD + DONE if hides else WORD + USAGE + DONE)
    assert stream.tokens() == Tokens(9, None, 4)


def test_usage_that_comes_with_content_stays_where_it_is() -> None:
    stream = EventStream(CHAT, hides_usage=True)
    assert stream.feed(WORD + LAST + DONE) == WORD + LAST + DONE


def test_timings_are_seen_and_stay_where_they_are() -> None:
    finish = b'data: {"choices":[{"delta":{}}],"timings":{"cache_n":1,"prompt_n":25,"predicted_n":3}}\n\n'
    stream = EventStream(CHAT)
    assert stream.feed(WORD + finish + DONE) == WORD + finish + DONE
    assert stream.tokens() == Tokens(26, 1, 3)


def test_usage_that_comes_again_and_again_is_not_added_up() -> None:
    stream = EventStream(CHAT)
    stream.feed(USAGE + LAST)
    assert stream.tokens() == Tokens(9, None, 5)
    assert EventStream(CHAT).tokens() == Tokens()


def test_usage_in_two_parts_is_put_together() -> None:
    stream = EventStream(MESSAGES)
    stream.feed(
        b'data: {"type":"message_start","message":{"usage":{"input_tokens":9,"output_tokens":1}}}\n\n'
    )
    stream.feed(b'data: {"type":"message_delta","usage":{"output_tokens":7}}\n\n')
    assert stream.tokens() == Tokens(9, None, 7)


# --- names --------------------------------------------------------------------------------


def _echoed(data: bytes, served: str = "org/Model-8B", wanted: str = "fast") -> bytes:
    return Echo(served, wanted)(data)


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
    assert _echoed(before) == after


@pytest.mark.parametrize(
    "wanted",
    [
        pytest.param('a "quoted" one', id="quotes"),
        pytest.param("back\\1slash\\g<1>", id="what a pattern would take for a group"),
        pytest.param("größe", id="letters beyond ASCII"),
    ],
)
def test_any_name_is_echoed_as_it_was_written(wanted: str) -> None:
    assert json.loads(_echoed(b'{"model":"org/Model-8B"}', wanted=wanted)) == {"model": wanted}


@pytest.mark.parametrize("ascii_only", [pytest.param(True, id="escaped"), pytest.param(False, id="as UTF-8")])
def test_an_engines_name_is_recognised_in_both_ways_to_write_it(ascii_only: bool) -> None:
    data = json.dumps({"model": "größe"}, ensure_ascii=ascii_only).encode()
    assert _echoed(data, served="größe") == b'{"model": "fast"}'
    assert streams.model_named_in(b": ping\n\ndata: " + data) == "größe"


def test_an_event_that_names_no_model_names_none() -> None:
    assert streams.model_named_in(b'data: {"content":"\\"model\\": \\"x\\""}\n\n') is None


def test_a_comment_is_one_line_whatever_is_in_it() -> None:
    assert streams.comment("loading\n\ndata: x") == b": loading data: x\n\n"
