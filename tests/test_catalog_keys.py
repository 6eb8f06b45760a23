"""An API key's text: recognised, never mistaken, never told by accident."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog.keys import ID_BYTES, SECRET_BYTES, KeyText

keys = st.builds(
    KeyText.from_bytes,
    st.binary(min_size=ID_BYTES, max_size=ID_BYTES),
    st.binary(min_size=SECRET_BYTES, max_size=SECRET_BYTES),
)


@given(keys)
def test_a_key_reads_back_as_it_was_made(key: KeyText) -> None:
    assert KeyText.parse(key.reveal()) == key


@given(keys, st.data())
def test_one_wrong_character_is_seen_without_asking_anybody(key: KeyText, data: st.DataObject) -> None:
    text = key.reveal()
    place = data.draw(st.integers(len("llmgw_"), len(text) - 1))
    wrong = data.draw(st.sampled_from("abcXYZ019_ \n").filter(lambda character: character != text[place]))
    assert KeyText.parse(text[:place] + wrong + text[place + 1 :]) is None


@given(keys)
def test_the_secret_is_in_no_representation(key: KeyText) -> None:
    assert key.secret not in f"{key!r} {key!s}"


@given(keys, keys)
def test_a_digest_fits_its_key_and_pepper_only(key: KeyText, other: KeyText) -> None:
    digest = key.digest(b"pepper")
    assert key.matches(digest, b"pepper")
    assert not key.matches(digest, b"salt")
    assert key == other or not other.matches(digest, b"pepper")


@pytest.mark.parametrize("text", ["", "llmgw_", "sk-abc", "llmgw_short_secret", "llmgw_ABCDEFGH_" + "é" * 38])
def test_what_is_no_key_is_no_key(text: str) -> None:
    assert KeyText.parse(text) is None
