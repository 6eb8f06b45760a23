"""The doorway of the periodic source check: it carries nothing, and may be lost or doubled."""

from __future__ import annotations

from celery import shared_task
from django.conf import settings

from catalog.actions import recheck_sources
from nodes.agents import ask_paths

MODELS_AT_ONCE = 8


# Acknowledged at once: a slow hub must not have the same message given to a second worker.
@shared_task(ignore_result=True, acks_late=False, expires=settings.LLMGW_RECHECK_EVERY_S)
def recheck() -> None:
    """Ask again about the few sources whose checks are the oldest."""
    recheck_sources(MODELS_AT_ONCE, settings.LLMGW_RECHECK_S, ask_paths=ask_paths)
