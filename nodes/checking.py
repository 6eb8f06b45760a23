"""Engine checks: asked for, carried out as a job against one running replica, and their findings kept.

A check asks the engine, not the catalog. What it found of a profile stands until the next check of the same.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from typing import Any

from django.db import transaction
from django.db.models.functions import Now

from catalog.models import Model
from catalog.reading import quote
from nodes import jobs
from nodes.checks import CHECKS, Claims, Finding, Verdict, claims_of, is_claimed, verdict_of
from nodes.engines import ENGINES, Adapter
from nodes.interview import EngineGone, Interview, Subject
from nodes.jobs import JobFailed, JobRefused
from nodes.models import EngineCheck, Job, Replica
from nodes.origins import Origin, origin_of

PATIENCE_S, LONGEST_PATIENCE_S = 60.0, 3_600.0
"""For one answer: where nobody says otherwise, and at most."""
PROFILES_KEPT = 5  # of a model: the check of a profile that nobody runs any more is worth little


def ask_check(
    model: Model,
    *,
    replica: str = "",
    patience_s: float = PATIENCE_S,
    by: str,
    why: str = "",
    door: str,
) -> Job:
    """The job, queued. replica: its id; empty is whichever is ready. Raises JobRefused."""
    if not 0 < patience_s <= LONGEST_PATIENCE_S:
        raise JobRefused(
            f"An answer is waited for up to {LONGEST_PATIENCE_S:g} s, and not for {patience_s:g} s; give "
            "another --patience.",
            field="patience",
            code="range",
        )
    chosen = choose(model, replica)
    _reached(chosen)
    options = {} if patience_s == PATIENCE_S else {"patience_s": patience_s}
    return jobs.ask(
        Job.Kind.ENGINE_CHECK,
        model,
        replica=chosen.pk if replica else None,
        options=options,
        by=by,
        why=why,
        door=door,
    )


def choose(model: Model, replica: str) -> Replica:
    """What is to be asked: this replica, or the newest that is ready. Raises JobRefused."""
    name = quote(model.name)
    if replica:
        found = _replica(replica)
        if found is None or found.model_id != model.pk:
            raise JobRefused(
                f"Model {name} has no replica {quote(replica)}; manage.py replicas --model tells which it "
                f"has.",
                field="replica",
                code="not_found",
            )
        if found.state != Replica.State.READY:
            raise JobRefused(
                f"The replica {found} is {found.state}, and only one that is ready can be asked; choose "
                f"another (manage.py replicas --model tells), or wait until it is.",
                field="replica",
                code="not_ready",
            )
        return found
    ready = model.replicas.filter(state=Replica.State.READY, wanted=Replica.Wanted.RUN)
    found = ready.order_by("-created_at").first()
    if found is not None:
        return found
    if model.scaling_max == 0:
        raise JobRefused(
            f"Model {name} is off, and no engine runs that could be asked; turn it on (scaling.max above 0) "
            f"first.",
            code="off",
        )
    count = model.replicas.exclude(state__in=Replica.OVER).count()
    on_the_way = f"{count} on the way" if count else "none on the way"
    raise JobRefused(
        f"Model {name} has no replica that is ready ({on_the_way}); manage.py why tells what it waits for.",
        code="not_ready",
    )


def _replica(text: str) -> Replica | None:
    try:
        return Replica.objects.filter(pk=uuid.UUID(text)).first()
    except ValueError:
        return None


def _reached(replica: Replica) -> tuple[Origin, Adapter]:
    """Where it is asked, and as what. Raises JobRefused."""
    origin = origin_of(replica)
    adapter = ENGINES.get(origin.launch.engine) if origin else None
    if origin is None or adapter is None:
        raise JobRefused(
            f"The replica {replica} tells no port at which its engine could be asked; manage.py replicas "
            f"tells what has become of it.",
            field="replica",
            code="not_ready",
        )
    return origin, adapter


def carry_out(job: Job, report: jobs.Report) -> Mapping[str, Any]:
    """The findings. Raises JobFailed and JobStopped, with those until then."""
    if job.model is None:
        raise JobFailed(jobs.without_model(job.model_name))
    try:
        replica = choose(job.model, str(job.replica or ""))
        origin, adapter = _reached(replica)
    except JobRefused as no:
        raise JobFailed(str(no)) from None
    about = {
        "fingerprint": replica.fingerprint,
        "engine": adapter.name,
        "engine_version": origin.version,
        "gpu": origin.gpu,
    }
    jobs.describe(job.pk, **about)
    patience_s = float(job.options.get("patience_s", PATIENCE_S))
    launch = origin.launch
    claims = claims_of(
        launch.model,
        launch.capabilities,
        launch.context_length,
        engine=launch.engine,
        args=launch.profile.get("args"),
    )
    subject = Subject(
        origin.url, origin.key, adapter, claims, origin.context_length, certificate=origin.certificate
    )
    interview = Interview(subject, patience_s=patience_s)

    def progress() -> jobs.Progress:
        found = as_list(interview.findings, claims)
        failed = sum(each["verdict"] == Verdict.FAILED for each in found)
        say = f"asks for {interview.step}" if interview.step else f"{len(found)} checks, {failed} failed"
        return {"part": interview.part, "say": say, "checks": len(found), "failed": failed}

    def result() -> dict[str, Any]:
        return {"replica": str(replica.pk), "findings": as_list(interview.findings, claims)}

    try:
        jobs.attend(interview.hold, report, progress)
    except jobs.JobStopped:
        raise jobs.JobStopped(result()) from None
    except EngineGone as fault:
        raise JobFailed(
            f"The replica {replica} {fault}, while it was asked for {interview.step}; manage.py replicas "
            f"tells what has become of it.",
            result(),
        ) from None
    found = result()
    keep(job, replica, found["findings"], about)
    return found


def as_list(findings: Iterable[Finding], claims: Claims) -> list[dict[str, Any]]:
    """In the order of the checks, whatever was asked first, each with what was claimed at that time."""
    by_check = {finding.check: finding for finding in findings}
    return [
        {
            **by_check[check].as_dict(),
            "claimed": (claimed := is_claimed(check, claims)),
            "verdict": str(verdict_of(by_check[check], claimed)),
        }
        for check in CHECKS
        if check in by_check
    ]


def keep(job: Job, replica: Replica, findings: list[dict[str, Any]], about: Mapping[str, str]) -> None:
    """Instead of what was found of the same profile before."""
    assert job.model is not None, "a model that is gone has no checks"
    with transaction.atomic():
        EngineCheck.objects.update_or_create(
            model=job.model,
            fingerprint=about["fingerprint"],
            defaults={
                **about,
                "profile_name": replica.profile_name,
                "replica": replica.pk,
                "job": job.pk,
                "findings": findings,
                "checked_at": Now(),
            },
        )
        kept = EngineCheck.objects.filter(model=job.model).values_list("pk", flat=True)[:PROFILES_KEPT]
        EngineCheck.objects.filter(model=job.model).exclude(pk__in=list(kept)).delete()
