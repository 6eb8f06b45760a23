"""What a body may hold and how much of it: the rules by themselves, and what is seen of real bodies."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llmgw.gateway import bounds, peek
from llmgw.gateway.admission import Refused
from llmgw.gateway.bounds import Peek
from llmgw.gateway.context import UNKNOWN, Span
from llmgw.gateway.surface import ENDPOINTS

pytestmark = pytest.mark.one_database

CHAT, COMPLETIONS = ENDPOINTS["/v1/chat/completions"], ENDPOINTS["/v1/completions"]
MESSAGES = ENDPOINTS["/v1/messages"]


def _refusal_of(seen: Peek, *hosts: str) -> tuple[int, str, str | None]:
    with pytest.raises(Refused) as caught:
        bounds.check_body(seen, hosts)
    return caught.value.status, caught.value.code, caught.value.param


@pytest.mark.parametrize(
    ("seen", "code", "param"),
    [
        pytest.param(Peek(), "missing_model", "model", id="no model"),
        pytest.param(Peek(model=""), "invalid_model", "model", id="an empty model"),
        pytest.param(Peek(model=["a"]), "invalid_model", "model", id="a list of models"),
        pytest.param(Peek(model="m", stream="yes"), "invalid_stream", "stream", id="a stream that is a text"),
        pytest.param(Peek(model="m", stream=1), "invalid_stream", "stream", id="a stream that is a number"),
        pytest.param(
            Peek(model="m", nested_fields=frozenset({"chat_template"})),
            "field_not_accepted",
            "chat_template",
            id="a template inside chat_template_kwargs",
        ),
        pytest.param(
            Peek(model="m", media_urls=("data:image/png;base64,AA==", "http://10.0.0.1/")),
            "remote_media",
            "messages",
            id="an image elsewhere, after one that is here",
        ),
        *(
            pytest.param(
                Peek(model="m", fields=frozenset({"model", name})), "field_not_accepted", name, id=name
            )
            for name in bounds.REFUSED_FIELDS
        ),
    ],
)
def test_what_a_body_may_not_hold_is_named(seen: Peek, code: str, param: str) -> None:
    assert _refusal_of(seen) == (400, code, param)


@pytest.mark.parametrize(
    "seen",
    [
        pytest.param(Peek(model="m"), id="nothing but a model"),
        pytest.param(Peek(model="m", fields=frozenset({"model", "a_new_parameter"})), id="an unknown field"),
        pytest.param(Peek(model="m", media_urls=("DATA:image/png;base64,AA==",)), id="an image that is here"),
        pytest.param(
            Peek(model="m", numbers=(("n", 128), ("logprobs", True), ("top_logprobs", None))), id="n"
        ),
    ],
)
def test_what_a_body_may_hold_passes(seen: Peek) -> None:
    assert bounds.check_body(seen) == "m"


@pytest.mark.parametrize("value", [129, -1, 1e9, "1", [1], {}], ids=repr)
def test_a_number_out_of_bounds_is_refused_however_it_is_written(value: object) -> None:
    assert _refusal_of(Peek(model="m", numbers=(("n", value),))) == (400, "out_of_bounds", "n")


@pytest.mark.parametrize(
    ("url", "is_allowed"),
    [
        pytest.param("https://images.example/a.png?size=1", True, id="an allowed host"),
        pytest.param("HTTP://images.example/a.png", False, id="a scheme in capitals"),
        pytest.param("https://IMAGES.example:8443/a.png", True, id="a host in capitals, with a port"),
        pytest.param("https://images.example", True, id="no path"),
        pytest.param("https://evil.example/images.example", False, id="the name in the path"),
        pytest.param("https://images.example.evil.example/", False, id="the name at the beginning"),
        pytest.param("https://images.example@evil.example/", False, id="the name as a user"),
        pytest.param("https://evil.example\\@images.example/", False, id="a backslash"),
        pytest.param("https://images.example\\@evil.example/", False, id="a backslash behind the name"),
        pytest.param("https://images.example#@evil.example/", False, id="a fragment"),
        pytest.param("https://images.example/a b", False, id="a space"),
        pytest.param("https://images.example/\r\nHost: evil", False, id="a line's end"),
        pytest.param("https://images.ex\u0430mple/", False, id="a letter that looks like one"),
        pytest.param("file:///etc/passwd", False, id="a file"),
        pytest.param("//images.example/a.png", False, id="no scheme"),
    ],
)
def test_media_comes_from_allowed_hosts_alone(url: str, is_allowed: bool) -> None:
    assert bounds.is_media_allowed(url, {"images.example"}) is is_allowed
    assert not bounds.is_media_allowed(url, ())


# --- bodies -------------------------------------------------------------------------------------------------


def _look(**fields: Any) -> Peek:
    return peek.look_at(peek.decode(json.dumps({"model": "m", **fields}).encode()))


def _user(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        pytest.param({"messages": [{"role": "user"}] * 4_097}, "messages", id="messages"),
        pytest.param({"messages": _user(*[{"type": "text"}] * 4_097)}, "messages", id="parts of a message"),
        pytest.param({"input": ["a"] * 2_049}, "input", id="texts to embed"),
        pytest.param({"prompt": ["a"] * 2_049}, "prompt", id="prompts"),
        pytest.param({"prompt": [[1, 2]] * 2_049}, "prompt", id="prompts in tokens"),
        pytest.param({"prompt": [1, "a"] * 2_049}, "prompt", id="prompts that begin as if in tokens"),
        pytest.param({"documents": ["a"] * 2_049}, "documents", id="documents"),
        pytest.param({"tools": [{}] * 513}, "tools", id="tools"),
        pytest.param({"stop": ["a"] * 33}, "stop", id="stops"),
        pytest.param({"stop": "a" * 16_384}, "stop", id="a stop"),
        pytest.param({"tools": [{"description": "x" * 1_048_576}]}, "tools", id="a tool"),
        pytest.param({"response_format": {"x": "y" * 262_144}}, "response_format", id="a schema"),
        pytest.param({"guided_regex": "a" * 65_536}, "guided_regex", id="a pattern"),
    ],
)
def test_what_is_too_much_or_too_large_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(Refused) as caught:
        _look(**fields)
    assert (caught.value.code, caught.value.param) == ("out_of_bounds", param)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(
            {"messages": [{"role": "user", "content": ",,"}] * 4_096}, id="as many messages as may be"
        ),
        pytest.param({"messages": _user(*[{"type": "text", "text": ","}] * 4_096)}, id="as many parts"),
        pytest.param({"messages": _user({"type": "text", "text": ", " * 100_000})}, id="commas in a text"),
        pytest.param({"prompt": [1] * 200_000}, id="a prompt in tokens"),
        pytest.param({"x": [1] * (bounds.VALUES_LIMIT - 1)}, id="as many numbers"),
        pytest.param({"x": [""] * (bounds.TEXTS_LIMIT - 4)}, id="as many texts"),
        pytest.param({"prompt": [[1, 2] * 40] * 2_048}, id="as many prompts in tokens"),
        pytest.param({"stop": ["a"] * 32}, id="as many stops as may be"),
        pytest.param({"messages": "of the wrong shape"}, id="the engine's to refuse"),
        pytest.param({"messages": [["type"] * 5_000]}, id="a message of the wrong shape"),
    ],
)
def test_what_is_within_bounds_passes(fields: dict[str, Any]) -> None:
    _look(**fields)


MANY = 1_000_000
_PARTS = b'{"model":"m","messages":[{"role":"user","content":[%s]}]}'


@pytest.mark.parametrize(
    ("body", "what"),
    [
        pytest.param(b"{%s}" % b",".join([b'"a":1'] * MANY), "100000 texts", id="fields"),
        pytest.param(_PARTS % b'"\\\\",' * MANY, "100000 texts", id="texts that end in a backslash"),
        pytest.param(
            _PARTS % (b'{"image_url":[%s{}]}' % (b"{}," * MANY)), "60000 lists and obj", id="objects"
        ),
        pytest.param(_PARTS % (b"[" * MANY + b"]" * MANY), "60000 lists and objects", id="lists in lists"),
        pytest.param(_PARTS % (b'{"image_url":[%s1]}' % (b"1," * MANY)), "100000 values", id="numbers"),
        pytest.param(b'{"input":{"a_url":[%s1]}}' % (b"1," * MANY), "100000 values", id="numbers no tokens"),
        pytest.param(
            b'{"documents":[%s1]}' % (b"1," * MANY), "100000 values", id="numbers that are documents"
        ),
        pytest.param(
            b'{"":[%s1]}' % (b"1," * (bounds.VALUES_LIMIT + 1)), "100000 values", id="one number too many"
        ),
        pytest.param(
            b'{"":[%s""]}' % (b'"",' * (bounds.TEXTS_LIMIT - 1)), "100000 texts", id="one text too many"
        ),
    ],
)
def test_a_body_of_very_many_parts_is_refused_before_they_are_looked_at(body: bytes, what: str) -> None:
    """They would hold up all other requests for seconds."""
    with pytest.raises(Refused, match=what) as caught:
        peek.decode(body)
    assert (caught.value.status, caught.value.code) == (400, "out_of_bounds")


PADDING = [
    pytest.param({}, id="alone"),
    pytest.param({"pad": [[]] * 1_000}, id="beside many others"),
    pytest.param({"pad": [{}] * 40_000}, id="beside very many others"),
    pytest.param({"pad": '\\"[{' * 200_000}, id="beside a text of brackets and quotes"),
    # Openings that are closed in texts, and closings that are opened in texts: they cancel each other out.
    pytest.param({"pad": ["]", ["]", "[["], "["] * 10_000}, id="beside texts that mislead"),
]


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("kind", [list, dict], ids=["lists", "objects"])
def test_a_body_is_as_deep_as_it_may_be_and_no_deeper(kind: type, padding: dict[str, Any]) -> None:
    value: Any = 1
    for _ in range(bounds.DEPTH_LIMIT - 1):  # the body itself is one level
        value = [value, "]"] if kind is list else {"x": value, "y": "}"}
    _look(x=value, **padding)
    with pytest.raises(Refused, match="nested deeper than 100 levels"):
        _look(x=[value], **padding)


@pytest.mark.parametrize(
    ("fields", "nested"),
    [
        pytest.param({"chat_template_kwargs": {"chat_template": "x"}}, {"chat_template"}, id="a template"),
        pytest.param({"chat_template_kwargs": {"enable_thinking": True}}, set(), id="a template's switch"),
        pytest.param(
            {"messages": _user({"image_embeds": "AA"})}, {"image_embeds"}, id="embeddings in a part"
        ),
        pytest.param(
            {"tools": [{"type": "mcp", "server_url": "http://h"}]}, {"server_url"}, id="a tool's host"
        ),
        pytest.param(
            {"tools": [{"parameters": {"properties": {"server_url": {}, "api_key": {}}}}]},
            set(),
            id="an argument of a tool, called as it likes",
        ),
        pytest.param(
            {"messages": _user({"type": "tool_use", "input": {"image_url": "http://h", "image_embeds": 1}})},
            set(),
            id="what a model gave a tool",
        ),
    ],
)
def test_a_refused_field_is_found_where_an_engine_would_read_it(fields: Any, nested: set[str]) -> None:
    seen = _look(**fields)
    assert seen.nested_fields == nested
    assert not seen.media_urls


def test_nothing_hides_behind_escapes() -> None:
    body = json.dumps({"model": "m", "messages": _user({"image_url": {"url": "http://h/"}})})
    for name in ("messages", "content", "image_url", "url"):
        hidden = body.replace(f'"{name}"', f'"{name[:2]}\\u00{ord(name[2]):02x}{name[3:]}"')
        assert hidden != body
        assert peek.look_at(peek.decode(hidden.encode())).media_urls == ["http://h/"]


def test_of_two_values_under_one_name_the_last_counts_as_in_engines() -> None:
    parts = json.dumps([{"image_url": {"url": "http://h/"}}])
    body = f'{{"model": "m", "messages": [{{"content": "x", "content": {parts}}}]}}'
    assert peek.look_at(peek.decode(body.encode())).media_urls == ["http://h/"]


@pytest.mark.parametrize(
    "part",
    [
        pytest.param({"type": "image_url", "image_url": {"url": "http://h/"}}, id="an image"),
        pytest.param({"type": "image_url", "image_url": "http://h/"}, id="an image, written short"),
        pytest.param({"image_url": "http://h/"}, id="an image without a type"),
        pytest.param({"type": "input_image", "image_url": "http://h/"}, id="an image for /v1/responses"),
        pytest.param(
            {"type": "image", "source": {"type": "url", "url": "http://h/"}}, id="one for Anthropic's"
        ),
        pytest.param({"type": "video_url", "video_url": {"url": "http://h/"}}, id="a video"),
        pytest.param({"type": "input_file", "file_url": "http://h/"}, id="a file"),
        pytest.param(
            {
                "type": "tool_result",
                "content": [{"type": "image", "source": {"type": "url", "url": "http://h/"}}],
            },
            id="an image that a tool gave",
        ),
    ],
)
def test_the_addresses_of_media_are_found(part: Any) -> None:
    for seen in (_look(messages=_user(part)), _look(input=_user(part)), _look(system=[part])):
        assert seen.media_urls == ["http://h/"]
        assert seen.has_media


# --- what is needed -----------------------------------------------------------------------------------------


def _needs(endpoint: Any = CHAT, **fields: Any) -> Any:
    decoded = peek.decode(json.dumps({"model": "m", **fields}).encode())
    return peek.needs_of(endpoint, decoded, peek.look_at(decoded))


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBOR"}}


@pytest.mark.parametrize(
    ("endpoint", "fields", "capabilities"),
    [
        pytest.param(CHAT, {"messages": _user({"type": "text", "text": "hi"})}, set(), id="a chat"),
        pytest.param(CHAT, {"tools": []}, set(), id="no tools"),
        pytest.param(CHAT, {"tools": None, "functions": None}, set(), id="null for tools"),
        pytest.param(CHAT, {"tools": [{"type": "function"}]}, {"tools"}, id="tools"),
        pytest.param(CHAT, {"functions": [{"name": "f"}]}, {"tools"}, id="tools as they were once written"),
        pytest.param(CHAT, {"messages": _user(IMAGE)}, {"vision"}, id="an image"),
        pytest.param(
            CHAT, {"messages": _user({"type": "text", "text": "what is data:image/png?"})}, set(), id="a word"
        ),
        pytest.param(
            MESSAGES,
            {"messages": _user({"type": "image", "source": {"type": "base64", "data": "iVBOR"}})},
            {"vision"},
            id="an image for Anthropic's",
        ),
        pytest.param(ENDPOINTS["/v1/embeddings"], {"input": "a"}, {"embeddings"}, id="embeddings"),
    ],
)
def test_capabilities_are_read_off_the_request(endpoint: Any, fields: Any, capabilities: set[str]) -> None:
    assert _needs(endpoint, **fields).capabilities == capabilities


@pytest.mark.parametrize(
    ("endpoint", "fields", "prompt"),
    [
        pytest.param(COMPLETIONS, {"prompt": "x" * 254}, Span.of_bytes(256), id="one prompt"),
        pytest.param(COMPLETIONS, {"prompt": ["x" * 252]}, Span(0, 256 + 1024), id="several prompts"),
        pytest.param(COMPLETIONS, {"prompt": [1, 2, 3, 4]}, Span.of_bytes(12), id="a prompt in tokens"),
        pytest.param(CHAT, {"messages": _user(IMAGE)}, UNKNOWN, id="a prompt with an image"),
        pytest.param(ENDPOINTS["/v1/rerank"], {"query": "a"}, UNKNOWN, id="a query with documents"),
    ],
)
def test_how_long_a_prompt_is_is_told_from_its_size(endpoint: Any, fields: Any, prompt: Span) -> None:
    assert _needs(endpoint, **fields).prompt == prompt


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        pytest.param({}, 0, id="left open"),
        pytest.param({"max_tokens": 5}, 5, id="one name"),
        pytest.param({"max_tokens": 5, "max_completion_tokens": 7}, 7, id="two names: the newer"),
        pytest.param({"max_tokens": "5"}, 0, id="a text is the engine's to refuse"),
        pytest.param({"max_tokens": True}, 0, id="so is a truth"),
        pytest.param({"max_tokens": 10**4_000}, 10**9, id="more than can be"),
        pytest.param({"max_tokens": 1e300}, 10**9, id="more than can be, written shortly"),
    ],
)
def test_how_long_an_answer_may_be_is_read(fields: Any, asked: int) -> None:
    assert _needs(**fields).output_tokens == asked


@pytest.mark.parametrize(
    ("fields", "bounded"),
    [
        pytest.param({}, {"max_tokens": 3}, id="left open"),
        pytest.param({"max_completion_tokens": 7}, {"max_completion_tokens": 3}, id="under its newer name"),
        pytest.param(
            {"max_tokens": 7, "max_completion_tokens": 7},
            {"max_tokens": 3, "max_completion_tokens": 3},
            id="under both",
        ),
    ],
)
def test_an_answer_is_bounded_under_the_name_that_was_used(fields: Any, bounded: Any) -> None:
    given = peek.decode(json.dumps({"model": "m", "x": [1, {"y": 2.50}], **fields}).encode())
    body = peek.encode(peek.with_output(CHAT, given, 3))
    assert json.loads(body) == {"model": "m", "x": [1, {"y": 2.5}], **bounded}
    assert b"2.5" in body
