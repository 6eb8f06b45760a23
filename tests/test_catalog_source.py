"""What a source may look like, and the sentence for everything that a hub or a node may say of it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from catalog.source import (
    Answer,
    Finding,
    HubFacts,
    HubFile,
    HubSource,
    PathFacts,
    PathSource,
    SourceError,
    judge_hub,
    judge_offline,
    judge_paths,
    judge_text,
    parse_source,
    still_says,
)
from catalog.spec import ModelSpec
from catalog.weights import choose_weights

HUB = "https://hub.example"


def model(*engines: str, source: str = "org/m") -> ModelSpec:
    profiles = [{"name": engine, "engine": engine, "gpu_class": "any"} for engine in engines or ("vllm",)]
    return ModelSpec.load({"name": "m", "source": source, "profiles": profiles})


def found(*names: str, **fields: Any) -> HubFacts:
    files = tuple(HubFile(name, 1_000_000_000) for name in names)
    return HubFacts(Answer.FOUND, HUB, repo="org/m", commit="a" * 40, files=files, **fields)


def judged(facts: HubFacts, *engines: str, source: str = "org/m") -> Finding:
    parsed = parse_source(source)
    assert isinstance(parsed, HubSource)
    return judge_hub(model(*engines, source=source), parsed, facts)


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("org/name", HubSource("org/name")),
        ("org/name@v1.0", HubSource("org/name", "v1.0")),
        ("org/name@refs/pr/7:sub/*.gguf", HubSource("org/name", "refs/pr/7", "sub/*.gguf")),
        ("a/b:x@y.gguf", HubSource("a/b", "", "x@y.gguf")),
        ("/models/q.gguf", PathSource("/models/q.gguf")),
        ("/models/with space:and@more", PathSource("/models/with space:and@more")),
    ],
)
def test_a_source_is_read_and_written_the_same(text: str, source: HubSource | PathSource) -> None:
    assert parse_source(text) == source
    assert str(source) == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param("name", "is neither a Hugging Face id", id="no organisation"),
        pytest.param("./models/q.gguf", "is neither a Hugging Face id", id="a path that is not absolute"),
        pytest.param("a/b/c", "is neither a Hugging Face id", id="three parts"),
        pytest.param("org/na me", "is neither a Hugging Face id", id="a space"),
        pytest.param("https://huggingface.co/org/name", "write org/name$", id="an address"),
        pytest.param("https://hub.example/org/name/tree/main", "write org/name$", id="a page of a mirror"),
        pytest.param("https://example.org/name", "is neither a Hugging Face id", id="another address"),
        pytest.param("", "is neither a Hugging Face id", id="nothing"),
        pytest.param("org/a--b", "is no name a hub can have", id="two dashes"),
        pytest.param("org/" + "x" * 96, "is no name a hub can have", id="too long"),
        pytest.param("org/name@", "no usable revision", id="an empty revision"),
        pytest.param("org/name@a b", "no usable revision", id="a space in the revision"),
        pytest.param("org/name@a..b", "no usable revision", id="dots in the revision"),
        pytest.param("org/name:", "no usable file", id="an empty file"),
        pytest.param("org/name:../x", "no usable file", id="a file outside the repository"),
        pytest.param("/models/../etc", "has .. in it", id="a path that climbs"),
    ],
)
def test_a_source_is_refused(text: str, says: str) -> None:
    with pytest.raises(SourceError, match=says):
        parse_source(text)


@given(st.text())
def test_any_text_is_a_source_or_a_sentence(text: str) -> None:
    try:
        source = parse_source(text)
    except SourceError as refused:
        sentence = str(refused)
    else:
        sentence = "read"
        assert str(source) == text
    assert sentence.isprintable()
    assert len(sentence) < 250


def test_a_model_that_only_simulates_needs_no_check() -> None:
    assert judge_text(model("sim")) == Finding(
        "ok", "simulated", 'model "m": every profile is simulated; no weights are read'
    )


def test_a_malformed_source_is_refused_in_the_models_name() -> None:
    finding = judge_text(model(source="nowhere"))
    assert isinstance(finding, Finding)
    assert (finding.level, finding.code) == ("refuse", "malformed")
    assert finding.sentence.startswith('model "m": source "nowhere" is neither')


# --- a hub ----------------------------------------------------------------------------------------

WITH_TOKEN = "the token in HF_TOKEN"
WITHOUT_TOKEN = "no token, as HF_TOKEN is not set"
UNANSWERED = {
    "no such repository": (
        HubFacts(Answer.NOT_FOUND, HUB),
        f'model "m": source "org/m@v2": {HUB} has no repository "org/m"; check the spelling',
    ),
    "missing or private, asked as nobody": (
        HubFacts(Answer.NOT_FOUND_OR_PRIVATE, HUB),
        (
            f'model "m": source "org/m@v2" is not found or private (asked with {WITHOUT_TOKEN});'
            " check the spelling, or set HF_TOKEN to one that may read it"
        ),
    ),
    "missing or private, asked with a token": (
        HubFacts(Answer.NOT_FOUND_OR_PRIVATE, HUB, has_token=True),
        (
            f'model "m": source "org/m@v2" is not found or private (asked with {WITH_TOKEN});'
            " check the spelling, or give that token access"
        ),
    ),
    "no such revision": (
        HubFacts(Answer.NO_REVISION, HUB),
        (
            'model "m": source "org/m@v2": the repository has no revision "v2";'
            " give a branch, tag or commit that it has"
        ),
    ),
    "gated, asked as nobody": (
        HubFacts(Answer.GATED, HUB),
        (
            f'model "m": source "org/m@v2" is gated (asked with {WITHOUT_TOKEN}); accept'
            f" its licence at {HUB}/org/m,"
            " then set HF_TOKEN to a token of that account"
        ),
    ),
    "gated, asked with a token": (
        HubFacts(Answer.GATED, HUB, has_token=True),
        (
            f'model "m": source "org/m@v2" is gated (asked with {WITH_TOKEN}); accept its'
            f" licence at {HUB}/org/m,"
            " then ask again"
        ),
    ),
    "a token that is none": (
        HubFacts(Answer.BAD_TOKEN, HUB, has_token=True),
        f'model "m": source "org/m@v2": {HUB} refuses the token in HF_TOKEN; set a valid one, or none',
    ),
    "a token without the right": (
        HubFacts(Answer.FORBIDDEN, HUB, has_token=True),
        (
            f'model "m": source "org/m@v2" may not be read (asked with {WITH_TOKEN});'
            " set HF_TOKEN to a token that may"
        ),
    ),
    "a repository that the hub has disabled": (
        HubFacts(Answer.DISABLED, HUB),
        f'model "m": source "org/m@v2": {HUB} has disabled "org/m" for everybody; choose another',
    ),
    "no way to the hub": (
        HubFacts(Answer.UNREACHABLE, HUB, cause="no answer in time"),
        (
            f'model "m": source "org/m@v2": could not ask the hub at {HUB}: no answer in time;'
            " check that address and the way to it, or save the model unchecked"
        ),
    ),
}


@pytest.mark.parametrize(("facts", "sentence"), UNANSWERED.values(), ids=UNANSWERED.keys())
def test_a_hub_without_an_answer_refuses(facts: HubFacts, sentence: str) -> None:
    finding = judged(facts, source="org/m@v2")
    assert (finding.level, finding.code, finding.sentence) == ("refuse", facts.answer.value, sentence)


def test_every_answer_has_its_sentence() -> None:
    assert {facts.answer for facts, _ in UNANSWERED.values()} == set(Answer) - {Answer.FOUND}


def test_a_good_check_says_what_was_found_and_records_it() -> None:
    facts = found(
        *("config.json", "a.safetensors", "b.safetensors"),
        pipeline_tag="text-generation",
        architecture="LlamaForCausalLM",
        context_length=8192,
        attention_heads=32,
        is_gated=True,
    )
    finding = judged(facts)
    assert finding.level == "ok"
    assert finding.sentence == f'model "m": source "org/m" found at commit {"a" * 12}, 2.0 GB in 2 files'
    assert finding.facts == {
        "repo": "org/m",
        "commit": "a" * 40,
        "bytes": 2_000_000_000,
        "files": ["a.safetensors", "b.safetensors"],
        "file_count": 2,
        "pipeline_tag": "text-generation",
        "architecture": "LlamaForCausalLM",
        "context_length": 8192,
        "attention_heads": 32,
        "gated": True,
    }


def test_offline_nobody_is_asked_and_that_is_said() -> None:
    finding = judge_offline(model(), HubSource("org/m", "v2"))
    assert (finding.level, finding.code, finding.is_answered) == ("warn", "offline", False)
    assert finding.sentence == (
        'model "m": source "org/m@v2" was not looked up, as llmgw is offline (LLMGW_OFFLINE);'
        " nodes must hold its weights already"
    )


@pytest.mark.parametrize(
    ("finding", "is_answered"),
    [
        pytest.param(judged(found("a.safetensors")), True, id="found"),
        pytest.param(judged(HubFacts(Answer.NOT_FOUND, HUB)), True, id="missing"),
        pytest.param(judged(HubFacts(Answer.UNREACHABLE, HUB, cause="x")), False, id="unreachable"),
        pytest.param(judge_paths(model(), PathSource("/m"), []), False, id="no node to ask"),
        pytest.param(judge_paths(model(), PathSource("/m"), [PathFacts("a", False)]), True, id="no node"),
    ],
)
def test_what_nobody_answered_is_told_from_a_no(finding: Finding, is_answered: bool) -> None:
    assert finding.is_answered is is_answered


@pytest.mark.parametrize(
    ("finding", "why"),
    [
        pytest.param(
            judged(HubFacts(Answer.UNREACHABLE, HUB, cause="no answer in time")),
            f"{HUB}: no answer in time",
            id="unreachable",
        ),
        pytest.param(
            judge_offline(model(), HubSource("org/m")), "llmgw is offline (LLMGW_OFFLINE)", id="offline"
        ),
        pytest.param(
            judge_paths(model(), PathSource("/m"), [PathFacts("a", None)]),
            "a told nothing",
            id="no node tells",
        ),
    ],
)
def test_without_an_answer_the_last_sentence_stands_and_says_why(finding: Finding, why: str) -> None:
    assert still_says("It was found", finding) == f"It was found; it could not be asked again since: {why}"


def test_an_unknown_size_is_not_recorded_as_a_small_one() -> None:
    facts = HubFacts(
        Answer.FOUND, HUB, repo="org/m", files=(HubFile("a.safetensors"), HubFile("b.safetensors", 5))
    )
    assert "bytes" not in judged(facts).facts


def test_a_renamed_repository_is_told_with_its_new_id() -> None:
    facts = HubFacts(Answer.FOUND, HUB, repo="new/m", files=(HubFile("a.safetensors", 1),))
    finding = judged(facts)
    assert (finding.level, finding.code) == ("warn", "renamed")
    assert 'is called "new/m" now' in finding.sentence


def test_a_gated_repository_that_may_or_may_not_be_read_is_told() -> None:
    finding = judged(found("a.safetensors", is_gated=True, may_read=None))
    assert (finding.level, finding.code) == ("warn", "gated_unknown")
    assert judged(found("a.safetensors", is_gated=True)).level == "ok"


def test_of_two_findings_the_worse_is_told_and_the_other_kept() -> None:
    facts = HubFacts(Answer.FOUND, HUB, repo="new/m", files=(HubFile("README.md", 1),))
    finding = judged(facts)
    assert finding.code == "no_weights"
    assert len(finding.facts["also"]) == 1
    assert "new/m" in finding.facts["also"][0]


SHARDS = ("q-00001-of-00002.gguf", "q-00002-of-00002.gguf")
QUANTS = ("q4/m-q4-00001-of-00002.gguf", "q4/m-q4-00002-of-00002.gguf", "q8/m-q8.gguf")


@pytest.mark.parametrize(
    ("engines", "files", "selector", "level", "code", "chosen"),
    [
        pytest.param(
            ("vllm",), ("a.safetensors", "b.gguf"), "", "ok", "", ("a.safetensors",), id="safetensors"
        ),
        pytest.param(("sglang",), ("q.gguf",), "", "warn", "gguf", ("q.gguf",), id="GGUF for sglang"),
        pytest.param(
            ("vllm",), ("pytorch_model.bin",), "", "refuse", "pickle", ("pytorch_model.bin",), id="pickle"
        ),
        pytest.param(("vllm",), ("README.md",), "", "refuse", "no_weights", (), id="no weights"),
        pytest.param(
            ("llamacpp",), ("README.md",), "", "refuse", "no_weights", (), id="no weights for llamacpp"
        ),
        pytest.param(
            ("llamacpp",), ("a.safetensors",), "", "refuse", "no_gguf", (), id="no GGUF for llamacpp"
        ),
        pytest.param(("llamacpp",), ("q.gguf",), "", "ok", "", ("q.gguf",), id="one GGUF"),
        pytest.param(
            ("llamacpp",), ("q.gguf", "mmproj-q.gguf"), "", "ok", "", ("q.gguf",), id="a projector beside"
        ),
        pytest.param(("llamacpp",), SHARDS, "", "ok", "", SHARDS, id="one GGUF in shards"),
        pytest.param(("llamacpp",), ("a.gguf", "b.gguf"), "", "refuse", "many_ggufs", (), id="several GGUF"),
        pytest.param(("llamacpp",), ("a.gguf", "b.gguf"), "b.gguf", "ok", "", ("b.gguf",), id="one chosen"),
        pytest.param(
            ("llamacpp",), ("a/x.gguf", "b/x.gguf"), "b/*", "ok", "", ("b/x.gguf",), id="chosen by a glob"
        ),
        pytest.param(
            ("llamacpp",), ("a.gguf", "b.gguf"), "*.gguf", "refuse", "many_ggufs", (), id="a loose glob"
        ),
        pytest.param(("llamacpp",), (*SHARDS, "r.gguf"), SHARDS[1], "ok", "", SHARDS, id="one shard for all"),
        pytest.param(
            ("llamacpp",), QUANTS, "*00001-of-*", "ok", "", QUANTS[:2], id="shards in a folder, by a glob"
        ),
        pytest.param(("llamacpp",), QUANTS, "*q8*", "ok", "", QUANTS[2:], id="the one beside the shards"),
        pytest.param(("llamacpp",), QUANTS, "", "refuse", "many_ggufs", (), id="shards count as one"),
        pytest.param(("llamacpp",), SHARDS[:1], "", "refuse", "no_shard", (), id="a shard is missing"),
        pytest.param(
            ("llamacpp",), ("mmproj-q.gguf",), "", "refuse", "no_gguf", (), id="nothing but a projector"
        ),
        pytest.param(
            ("llamacpp",), ("a[1].gguf", "b.gguf"), "a[1].gguf", "ok", "", ("a[1].gguf",), id="brackets in it"
        ),
        pytest.param(
            ("vllm",), ("a.safetensors", "q.gguf"), "q.gguf", "warn", "gguf", ("q.gguf",), id="GGUF chosen"
        ),
        pytest.param(("llamacpp",), ("a.gguf",), "c.gguf", "refuse", "no_file", (), id="no such file"),
        pytest.param(
            ("vllm", "llamacpp"),
            ("a.safetensors",),
            "",
            "refuse",
            "no_gguf",
            ("a.safetensors",),
            id="the worst counts",
        ),
        pytest.param(
            ("vllm", "llamacpp"),
            ("a.safetensors", "q.gguf"),
            "",
            "ok",
            "",
            ("a.safetensors", "q.gguf"),
            id="both",
        ),
    ],
)
def test_the_weights_fit_the_engines(
    engines: tuple[str, ...],
    files: tuple[str, ...],
    selector: str,
    level: str,
    code: str,
    chosen: tuple[str, ...],
) -> None:
    choice = choose_weights(engines, files, selector)
    assert (choice.level, choice.code, choice.files) == (level, code, chosen)


def test_several_gguf_files_are_listed_a_few_of_them() -> None:
    finding = judged(found(*(f"q{number}.gguf" for number in range(7))), "llamacpp")
    assert finding.sentence == (
        'model "m": source "org/m" holds 7 GGUF models; choose one by its file name, as in'
        " org/name:file.gguf,"
        " from q0.gguf, q1.gguf, q2.gguf, q3.gguf, q4.gguf, ..."
    )


def test_missing_shards_are_listed() -> None:
    assert judged(found("q-00001-of-00003.gguf"), "llamacpp").sentence == (
        'model "m": source "org/m" holds a GGUF model that lacks 2 of its shards'
        " (q-00002-of-00003.gguf, q-00003-of-00003.gguf); bring them there, or choose another"
    )


def test_a_file_name_of_a_strange_repository_is_shown_harmlessly() -> None:
    finding = judged(found("a{names}.gguf", "b\x1b[31m.gguf"), "llamacpp")
    assert finding.sentence.endswith(r"from a{names}.gguf, b\x1b[31m.gguf")


# --- nodes ----------------------------------------------------------------------------------------

PATH = PathSource("/models/q.gguf")


def here(node: str, **fields: Any) -> PathFacts:
    usual: dict[str, Any] = {"kind": "file", "size_bytes": 5, "files": ("q.gguf",)}
    return PathFacts(node, True, **usual | fields)


PATHS = {
    "on every node": (
        [here("a"), here("b")],
        ("ok", "found", 'model "m": source "/models/q.gguf" found on a, b'),
    ),
    "on no node": (
        [PathFacts("a", False), PathFacts("b", False, reason="outside the allowed folders")],
        (
            "refuse",
            "path_missing",
            (
                'model "m": source "/models/q.gguf" is not on any of 2 nodes (a, b'
                " (outside the allowed folders));"
                " copy the weights there, or correct the path"
            ),
        ),
    ),
    "not on the only node": (
        [PathFacts("a", False)],
        (
            "refuse",
            "path_missing",
            (
                'model "m": source "/models/q.gguf" is not on the node a; copy the weights'
                " there, or correct the path"
            ),
        ),
    ),
    "on some nodes": (
        [here("a"), PathFacts("b", False), PathFacts("c", None)],
        (
            "warn",
            "path_partly",
            (
                'model "m": source "/models/q.gguf" is on a and not on b; copy it there if'
                " they shall run it, too"
            ),
        ),
    ),
    "no node yet": (
        [],
        (
            "warn",
            "path_unasked",
            (
                'model "m": source "/models/q.gguf" could not be checked: no node that'
                " could run it is there yet;"
                " check again later"
            ),
        ),
    ),
    "no node answers": (
        [PathFacts("a", None)],
        (
            "warn",
            "path_unasked",
            'model "m": source "/models/q.gguf" could not be checked: a told nothing; check again later',
        ),
    ),
    "a folder without weights": (
        [here("a", kind="directory", files=())],
        (
            "refuse",
            "no_weights",
            (
                'model "m": source "/models/q.gguf" on node "a" holds no weights;'
                " give one that has some (safetensors, or GGUF for llamacpp)"
            ),
        ),
    ),
    "a file whose name alone is known": (
        [here("a", files=())],
        ("ok", "found", 'model "m": source "/models/q.gguf" found on a'),
    ),
}


@pytest.mark.parametrize(("facts", "expected"), PATHS.values(), ids=PATHS.keys())
def test_a_path_is(facts: list[PathFacts], expected: tuple[str, str, str]) -> None:
    finding = judge_paths(model("llamacpp", source=PATH.path), PATH, facts)
    assert (finding.level, finding.code, finding.sentence) == expected


def test_one_shard_by_its_path_says_nothing_of_those_beside_it() -> None:
    shard = "q-00001-of-00002.gguf"
    finding = judge_paths(
        model("llamacpp", source=f"/models/{shard}"),
        PathSource(f"/models/{shard}"),
        [here("a", files=(shard,))],
    )
    assert (finding.level, finding.facts["files"]) == ("ok", [shard])


def test_a_path_in_the_wrong_form_warns_the_engine_that_cannot_read_it() -> None:
    finding = judge_paths(model("vllm", source=PATH.path), PATH, [here("a")])
    assert (finding.level, finding.code) == ("warn", "gguf")
