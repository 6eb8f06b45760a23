"""What was found of an engine, held against what is claimed of it now, and the words for that.

A finding says what the engine does, whatever was claimed: so the verdict follows the catalog when that
changes, and a finding stays true of the profile and the engine that it was made of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from catalog.reading import shown
from nodes.checks.claims import CAPABILITIES, Claims

CHECKS: Mapping[str, str] = {
    "health": "health",
    "name": "model name",
    "chat": "chat",
    "stream": "streaming with usage",
    "stop": "stop text",
    "max_tokens": "max_tokens",
    "context": "context limit",
    "tools_auto": "tools, where the model chooses",
    "tools_required": "tools, where one is required",
    "tools_named": "tools, where one is named",
    "json_schema": "JSON schema",
    "vision": "vision",
    "embeddings": "embeddings",
    "cancel": "cancellation",
    "prefix": "prefix reuse",
}
"""All checks, in the order in which they are made."""

_OF_TALK = (
    "chat", "stream", "stop", "max_tokens", "context", "tools_auto", "tools_required", "tools_named",
    "json_schema", "vision", "cancel", "prefix",
)  # fmt: skip
SAYS_LIMIT = 500
HOUR_S, DAY_S = 3600, 86_400


@dataclass(frozen=True, slots=True)
class Finding:
    """works: None where it cannot be told. says: why, in a few words that begin with "it"."""

    check: str
    works: bool | None
    says: str

    def as_dict(self) -> dict[str, Any]:
        return {"check": self.check, "works": self.works, "says": shown(self.says, SAYS_LIMIT)}


class Verdict(StrEnum):
    VERIFIED = "verified"
    FAILED = "claimed, failed"
    BONUS = "not claimed, works"
    ABSENT = "not claimed"
    UNCLEAR = "could not be told"
    NEVER = "never checked"
    NOT_APPLICABLE = "not applicable"


def is_claimed(check: str, claims: Claims) -> bool | None:
    """None: it does not apply. What only embeds has no talk to be judged."""
    if claims.embeddings and check in _OF_TALK:
        return None
    if check.startswith("tools"):
        return claims.tools
    return {"vision": claims.vision, "embeddings": claims.embeddings, "prefix": claims.is_caching}.get(
        check, True
    )


def verdict_of(finding: Finding | None, claimed: bool | None) -> Verdict:
    if claimed is None:
        return Verdict.NOT_APPLICABLE
    if finding is None:
        return Verdict.NEVER if claimed else Verdict.ABSENT
    if finding.works is None:
        return Verdict.UNCLEAR if claimed else Verdict.ABSENT
    if claimed:
        return Verdict.VERIFIED if finding.works else Verdict.FAILED
    return Verdict.BONUS if finding.works else Verdict.ABSENT


# --- the words ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verified:
    """A check as it was made. is_older: of a profile that is not as it was then. engine: with its version."""

    findings: Mapping[str, Finding]
    age_s: float
    engine: str
    is_older: bool = False


@dataclass(frozen=True, slots=True)
class Badge:
    """about: what is judged, in a word or two. says: the badge whole."""

    about: str
    verdict: Verdict
    says: str
    is_older: bool = False


def badges(found: Verified | None, claims: Claims) -> tuple[Badge, ...]:
    """What of an engine is worth a badge: what every engine should do as one, unless parts of it fail, and
    each capability that is claimed, or there."""
    groups: dict[str, list[str]] = {"engine": [], **{each: [] for each in CAPABILITIES}}
    for check in CHECKS:
        groups[_group(check)].append(check)
    told: list[Badge] = []
    for about, checks in groups.items():
        verdicts = {
            check: verdict_of(found.findings.get(check) if found else None, is_claimed(check, claims))
            for check in checks
        }
        failed = [check for check in checks if verdicts[check] is Verdict.FAILED]
        if failed and about == "engine":
            told += [_badge(CHECKS[check], Verdict.FAILED, found) for check in failed]
        elif failed:
            told.append(_badge(about, Verdict.FAILED, found))
        else:
            verdict = _together(list(verdicts.values()))
            if verdict not in (Verdict.ABSENT, Verdict.NOT_APPLICABLE):
                told.append(_badge(about, verdict, found))
    return tuple(told)


def _group(check: str) -> str:
    head = check.partition("_")[0]
    return head if head in CAPABILITIES else "engine"


def _together(verdicts: Sequence[Verdict]) -> Verdict:
    """Of checks of which none has failed. What could not be told of some takes nothing from the others."""
    for each in (Verdict.VERIFIED, Verdict.UNCLEAR, Verdict.BONUS, Verdict.NEVER, Verdict.ABSENT):
        if each in verdicts:
            return each
    return Verdict.NOT_APPLICABLE


def _ago(age_s: float) -> str:
    """Coarse: a badge that changes every second tells nothing new."""
    if age_s < HOUR_S:
        return "less than an hour ago"
    count, unit = (age_s // HOUR_S, "hour") if age_s < 2 * DAY_S else (age_s // DAY_S, "day")
    return f"{count:.0f} {unit}{'' if count == 1 else 's'} ago"


def _badge(about: str, verdict: Verdict, found: Verified | None) -> Badge:
    is_older = found is not None and found.is_older
    says = f"{about}: {verdict}"
    if found is not None and verdict is not Verdict.NEVER:
        says += " on an older profile," if is_older else ""
        says += f" {_ago(found.age_s)}"
        says += f" on {found.engine}" if found.engine and not is_older else ""
    return Badge(about, verdict, says, is_older)
