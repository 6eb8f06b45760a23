"""What the sim engine says, as pure values: its words, its JSON, its embeddings, and what its cache knows."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.agent.sim.answers import compose, embed, transcript
from nodes.agent.sim.asks import TOKEN_CHARACTERS, WORDS, Ask, Served, count_tokens, judge
from nodes.agent.sim.cache import PrefixCache
from nodes.agent.sim.schemas import SchemaError, example

SERVED = Served("m", context_length=1000, default_tokens=5)


# --- words ----------------------------------------------------------------------------------------------


@given(
    prompt=st.text(max_size=20),
    max_tokens=st.integers(1, 60),
    stops=st.lists(st.sampled_from(["the", "o", " s", "fox joy", "zzz"]), max_size=3),
    choice=st.integers(0, 5),
)
def test_an_answer_never_holds_its_stop_text(
    prompt: str, max_tokens: int, stops: list[str], choice: int
) -> None:
    asked = Ask(prompt, max_tokens, stops=tuple(stops))
    answer = compose(asked, choice)
    assert answer == compose(asked, choice)
    assert not any(stop in answer.text for stop in stops)
    assert len(answer.pieces) <= answer.tokens <= max_tokens
    assert (answer.finish_reason == "stop") == (answer.stop_reason is not None)


@given(st.text())
def test_any_text_has_an_embedding(text: str) -> None:
    assert sum(value * value for value in embed(text)) == pytest.approx(1)


@given(st.lists(st.text(max_size=30), min_size=1, max_size=4), st.integers(1, 30))
def test_a_talk_goes_on_where_its_answer_ended(said: list[str], max_tokens: int) -> None:
    talk: list[dict[str, Any]] = [{"role": "user", "content": text} for text in said]
    asked = judge({"messages": talk, "max_tokens": max_tokens}, SERVED, is_chat=True)
    answer = compose(asked, 0)
    talk += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "And?"}]
    then = judge({"messages": talk}, SERVED, is_chat=True)
    assert then.prompt.startswith(transcript(asked, answer))
    assert len(then.prompt) % TOKEN_CHARACTERS == 0


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [("", 0), ("abc", 1), ("abcd", 1), ("abcde", 2), ([1, 2, 3], 3), (["abcde"], 2)],
    ids=["nothing", "less than a token", "one token", "two tokens", "tokens as numbers", "a list of one"],
)
def test_a_prompt_has_its_tokens(prompt: Any, tokens: int) -> None:
    assert judge({"prompt": prompt}, SERVED, is_chat=False).prompt_tokens == tokens


@pytest.mark.parametrize(
    ("max_tokens", "tokens", "finish_reason"),
    [(None, 6, "stop"), (6, 6, "stop"), (5, 5, "length")],
    ids=["as long as it is", "just as long", "cut short"],
)
def test_a_json_text_ends_where_it_ends_or_is_cut(
    max_tokens: int | None, tokens: int, finish_reason: str
) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {"const": "x" * 22}}}
    body = {"prompt": "hi", "response_format": form, "max_tokens": max_tokens}
    answer = compose(judge(body, SERVED, is_chat=False), 0)
    assert (answer.tokens, answer.finish_reason) == (tokens, finish_reason)
    assert count_tokens(answer.text) == tokens


# --- JSON by a schema -----------------------------------------------------------------------------------

SCHEMAS: dict[str, Any] = {
    "anything": {},
    "anything, said otherwise": True,
    "an object with what it must have": {"type": "object", "required": ["a", "b"]},
    "an object and no more": {
        "type": "object",
        "properties": {"a": {"type": "null"}, "b": {"type": "boolean"}},
        "additionalProperties": False,
        "required": ["a"],
    },
    "names of one kind": {"required": ["x"], "additionalProperties": {"type": "integer"}},
    "a list of at least five": {"type": "array", "items": {"type": "integer"}, "minItems": 5},
    "a list of at most one": {"type": "array", "items": {"type": "string"}, "maxItems": 1},
    "a list whose items differ": {"type": "array", "uniqueItems": True},
    "a pair": {"prefixItems": [{"type": "string"}, {"type": "number"}], "items": False},
    "a long text": {"type": "string", "minLength": 700},
    "a short text": {"type": "string", "maxLength": 3},
    "no text": {"type": "string", "maxLength": 0},
    "a day": {"type": "string", "format": "date"},
    "one of few": {"enum": ["red", 7, None]},
    "just this": {"const": {"a": [1]}},
    "a whole number between two": {"type": "integer", "exclusiveMinimum": 7, "exclusiveMaximum": 9},
    "a number between two": {"type": "number", "minimum": 0.2, "maximum": 0.3},
    "a negative number": {"type": "integer", "maximum": -5},
    "a multiple": {"type": "integer", "minimum": 100, "multipleOf": 7},
    "a part": {"type": "number", "exclusiveMinimum": 0, "multipleOf": 0.25},
    "this or that": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "that, where this cannot be": {"anyOf": [{"not": {}}, {"type": "null"}]},
    "this and that": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"$ref": "#/$defs/b"},
        ],
        "$defs": {"b": {"properties": {"b": {"type": "string"}}, "required": ["b"]}},
    },
    "a bound within a bound": {"allOf": [{"type": "integer", "minimum": 5}, {"minimum": 9}, {"maximum": 9}]},
    "one of several kinds": {"type": ["integer", "null"]},
    "a tree": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "left": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                },
                "required": ["name", "left"],
            }
        },
        "$ref": "#/$defs/node",
    },
    "a name with a slash": {"$defs": {"a/b~c": {"type": "integer"}}, "$ref": "#/$defs/a~1b~0c"},
}


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_a_value_is_what_its_schema_asks_for(schema: Any) -> None:
    for seed in range(20):
        value = example(schema, seed, WORDS)
        jsonschema.Draft202012Validator(schema).validate(value)
        assert value == example(schema, seed, WORDS)


CIRCLE: Any = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
FOREST: Any = {"anyOf": [{"type": "array", "items": {"$ref": "#"}, "minItems": 3}] * 4}

REFUSED: dict[str, tuple[Any, str]] = {
    "what allows nothing": (False, "allows nothing"),
    "what is no schema": (7, "allows nothing, or is none"),
    "a keyword beyond it": ({"type": "string", "pattern": "^a"}, "keyword pattern is not supported"),
    "a format beyond it": ({"type": "string", "format": "iri"}, "format iri is not supported"),
    "a format that is too long": ({"type": "string", "format": "date", "maxLength": 3}, "format date"),
    "a type beyond JSON": ({"type": "thing"}, "type is not one of JSON's"),
    "no type at all": ({"type": []}, "type is not one of JSON's"),
    "a circle": (CIRCLE, "without end"),
    "a forest": (FOREST, "without end"),
    "another document": ({"$ref": "https://example.org/s"}, "refers to another document"),
    "a definition that is not there": ({"$ref": "#/$defs/x"}, "refers to #/$defs/x, which it does not hold"),
    "no number between": ({"type": "integer", "minimum": 1.2, "maximum": 1.8}, "no number between"),
    "a step of nothing": ({"type": "number", "multipleOf": 0}, "multipleOf is not above zero"),
    "a bound that is none": ({"type": "number", "minimum": True}, "minimum is no number"),
    "a bound beyond all": ({"type": "number", "minimum": 1e300}, "beyond 2 to the 53rd"),
    "a bound that is not a number": ({"type": "number", "minimum": float("nan")}, "beyond 2 to the 53rd"),
    "a text without end": ({"type": "string", "minLength": 10**9}, "minLength is not a number from 0 to"),
    "a list of differing items": (
        {"type": "array", "uniqueItems": True, "minItems": 2},
        "uniqueItems is not supported above one item",
    ),
    "choices that are none": ({"anyOf": []}, "anyOf is no list, or an empty one"),
    "choices of nothing": ({"oneOf": [False]}, "allows nothing"),
    "properties that are none": ({"type": "object", "properties": []}, "properties are no object"),
    "names that are none": ({"type": "object", "required": [1]}, "required is no list of names"),
    "a part that is none": ({"allOf": [True]}, "allOf holds what is no schema"),
    "a part that is itself": ({"allOf": [{"$ref": "#/allOf/0"}]}, "allOf holds what is no schema"),
    "a name that may not be": (
        {"type": "object", "required": ["x"], "additionalProperties": False},
        "allows nothing",
    ),
    "a long schema": ({"enum": ["x" * 70_000]}, "longer than 65536 characters"),
}


@pytest.mark.parametrize(("schema", "words"), REFUSED.values(), ids=REFUSED)
def test_a_schema_that_cannot_be_followed_is_refused(schema: Any, words: str) -> None:
    with pytest.raises(SchemaError) as refused:
        example(schema, 1, WORDS)
    assert words in str(refused.value)
    assert str(refused.value).endswith(".")


keywords = st.sampled_from(
    ["type", "properties", "required", "items", "anyOf", "allOf", "$ref", "enum", "const", "minimum",
     "maximum", "multipleOf", "minLength", "maxLength", "minItems", "maxItems", "prefixItems", "format"]
)  # fmt: skip
leaves = st.sampled_from(
    [
        "object",
        "array",
        "string",
        "integer",
        "number",
        "#",
        "#/anyOf/0",
        "a",
        True,
        False,
        None,
        0,
        2,
        0.5,
        -3,
    ]
)
hostile = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keywords | st.just("a"), inner, max_size=4),
    max_leaves=12,
)


@given(hostile, st.integers(0, 2**32))
def test_any_schema_gets_a_value_or_a_sentence(schema: Any, seed: int) -> None:
    with contextlib.suppress(SchemaError):
        json.dumps(example(schema, seed, WORDS))


# --- the cache ------------------------------------------------------------------------------------------


def test_a_block_is_known_by_all_before_it() -> None:
    cache = PrefixCache(10, 4)
    cache.keep("aaaabbbbcc")
    assert [cache.find(text) for text in ("aaaabbbbccdd", "aaaacccc", "bbbb", "aaa", "")] == [2, 1, 0, 0, 0]


def test_what_was_not_used_for_longest_goes_first_and_ends_go_before_beginnings() -> None:
    cache = PrefixCache(4, 1)
    cache.keep("ab")
    cache.keep("xy")
    cache.find("ab")
    cache.keep("q")
    assert (cache.find("ab"), cache.find("xy"), cache.find("q")) == (2, 1, 1)


@given(st.integers(1, 8), st.lists(st.text("ab", max_size=12), max_size=20), st.text("ab", max_size=12))
def test_a_cache_finds_no_more_than_was_kept_and_holds_no_more_than_it_may(
    blocks: int, kept: list[str], text: str
) -> None:
    cache = PrefixCache(blocks, 2)
    for each in kept:
        cache.keep(each)
        assert len(cache) <= blocks
    found = cache.find(text)
    assert found == 0 or any(each.startswith(text[: found * 2]) for each in kept)
    cache.keep(text)
    assert cache.find(text) == min(blocks, len(text) // 2)
