"""Laws of a merge patch, and of scaling what an older law let in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog.parts import (
    LONGEST_TIMEOUT,
    OVER_MAX_OUTPUT,
    Capabilities,
    Limits,
    Scaling,
    Slo,
    Timeouts,
)
from catalog.patching import merged, patched, patched_profile
from catalog.reading import INT_LIMIT, CatalogError
from catalog.spec import ROUTING_PROFILES, ModelSpec, ProfileSpec
from tests.test_catalog_spec import NAMES, PROFILES, TEXTS

# --- RFC 7396 -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("was", "patch", "now"),
    [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        (["a", "b"], ["c", "d"], ["c", "d"]),
        ({"a": "b"}, ["c"], ["c"]),
        ({"a": "foo"}, None, None),
        ({"a": "foo"}, "bar", "bar"),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_a_patch_is_a_json_merge_patch(was: Any, patch: Any, now: Any) -> None:
    assert merged(was, patch) == now


JSON_MAPS = st.dictionaries(
    NAMES,
    st.recursive(
        st.booleans() | st.integers() | TEXTS,
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=3),
        max_leaves=6,
    ),
    max_size=4,
)


def difference(was: Any, now: Any) -> Any:
    """The smallest patch that makes one of the other."""
    if not isinstance(was, dict) or not isinstance(now, dict):
        return now
    gone = dict.fromkeys(was.keys() - now.keys())
    return gone | {
        key: difference(was.get(key), value)
        for key, value in now.items()
        if key not in was or was[key] != value
    }


@given(JSON_MAPS, JSON_MAPS)
def test_the_difference_of_two_maps_makes_one_of_the_other(was: Any, now: Any) -> None:
    assert merged(was, difference(was, now)) == now


# --- of models ------------------------------------------------------------------------------------

SCALINGS = st.tuples(st.integers(0, INT_LIMIT), st.integers(0, INT_LIMIT), st.integers(0, 2**62)).map(
    lambda told: Scaling(min(told[:2]), max(told[:2]), told[2])
)
MODELS = st.builds(
    ModelSpec,
    name=NAMES,
    aliases=st.lists(NAMES.map("alias-{}".format), max_size=3, unique=True).map(tuple),
    description=TEXTS,
    source=NAMES.map("/models/{}".format),
    profiles=st.lists(PROFILES, min_size=1, max_size=3, unique_by=lambda raw: raw["name"]).map(
        lambda raws: tuple(ProfileSpec.load(raw) for raw in raws)
    ),
    scaling=SCALINGS,
    fallbacks=st.lists(NAMES.map("other-{}".format), max_size=2).map(tuple),
    routing_profile=st.sampled_from(ROUTING_PROFILES),
    slo=st.builds(Slo, st.integers(0, 2**62), st.integers(0, 2**62)),
    context_length=st.integers(0, INT_LIMIT),
    max_output=st.integers(0, INT_LIMIT),
    capabilities=st.builds(Capabilities, st.booleans(), st.booleans(), st.booleans()),
    limits=st.builds(Limits, *[st.integers(0, INT_LIMIT)] * 3),
    over_max_output=st.sampled_from(OVER_MAX_OUTPUT),
    timeouts=st.builds(Timeouts, *[st.integers(0, LONGEST_TIMEOUT)] * 4),
)


@given(MODELS, MODELS)
def test_a_patch_of_what_differs_makes_one_model_of_another(was: ModelSpec, now: ModelSpec) -> None:
    patch = difference(was.as_text_dict(), now.as_text_dict())
    assert ModelSpec.load_edit(patched(was, patch), was) == now
    assert ModelSpec.load_edit(patched(now, {}), now) == now


@given(MODELS, st.sampled_from([("TTFTp99", "ttft_p99"), ("ttft_p99", "TTFTp99")]))
def test_an_slo_may_be_spelt_either_way(model: ModelSpec, spellings: tuple[str, str]) -> None:
    spelling, other = spellings
    edited = ModelSpec.load(patched(model, {"slo": {spelling: "1.5s"}}))
    assert edited == replace(model, slo=replace(model.slo, ttft_p99=1_500_000_000))
    assert ModelSpec.load(patched(model, {"slo": {spelling: None}})).slo == replace(model.slo, ttft_p99=0)
    with pytest.raises(CatalogError, match=r"slo gives both TTFTp99 and ttft_p99; keep one$"):
        ModelSpec.load(patched(model, {"slo": {spelling: "1s", other: "2s"}}))


@pytest.mark.parametrize("patch", [None, [], "tiny", 1, {"slo": []}, {"scaling": 1}, {"profiles": {}}])
def test_a_patch_of_a_wrong_type_is_for_the_law_to_refuse(patch: Any) -> None:
    model = ModelSpec("m", source="org/m", profiles=(ProfileSpec("p", gpu_class="h100", gpus_per_node=1),))
    with pytest.raises(CatalogError, match="must be"):
        ModelSpec.load_edit(patched(model, patch), model)


# --- of profiles ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "patch", "gpus_per_node"),
    [
        pytest.param({"tp": 2}, {"tp": 4}, 4, id="they follow tp"),
        pytest.param({"tp": 8, "nodes": 2}, {"nodes": 4}, 2, id="they follow nodes"),
        pytest.param({"tp": 4, "pp": 2, "gpus_per_node": 8}, {"tp": 8, "pp": None}, 8, id="their own stay"),
        pytest.param({"tp": 4}, {"tp": 2, "pp": 4, "gpus_per_node": 8}, 8, id="what is said is taken"),
        pytest.param(
            {"tp": 4, "pp": 2, "gpus_per_node": 8}, {"pp": None, "gpus_per_node": None}, 4, id="taken back"
        ),
    ],
)
def test_gpus_per_node_follow_where_they_did(
    stored: dict[str, Any], patch: dict[str, Any], gpus_per_node: int
) -> None:
    profile = ProfileSpec.load({"name": "p", "gpu_class": "h100"} | stored)
    assert ProfileSpec.load(patched_profile(profile, patch)).gpus_per_node == gpus_per_node


@given(PROFILES, PROFILES)
def test_a_patch_of_what_differs_makes_one_profile_of_another(
    was: dict[str, Any], now: dict[str, Any]
) -> None:
    old, new = ProfileSpec.load(was), ProfileSpec.load(now)
    patch = difference(old.as_text_dict(), new.as_text_dict())
    assert ProfileSpec.load(patched_profile(old, patch)) == new


# --- what an older law let in ---------------------------------------------------------------------

ANYTHING = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
COUNTS = st.integers(0, INT_LIMIT)
ANY_PAIRS = st.dictionaries(ANYTHING, ANYTHING, max_size=2)
ANY_PROFILE = st.builds(
    ProfileSpec,
    name=ANYTHING.filter(bool),
    engine=ANYTHING | st.just("vllm"),
    gpu_class=ANYTHING,
    tp=COUNTS,
    pp=COUNTS,
    gpus_per_node=COUNTS,
    nodes=st.integers(1, INT_LIMIT),
    args=st.lists(ANYTHING | st.sampled_from(["--port", "--api-key=x"]), max_size=3).map(tuple),
    env=ANY_PAIRS,
    min_memory_gb=COUNTS,
    min_disk_gb=COUNTS,
    node_selector=ANY_PAIRS,
    weight=st.floats(0.001, 1e9),
    priority=st.integers(-INT_LIMIT, INT_LIMIT),
    startup_timeout=st.integers(0, 2**63 - 1),
)
ANY_MODEL = st.builds(
    ModelSpec,
    name=ANYTHING.filter(bool),
    aliases=st.lists(ANYTHING, max_size=3).map(tuple),
    description=ANYTHING | st.just("x" * 10_001),
    source=ANYTHING,
    profiles=st.lists(ANY_PROFILE, max_size=3, unique_by=lambda profile: profile.name).map(tuple),
    scaling=SCALINGS,
    fallbacks=st.lists(ANYTHING, max_size=2).map(tuple),
    routing_profile=ANYTHING,
    slo=st.builds(Slo, st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1)),
    context_length=st.integers(0, 2**63 - 1),
    max_output=st.integers(0, 2**63 - 1),
    capabilities=st.builds(Capabilities, st.booleans(), st.booleans(), st.booleans()),
    limits=st.builds(Limits, *[st.integers(0, 2**63 - 1)] * 3),
    over_max_output=ANYTHING,
    timeouts=st.builds(Timeouts, *[st.integers(0, 2**63 - 1)] * 4),
)


@given(ANY_MODEL, SCALINGS)
def test_whatever_is_stored_can_be_scaled_and_is_otherwise_left_as_it_is(
    stored: ModelSpec, scaling: Scaling
) -> None:
    told = {"min": scaling.min, "max": scaling.max, "idle_timeout": scaling.idle_timeout}
    assert ModelSpec.load_edit(patched(stored, {"scaling": told}), stored) == replace(stored, scaling=scaling)


@given(ANY_MODEL)
def test_whatever_is_stored_can_be_stopped(stored: ModelSpec) -> None:
    off = patched(stored, {"scaling": {"min": 0, "max": 0}})
    assert ModelSpec.load_edit(off, stored).scaling == replace(stored.scaling, min=0, max=0)


@given(ANY_MODEL)
def test_what_the_law_has_against_a_stored_model_is_what_it_would_refuse(stored: ModelSpec) -> None:
    faults = stored.faults_today()
    if faults:
        with pytest.raises(CatalogError) as no:
            ModelSpec.load(stored.as_text_dict())
        assert no.value.faults == faults
    else:
        ModelSpec.load(stored.as_text_dict())


STRANGE = ModelSpec(
    "m", description="x" * 10_001, source="s", profiles=(ProfileSpec("p", "sim", "sim", args=("--port",)),)
)


@pytest.mark.parametrize(
    ("patch", "says"),
    [
        pytest.param({"scaling": {"max": -1}}, "scaling max -1 is below min 0", id="below the minimum"),
        pytest.param({"scaling": {"max": "many"}}, "scaling.max must be a whole number", id="no number"),
        pytest.param({"scaling": {"mx": 1}}, "unknown key", id="an unknown key"),
        pytest.param({"context_length": 1}, "description is longer", id="something else"),
        pytest.param({"context_length": "x", "scaling": {"max": 1}}, "must be a whole", id="a new fault"),
    ],
)
def test_what_is_wrong_with_an_edit_itself_is_refused(patch: dict[str, Any], says: str) -> None:
    with pytest.raises(CatalogError) as no:
        ModelSpec.load_edit(patched(STRANGE, patch), STRANGE)
    assert any(says in fault.sentence for fault in no.value.faults)


def test_scaling_that_is_wrong_already_stays_wrong() -> None:
    stored = replace(STRANGE, scaling=Scaling(0, 2**40))
    with pytest.raises(CatalogError, match=r"scaling.max is out of range"):
        ModelSpec.load_edit(patched(stored, {"scaling": {"min": 1}}), stored)
