"""What control plane and agent say to each other survives the wire, and one version of difference."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.protocol import (
    Assignment,
    AttemptReport,
    ClusterKey,
    GpuReport,
    Launch,
    PathReport,
    ProtocolError,
    RankReport,
    StateReport,
    read,
    to_json,
)

texts = st.text(max_size=20)
launches = st.builds(
    Launch,
    model=texts,
    source=texts,
    profile=st.dictionaries(texts, st.integers() | texts | st.lists(texts, min_size=1), max_size=3),
    fingerprint=texts,
    revision=texts,
    context_length=st.integers(0, 10**6),
    capabilities=st.dictionaries(texts, st.booleans(), max_size=3),
    source_bytes=st.none() | st.integers(0),
)
ranks = st.builds(
    RankReport,
    replica=texts,
    generation=st.integers(1),
    rank=st.integers(0),
    state=texts,
    age_s=st.floats(0, 1e9),
    port=st.none() | st.integers(1, 65535),
    gpus=st.lists(texts.filter(bool), max_size=2).map(tuple),
    launch=st.none() | launches,
    meeting=texts,
    attempts=st.lists(
        st.builds(AttemptReport, number=st.integers(1), signal=st.none() | st.integers(1, 64)), max_size=2
    ).map(tuple),
)
MESSAGES = {
    "an assignment": st.builds(
        Assignment,
        cluster=texts,
        replica=texts,
        generation=st.integers(1),
        fence=st.integers(0),
        launch=launches,
        key=texts,
        gpus=st.lists(texts.filter(bool), max_size=2).map(tuple),
        rank=st.integers(0),
    ),
    "a state report": st.builds(
        StateReport,
        cluster=texts,
        node=texts,
        gpus=st.lists(st.builds(GpuReport, id=texts, index=st.integers(0)), max_size=2).map(tuple),
        labels=st.dictionaries(texts, texts.filter(bool), max_size=2),
        memory_free_mib=st.none() | st.integers(0),
        ranks=st.lists(ranks, max_size=2).map(tuple),
    ),
    "a path report": st.builds(PathReport, path=texts, exists=st.booleans()),
}


@given(st.data())
@pytest.mark.parametrize("messages", MESSAGES.values(), ids=MESSAGES)
def test_what_is_written_reads_back_the_same(
    messages: st.SearchStrategy[object], data: st.DataObject
) -> None:
    message = data.draw(messages)
    raw = json.loads(json.dumps(to_json(message)))
    assert to_json(read(type(message), raw)) == to_json(message)


@given(st.builds(RankReport, replica=texts, generation=st.integers(1), rank=st.integers(0), state=texts))
def test_a_field_from_the_future_is_ignored(report: RankReport) -> None:
    assert read(RankReport, to_json(report) | {"from_the_future": {"deep": [1]}}) == report


def test_what_an_older_agent_leaves_out_is_unknown() -> None:
    report = read(
        StateReport,
        {
            "cluster": "c",
            "node": "n",
            "ranks": [{"replica": "r", "generation": 1, "rank": 0, "state": "ready"}],
        },
    )
    assert report.memory_free_mib is None
    assert report.ranks[0].launch is None
    assert report.ranks[0].running is None


REFUSED = {
    "a list is no report": (StateReport, [], "StateReport must be an object"),
    "a required field is missing": (StateReport, {"cluster": "c"}, "StateReport lacks node"),
    "a number where a text belongs": (
        StateReport,
        {"cluster": 1, "node": "n"},
        "StateReport.cluster must be a text",
    ),
    "true is no number": (
        RankReport,
        {"replica": "r", "generation": True, "rank": 0, "state": "ready"},
        "RankReport.generation must be a whole number",
    ),
    "a text where a list belongs": (
        StateReport,
        {"cluster": "c", "node": "n", "gpus": "all"},
        "StateReport.gpus must be a list",
    ),
    "the fault is deep inside": (
        StateReport,
        {"cluster": "c", "node": "n", "gpus": [{"id": "g", "index": "0"}]},
        "StateReport.gpus[0].index must be a whole number",
    ),
}


@pytest.mark.parametrize(("kind", "raw", "sentence"), REFUSED.values(), ids=REFUSED)
def test_a_message_that_cannot_be_read_names_its_field(kind: type, raw: object, sentence: str) -> None:
    with pytest.raises(ProtocolError) as refused:
        read(kind, raw)
    assert str(refused.value) == sentence


FIELD_NAMES = st.sampled_from(
    ["cluster", "node", "gpus", "ranks", "launch", "profile", "index", "id", "state"]
)
any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner) | st.dictionaries(FIELD_NAMES | texts, inner),
    max_leaves=30,
)


@given(any_json)
def test_no_json_makes_reading_fail_in_another_way(raw: object) -> None:
    with contextlib.suppress(ProtocolError):
        assert isinstance(read(StateReport, raw), StateReport)


def test_a_token_belongs_to_one_subject_one_purpose_and_one_generation() -> None:
    key = ClusterKey("k1", b"secret")
    other = ClusterKey("k1", b"another")
    tokens = [
        key.node_token("a", 1),
        key.node_token("b", 1),
        key.node_token("a", 2),
        key.replica_key("a", 1),
        other.node_token("a", 1),
    ]
    assert len(set(tokens)) == len(tokens)
    assert key.node_token("a", 1) == tokens[0]
    assert all(set(token) <= set(string.ascii_lowercase + string.digits + ".") for token in tokens)


def test_messages_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Launch("m", "s", {}).model = "other"  # type: ignore[misc]
