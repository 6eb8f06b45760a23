"""What people type becomes the law's JSON, and what is stored can be typed again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog.durations import MINUTE
from catalog.parts import Scaling
from catalog.typed import (
    TypingError,
    read_list,
    read_pairs,
    read_settings,
    scaling_words,
    span_words,
    split_settings,
    typed_value,
    write_list,
    write_pairs,
)

texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
names = texts.filter(lambda text: text and text == text.strip() and "=" not in text and text.isprintable())


@given(st.lists(texts))
def test_any_list_of_texts_survives_its_lines(entries: list[str]) -> None:
    assert read_list(write_list(entries)) == entries


@given(st.dictionaries(names, texts))
def test_any_map_of_texts_survives_its_lines(pairs: dict[str, str]) -> None:
    assert read_pairs(write_pairs(pairs)) == pairs


@given(st.lists(texts))
def test_a_browser_may_end_lines_its_own_way(entries: list[str]) -> None:
    assert read_list(write_list(entries).replace("\n", "\r\n") + "\r\n\r\n") == entries


def test_what_is_plain_is_written_plainly() -> None:
    assert write_list(["--ctx-size", "4096", "", 'say "hi"']) == '--ctx-size\n4096\n""\nsay "hi"'
    assert write_pairs({"A": "1", "EMPTY": "", "B": " two "}) == 'A=1\nEMPTY=\nB=" two "'


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        pytest.param("A=1\nB", "line 2 has no =; write NAME=value", id="a line without an equals sign"),
        pytest.param(
            "\n =1", "line 2 has no name before the =; write NAME=value", id="a line without a name"
        ),
        pytest.param("A=1\n\nA=2", 'line 3 sets "A" a second time; keep one of the two', id="a name twice"),
        pytest.param(
            'A="1',
            "line 1 begins with a quote and is not a whole JSON text; close the quote, or drop it",
            id="an open quote",
        ),
    ],
)
def test_a_line_that_cannot_be_read_is_named(text: str, sentence: str) -> None:
    with pytest.raises(TypingError) as no:
        read_pairs(text)
    assert str(no.value) == sentence


def test_settings_make_a_profile() -> None:
    settings = [
        *(
            "name=big",
            "tp=4",
            "weight=0.5",
            "priority=-1",
            "startup_timeout=5m",
            "args=--ctx-size",
            "args=4096",
        ),
        *("env.HF_HOME=/data", "env.N=1", "node_selector.zone=a", "args=--x=y"),
    ]
    assert read_settings(settings) == {
        "name": "big",
        "tp": 4,
        "weight": 0.5,
        "priority": -1,
        "startup_timeout": "5m",
        "args": ["--ctx-size", "4096", "--x=y"],
        "env": {"HF_HOME": "/data", "N": "1"},
        "node_selector": {"zone": "a"},
    }


def test_a_setting_can_be_taken_back() -> None:
    settings = ["tp=", "args=", "env.A-", "env.B=", "node_selector=", "tpp="]
    assert read_settings(settings) == {
        "tp": None,
        "args": None,
        "env": {"A": None, "B": ""},
        "node_selector": None,
        "tpp": "",  # for the law to refuse
    }
    assert read_settings(["args=", "args="]) == {"args": ["", ""]}


@pytest.mark.parametrize(
    ("words", "name", "settings"),
    [
        pytest.param(["fast", "tp=2"], "fast", ["tp=2"], id="a name and a setting"),
        pytest.param(["tp=2", "pp=2"], "", ["tp=2", "pp=2"], id="settings alone"),
        pytest.param(["env.A-", "pp=2"], "", ["env.A-", "pp=2"], id="an entry that is taken away"),
        pytest.param(["tp"], "", ["tp"], id="one word is no name"),
        pytest.param(["a=b", "tp=2"], "a=b", ["tp=2"], id="a known name that looks like a setting"),
    ],
)
def test_settings_may_name_their_profile(words: list[str], name: str, settings: list[str]) -> None:
    assert split_settings(words, ["a=b"]) == (name, settings)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        pytest.param(
            ["tp"], 'the profile setting "tp" is not key=value; write it like tp=2', id="no equals sign"
        ),
        pytest.param(["=2"], 'the profile setting "=2" is not key=value; write it like tp=2', id="no key"),
        pytest.param(
            ["tp=2", "tp=4"], 'the profile setting "tp" is given twice; keep one of the two', id="a key twice"
        ),
        pytest.param(
            ["env.A=2", "env.A=4"],
            'the profile setting "env.A" is given twice; keep one of the two',
            id="an env twice",
        ),
        pytest.param(["env=A=1"], "env is set entry by entry; write env.NAME=value", id="a whole env"),
        pytest.param(
            ["env=", "env.A=1"],
            'the profile setting "env.A" is given twice; keep one of the two',
            id="an env emptied and set",
        ),
        pytest.param(
            ["env.A=1", "env="],
            'the profile setting "env" is given twice; keep one of the two',
            id="an env set and emptied",
        ),
    ],
)
def test_a_setting_that_cannot_be_read_is_named(settings: list[str], sentence: str) -> None:
    with pytest.raises(TypingError) as no:
        read_settings(settings)
    assert str(no.value) == sentence


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        pytest.param("tp", " 4 ", 4, id="a whole number among spaces"),
        pytest.param("tp", "four", "four", id="a word stays for the law to refuse"),
        pytest.param("tp", "4.5", "4.5", id="a fraction is no whole number"),
        pytest.param("weight", "4.5", 4.5, id="a weight may be a fraction"),
        pytest.param("gpu_class", "4090", "4090", id="a text of digits stays a text"),
    ],
)
def test_a_number_is_read_where_one_belongs(key: str, text: str, value: object) -> None:
    assert typed_value(key, text) == value


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        pytest.param(Scaling(0, 0), "off", id="off"),
        pytest.param(Scaling(2, 2), "kept running: 2", id="a fixed number"),
        pytest.param(Scaling(2, 4), "kept running: 2 to 4", id="a range"),
        pytest.param(Scaling(0, 1), "on demand, up to 1, unloaded after 15m idle", id="on demand"),
        pytest.param(
            Scaling(0, 3, 90 * MINUTE),
            "on demand, up to 3, unloaded after 1h30m idle",
            id="its own idle time",
        ),
    ],
)
def test_scaling_is_said_in_words(scaling: Scaling, words: str) -> None:
    assert scaling_words(scaling, 15 * MINUTE) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-1, "0 s"), (12.9, "12 s"), (119, "119 s"), (120, "2 min"), (7_200, "2 h"), (172_800, "2 d")],
)
def test_spans_are_read_at_a_glance(seconds: float, words: str) -> None:
    assert span_words(seconds) == words
