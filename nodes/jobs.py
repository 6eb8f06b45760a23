"""Jobs: asked for, claimed once, reported on, and over in the end, whatever becomes of who carries them out.

A job is claimed by one conditional update, so that of two workers one gets it, and a shell that carries its
own job out takes part in the same way. Whoever has it reports more often than every SILENT_S; who is silent
for longer has died, and `sweep` says so. A job that is over stays as it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from collections.abc import Callable, Coroutine, Mapping
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from django.db import IntegrityError, transaction
from django.db.models import F, Q, QuerySet
from django.db.models.functions import Coalesce, Now

from catalog.actions import record, revoke_key
from catalog.models import Key, Model
from catalog.reading import CatalogError, Fault, quote, storable
from nodes.models import Cluster, Job

SILENT_S = 30
REPORT_EVERY_S = 1.0
AT_ONCE = (
    2  # by all workers together: they share their threads with the reconciler, and machines with engines
)
OFFER_AGAIN_S = 5
KEEP = timedelta(days=90)
KEEP_COUNT = 1_000

T = TypeVar("T")

Progress = Mapping[str, Any]
"""`part` from 0 to 1, `say` in a few words, and whatever numbers of the moment the kind has besides."""


class JobRefused(CatalogError):
    """A job cannot be done as asked; the text says why, and what to do."""

    def __init__(self, sentence: str, *, field: str = "", code: str = "invalid") -> None:
        super().__init__([Fault("", "", field, code, sentence)])


class JobFailed(Exception):
    """What keeps a job from being carried out, in one sentence; `result` is what was found until then."""

    def __init__(self, sentence: str, result: Mapping[str, Any] | None = None) -> None:
        super().__init__(sentence)
        self.result = result


class JobStopped(Exception):
    """Somebody asked for it to be stopped, and it has. `result` is what was found until then."""

    def __init__(self, result: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self.result = result


class Report(Protocol):
    """How whoever carries a job out tells of it. False: stop, as somebody asked for that, or took it away."""

    def __call__(self, progress: Progress, /) -> bool: ...


Runner = Callable[[Job, Report], Mapping[str, Any]]
"""Carries a job out and returns its result. Raises JobFailed or JobStopped."""


# --- asked for ------------------------------------------------------------------------------------


def ask(
    kind: Job.Kind,
    model: Model,
    *,
    replica: uuid.UUID | None = None,
    options: Mapping[str, Any] | None = None,
    by: str,
    why: str = "",
    door: str,
) -> Job:
    """The job, queued: for a worker, or for the caller to `run`. Raises JobRefused while the model has one of
    this kind."""
    try:
        with transaction.atomic():
            job = Job.objects.create(
                kind=kind,
                model=model,
                model_name=model.name,
                replica=replica,
                options=dict(options or {}),
                by=by,
                why=storable(why),
            )
            detail = {"job": str(job.pk)} | ({"replica": str(replica)} if replica else {})
            record(
                kind.label,
                "model",
                model.name,
                subject_key=model.pk,
                by=by,
                door=door,
                why=why,
                detail=detail,
            )
    except IntegrityError:
        live = Job.objects.filter(kind=kind, model=model, state__in=Job.LIVE).first()
        if live is None and not Model.objects.filter(pk=model.pk).exists():
            raise JobRefused(without_model(model.name), field="model", code="not_found") from None
        if live is None:  # it has ended this moment
            return ask(kind, model, replica=replica, options=options, by=by, why=why, door=door)
        raise JobRefused(
            f"The {kind.label} of {quote(model.name)} that {quote(live.by)} asked for is {live.state}; wait "
            f"until it is over, or stop it (manage.py job_stop {str(live.pk)[:8]}).",
            code="in_use",
        ) from None
    job.refresh_from_db()
    return job


def without_model(name: str) -> str:
    """Why nothing can be done for one that was removed, a sentence."""
    return f"The model {quote(name)} is not in the catalog any more; choose another."


def stop(job_id: uuid.UUID, *, by: str, why: str = "", door: str) -> bool:
    """Have it stopped: at once where it only waits, else at its next report. False: it was over, or told so
    already."""
    said = storable(f"stopped by {by}" + (f": {why}" if why else ""))
    with transaction.atomic():
        waiting = Job.objects.filter(pk=job_id, state=Job.State.QUEUED)
        changed = waiting.update(
            state=Job.State.STOPPED, stop_asked_at=Now(), ended_at=Now(), problem=said
        ) or Job.objects.filter(pk=job_id, state=Job.State.RUNNING, stop_asked_at=None).update(
            stop_asked_at=Now(), problem=said
        )
        if changed:
            job = Job.objects.get(pk=job_id)
            told: dict[str, Any] = {"by": by, "door": door, "why": why, "detail": {"job": str(job_id)}}
            verb = f"stop {job.get_kind_display()}"
            record(verb, "model", job.model_name, subject_key=job.model_id or "", **told)
    return bool(changed)


# --- carried out ----------------------------------------------------------------------------------


def claim(job_id: uuid.UUID, *, at_once: int | None = None) -> Job | None:
    """The job, for the caller alone to carry out; None where it is not queued any more, or `at_once` others
    are being carried out."""
    with transaction.atomic():
        if at_once is not None:
            Cluster.objects.select_for_update().get_or_create(pk=1)  # who counts is not counted past
            if Job.objects.filter(state=Job.State.RUNNING).count() >= at_once:
                return None
        changed = Job.objects.filter(pk=job_id, state=Job.State.QUEUED).update(
            state=Job.State.RUNNING, claimed_at=Now(), heartbeat_at=Now()
        )
    return Job.objects.select_related("model").get(pk=job_id) if changed else None


def report(job_id: uuid.UUID, progress: Progress) -> bool:
    """How far it is, and that whoever carries it out lives. False: stop."""
    running = Job.objects.filter(pk=job_id, state=Job.State.RUNNING)
    return bool(running.update(heartbeat_at=Now(), progress=dict(progress))) and not (
        running.exclude(stop_asked_at=None).exists()
    )


def describe(job_id: uuid.UUID, *, fingerprint: str, engine: str, engine_version: str, gpu: str) -> None:
    """What it is done to, as soon as that is known."""
    Job.objects.filter(pk=job_id).update(
        fingerprint=fingerprint[:16], engine=engine[:40], engine_version=engine_version[:100], gpu=gpu[:100]
    )


def finish(job_id: uuid.UUID, result: Mapping[str, Any]) -> bool:
    """False: it was over already."""
    return _end(job_id, Job.State.DONE, result, problem="")


def fail(job_id: uuid.UUID, sentence: str, result: Mapping[str, Any] | None = None) -> bool:
    """False: it was over already."""
    return _end(job_id, Job.State.FAILED, result, problem=storable(sentence))


def halt(job_id: uuid.UUID, result: Mapping[str, Any] | None = None) -> bool:
    """It has stopped, as somebody asked for. False: it was over already."""
    return _end(job_id, Job.State.STOPPED, result)


def _end(job_id: uuid.UUID, state: Job.State, result: Mapping[str, Any] | None, **told: str) -> bool:
    found = {} if result is None else {"result": dict(result)}
    running = Job.objects.filter(pk=job_id, state=Job.State.RUNNING)
    return bool(running.update(state=state, ended_at=Now(), **found, **told))


def keep_key(job: Job, key: Key) -> None:
    """By which the job goes through the gateway. It ends with the job, whatever becomes of who has that."""
    Job.objects.filter(pk=job.pk).update(key=key)


def end_key(job: Job, *, why: str) -> None:
    key_id = Job.objects.filter(pk=job.pk).values_list("key", flat=True).first()
    if key_id is not None:
        revoke_key(key_id, by=job.by, door=job.kind, why=why)


def run(
    job_id: uuid.UUID,
    runner: Runner,
    *,
    at_once: int | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    is_leaving: Callable[[], bool] = lambda: False,
) -> Job | None:
    """Claim the job and carry it out, to its end; the job as it is then, None where it could not be claimed.

    on_progress hears what is reported. is_leaving: whether this process is to end, and the job with it.
    """
    job = claim(job_id, at_once=at_once)
    if job is None:
        return None

    def tell(progress: Progress) -> bool:
        on_progress(progress)
        return report(job_id, progress) and not is_leaving()

    try:
        finish(job_id, runner(job, tell))
    except JobFailed as no:
        fail(job_id, str(no), no.result)
    except JobStopped as end:
        if is_leaving():
            fail(job_id, "The worker that carried it out was told to end; ask for it again.", end.result)
        else:
            halt(job_id, end.result)
    except KeyboardInterrupt:
        running = Job.objects.filter(pk=job_id, state=Job.State.RUNNING, problem="")
        running.update(problem="stopped by Ctrl-C")
        halt(job_id)
        raise
    except BaseException as fault:
        fail(job_id, f"It failed by a fault of llmgw's own ({type(fault).__name__}); the log tells more.")
        raise
    job.refresh_from_db()
    return job


def attend(
    talk: Callable[[], Coroutine[Any, Any, T]],
    report: Report,
    progress: Callable[[], Progress],
    *,
    every_s: float = REPORT_EVERY_S,
) -> T:
    """What comes of a conversation, which has an event loop and a thread of its own, while the caller's
    thread reports its progress. Cancelled, and over, when this ends in any other way. Raises JobStopped."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(talk())

    def converse() -> None:
        with contextlib.suppress(BaseException):  # the task keeps it
            loop.run_until_complete(task)
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    thread = threading.Thread(target=converse, name="talk", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            if not report(progress()):
                raise JobStopped
            thread.join(every_s)
    except BaseException:
        with contextlib.suppress(RuntimeError):  # it is over already
            loop.call_soon_threadsafe(task.cancel)
        thread.join()
        raise
    report(progress())
    return task.result()


# --- looked after ---------------------------------------------------------------------------------


def sweep(*, keep_count: int = KEEP_COUNT) -> list[uuid.UUID]:
    """End what nobody carries out any more, with its key, and forget what is old. What still waits for a
    worker, whose message may be lost."""
    running, silence = Job.objects.filter(state=Job.State.RUNNING), timedelta(seconds=SILENT_S)
    running.filter(heartbeat_at__gt=Now() + silence).update(heartbeat_at=Now())  # the clock was set back
    silent = running.filter(heartbeat_at__lt=Now() - silence)
    silent.exclude(stop_asked_at=None).update(state=Job.State.STOPPED, ended_at=Now())
    silent.filter(stop_asked_at=None).update(
        state=Job.State.FAILED,
        ended_at=Now(),
        problem="Its worker died, or lost the database; ask for it again.",
    )
    over = Job.objects.exclude(state__in=Job.LIVE)
    for job in over.filter(key__revoked_at=None).exclude(key=None):
        end_key(job, why="nobody carries it out any more")
    old = Q(asked_at__lt=Now() - KEEP)
    for edge in over.values_list("asked_at", flat=True)[keep_count : keep_count + 1]:
        old |= Q(asked_at__lte=edge)
    over.filter(old).delete()
    waits = Job.objects.filter(state=Job.State.QUEUED, asked_at__lt=Now() - timedelta(seconds=OFFER_AGAIN_S))
    return list(waits.order_by("asked_at").values_list("pk", flat=True)[:AT_ONCE])


# --- shown ----------------------------------------------------------------------------------------


def jobs() -> QuerySet[Job]:
    """All of them, newest first. One query."""
    return Job.objects.annotate(lasted=Coalesce("ended_at", Now()) - F("claimed_at"))


def says_of(job: Job) -> str:
    """What it does, in a few words, or what it found once it is over; empty: not even that it began."""
    found = job.result.get("says", "") if job.state not in Job.LIVE else ""
    return str(found or job.progress.get("say", ""))


def job_as_dict(job: Job) -> dict[str, Any]:
    """As REST and `--json` tell it."""
    return {
        "id": str(job.pk),
        "kind": job.kind,
        "model": job.model_name,
        "replica": str(job.replica) if job.replica else None,
        "options": job.options,
        "by": job.by,
        "why": job.why,
        "state": job.state,
        "asked_at": job.asked_at.isoformat(),
        "claimed_at": job.claimed_at and job.claimed_at.isoformat(),
        "heartbeat_at": job.heartbeat_at and job.heartbeat_at.isoformat(),
        "ended_at": job.ended_at and job.ended_at.isoformat(),
        "stop_asked_at": job.stop_asked_at and job.stop_asked_at.isoformat(),
        "progress": job.progress,
        "result": job.result,
        "problem": job.problem,
        "fingerprint": job.fingerprint,
        "engine": job.engine,
        "engine_version": job.engine_version,
        "gpu": job.gpu,
    }
