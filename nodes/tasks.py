"""The doorways of the reconciler, of what is forgotten, of jobs and of notices: each task carries an id or
nothing, expires after one interval, and may be lost or doubled."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Mapping

from celery import shared_task
from celery.signals import worker_shutting_down
from django.conf import settings
from kombu.exceptions import OperationalError

from nodes import benching, checking, jobs, noticing, samples, usage
from nodes.models import Job
from nodes.reconcile import run_pass

PASSES_A_TICK = 3  # a pass that changed something is often followed by one that can go on from there
WAKE_WAIT_S = 1.0
BITES_A_TASK = 10
HINT_GAP_S = 0.5

logger = logging.getLogger(__name__)

_waking, _hinting = threading.Lock(), threading.Lock()
_hinted_s, _is_later = float("-inf"), False  # when a hint last woke it, and whether one is to


@shared_task(ignore_result=True, expires=settings.LLMGW_TICK_S)
def tick() -> None:
    """Run a pass, and another at once while passes change something."""
    # A thread runs one pass at a time, so this names a pass: two that overlap never share a lease.
    holder = f"{socket.gethostname()[:40]}:{os.getpid()}:{threading.get_ident()}"
    for _ in range(PASSES_A_TICK):
        report = run_pass(holder)
        if report is None or not report.has_changed:
            return


@shared_task(ignore_result=True, expires=settings.LLMGW_FORGET_EVERY_S)
def forget_usage() -> None:
    """Remove minutes, hours and samples that are too old to be told of, a few bites at a time."""
    for _ in range(BITES_A_TASK):
        if not any([usage.forget(), usage.forget_traffic(), samples.forget()]):
            return


# --- jobs -----------------------------------------------------------------------------------------

RUNNERS: Mapping[str, jobs.Runner] = {
    Job.Kind.BENCH: benching.carry_out,
    Job.Kind.ENGINE_CHECK: checking.carry_out,
}
"""By kind of job: what carries it out."""

_leaving = threading.Event()


@worker_shutting_down.connect
def _leave(**_: object) -> None:
    _leaving.set()


# Acknowledged at once: it lasts for longer than a broker waits, and whoever claims it has it alone.
@shared_task(ignore_result=True, acks_late=False, expires=settings.LLMGW_SWEEP_EVERY_S)
def run_job(job_id: str) -> None:
    """Carry it out, unless somebody does already, or enough others are."""
    kind = Job.objects.filter(pk=job_id).values_list("kind", flat=True).first()
    if kind is not None and not _leaving.is_set():
        jobs.run(uuid.UUID(job_id), RUNNERS[kind], at_once=jobs.AT_ONCE, is_leaving=_leaving.is_set)


@shared_task(ignore_result=True, expires=settings.LLMGW_SWEEP_EVERY_S)
def sweep_jobs() -> None:
    """See to jobs that nobody carries out."""
    for job_id in jobs.sweep():
        run_job.apply_async([str(job_id)], retry=False)


def offer(*asked: Job) -> None:
    """Have workers carry them out. Never raises: while the broker is away they wait, and are offered again
    later."""
    sender = threading.Thread(
        target=_send_jobs, args=[str(job.pk) for job in asked], name="offer", daemon=True
    )
    sender.start()
    sender.join(WAKE_WAIT_S)


def _send_jobs(*job_ids: str) -> None:
    try:
        for job_id in job_ids:
            run_job.apply_async([job_id], retry=False)
    except (OperationalError, OSError) as problem:
        logger.warning("Could not offer a job to the workers; it is offered again: %s", problem)


# --- notices --------------------------------------------------------------------------------------

POSTING_AT_ONCE = 2  # of a worker's threads: webhooks that hang keep the others free

_posting = threading.BoundedSemaphore(POSTING_AT_ONCE)


@shared_task(ignore_result=True, expires=settings.LLMGW_NOTICE_EVERY_S)
def notice() -> None:
    """Look for what is wrong, and post what webhooks are to be told."""
    noticing.look()
    if _posting.acquire(blocking=False):
        try:
            noticing.deliver()
        finally:
            _posting.release()


@shared_task(ignore_result=True, expires=settings.LLMGW_FORGET_EVERY_S)
def forget_notices() -> None:
    """Give up what no webhook takes, and remove what is too old to be told of."""
    noticing.forget()


# --- the reconciler is woken ----------------------------------------------------------------------


def wake() -> None:
    """Have the reconciler look now. Never raises, and waits a second at most: the next tick comes anyway."""
    if not _waking.acquire(blocking=False):
        return  # a tick is on its way already
    # A broker's client tries for seconds to reach one that is down, and takes no word for it.
    sender = threading.Thread(target=_send_tick, name="wake", daemon=True)
    sender.start()
    sender.join(WAKE_WAIT_S)


def hint() -> None:
    """As `wake`, and twice a second at most: many machines may have something to tell at once, and again. The
    last of them is not forgotten."""
    global _hinted_s, _is_later
    with _hinting:
        if _is_later:  # a wake that comes after this hint is on its way already
            return
        wait_s = max(0.0, _hinted_s + HINT_GAP_S - time.monotonic())
        _is_later = wait_s > 0
        if not _is_later:
            _hinted_s = time.monotonic()
    if not wait_s:
        wake()
        return
    later = threading.Timer(wait_s, _wake_later)
    later.daemon = True
    later.start()


def _wake_later() -> None:
    global _hinted_s, _is_later
    with _hinting:
        _hinted_s, _is_later = time.monotonic(), False
    wake()


def _send_tick() -> None:
    try:
        tick.apply_async(retry=False)
    except (OperationalError, OSError) as problem:
        logger.warning("Could not wake the reconciler, which looks again by itself: %s", problem)
    finally:
        _waking.release()
