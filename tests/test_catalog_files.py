"""A catalog as a file: what is written reads back, and what cannot be read is refused with its line."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from catalog.files import BYTES_LIMIT, FORMATS, FileError, Placed, read_catalog_file, write_catalog_file
from catalog.files.building import DEPTH_LIMIT, FAULTS_LIMIT, PARTS_LIMIT, Building
from catalog.files.from_yaml import read_yaml
from catalog.reading import CatalogError, Fault
from catalog.spec import Catalog, ModelSpec
from tests.test_catalog_spec import ACCEPTED

PROFILE: dict[str, Any] = {"name": "p", "engine": "vllm", "gpu_class": "h100"}


def model(**fields: Any) -> ModelSpec:
    return ModelSpec.load({"name": "m", "source": "org/m", "profiles": [PROFILE]} | fields)


def written(*models: ModelSpec, format: str = "yaml") -> str:
    return write_catalog_file([each.as_text_dict() for each in models], format)


def read(text: str, name: str = "") -> list[Any]:
    return list(read_catalog_file(text.encode(), name).models)


def refusals(text: str | bytes, name: str = "") -> list[str]:
    with pytest.raises(FileError) as no:
        read_catalog_file(text if isinstance(text, bytes) else text.encode(), name)
    assert str(no.value) == str(no.value.placed[0])
    return [str(each) for each in no.value.placed]


# --- what is written reads back -------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("vector", ACCEPTED)
def test_what_is_written_reads_back(vector: dict[str, Any], format: str) -> None:
    catalog = Catalog.load(vector["models"])
    text = written(*catalog.models, format=format)
    again = Catalog.load(read(text, f"catalog.{format}"))
    assert again.models == catalog.models
    assert written(*again.models, format=format) == text


# What the law lets into a text: anything but NUL and halves of surrogate pairs.
TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)
TYPED = st.one_of(
    TEXTS,
    st.from_regex(r"\A[-+.0-9xXoOeE_:T ]{1,12}\Z"),
    st.from_regex(r"\A[yYnN~=<>|&*!%@`'\"#{}\[\]?,: -]{1,6}\Z"),
    st.sampled_from(["yes", "No", "ON", "null", "Null", "~", "<<", "=", ".inf", "-.NaN", "0x10", "1e3", "y"]),
    st.lists(TEXTS, min_size=2, max_size=4).map("\n".join),
)


@pytest.mark.parametrize("format", FORMATS)
@given(texts=st.lists(TYPED, max_size=4), value=TYPED, weight=st.floats(1e-300, 1000))
def test_every_text_and_number_reads_back_as_it_was(
    format: str, texts: list[str], value: str, weight: float
) -> None:
    profile = PROFILE | {"args": [f"a{text}" for text in texts], "env": {"A": value}, "weight": weight}
    spec = model(description=value, profiles=[profile])
    again = Catalog.load(read(written(spec, format=format), f"x.{format}"))
    assert again.models == (spec,)


@given(TYPED)
def test_other_readers_of_yaml_see_the_same_text(text: str) -> None:
    """PyYAML's own loader follows YAML 1.1 to the letter."""
    form = model(description=text).as_text_dict()
    content = yaml.safe_load(write_catalog_file([form], "yaml"))
    assert content["models"][0].get("description", "") == text


def test_yaml_is_pleasant_to_read() -> None:
    profile = PROFILE | {"args": ["--max-num-seqs", "8"], "env": {"B": "yes", "A": "12:30", "C": "plain"}}
    spec = model(
        aliases=["small", "1e3"],
        description="For the trial.\nAsk Ann first.\n",
        profiles=[profile],
        scaling={"max": 2, "idle_timeout": "90m"},
        slo={"TTFTp99": "1.5s"},
        context_length=8192,
        capabilities={"tools": True},
    )
    assert written(spec) == (
        "models:\n"
        "- name: m\n"
        "  aliases:\n"
        "  - small\n"
        '  - "1e3"\n'
        "  description: |\n"
        "    For the trial.\n"
        "    Ask Ann first.\n"
        "  source: org/m\n"
        "  profiles:\n"
        "  - name: p\n"
        "    engine: vllm\n"
        "    gpu_class: h100\n"
        "    tp: 1\n"
        "    gpus_per_node: 1\n"
        "    nodes: 1\n"
        "    args:\n"
        "    - --max-num-seqs\n"
        '    - "8"\n'
        "    env:\n"
        '      A: "12:30"\n'
        '      B: "yes"\n'
        "      C: plain\n"
        "    weight: 1\n"
        "    startup_timeout: 20m\n"
        "  scaling:\n"
        "    max: 2\n"
        "    idle_timeout: 1h30m\n"
        "  slo:\n"
        "    TTFTp99: 1.5s\n"
        "  context_length: 8192\n"
        "  capabilities:\n"
        "    tools: true\n"
    )


def test_an_edit_changes_one_line() -> None:
    before, after = (written(model(description=text)) for text in ("word " * 60, "word " * 60 + "more"))
    lines = zip(before.splitlines(), after.splitlines(), strict=True)
    assert sum(was != now for was, now in lines) == 1


def test_an_empty_catalog_is_a_catalog() -> None:
    for format in FORMATS:
        assert read(write_catalog_file([], format), f"x.{format}") == []


# --- forms of a file ------------------------------------------------------------------------------

FORMS: dict[str, tuple[str, str]] = {
    "YAML": ("models:\n- name: m\n  min: 1\n", "a.yaml"),
    "YAML by another ending": ("models:\n- name: m\n  min: 1\n", "a.YML"),
    "YAML without a name": ("# mine\nmodels:\n- {name: m, min: 1}\n", ""),
    "YAML in brackets": ("{models: [{name: m, min: 1}]}", "a.yaml"),
    "YAML after a mark": ("---\nmodels:\n- name: m\n  min: 1\n...\n", ""),
    "YAML of another system": ("models:\r\n- name: m\r\n  min: 1\r\n", "a.yaml"),
    "a list alone": ("- name: m\n  min: 1\n", "a.yaml"),
    "JSON": ('{"models": [{"name": "m", "min": 1}]}', "a.json"),
    "JSON without a name": ('\n {"models":\t[{"name": "m", "min": 1}]}', "-"),
    "JSON that is a list": ('[{"name": "m", "min": 1}]', ""),
    "a byte order mark": ('\ufeff{"models": [{"name": "m", "min": 1}]}', ""),
}


@pytest.mark.parametrize(("text", "name"), FORMS.values(), ids=FORMS)
def test_files_come_in_several_forms(text: str, name: str) -> None:
    assert read(text, name) == [{"name": "m", "min": 1}]


VALUES: dict[str, tuple[str, Any]] = {
    "a text": ("abc", "abc"),
    "a version": ("4.0.1", "4.0.1"),
    "a duration": ("20m", "20m"),
    "a letter": ("y", "y"),
    "a number": ("12", 12),
    "a negative number": ("-3", -3),
    "a fraction": ("0.5", 0.5),
    "a small fraction": ("1.5e-07", 1.5e-07),
    "true": ("true", True),
    "False": ("False", False),
    "null": ("null", None),
    "nothing": ("", None),
    "infinite": (".inf", float("inf")),
    "a number in quotes": ('"12"', "12"),
    "a word in quotes": ("'yes'", "yes"),
    "a date in quotes": ('"2026-01-31"', "2026-01-31"),
    "a text over two lines": ("one\n    two", "one two"),
    "a block": ("|\n    one\n    two\n", "one\ntwo\n"),
}


@pytest.mark.parametrize(("typed", "value"), VALUES.values(), ids=VALUES)
def test_what_is_typed_in_yaml_means_one_thing(typed: str, value: Any) -> None:
    (model,) = read(f"- x: {typed}\n")
    assert model == {"x": value}
    assert type(model["x"]) is type(value)


def test_numbers_that_are_none_are_left_to_the_law() -> None:
    for text, name in ((".nan", "a.yaml"), (".NaN", "a.yaml"), ("NaN", "a.json"), ("Infinity", "a.json")):
        profile = json.dumps(PROFILE)[:-1] + f', "weight": {text}}}'
        raws = read('[{"name": "m", "source": "org/m", "profiles": [' + profile + "]}]", name)
        with pytest.raises(CatalogError, match="weight must be a finite number"):
            Catalog.load(raws)


# --- refusals -------------------------------------------------------------------------------------

NO_CATALOG = 'there is no catalog in the file; write the key "models" and a list of models under it'
TOO_DEEP = f"the file is nested more than {DEPTH_LIMIT} deep, and a catalog is not; write it flat"
BOTH = "true or false to one reader of YAML and a text to another; write true or false"
DATE = "a date or a time to one reader of YAML and a text to another; write it otherwise"
NUMBER = "a number to one reader of YAML, and another or a text to the next; write it in plain digits"
MILLIONS = 4_000_000
QUOTES = "or put it in quotes if it is a text"

REFUSED: dict[str, tuple[str, str, str]] = {
    "not UTF-8": (
        "models:\n- name: \udcff\n",
        "a.yaml",
        "line 2: the text is not UTF-8; save the file as UTF-8",
    ),
    "nothing": (
        "",
        "",
        NO_CATALOG,
    ),
    "a text": (
        "hello",
        "",
        NO_CATALOG,
    ),
    "an empty map": (
        "{}",
        "",
        NO_CATALOG,
    ),
    "another key": (
        "models: []\nmodel: []\n",
        "",
        'line 2: unknown key "model"; the only key here is "models"',
    ),
    "no list": ("models:\n  m: {}\n", "", "line 1: the catalog must be a list of models"),
    "no list in JSON": ('{"models": 3}', "", "line 1: the catalog must be a list of models"),
    "an anchor": ("models:\n- &a {name: m}\n", "", "line 2: the anchor &a is not read; remove it"),
    "a reference": (
        "models:\n- *a\n",
        "",
        "line 2: the reference *a is not followed; write out what it stands for",
    ),
    "a merge key": (
        "models:\n- name: m\n  <<: {a: b}\n",
        "",
        'line 3: the merge key "<<" is not followed; write out the fields',
    ),
    "a tag": (
        "models:\n- !!python/object:os.system {}\n",
        "",
        "line 2: the tag !!python/object:os.system is not read; remove it",
    ),
    "a tag of one's own": ("models:\n- !secret x\n", "", "line 2: the tag !secret is not read; remove it"),
    "two documents": (
        "models: []\n---\nmodels: []\n",
        "",
        "line 2: a second document begins here; put one catalog in a file",
    ),
    "a key twice": (
        "models:\n- name: m\n  source: a\n  name: n\n",
        "",
        'line 4: the key "name" is there twice, on lines 2 and 4; keep one of the two',
    ),
    "a key twice in JSON": (
        '{"models": [\n{"name": "m",\n"name": "n"}]}',
        "",
        'line 3: the key "name" is there twice, on lines 2 and 3; keep one of the two',
    ),
    "a key that is a number": (
        "models:\n- 1: x\n",
        "",
        "line 2: keys must be texts; put the key in quotes",
    ),
    "a key that is nothing": ("models:\n- ~: x\n", "", "line 2: keys must be texts; put the key in quotes"),
    "a key that is a list": (
        "models:\n- [a]: x\n",
        "",
        "line 2: a list or a map cannot be a key; a key must be a text",
    ),
    "a key that YAML takes for true": (
        "models:\n- on: x\n",
        "",
        f"line 2: on is {BOTH}, {QUOTES}",
    ),
    "yes": (
        "- x: Yes\n",
        "",
        f"line 1: Yes is {BOTH}, {QUOTES}",
    ),
    "a date": (
        "- x: 2026-01-31\n",
        "",
        f"line 1: 2026-01-31 is {DATE}, {QUOTES}",
    ),
    "a time": (
        "- x: 12:30\n",
        "",
        f"line 1: 12:30 is {NUMBER}, {QUOTES}",
    ),
    "characters that YAML has not": (
        "models:\n- name: a\x07b\n",
        "",
        'line 2: the character "\\x07" cannot stand in YAML as it is; write it as an escape in quotes',
    ),
    "no YAML": (
        "models:\n- name: [\n",
        "a.yaml",
        "line 3: this is not YAML: while parsing a flow node, did not find expected node content",
    ),
    "a text that does not end": (
        'models:\n- name: "m\n',
        "a.yaml",
        "line 3: this is not YAML: while scanning a quoted scalar, found unexpected end of stream",
    ),
    "no JSON": ('{"models": [\n{"name": }]}', "", "line 2: this is not JSON: Expecting value"),
    "two texts of JSON": ('{"models": []}\n{}', "", "line 2: this is not JSON: Extra data"),
    "a long number in JSON": (
        '[{"name": "m",\n"min": ' + "9" * 5000 + "}]",
        "",
        "line 2: a number of 5000 digits is out of range; write a smaller one",
    ),
    "a deep list": (
        "\n" + "[" * 200,
        "a.yaml",
        f"line 2: {TOO_DEEP}",
    ),
    "a deep list in JSON": (
        "\n" + "[" * 100_000,
        "a.json",
        f"line 2: {TOO_DEEP}",
    ),
    "a deep map": (
        "".join(" " * depth + "a:\n" for depth in range(50)),
        "",
        f"line {DEPTH_LIMIT + 1}: {TOO_DEEP}",
    ),
}


@pytest.mark.parametrize(("text", "name", "sentence"), REFUSED.values(), ids=REFUSED)
def test_a_file_that_cannot_be_read_is_refused_with_its_line(text: str, name: str, sentence: str) -> None:
    assert refusals(text.encode(errors="surrogateescape"), name) == [sentence]


@pytest.mark.parametrize(
    "typed", ["0x10", "0o17", "017", "0b1", "1_000", "190:20:30", "1e3", "1.5e3", ".5e1", "6.02e23", "1_0.5"]
)
def test_a_number_that_readers_do_not_agree_on_is_refused(typed: str) -> None:
    (sentence,) = refusals(f"- x: {typed}\n")
    assert sentence.startswith(f"line 1: {typed} is a number to one reader of YAML")


def test_all_that_cannot_be_read_is_told_at_once() -> None:
    told = refusals("models:\n- &a\n  name: on\n  name: *a\n- !x 12:30\n")
    assert [sentence.split(":")[0] for sentence in told] == ["line 2", "line 3", "line 4", "line 4", "line 5"]


def test_what_is_wrong_before_the_end_of_yaml_is_told_as_well() -> None:
    told = refusals("models:\n- name: on\n- [\n")
    assert [sentence.split(":")[0] for sentence in told] == ["line 2", "line 4"]


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_of_faults_is_left_early(format: str) -> None:
    entries = ",\n".join(['{"a": 1, "a": 2}'] * (FAULTS_LIMIT * 2))
    assert len(refusals(f"[{entries}]", f"x.{format}")) == FAULTS_LIMIT


def test_a_file_of_too_many_parts_is_left_early() -> None:
    text = "[" + "1," * PARTS_LIMIT + "1]"
    says = f"line 1: the file has more than {PARTS_LIMIT} keys and values; split the catalog"
    assert refusals(text, "x.json") == [says]


def test_parts_of_yaml_are_counted_while_they_are_read() -> None:
    """What comes after the limit is no YAML, and nobody gets that far."""
    with pytest.raises(FileError, match="line 1: the file has more than 1000 keys and values"):
        read_yaml("[" + "1," * 1000 + "1]\n}", Building(parts_limit=1000))


def test_a_file_that_is_too_large_is_not_read() -> None:
    says = f"the file is larger than {BYTES_LIMIT} bytes; split the catalog"
    assert refusals(b"\xff" * (BYTES_LIMIT + 1)) == [says]


COSTLY = {
    "a long text": '["' + "x" * MILLIONS + '"]',
    "a text of escapes that does not end": '["' + '\\"' * MILLIONS,
    "escapes outside of a text": "[" + '\\"' * MILLIONS,
    "empty lines": "[" + " \n" * MILLIONS + "}",
    "lists without anything": "[" + "[]," * MILLIONS + "[]]",
    "ends without beginnings": "]" * MILLIONS,
    "commas": "[" + "," * MILLIONS,
}


@pytest.mark.parametrize("text", COSTLY.values(), ids=COSTLY)
def test_what_looks_cheap_in_json_is_cheap(text: str) -> None:
    """In a process that may hold little, and may not run for long."""
    limits = "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**29, 2**29));"
    limits += "resource.setrlimit(resource.RLIMIT_CPU, (30, 30));"
    read = (
        "import sys; from catalog.files import FileError, read_catalog_file\n"
        "try: read_catalog_file(sys.stdin.buffer.read(), 'a.json')\n"
        "except FileError: pass"
    )
    subprocess.run([sys.executable, "-c", f"{limits}{read}"], input=text.encode(), check=True)


def test_a_bomb_of_references_costs_nothing() -> None:
    bomb = "a: &a [x]\n" + "".join(f"b{n}: &b{n} [*a, *a, *a]\n" for n in range(20))
    assert len(refusals(bomb)) == 81


@given(
    st.one_of(
        st.binary(max_size=60),
        st.text("{}[]:,-&*!|>'\"#%@` \n\tabn01.~<", max_size=40).map(str.encode),
    ),
    st.sampled_from(["a.yaml", "a.json", ""]),
)
def test_no_file_does_more_than_be_refused(content: bytes, name: str) -> None:
    told: list[Placed] = []
    try:
        read_catalog_file(content, name)
    except FileError as no:
        told += no.placed
    assert all(str(each).isprintable() for each in told)


# --- the line of a fault --------------------------------------------------------------------------

FAULTY = """\
models:
- name: first
  source: org/m
  profiles:
  - name: p
    gpu_class: h100
- name: m
  surce: org/m
  aliases: [a, 7]
  profiles:
  - engine: vllm
    gpu_class: h100
  - name: p
    tp: two
    env:
      A: 1
  - name: p
    gpu_class: h100
    args:
    - --port
  - gpu_class: h100
    tp: -3000000000
  scaling:
    min: 3
    max: 1
    idle_timeout: soon
"""


# In YAML, in JSON, and how the sentence ends that belongs there.
PLACES = [
    (8, 15, ': unknown key "surce"; did you mean source?'),
    (9, 16, ": aliases must be a list of texts, and one entry is a number"),
    (26, 47, ": scaling.idle_timeout must be a duration in h, m, s or ms, such as 1h30m, 1.5s or 300ms"),
    (7, 13, ": source is required"),
    (11, 21, ": a profile has no name"),
    (14, 27, ' profile "p": tp must be a whole number, not a text'),
    (15, 28, ' profile "p": env "A" must be a text, not a number; put it in quotes'),
    (13, 25, ' profile "p": gpu_class is required for engine "vllm"'),
    (17, 33, ': profile "p" is declared twice'),
    (19, 35, ' profile "p": argument "--port" is set by llmgw (chosen on the node); leave it out'),
    (22, 41, " profile number 4: tp is out of range; at most 2147483647 is possible"),
]


@pytest.mark.parametrize("format", FORMATS)
def test_every_fault_has_its_line(format: str) -> None:
    text = FAULTY if format == "yaml" else json.dumps(yaml.safe_load(FAULTY), indent=1)
    file = read_catalog_file(text.encode(), f"x.{format}")
    with pytest.raises(CatalogError) as no:
        ModelSpec.load(file.models[1])
    told = [str(file.placed(fault, 1)) for fault in no.value.faults]
    column = FORMATS.index(format)
    assert told[: len(PLACES)] == [f'line {place[column]}: model "m"{place[2]}' for place in PLACES]


def test_a_fault_of_no_model_in_the_file_has_no_line() -> None:
    fault = Fault("other", "", "name", "in_use", "something else is wrong")
    file = read_catalog_file(FAULTY.encode())
    assert str(file.placed(fault, None)) == "something else is wrong"


def test_a_model_that_is_no_map_has_its_line() -> None:
    file = read_catalog_file(b"models:\n- name: m\n- 7\n")
    with pytest.raises(CatalogError) as no:
        ModelSpec.load(file.models[1])
    (fault,) = no.value.faults
    assert str(file.placed(fault, 1)) == "line 3: the model: it must be a map of fields, not a number"
