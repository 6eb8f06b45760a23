"""What is said where a source is no longer at the commit that launches are pinned to."""

from __future__ import annotations

from typing import Any

import pytest

from catalog.pins import is_elsewhere, judge_pinned
from catalog.source import Answer, Finding, HubFacts, HubFile, HubSource
from catalog.spec import ModelSpec

HUB = "https://hub.example"
OLD, NEW = "a" * 40, "b" * 40
SOURCE = HubSource("org/m", "v2")
MODEL = ModelSpec.load(
    {
        "name": "my model",
        "source": str(SOURCE),
        "profiles": [{"name": "p", "engine": "vllm", "gpu_class": "any"}],
    }
)
ON = 'model "my model": source "org/m@v2"'
PIN = "manage.py model_check 'my model' --pin"


def at(commit: str, *names: str, **fields: Any) -> HubFacts:
    files = tuple(HubFile(name, 1_000_000_000) for name in names or ("a.safetensors",))
    return HubFacts(Answer.FOUND, HUB, **{"repo": "org/m", "commit": commit, "files": files} | fields)


def no(answer: Answer) -> HubFacts:
    return HubFacts(answer, HUB, cause="no answer in time" if answer is Answer.UNREACHABLE else "")


@pytest.mark.parametrize(
    ("newest", "pinned", "is_so"),
    [
        pytest.param(at(NEW), OLD, True, id="at another commit"),
        pytest.param(at(OLD), OLD, False, id="at the pinned commit"),
        pytest.param(at(NEW), "", False, id="nothing is pinned"),
        pytest.param(at(""), OLD, False, id="a mirror that tells no commit"),
        pytest.param(no(Answer.NO_REVISION), OLD, True, id="the branch is gone"),
        pytest.param(no(Answer.NO_REVISION), "", False, id="the branch is gone, and nothing is pinned"),
        pytest.param(no(Answer.NOT_FOUND), OLD, False, id="the repository is gone"),
        pytest.param(no(Answer.UNREACHABLE), OLD, False, id="no answer"),
    ],
)
def test_the_pinned_commit_is_asked_about_where_the_source_is_elsewhere(
    newest: HubFacts, pinned: str, is_so: bool
) -> None:
    assert is_elsewhere(newest, pinned) is is_so


MOVED = (
    f"{ON} has moved on from commit {OLD[:12]}, which launches are pinned to, to {NEW[:12]};"
    f" pin the new one with {PIN}"
)


@pytest.mark.parametrize(
    ("newest", "kept", "level", "code", "sentence"),
    [
        pytest.param(at(NEW), at(OLD), "warn", "moved_on", MOVED, id="the branch moved on"),
        pytest.param(
            at(NEW), no(Answer.UNREACHABLE), "warn", "moved_on", MOVED, id="moved on, and then no answer"
        ),
        pytest.param(
            at(NEW),
            no(Answer.NO_REVISION),
            "refuse",
            "commit_gone",
            f"{ON} no longer has commit {OLD[:12]}, which launches are pinned to, and is at"
            f" {NEW[:12]} now; pin that one with {PIN}",
            id="history was rewritten",
        ),
        pytest.param(
            no(Answer.NO_REVISION),
            at(OLD),
            "warn",
            "branch_gone",
            f'{ON} no longer has a revision "v2"; launches keep to commit {OLD[:12]}, which is still'
            " there; name one that it has",
            id="the branch is gone, its commit is not",
        ),
        pytest.param(
            no(Answer.NO_REVISION),
            no(Answer.NO_REVISION),
            "refuse",
            "no_revision",
            f'{ON}: the repository has no revision "v2"; give a branch, tag or commit that it has',
            id="the branch and its commit are gone",
        ),
        pytest.param(
            at(NEW),
            at(OLD, "README.md"),
            "refuse",
            "no_weights",
            f"{ON} holds no weights; give one that has some (safetensors, or GGUF for llamacpp)",
            id="what is pinned cannot be run",
        ),
    ],
)
def test_beside_what_is_pinned_a_source_is(
    newest: HubFacts, kept: HubFacts, level: str, code: str, sentence: str
) -> None:
    finding = judge_pinned(MODEL, SOURCE, OLD, newest, kept)
    assert (finding.level, finding.code, finding.sentence) == (level, code, sentence)


def moved(newest: HubFacts, kept: HubFacts) -> Finding:
    return judge_pinned(MODEL, SOURCE, OLD, newest, kept)


def test_the_facts_are_those_of_what_launches_are_pinned_to() -> None:
    finding = moved(at(NEW, "a.safetensors", "b.safetensors"), at(OLD))
    assert (finding.facts["commit"], finding.facts["bytes"]) == (OLD, 1_000_000_000)
    assert finding.facts["newest_commit"] == NEW
    assert "commit" not in moved(at(NEW), no(Answer.UNREACHABLE)).facts


def test_what_is_wrong_with_the_new_commit_alone_is_told_beside_and_refuses_nothing() -> None:
    finding = moved(at(NEW, "README.md"), at(OLD))
    assert (finding.level, finding.code) == ("warn", "moved_on")
    (also,) = finding.facts["also"]
    assert also.startswith(f"at commit {NEW[:12]}: {ON} holds no weights; give one")


def test_what_both_commits_say_is_told_once() -> None:
    finding = moved(at(NEW, repo="new/m", may_read=None), at(OLD, repo="new/m", may_read=None))
    assert finding.code == "moved_on"
    also = finding.facts["also"]
    assert len(also) == len(set(also)) == 2
    assert "is gated" in also[0]
    assert 'is called "new/m" now' in also[1]
