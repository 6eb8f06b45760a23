"""The law of the catalog: the recorded vectors, every refusal as a sentence, and what always holds."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from catalog.differences import Difference, differences
from catalog.durations import HOUR, MILLISECOND, MINUTE, SECOND, format_duration, parse_duration
from catalog.names import Neighbours, faults_among, faults_of_removal
from catalog.owned import owner_of
from catalog.reading import CatalogError
from catalog.spec import ENGINES, Catalog, ModelSpec, ProfileSpec

VECTORS = [
    json.loads(line)
    for line in (Path(__file__).parent / "data/catalog.jsonl").read_text("utf-8").splitlines()
]
NUMBERED = list(enumerate(VECTORS, 1))
ACCEPTED = [pytest.param(vector, id=f"line {line}") for line, vector in NUMBERED if "error" not in vector]
REFUSED = [pytest.param(vector, id=f"line {line}") for line, vector in NUMBERED if "error" in vector]


def profile(**fields: Any) -> dict[str, Any]:
    return {"name": "gpu", "engine": "vllm", "gpu_class": "h100"} | fields


def model(**fields: Any) -> dict[str, Any]:
    return {"name": "m", "source": "org/m", "profiles": [profile()]} | fields


def first_fault(*models: Any) -> str:
    with pytest.raises(CatalogError) as refused:
        Catalog.load(list(models))
    assert str(refused.value) == str(refused.value.faults[0])
    return str(refused.value)


# --- the vectors ----------------------------------------------------------------------------------


def test_the_vectors_are_all_there() -> None:
    assert (len(ACCEPTED), len(REFUSED)) == (150, 138)


@pytest.mark.parametrize("vector", ACCEPTED)
def test_an_accepted_catalog_is_normalised_as_recorded(vector: dict[str, Any]) -> None:
    catalog = Catalog.load(vector["models"])
    assert [each.as_dict() for each in catalog.models] == vector["normalized"]
    assert [[p.fingerprint() for p in each.profiles] for each in catalog.models] == vector["fingerprints"]
    assert [each.on_demand for each in catalog.models] == vector["on_demand"]
    assert [each.simulated for each in catalog.models] == vector["simulated"]
    assert [[p.cpu_only for p in each.profiles] for each in catalog.models] == vector["cpu_only"]
    assert str(catalog) == vector["text"]


@pytest.mark.parametrize("vector", ACCEPTED)
def test_what_was_written_down_loads_as_it_was(vector: dict[str, Any]) -> None:
    models = Catalog.load(vector["models"]).models
    for written in (ModelSpec.as_dict, ModelSpec.as_text_dict):
        through_json = json.loads(json.dumps([written(each) for each in models]))
        assert Catalog.load(through_json).models == models


@pytest.mark.parametrize("vector", REFUSED)
def test_a_refused_catalog_is_refused_in_the_recorded_words(vector: dict[str, Any]) -> None:
    assert first_fault(*vector["models"]) == vector["error"]


# --- refusals -------------------------------------------------------------------------------------

REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown key": (model(scalling={}), 'model "m": unknown key "scalling"; did you mean scaling?'),
    "an unknown key of a profile": (
        model(profiles=[profile(gpuclass="h100")]),
        'model "m" profile "gpu": unknown key "gpuclass"; did you mean gpu_class?',
    ),
    "an unknown key inside scaling": (
        model(scaling={"replicas": 1}),
        'model "m": unknown key "replicas" in scaling; the keys are min, max, idle_timeout',
    ),
    "a name that is a number": (model(name=7), "model number 1: name must be a text, not a number"),
    "null": (
        model(description=None),
        'model "m": description must be a text, not null; leave the key out instead',
    ),
    "a bool for an int": (
        model(profiles=[profile(tp=True)]),
        'model "m" profile "gpu": tp must be a whole number, not true or false',
    ),
    "a fraction for an int": (
        model(profiles=[profile(tp=2.0)]),
        'model "m" profile "gpu": tp must be a whole number, not a decimal number',
    ),
    "an int for a bool": (
        model(capabilities={"tools": 1}),
        'model "m": capabilities.tools must be true or false, not a number',
    ),
    "a map for a list": (model(aliases={}), 'model "m": aliases must be a list of texts, not a map'),
    "a list for a map": (model(scaling=[]), 'model "m": scaling must be a map of fields, not a list'),
    "a profile that is a text": (
        model(profiles=["gpu"]),
        'model "m" profile number 1: it must be a map of fields, not a text',
    ),
    "a number among the arguments": (
        model(profiles=[profile(args=["--max-num-seqs", 8])]),
        'model "m" profile "gpu": args must be a list of texts, and one entry is a number',
    ),
    "an environment value that is a number": (
        model(profiles=[profile(env={"A": 1})]),
        'model "m" profile "gpu": env "A" must be a text, not a number; put it in quotes',
    ),
    "an environment name with =": (
        model(profiles=[profile(env={"A=B": ""})]),
        'model "m" profile "gpu": env has an entry "A=B"; a name cannot hold =',
    ),
    "a NUL": (model(description="a\0b"), 'model "m": description holds a NUL character; remove it'),
    "half a surrogate pair": (
        model(description="\ud800"),
        'model "m": description holds half of a surrogate pair, which is no text; remove it',
    ),
    "half a surrogate pair in a name": (
        model(name="\ud800"),
        'model "\\ud800": name holds half of a surrogate pair, which is no text; remove it',
    ),
    "a control character in a name": (
        model(name="a\x1bb"),
        'model "a\\x1bb": name "a\\x1bb" holds control or invisible characters; remove them',
    ),
    "an invisible character in an alias": (
        model(aliases=["a\u200b"]),
        'model "m": aliases "a\\u200b" holds control or invisible characters; remove them',
    ),
    "an outer space": (model(name="m "), 'model "m ": name "m " begins or ends with a space; remove it'),
    "a name that is too long": (
        model(aliases=["x" * 201]),
        'model "m": aliases is longer than 200 characters; shorten it',
    ),
    "an empty alias": (model(aliases=[""]), 'model "m": aliases holds an empty name; remove it'),
    "an unknown engine": (
        model(profiles=[profile(engine="vlm")]),
        'model "m" profile "gpu": engine "vlm" is not known; choose vllm, sglang, llamacpp or sim',
    ),
    "an unknown routing profile": (
        model(routing_profile="random"),
        (
            'model "m": routing_profile "random" is not known; choose prefix,'
            " least-loaded, round-robin, session,"
            " or leave it out"
        ),
    ),
    "a negative pp": (
        model(profiles=[profile(pp=-1)]),
        'model "m" profile "gpu": pp cannot be below 0, and is -1; use 0 for none',
    ),
    "a negative need of memory": (
        model(profiles=[profile(min_memory_gb=-1)]),
        'model "m" profile "gpu": min_memory_gb cannot be below 0, and is -1; use 0 for none',
    ),
    "a negative need of disk": (
        model(profiles=[profile(min_disk_gb=-1)]),
        'model "m" profile "gpu": min_disk_gb cannot be below 0, and is -1; use 0 for none',
    ),
    "a negative context": (
        model(context_length=-1),
        'model "m": context_length cannot be below 0, and is -1; use 0 for none',
    ),
    "a negative output": (
        model(max_output=-1),
        'model "m": max_output cannot be below 0, and is -1; use 0 for none',
    ),
    "a negative idle_timeout": (
        model(scaling={"idle_timeout": -1}),
        'model "m": scaling.idle_timeout cannot be below 0; leave it out, or give 0',
    ),
    "a duration that is none": (
        model(scaling={"idle_timeout": "soon"}),
        'model "m": scaling.idle_timeout must be a duration in h, m, s or ms, such as 1h30m, 1.5s or 300ms',
    ),
    "one promise under both of its names": (
        model(slo={"TTFTp99": 1, "ttft_p99": 1}),
        'model "m": slo gives both TTFTp99 and ttft_p99; keep one',
    ),
    "a weight that is not a number": (
        model(profiles=[profile(weight=math.nan)]),
        'model "m" profile "gpu": weight must be a finite number; give one of at most 1000',
    ),
    "an endless weight": (
        model(profiles=[profile(weight=math.inf)]),
        'model "m" profile "gpu": weight must be a finite number; give one of at most 1000',
    ),
    "a weight above the bound": (
        model(profiles=[profile(weight=1000.5)]),
        'model "m" profile "gpu": weight is above 1000; give a smaller number',
    ),
    "a number that no column holds": (
        model(profiles=[profile(priority=10**5000)]),
        'model "m" profile "gpu": priority is out of range; at most 2147483647 is possible',
    ),
    "an argument that llmgw owns": (
        model(profiles=[profile(args=["--port", "80"])]),
        'model "m" profile "gpu": argument "--port" is set by llmgw (chosen on the node); leave it out',
    ),
    "a secret under no name": (
        model(profiles=[profile(env={"HF_TOKEN": "secret:hf token"})]),
        (
            'model "m" profile "gpu": env "HF_TOKEN" begins with secret: and is no reference; write'
            " secret:NAME, the name of 1 to 64 letters, digits or _"
        ),
    ),
    "a fallback to itself": (
        model(fallbacks=["m"]),
        'model "m": fallback "m" is the model itself; name another model',
    ),
    "a fallback to its own alias": (
        model(aliases=["n"], fallbacks=["n"]),
        'model "m": fallback "n" is the model itself; name another model',
    ),
    "a limit below nothing": (
        model(limits={"concurrency": -1}),
        'model "m": limits.concurrency cannot be below 0, and is -1; use 0 for none',
    ),
    "a limit that is true": (
        model(limits={"requests_per_minute": True}),
        'model "m": limits.requests_per_minute must be a whole number, not true or false',
    ),
    "a limit beyond its column": (
        model(limits={"tokens_per_minute": 2**31}),
        'model "m": limits.tokens_per_minute is out of range; at most 2147483647 is possible',
    ),
    "a limit that there is not": (
        model(limits={"rpm": 1}),
        (
            'model "m": unknown key "rpm" in limits; the keys are requests_per_minute, tokens_per_minute,'
            " concurrency, over_max_output"
        ),
    ),
    "an unknown way with long answers": (
        model(limits={"over_max_output": "cut"}),
        'model "m": limits.over_max_output "cut" is not known; choose clamp or refuse, or leave it out',
    ),
    "limits in a list": (model(limits=[]), 'model "m": limits must be a map of fields, not a list'),
    "a time-out below nothing": (
        model(timeouts={"hold": "-1s"}),
        'model "m": timeouts.hold cannot be below 0; leave it out, or give 0',
    ),
    "a time-out of a decimal number": (
        model(timeouts={"connect": 1.5}),
        'model "m": timeouts.connect must be a duration such as 20m or 1.5s',
    ),
    "a time-out of more than a day": (
        model(timeouts={"first_byte": "24h1s"}),
        'model "m": timeouts.first_byte is longer than 24h; give a shorter one, as no client waits so long',
    ),
    "a time-out that there is not": (
        model(timeouts={"total": "1m"}),
        'model "m": unknown key "total" in timeouts; the keys are hold, connect, first_byte, idle',
    ),
}


@pytest.mark.parametrize(("raw", "sentence"), REFUSALS.values(), ids=REFUSALS.keys())
def test_a_model_is_refused_for(raw: dict[str, Any], sentence: str) -> None:
    assert first_fault(raw) == sentence


def test_a_catalog_must_be_a_list() -> None:
    with pytest.raises(CatalogError, match="the catalog must be a list of models"):
        Catalog.load({"models": []})


def test_all_faults_are_told_at_once_and_each_says_where() -> None:
    raw = [model(source="", profiles=[profile(), profile()]), model(aliases=["m"])]
    with pytest.raises(CatalogError) as refused:
        Catalog.load(raw)
    assert [(fault.model, fault.profile, fault.field, fault.code) for fault in refused.value.faults] == [
        ("m", "", "source", "required"),
        ("m", "gpu", "name", "duplicate"),
        ("m", "", "name", "duplicate"),
        ("m", "", "aliases", "duplicate"),
    ]


def test_a_field_that_cannot_be_read_earns_no_second_sentence() -> None:
    raw = model(name=1, source=2, profiles=3, scaling={"min": 5, "max": "x"})
    with pytest.raises(CatalogError) as refused:
        Catalog.load([raw])
    assert {fault.code for fault in refused.value.faults} == {"type"}


def test_one_model_alone_may_fall_back_to_one_it_does_not_know() -> None:
    assert ModelSpec.load(model(fallbacks=["elsewhere"])).fallbacks == ("elsewhere",)


def test_one_profile_alone_is_under_the_same_law() -> None:
    with pytest.raises(
        CatalogError, match=r'^model "m" profile "gpu": 1 nodes x 1 GPUs does not match TP 1 x PP 2$'
    ):
        ProfileSpec.load(profile(pp=2), model="m")
    with pytest.raises(CatalogError, match=r"^a profile has no name$"):
        ProfileSpec.load({"engine": "llamacpp"})


def test_neighbours_are_judged_by_their_names_alone() -> None:
    neighbours = Neighbours(names=frozenset({"a"}), aliases={"x": "a"})
    sentences = [
        [str(fault) for fault in faults_among([ModelSpec.load(raw)], neighbours)]
        for raw in (
            model(name="a"),
            model(name="x"),
            model(aliases=["a"]),
            model(aliases=["x"]),
            model(fallbacks=["x"]),
        )
    ]
    assert sentences == [
        ['model "a" is in the catalog already; edit it, or choose another name'],
        ['model "a": alias "x" collides with another model name'],
        ['model "m": alias "a" collides with another model name'],
        ['alias "x" is claimed by both "a" and "m"'],
        [],
    ]


def test_a_name_that_others_fall_back_to_cannot_go() -> None:
    assert [str(fault) for fault in faults_of_removal("m", [("a", "m"), ("b", "m-chat")])] == [
        'model "m" cannot be removed: model "a" falls back to it; change that model\'s fallbacks first',
        (
            'model "m": alias "m-chat" cannot be removed: model "b" falls back to it;'
            " change that model's fallbacks first"
        ),
    ]


# --- asking a catalog -----------------------------------------------------------------------------


def test_names_and_aliases_resolve() -> None:
    catalog = Catalog.load([model(name="b", aliases=["z", "y"]), model(name="a")])
    assert catalog.names == ["a", "b"]
    assert [each.name for each in catalog.models] == ["b", "a"]
    assert catalog.aliases_of("b") == catalog.aliases_of("y") == ["z", "y"]
    assert catalog.aliases_of("nobody") == []
    assert [found and found.name for found in map(catalog.resolve, ("a", "z", "nobody"))] == ["a", "b", None]


def test_a_fallback_cycle_is_allowed() -> None:
    assert Catalog.load([model(name="a", fallbacks=["b"]), model(name="b", fallbacks=["a"])]).names == [
        "a",
        "b",
    ]


def test_a_difference_names_only_what_differs() -> None:
    was = ProfileSpec.load(profile(env={"A": "1", "B": "2"}, args=["--x"]))
    now = ProfileSpec.load(profile(env={"A": "1", "B": "3", "C": "4"}, args=["--y"], priority=5))
    assert differences(was.as_dict(), now.as_dict()) == (
        Difference("args", ["--x"], ["--y"]),
        Difference("env", {"B": "2"}, {"B": "3", "C": "4"}),
        Difference("priority", None, 5),
    )
    assert differences(was.as_dict(), was.as_dict()) == ()


@pytest.mark.parametrize(
    ("engine", "argument", "is_owned"),
    [
        pytest.param("vllm", "--port", True, id="the option itself"),
        pytest.param("vllm", "--port=80", True, id="with its value"),
        pytest.param("vllm", "--served_model_name", True, id="underscores for dashes"),
        pytest.param("vllm", "-tp", True, id="the short form"),
        pytest.param("vllm", "-tp=8", True, id="the short form with its value"),
        pytest.param("vllm", "-r1", True, id="a value stuck to one letter"),
        pytest.param("vllm", "--tensor-par", True, id="an abbreviation"),
        pytest.param("vllm", "--max-model-len", False, id="the operator's own"),
        pytest.param("vllm", "--model-impl", False, id="longer than an owned one"),
        pytest.param("vllm", "--", False, id="dashes alone"),
        pytest.param("vllm", "--host-like value", False, id="an unknown option"),
        pytest.param("sglang", "--dist-init-addr", True, id="the rendezvous"),
        pytest.param("sglang", "--tp", True, id="sglang's tp"),
        pytest.param("llamacpp", "-m", True, id="llama.cpp's model"),
        pytest.param("llamacpp", "-hf", True, id="llama.cpp's own download"),
        pytest.param("llamacpp", "--ctx-size", False, id="llama.cpp's context"),
        pytest.param("llamacpp", "--mod", False, id="llama.cpp has no abbreviations"),
        pytest.param("sim", "--api-key", True, id="the sim's key"),
        pytest.param("sim", "", False, id="an empty text"),
    ],
)
def test_an_argument_is_owned(engine: str, argument: str, is_owned: bool) -> None:
    assert bool(owner_of(argument, engine)) is is_owned


@pytest.mark.parametrize(
    "argument",
    [
        "hf_" + "s" * 34,
        "--api-key=sk-" + "s" * 40,
        "--url=https://user:ssssssss@mirror/x",
        "llmgw_abcdefgh_" + "s" * 38,
    ],
)
def test_a_secret_among_the_arguments_is_refused_and_not_repeated(argument: str) -> None:
    told = first_fault(model(profiles=[profile(args=["--x", argument])]))
    assert told.startswith('model "m" profile "gpu": an argument looks like a secret')
    assert "ssss" not in told


# --- durations ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nanoseconds", "printed"),
    [
        ("0", 0, "0s"),
        ("20m", 20 * MINUTE, "20m"),
        ("90m", 90 * MINUTE, "1h30m"),
        ("1h30m", 90 * MINUTE, "1h30m"),
        ("1.5h", 90 * MINUTE, "1h30m"),
        ("1.5s", 1500 * MILLISECOND, "1.5s"),
        ("1500ms", 1500 * MILLISECOND, "1.5s"),
        ("300ms", 300 * MILLISECOND, "300ms"),
        ("1m0.3s", MINUTE + 300 * MILLISECOND, "1m300ms"),
        ("2h1s", 2 * HOUR + SECOND, "2h1s"),
        ("0.000001ms", 1, "0.000001ms"),
        (" 5s ", 5 * SECOND, "5s"),
        ("-1s", -SECOND, "-1s"),
    ],
)
def test_a_duration_has_one_way_to_be_printed(text: str, nanoseconds: int, printed: str) -> None:
    assert parse_duration(text) == nanoseconds
    assert format_duration(nanoseconds) == printed


@pytest.mark.parametrize(
    "value",
    [
        "",
        "s",
        "5",
        "1s1h",
        "1 s",
        "1d",
        "٣s",
        "1e3s",
        "0.0000001ms",
        "9999999999h",
        "1" * 5000,
        2**63,
        True,
        1.5,
    ],
)
def test_a_duration_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^(must be|is finer|is longer)"):
        parse_duration(value)


@given(st.integers(-(2**63) + 1, 2**63 - 1))
def test_every_duration_reads_back_exactly(nanoseconds: int) -> None:
    assert parse_duration(format_duration(nanoseconds)) == nanoseconds


# --- what always holds ----------------------------------------------------------------------------

NAMES = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=6)
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0-"), max_size=8)
PAIRS = st.dictionaries(NAMES, TEXTS, max_size=3)
PROFILES = st.fixed_dictionaries(
    {"name": NAMES, "engine": st.sampled_from(ENGINES), "gpu_class": NAMES, "tp": st.integers(-1, 8)},
    optional={
        "args": st.lists(TEXTS, max_size=3),
        "env": PAIRS,
        "node_selector": PAIRS,
        "weight": st.integers(-1, 1000) | st.floats(-1, 1000),
        "priority": st.integers(-(2**31) + 1, 2**31 - 1),
        "startup_timeout": st.integers(-1, 2**62),
        "min_disk_gb": st.integers(0, 2**31 - 1),
    },
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(), max_size=8), inner, max_size=3)
    ),
    max_leaves=12,
)
ALMOST_A_PROFILE = st.dictionaries(
    st.sampled_from(list(profile(tp=1, env=1, args=1, weight=1, startup_timeout=1))), JSON
)
ALMOST_A_MODEL = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(("name", "aliases", "source", "scaling", "slo", "fallbacks", "capabilities"), JSON)
    | {"profiles": st.lists(ALMOST_A_PROFILE | JSON, max_size=3) | JSON},
)


@given(PROFILES)
def test_loading_what_was_written_is_the_identity(raw: dict[str, Any]) -> None:
    loaded = ProfileSpec.load(raw)
    assert ProfileSpec.load(loaded.as_dict()) == loaded
    assert ProfileSpec.load(loaded.as_text_dict()) == loaded
    assert ProfileSpec.load(json.loads(json.dumps(loaded.as_dict()))).fingerprint() == loaded.fingerprint()


@given(PROFILES, st.randoms(use_true_random=False))
def test_the_order_of_keys_does_not_change_the_fingerprint(raw: dict[str, Any], random: Any) -> None:
    def shuffled(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        keys = list(value)
        random.shuffle(keys)
        return {key: shuffled(value[key]) for key in keys}

    assert ProfileSpec.load(shuffled(raw)).fingerprint() == ProfileSpec.load(raw).fingerprint()


@given(st.lists(ALMOST_A_MODEL, max_size=2) | JSON)
@example([{"name": "\ue000"}, {"name": "\ue000"}])
def test_whatever_comes_in_is_loaded_or_refused_in_words_that_can_be_shown(raw: Any) -> None:
    try:
        catalog = Catalog.load(raw)
    except CatalogError as refused:
        for fault in refused.faults:
            assert fault.sentence
            assert len(fault.sentence) < 1_000
            for text in (fault.sentence, fault.model, fault.profile, fault.field):
                assert text.encode("utf-8").decode("utf-8").isprintable()
    else:
        assert Catalog.load([each.as_dict() for each in catalog.models]).models == catalog.models
