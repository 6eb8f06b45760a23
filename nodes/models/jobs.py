"""Work of minutes that an operator asks for, and a worker or a shell does."""

from __future__ import annotations

import uuid

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from catalog.models import Key, Model


class Job(models.Model):
    """One piece of it, from its asking until it is over.

    Who asks writes kind to asked_at; who carries it out, the rest; who has it stopped, stop_asked_at and
    problem. `model_name` is known when the model is gone; replica is None where any will do; key opens the
    gateway to it, and to nobody else, for as long as it goes on.
    """

    class Kind(models.TextChoices):
        BENCH = "bench", "bench"
        ENGINE_CHECK = "engine_check", "engine check"

    class State(models.TextChoices):
        QUEUED = "queued"
        RUNNING = "running"
        DONE = "done"
        FAILED = "failed"
        STOPPED = "stopped"

    LIVE = (State.QUEUED, State.RUNNING)

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    kind = models.CharField(max_length=20, choices=Kind)
    model = models.ForeignKey(Model, models.SET_NULL, null=True, related_name="jobs")
    model_name = models.CharField(max_length=200)
    replica = models.UUIDField(null=True)
    options = models.JSONField(default=dict)
    by = models.CharField(max_length=150)
    why = models.TextField(blank=True)
    asked_at = models.DateTimeField(db_default=Now())

    state = models.CharField(max_length=10, choices=State, default=State.QUEUED)
    claimed_at = models.DateTimeField(null=True)
    heartbeat_at = models.DateTimeField(null=True)
    ended_at = models.DateTimeField(null=True)
    stop_asked_at = models.DateTimeField(null=True)
    progress = models.JSONField(default=dict, help_text="part (0 to 1), say, and numbers of the moment")
    result = models.JSONField(default=dict)
    problem = models.TextField(blank=True, help_text="why it failed, or by whom it was stopped")
    key = models.ForeignKey(Key, models.SET_NULL, null=True, related_name="+")

    fingerprint = models.CharField(max_length=16, blank=True, help_text="of the profile that it was done to")
    engine = models.CharField(max_length=40, blank=True)
    engine_version = models.CharField(max_length=100, blank=True)
    gpu = models.CharField(max_length=100, blank=True)

    class Meta:
        ordering = ["-asked_at", "-id"]
        default_permissions = ("view", "add", "change")
        indexes = [models.Index(fields=["state", "kind"], name="jobs_by_state")]
        constraints = [
            models.UniqueConstraint(
                fields=["kind", "model"],
                condition=Q(state__in=("queued", "running")),
                name="a_model_has_one_live_job_of_a_kind",
            )
        ]

    def __str__(self) -> str:
        return f"{self.get_kind_display()} of {self.model_name}"

    @property
    def is_live(self) -> bool:
        return self.state in self.LIVE
