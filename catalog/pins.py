"""What a hub says now, beside the commit that launches are pinned to.

A branch that moved on is a warning: what runs and what will start keep to the pinned commit until a person
pins another. A pinned commit that is gone from the hub is a refusal: nothing could be downloaded any more.
"""

import shlex
from collections.abc import Sequence

from catalog.reading import quote, shown
from catalog.source import Answer, Finding, HubFacts, HubSource, about, judge_hub
from catalog.spec import ModelSpec

_SHOWN_DIGITS = 12
_GONE = (Answer.NO_REVISION, Answer.NOT_FOUND)  # a mirror without codes says the latter of a commit, too


def is_elsewhere(newest: HubFacts, pinned: str) -> bool:
    """Only the pinned commit's own facts can tell whether it is still there."""
    if not pinned:
        return False
    if newest.answer is Answer.FOUND:
        return newest.commit not in ("", pinned)
    return newest.answer is Answer.NO_REVISION


def judge_pinned(
    model: ModelSpec, source: HubSource, pinned: str, newest: HubFacts, kept: HubFacts
) -> Finding:
    """The finding where `newest`, asked of the source, is not at the commit `pinned`, of which `kept` tells.

    Its facts are those of the pinned commit; `newest_commit` is where the source has moved on to.
    """
    on = about(model, source)
    now = judge_hub(model, source, newest)
    old, new = pinned[:_SHOWN_DIGITS], newest.commit[:_SHOWN_DIGITS]
    step = f"manage.py model_check {shlex.quote(shown(model.name))} --pin"
    if newest.answer is not Answer.FOUND:
        if kept.answer is not Answer.FOUND:
            return now
        says = f"no longer has a revision {quote(source.revision or 'main')}; launches keep to commit {old}"
        gone = Finding("warn", "branch_gone", f"{on} {says}, which is still there; name one that it has")
        return _beside(gone, judge_hub(model, source, kept))
    moved_to = {"newest_commit": newest.commit}
    if kept.answer in _GONE:
        says = f"no longer has commit {old}, which launches are pinned to, and is at {new} now"
        return Finding("refuse", "commit_gone", f"{on} {says}; pin that one with {step}", moved_to)
    says = f"has moved on from commit {old}, which launches are pinned to, to {new}"
    moved = Finding("warn", "moved_on", f"{on} {says}; pin the new one with {step}", moved_to)
    if kept.answer is not Answer.FOUND:
        return moved
    then = judge_hub(model, source, kept)
    # What is wrong with the new commit matters to who would pin it, and to nothing that is pinned now.
    is_news = now.level != "ok" and now.sentence != then.sentence
    return _beside(moved, then, [f"at commit {new}: {now.sentence}"] if is_news else [])


def _beside(seen: Finding, then: Finding, later: Sequence[str] = ()) -> Finding:
    """The worse of what was seen and of what the pinned commit's own facts say, with those facts."""
    told, other = (then, seen) if then.is_refused else (seen, then)
    also = [other.sentence] if other.level != "ok" else []
    also += [*then.facts.get("also", ()), *later]
    facts = {**then.facts, **seen.facts} | ({"also": also} if also else {})
    return Finding(told.level, told.code, told.sentence, facts)
