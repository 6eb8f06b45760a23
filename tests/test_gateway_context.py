"""How many tokens there may be: what size alone can tell, and what an operator allows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmgw.gateway import context, needs
from llmgw.gateway.admission import ModelEntry, Refused
from llmgw.gateway.context import EXCEEDS, FITS, UNKNOWN, UNSURE, Span
from llmgw.gateway.needs import Needs, Reach
from llmgw.gateway.routing import Target
from llmgw.gateway.surface import ENDPOINTS

pytestmark = pytest.mark.one_database


@pytest.mark.parametrize(
    ("prompt", "output", "length", "verdict"),
    [
        pytest.param(Span.of_bytes(10**9), 10**9, 0, FITS, id="nobody knows the context"),
        pytest.param(Span.of_bytes(1000), 100, 8192, FITS, id="a short prompt"),
        pytest.param(Span.of_bytes(8192 - 1024 - 100), 100, 8192, FITS, id="each byte a token, and it fits"),
        pytest.param(Span.of_bytes(20_000), 100, 8192, FITS, id="it fits unless it is very dense"),
        pytest.param(Span.of_bytes(30_000), 100, 8192, UNSURE, id="near the limit"),
        pytest.param(Span.of_bytes(8192 * 128), 1, 8192, EXCEEDS, id="too long, were each token the longest"),
        pytest.param(Span.of_bytes(10), 8193, 8192, EXCEEDS, id="the answer alone is too long"),
        pytest.param(Span.counted(8092), 100, 8192, FITS, id="counted, and it just fits"),
        pytest.param(Span.counted(8093), 100, 8192, EXCEEDS, id="counted, and one too many"),
        pytest.param(UNKNOWN, 100, 8192, FITS, id="an image is the engine's to judge"),
        pytest.param(UNKNOWN, 8193, 8192, EXCEEDS, id="an answer too long beside an image"),
    ],
)
def test_whether_it_fits(prompt: Span, output: int, length: int, verdict: str) -> None:
    assert context.judge(prompt, output, length) == verdict


@given(
    size=st.integers(0, 10**8),
    bytes_per_token=st.integers(1, context.BYTES_PER_TOKEN_MOST),
    template=st.integers(0, context.TEMPLATE_TOKENS),
    output=st.integers(0, 10**6),
    length=st.integers(1, 10**7),
)
def test_size_never_tells_a_lie(
    size: int, bytes_per_token: int, template: int, output: int, length: int
) -> None:
    """However long its tokens are: what surely exceeds does, and what could not be counted was in between."""
    tokens = -(-size // bytes_per_token) + template
    span = Span.of_bytes(size)
    assert span.most is not None
    assert span.least <= tokens <= span.most
    if context.judge(span, output, length) == EXCEEDS:
        assert tokens + output > length
    if span.most + output <= length:
        assert context.judge(span, output, length) == FITS


def test_both_numbers_are_told_when_a_request_does_not_fit() -> None:
    model = ModelEntry(1, "m")
    with pytest.raises(Refused) as caught:
        needs.check_context(model, 8192, Span.counted(8000), 500)
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    assert "needs 8500 tokens, 8000 for the prompt and 500 for the answer" in caught.value.message
    assert "takes 8192 in all" in caught.value.message
    with pytest.raises(Refused, match="at least 9500 tokens"):
        needs.check_context(model, 8192, Span(9000, 10**6), 500)


# --- the answer ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "asked", "allowed"),
    [
        pytest.param(0, 10**6, 10**6, id="no limit"),
        pytest.param(100, 100, 100, id="at the limit"),
        pytest.param(100, None, None, id="nothing asked for"),
        pytest.param(100, 101, 100, id="cut down"),
    ],
)
def test_an_answer_is_cut_down_where_the_operator_chose_so(
    limit: int, asked: int | None, allowed: int | None
) -> None:
    model = ModelEntry(1, "m", max_output=limit, over_max_output="clamp")
    assert needs.allowed_output(model, asked) == allowed


@pytest.mark.parametrize("choice", ["", "refuse"])
def test_an_answer_too_long_is_refused_otherwise(choice: str) -> None:
    with pytest.raises(Refused) as caught:
        needs.allowed_output(ModelEntry(1, "m", max_output=100, over_max_output=choice), 101)
    assert caught.value.code == "max_output_exceeded"
    assert "asks for 101 tokens" in caught.value.message
    assert "with 100 at most" in caught.value.message


@pytest.mark.parametrize(
    ("limit", "prompt", "has_room"),
    [
        pytest.param(0, UNKNOWN, True, id="no limit, and so nothing to find room for"),
        pytest.param(100, Span.of_bytes(10), True, id="a short prompt"),
        pytest.param(100, Span.of_bytes(30_000), False, id="a long one"),
        pytest.param(100, UNKNOWN, False, id="nobody knows how long it is"),
    ],
)
def test_whether_the_longest_answer_surely_fits(limit: int, prompt: Span, has_room: bool) -> None:
    assert needs.has_room_for_most(ModelEntry(1, "m", max_output=limit), 8192, prompt) is has_room


@pytest.mark.parametrize(
    ("limit", "prompt", "length", "given"),
    [
        pytest.param(0, Span.of_bytes(10), 8192, None, id="no limit to keep"),
        pytest.param(100, Span.of_bytes(10**9), 0, 100, id="nobody knows the context"),
        pytest.param(100, Span.of_bytes(1000), 8192, 100, id="there is room"),
        pytest.param(100, Span.of_bytes(30_000), 8192, None, id="nobody knows whether there is room"),
        pytest.param(100, Span.counted(8150), 8192, 42, id="what is left, once it was counted"),
        pytest.param(100, Span.counted(8192), 8192, 1, id="nothing is left, and the engine says so"),
        pytest.param(100, UNKNOWN, 8192, None, id="nobody knows how long an image is"),
    ],
)
def test_an_answer_that_was_left_open_is_bounded(
    limit: int, prompt: Span, length: int, given: int | None
) -> None:
    assert needs.default_output(ModelEntry(1, "m", max_output=limit), length, prompt) == given


# --- at once ------------------------------------------------------------------------------------------------

lengths = st.sampled_from([0, 1, 100, 2_000, 8_192])
engines = st.sampled_from(["", "llamacpp", "sim"])


@given(
    st.builds(
        Needs,
        st.sampled_from([*ENDPOINTS.values()]),
        st.sampled_from([frozenset(), frozenset(), frozenset({"tools"})]),
        st.one_of(st.just(UNKNOWN), st.integers(0, 10_000).map(Span.of_bytes)),
        st.sampled_from([-1, 0, 1, 99, 5_000]),
    ),
    st.builds(
        ModelEntry,
        st.just(1),
        st.just("m"),
        context_length=lengths,
        max_output=st.sampled_from([0, 0, 50, 100]),
        engines=st.sampled_from([(), ("sim",), ("llamacpp",), ("llamacpp", "sim")]),
    ),
    st.lists(st.tuples(engines, lengths), max_size=2),
)
def test_what_is_plain_would_be_let_through_as_it_is_and_what_is_held_fits_every_replica(
    wanted: Needs, model: ModelEntry, running: list[tuple[str, int]]
) -> None:
    targets = [
        Target(f"r{at}", "m", "http://r", "k", 1, engine, length)
        for at, (engine, length) in enumerate(running)
    ]
    reach, asked = Reach.of(model, targets), wanted.output_tokens or None
    if reach.is_plain(model, wanted):
        needs.check_model(model, wanted, [])
        assert needs.allowed_output(model, asked) == asked
        assert needs.check_context(model, reach.context_length, wanted.prompt, wanted.room_for_output)
        assert asked is not None or needs.default_output(model, reach.context_length, wanted.prompt) is None
    if reach.holds(wanted):
        assert needs.fitting(model, targets, wanted) is targets
