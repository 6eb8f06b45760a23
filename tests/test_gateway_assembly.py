"""Chunks put together: the plain answer that the engine would have given."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.gateway.assembly import NotAnswered, assembly_of
from llmgw.gateway.surface import ENDPOINTS

CHAT = ENDPOINTS["/v1/chat/completions"]
HEAD = {"created": 1, "id": "chatcmpl-1", "model": "my-model", "system_fingerprint": "b0-unknown"}


def _chunk(*choices: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"choices": list(choices), **HEAD, "object": "chat.completion.chunk", **more}


def _said(delta: dict[str, Any], index: int = 0, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"finish_reason": finish, "index": index, "delta": delta, **more}


def _assembled(*chunks: dict[str, Any]) -> dict[str, Any]:
    assembly = assembly_of(CHAT)
    for chunk in chunks:
        assembly.feed(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    assembly.feed(b"data: [DONE]\n\n")
    return assembly.whole()


def test_a_chat_of_llamacpp_is_what_it_says_plainly() -> None:
    usage = {"completion_tokens": 2, "prompt_tokens": 29, "total_tokens": 31}
    assert _assembled(
        _chunk(_said({"role": "assistant", "content": None})),
        _chunk(_said({"content": "Say"})),
        _chunk(_said({"content": " hello"})),
        _chunk(_said({}, finish="length")),
        _chunk(usage=usage, timings={"cache_n": 24}),
    ) == {
        "choices": [
            {
                "finish_reason": "length",
                "index": 0,
                "message": {"role": "assistant", "content": "Say hello"},
            }
        ],
        **HEAD,
        "object": "chat.completion",
        "usage": usage,
        "timings": {"cache_n": 24},
    }


def test_a_completion_of_llamacpp_is_what_it_says_plainly() -> None:
    def part(text: str, finish: str | None = None) -> dict[str, Any]:
        return {"text": text, "index": 0, "logprobs": None, "finish_reason": finish}

    whole = _assembled(
        _chunk(part(" the"), object="text_completion"),
        _chunk(part(" capital"), object="text_completion"),
        _chunk(part("", "length"), object="text_completion", usage={"completion_tokens": 2}),
    )
    assert whole["choices"] == [
        {"text": " the capital", "index": 0, "logprobs": None, "finish_reason": "length"}
    ]
    assert whole["object"] == "text_completion"


def test_calls_of_tools_are_put_together_from_their_fragments() -> None:
    def call(index: int, **function: str) -> dict[str, Any]:
        return {"index": index, "function": function}

    first = {"id": "a", "type": "function", **call(0, name="get", arguments="")}
    second = {"id": "b", "type": "function", **call(1, name="put", arguments='{"')}
    whole = _assembled(
        _chunk(_said({"role": "assistant", "content": None})),
        _chunk(_said({"tool_calls": [first]})),
        _chunk(_said({"tool_calls": [call(0, arguments='{"x":')]})),
        _chunk(_said({"tool_calls": [second, call(0, arguments="1}")]})),
        _chunk(_said({"tool_calls": [call(1, arguments='y":2}')]})),
        _chunk(_said({}, finish="tool_calls")),
    )
    assert whole["choices"][0]["message"] == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "get", "arguments": '{"x":1}'}},
            {"id": "b", "type": "function", "function": {"name": "put", "arguments": '{"y":2}'}},
        ],
    }


def test_reasoning_comes_beside_what_is_said() -> None:
    whole = _assembled(
        _chunk(_said({"role": "assistant", "content": None})),
        _chunk(_said({"reasoning_content": "Hm"})),
        _chunk(_said({"reasoning_content": "m."})),
        _chunk(_said({"content": "Yes."})),
        _chunk(_said({}, finish="stop")),
    )
    message = {"role": "assistant", "reasoning_content": "Hmm.", "content": "Yes."}
    assert whole["choices"][0]["message"] == message


def test_log_probabilities_are_of_all_tokens() -> None:
    def tokens(*names: str) -> dict[str, Any]:
        return {"content": [{"token": name, "top_logprobs": []} for name in names]}

    whole = _assembled(
        _chunk(_said({"content": "a"}, logprobs=tokens("a"))),
        _chunk(_said({"content": "bc"}, logprobs=tokens("b", "c"))),
        _chunk(_said({}, finish="stop")),
    )
    assert whole["choices"][0]["logprobs"] == tokens("a", "b", "c")


def test_several_choices_are_kept_apart_and_in_order() -> None:
    whole = _assembled(
        _chunk(_said({"content": "b"}, 1)),
        _chunk(_said({"content": "a"}, 0), _said({"content": "B"}, 1, "stop")),
        _chunk(_said({}, 0, "length")),
        _chunk(usage={"completion_tokens": 1}),
        _chunk(usage={"completion_tokens": 2}),
    )
    said = [(each["index"], each["message"]["content"], each["finish_reason"]) for each in whole["choices"]]
    assert said == [(0, "a", "length"), (1, "bB", "stop")]
    assert whole["usage"] == {"completion_tokens": 2}, "the last that was said, never a sum"


def test_a_model_that_says_nothing_at_all_says_an_empty_text() -> None:
    whole = _assembled(_chunk(_said({"role": "assistant", "content": None}, finish="stop")))
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": ""}


@given(st.text(max_size=50), st.lists(st.integers(0, 50), max_size=10))
def test_a_text_is_whole_however_it_was_cut(text: str, cuts: list[int]) -> None:
    at = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[start:end] for start, end in itertools.pairwise(at)]
    whole = _assembled(
        *(_chunk(_said({"content": piece})) for piece in pieces), _chunk(_said({}, finish="stop"))
    )
    assert whole["choices"][0]["message"]["content"] == text


@pytest.mark.parametrize(
    ("chunks", "says"),
    [
        pytest.param([], "unfinished", id="nothing"),
        pytest.param([_chunk(_said({"content": "a"}))], "unfinished", id="no finish"),
        pytest.param(
            [_chunk(_said({}, 0, "stop"), _said({"content": "a"}, 1))], "unfinished", id="one of two choices"
        ),
        pytest.param([{"choices": [{"delta": {}}]}], "something else", id="a choice without its index"),
        pytest.param([{"choices": [1]}], "something else", id="no choice"),
        pytest.param(
            [_chunk(_said({"tool_calls": [{"function": {}}]}))],
            "something else",
            id="a call without its index",
        ),
    ],
)
def test_what_is_no_answer_is_not_made_one(chunks: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(NotAnswered, match=says):
        _assembled(*chunks)


@pytest.mark.parametrize(
    "events", [pytest.param(b"data: <html>\n\n", id="a page"), pytest.param(b"data: [1]\n\n", id="a list")]
)
def test_events_that_are_no_chunks_are_seen(events: bytes) -> None:
    with pytest.raises(NotAnswered, match="something else"):
        assembly_of(CHAT).feed(events)


# --- messages and responses ---------------------------------------------------------------


def _told(path: str, *events: dict[str, Any]) -> dict[str, Any]:
    assembly = assembly_of(ENDPOINTS[path])
    for event in events:
        assembly.feed(f"event: {event.get('type')}\ndata: {json.dumps(event)}\n\n".encode())
    return assembly.whole()


def _start(index: int, **block: Any) -> dict[str, Any]:
    return {"type": "content_block_start", "index": index, "content_block": block}


def _delta(index: int, **delta: Any) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": delta}


def _stop(index: int) -> dict[str, Any]:
    return {"type": "content_block_stop", "index": index}


BEGUN = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": []}
START = {
    "type": "message_start",
    "message": {**BEGUN, "stop_reason": None, "usage": {"input_tokens": 5, "output_tokens": 0}},
}
END = {
    "type": "message_delta",
    "delta": {"stop_reason": "tool_use", "stop_sequence": None},
    "usage": {"output_tokens": 9},
}


def test_a_message_has_its_blocks_whole_and_in_order() -> None:
    citation = {"type": "char_location", "cited_text": "Paris"}
    assert _told(
        "/v1/messages",
        START,
        _start(0, type="thinking", thinking="", signature=""),
        _delta(0, type="thinking_delta", thinking="Hm"),
        _delta(0, type="thinking_delta", thinking="m."),
        _delta(0, type="signature_delta", signature="abc"),
        _stop(0),
        _start(1, type="text", text=""),
        {"type": "ping"},
        _delta(1, type="text_delta", text="Let me"),
        _delta(1, type="text_delta", text=" look."),
        _delta(1, type="citations_delta", citation=citation),
        _start(2, type="tool_use", id="toolu_1", name="get_weather", input={}),
        _delta(2, type="input_json_delta", partial_json=""),
        _delta(2, type="input_json_delta", partial_json='{"city": '),
        _delta(2, type="input_json_delta", partial_json='"Paris"}'),
        _start(3, type="tool_use", id="toolu_2", name="get_time", input={}),
        END,
        {"type": "message_stop"},
    ) == {
        **BEGUN,
        "content": [
            {"type": "thinking", "thinking": "Hmm.", "signature": "abc"},
            {"type": "text", "text": "Let me look.", "citations": [citation]},
            {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Paris"}},
            {"type": "tool_use", "id": "toolu_2", "name": "get_time", "input": {}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {"input_tokens": 5, "output_tokens": 9},
    }


def test_of_a_call_that_is_cut_nothing_is_said_as_llamacpp_does() -> None:
    """It is no fault of the replica's that an answer reaches its greatest length there."""
    begun = _start(0, type="tool_use", id="toolu_1", name="get_weather")
    end = {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": {"output_tokens": 4}}
    for delta in ([], [_delta(0, type="input_json_delta", partial_json='{"city"')]):
        whole = _told("/v1/messages", START, begun, *delta, end, {"type": "message_stop"})
        assert whole["content"] == [{**begun["content_block"], "input": {}}]
        assert whole["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("status", ["completed", "incomplete"])
def test_a_response_is_what_its_last_event_says(status: str) -> None:
    whole = {"id": "resp_1", "status": status, "output": [{"type": "message"}]}
    begun = {"type": "response.created", "response": {"id": "resp_1", "status": "in_progress"}}
    assert _told("/v1/responses", begun, {"type": f"response.{status}", "response": whole}) == whole


@pytest.mark.parametrize(
    ("path", "events", "says"),
    [
        pytest.param("/v1/messages", [], "unfinished", id="no message"),
        pytest.param("/v1/messages", [START], "unfinished", id="a message that does not end"),
        pytest.param("/v1/messages", [{}], "something else", id="an event without a type"),
        pytest.param(
            "/v1/messages",
            [START, _delta(0, type="text_delta", text="a"), END],
            "something else",
            id="a block that never began",
        ),
        pytest.param(
            "/v1/responses", [{"type": "response.created", "response": {}}], "unfinished", id="no response"
        ),
        pytest.param(
            "/v1/responses", [{"type": "response.completed"}], "something else", id="one without itself"
        ),
    ],
)
def test_what_is_no_message_and_no_response_is_not_made_one(
    path: str, events: list[dict[str, Any]], says: str
) -> None:
    with pytest.raises(NotAnswered, match=says):
        _told(path, *events)
