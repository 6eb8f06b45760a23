"""Ways along fallbacks: which lead back, and in what order models can go."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog.names import circle, users_first, warnings_of_circle, ways_that_end
from catalog.spec import ModelSpec


@pytest.mark.parametrize(
    ("falls_back_to", "way"),
    [
        pytest.param({}, "", id="no fallbacks"),
        pytest.param({"a": ["b"]}, "", id="a way that ends"),
        pytest.param({"a": ["b"], "b": ["a"]}, "aba", id="two of them"),
        pytest.param({"a": ["b", "c"], "b": ["d"], "d": ["a"], "c": ["a"]}, "aca", id="the shortest way"),
        pytest.param({"a": ["b"], "b": ["c"], "c": ["b"]}, "", id="a circle of others"),
        pytest.param({"a": ["b"], "b": ["c"], "c": ["b", "d"], "d": ["a"]}, "abcda", id="past one of others"),
    ],
)
def test_a_circle_is_found(falls_back_to: dict[str, list[str]], way: str) -> None:
    assert "".join(circle("a", falls_back_to)) == way
    assert bool(warnings_of_circle("a", falls_back_to)) == bool(way)


GRAPHS = st.dictionaries(st.sampled_from("abcdef"), st.lists(st.sampled_from("abcdef"), max_size=3))


@given(GRAPHS)
def test_a_circle_goes_along_fallbacks_and_is_missed_by_nobody(falls_back_to: dict[str, list[str]]) -> None:
    way = circle("a", falls_back_to)
    assert all(there in falls_back_to[here] for here, there in pairwise(way))
    reached: set[str] = set()
    ahead = set(falls_back_to.get("a", ()))
    while ahead - reached:
        reached |= ahead
        ahead = {there for here in reached for there in falls_back_to.get(here, ())}
    assert ("a" in reached) == bool(way)
    assert not way or (way[0], way[-1]) == ("a", "a")


@given(GRAPHS)
def test_every_way_ends_where_no_circle_can_be_reached(falls_back_to: dict[str, list[str]]) -> None:
    ended = ways_that_end(falls_back_to)
    for place, name in enumerate(ended):
        assert set(falls_back_to.get(name, ())) <= set(ended[:place])
    for name in falls_back_to.keys() - set(ended):
        assert set(falls_back_to[name]) - set(ended)


def test_models_go_before_those_that_they_fall_back_to() -> None:
    last = ModelSpec("last", aliases=("end",), fallbacks=("elsewhere",))
    second, first = ModelSpec("second", fallbacks=("end",)), ModelSpec("first", fallbacks=("second", "last"))
    assert users_first([last, second, first]) == ["first", "second", "last"]


def test_those_of_a_circle_go_in_any_order_and_before_what_they_fall_back_to() -> None:
    last = ModelSpec("last")
    one, other = ModelSpec("one", fallbacks=("other", "last")), ModelSpec("other", fallbacks=("one",))
    *circling, end = users_first([last, one, other])
    assert (sorted(circling), end) == (["one", "other"], "last")
