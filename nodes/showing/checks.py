"""What engine checks found, as every door shows it: held against what is claimed now, and told as older where
the profile is not as it was then."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from django.db.models import QuerySet

from nodes.checks import CHECKS, Badge, Claims, Finding, Verified, badges, claims_of, is_claimed, verdict_of
from nodes.models import EngineCheck, Replica
from nodes.showing.ages import seconds, with_age
from nodes.stale import launch_from


@dataclass(frozen=True, slots=True)
class Checked:
    """The check that tells most of a model or a replica; row and found are None where none was made."""

    row: EngineCheck | None
    found: Verified | None
    claims: Claims

    @property
    def badges(self) -> tuple[Badge, ...]:
        return badges(self.found, self.claims)

    @property
    def verdicts(self) -> list[tuple[str, str, str, str]]:
        return verdict_rows(self.found.findings.values() if self.found else (), self.claims)

    def as_dict(self) -> dict[str, Any]:
        """As REST and `--json` tell it."""
        row = self.row
        return {
            "badges": [
                {"about": each.about, "verdict": each.verdict, "says": each.says} for each in self.badges
            ],
            "checked_at": row.checked_at.isoformat() if row else None,
            "older": bool(self.found and self.found.is_older),
            "profile": row.profile_name if row else "",
            "fingerprint": row.fingerprint if row else "",
            "engine": row.engine if row else "",
            "engine_version": row.engine_version if row else "",
            "gpu": row.gpu if row else "",
            "job": str(row.job) if row else None,
        }


def engine_checks() -> QuerySet[EngineCheck]:
    """All of them, the newest first. One query."""
    return with_age(EngineCheck.objects.all(), "checked_at")


def checked(rows: Collection[EngineCheck], fingerprints: Collection[str], claims: Claims) -> Checked:
    """rows: newest first. The newest of a profile that is as one of these, else the newest."""
    current = next((row for row in rows if row.fingerprint and row.fingerprint in fingerprints), None)
    row = current or next(iter(rows), None)
    if row is None:
        return Checked(None, None, claims)
    age_s = seconds(row.age) or 0.0  # type: ignore[attr-defined]  # annotated
    findings = {each.check: each for each in findings_from(row.findings)}
    engine = f"{row.engine} {row.engine_version}".strip()
    return Checked(row, Verified(findings, age_s, engine, is_older=current is None), claims)


def check_of_replica(replica: Replica) -> Checked:
    """Of a row of `replicas()`. Claimed is what it was started with: what the catalog says since then is
    claimed of the next one."""
    launch = launch_from(replica.launch)
    claims = claims_of(
        launch.model,
        launch.capabilities,
        launch.context_length,
        engine=launch.engine,
        args=launch.profile.get("args"),
    )
    rows = list(replica.model.engine_checks.all()) if replica.model else []
    return checked(rows, (replica.fingerprint,), claims)


def checked_words(found: Checked) -> str:
    """All badges in a line."""
    return "; ".join(each.says for each in found.badges) if found.row else "never checked"


def verdict_rows(findings: Iterable[Finding], claims: Claims) -> list[tuple[str, str, str, str]]:
    """Check, whether it is claimed, verdict and why, in the order of the checks."""
    by_check = {finding.check: finding for finding in findings}
    rows = []
    for check, title in CHECKS.items():
        claimed, finding = is_claimed(check, claims), by_check.get(check)
        word = "" if claimed is None else "yes" if claimed else "no"
        says = finding.says if finding and claimed is not None else ""
        rows.append((title, word, str(verdict_of(finding, claimed)), says))
    return rows


def findings_from(raw: object) -> list[Finding]:
    """As a job or a row keeps them; what is no check of ours is passed over."""
    return [
        Finding(each["check"], each.get("works"), str(each.get("says", "")))
        for each in (raw if isinstance(raw, list) else ())
        if isinstance(each, dict) and each.get("check") in CHECKS
    ]
