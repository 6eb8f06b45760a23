"""Where a replica differs from the catalog: a table of edits, and what each makes of a replica that runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog.spec import ModelSpec, ProfileSpec
from nodes.protocol import Launch, read, to_json
from nodes.snapshot import Model, launch_of
from nodes.stale import Staleness, is_as_the_catalog, judge, launch_from

PROFILE = {"name": "p", "engine": "vllm", "gpu_class": "h100-80g", "tp": 2, "env": {"A": "1", "B": "2"}}
MODEL = {
    "name": "m",
    "source": "org/m",
    "profiles": [PROFILE],
    "scaling": {"min": 1, "max": 1},
    "context_length": 8192,
    "capabilities": {"tools": True},
}


def spec(profile: dict[str, Any] | None = None, **model: Any) -> ModelSpec:
    return ModelSpec.load(MODEL | {"profiles": [PROFILE | (profile or {})]} | model)


LAUNCH = launch_of(Model(1, spec(), source_revision="c0ffee"), spec().profiles[0])


def judged(now: ModelSpec, *, revision: str = "c0ffee") -> Staleness:
    return judge(LAUNCH.fingerprint, LAUNCH, now.profile("p"), now, source_revision=revision)


def is_sound(launch: Launch, now: ModelSpec, revision: str = "c0ffee") -> bool:
    """As it is told of thousands, from the columns of rows."""
    profile = now.profile("p")
    columns = {
        "name": now.name,
        "source": now.source,
        "context_length": now.context_length,
        "capabilities": set(now.capabilities.written()),
    }
    told = profile.fingerprint() if profile else ""
    return is_as_the_catalog(launch.fingerprint, to_json(launch), told, columns, revision)


@pytest.mark.parametrize(
    ("edit", "word", "fields", "launch_fields", "restart_needed"),
    [
        pytest.param({}, "", [], [], False, id="nothing"),
        pytest.param({"profile": {"args": ["--x"]}}, "stale profile", ["args"], [], True, id="an argument"),
        pytest.param(
            {"profile": {"tp": 4, "gpus_per_node": 4}},
            "stale profile",
            ["tp", "gpus_per_node"],
            [],
            True,
            id="two fields",
        ),
        pytest.param(
            {"profile": {"weight": 2, "priority": 9}},
            "stale profile, no restart needed",
            ["weight", "priority"],
            [],
            False,
            id="only what takes effect at once",
        ),
        pytest.param(
            {"profile": {"weight": 2, "args": ["-x"]}},
            "stale profile",
            ["args", "weight"],
            [],
            True,
            id="both kinds",
        ),
        pytest.param({"source": "org/n"}, "stale launch", [], ["source"], True, id="the source"),
        pytest.param({"name": "n"}, "stale launch", [], ["name"], True, id="the model's name"),
        pytest.param(
            {"context_length": 0},
            "stale launch",
            [],
            ["context_length"],
            True,
            id="the context length taken away",
        ),
        pytest.param(
            {"capabilities": {"vision": True}}, "stale launch", [], ["capabilities"], True, id="a capability"
        ),
        pytest.param({"description": "better"}, "", [], [], False, id="what shapes no command"),
        pytest.param({"scaling": {"min": 3, "max": 3}}, "", [], [], False, id="how many"),
        pytest.param(
            {"profile": {"args": ["-x"]}, "source": "org/n"},
            "stale profile, stale launch",
            ["args"],
            ["source"],
            True,
            id="profile and source",
        ),
        pytest.param(
            {"profile": {"weight": 2}, "source": "org/n"},
            "stale launch",
            ["weight"],
            ["source"],
            True,
            id="the graver of two is the word",
        ),
    ],
)
def test_after_an_edit_of(
    edit: dict[str, Any], word: str, fields: list[str], launch_fields: list[str], restart_needed: bool
) -> None:
    found = judged(spec(**edit))
    assert found.word == word
    assert is_sound(LAUNCH, spec(**edit)) is (word == "")
    assert [each.field for each in found.stale_fields] == fields
    assert [each.field for each in found.launch_fields] == launch_fields
    assert found.restart_needed is restart_needed
    assert found.stale_profile is bool(fields)
    assert found.stale_launch is bool(launch_fields)
    assert bool(found.sentence) is bool(fields or launch_fields)
    for field in fields + launch_fields:
        assert field in found.sentence


def test_a_difference_says_what_was_and_what_is() -> None:
    (difference,) = judged(spec({"env": {"A": "1", "B": "3", "C": "4"}})).stale_fields
    assert (difference.field, difference.was, difference.now) == ("env", {"B": "2"}, {"B": "3", "C": "4"})


@pytest.mark.parametrize(
    ("was", "now", "is_stale"),
    [
        pytest.param("c0ffee", "beef", True, id="another commit"),
        pytest.param("c0ffee", "", False, id="a commit that nobody has checked yet"),
        pytest.param("", "beef", False, id="a record without a commit"),
    ],
)
def test_a_source_that_moved_on(was: str, now: str, is_stale: bool) -> None:
    launch = replace(LAUNCH, revision=was)
    found = judge(launch.fingerprint, launch, spec().profile("p"), spec(), source_revision=now)
    assert found.stale_launch is is_stale
    assert is_sound(launch, spec(), now) is not is_stale
    assert [each.field for each in found.launch_fields] == ["revision"] * is_stale


def test_an_unknown_fingerprint_is_unknown_and_never_stale() -> None:
    found = judge("", replace(LAUNCH, fingerprint=""), spec({"tp": 1}).profile("p"), spec({"tp": 1}))
    assert found.stale_profile is None
    assert found.word == "unknown profile"
    assert not is_sound(replace(LAUNCH, fingerprint=""), spec())
    assert not found.stale_fields
    assert not found.restart_needed


def test_a_record_that_tells_nothing_can_be_judged() -> None:
    found = judge("", launch_from({}), spec().profile("p"), spec())
    assert (found.stale_profile, found.stale_launch, found.word) == (None, False, "unknown profile")


@pytest.mark.parametrize(
    ("profile", "model", "word", "sentence"),
    [
        pytest.param(
            None, spec(), "profile removed", 'Profile "p" is no longer in the catalog', id="a profile"
        ),
        pytest.param(None, None, "model removed", 'Model "m" is no longer in the catalog', id="a model"),
    ],
)
def test_what_left_the_catalog_is_said_as_such(
    profile: ProfileSpec | None, model: ModelSpec | None, word: str, sentence: str
) -> None:
    found = judge(LAUNCH.fingerprint, LAUNCH, profile, model)
    assert found.word == word
    assert found.sentence.startswith(sentence)
    assert found.stale_profile is True


def test_a_profile_removed_and_a_model_edited_are_both_said() -> None:
    found = judge(LAUNCH.fingerprint, LAUNCH, None, spec(source="org/n"))
    assert found.word == "profile removed, stale launch"


def test_a_launch_outlives_the_database() -> None:
    assert launch_from(to_json(LAUNCH)) == LAUNCH
    assert read(Launch, to_json(LAUNCH)) == LAUNCH


@given(
    tp=st.integers(1, 8),
    weight=st.floats(0.1, 10),
    priority=st.integers(-5, 5),
    args=st.lists(st.sampled_from(["-x", "--enforce-eager", "x y"]), max_size=3),
)
def test_a_replica_is_stale_exactly_when_its_fingerprint_differs(
    tp: int, weight: float, priority: int, args: list[str]
) -> None:
    now = spec({"tp": tp, "gpus_per_node": tp, "weight": weight, "priority": priority, "args": args})
    found = judged(now)
    assert found.stale_profile is (now.profiles[0].fingerprint() != LAUNCH.fingerprint)
    assert found.stale_profile is bool(found.stale_fields)
    assert is_sound(LAUNCH, now) is (found.word == "")
    assert found.restart_needed is any(
        each.field not in ("weight", "priority") for each in found.stale_fields
    )
