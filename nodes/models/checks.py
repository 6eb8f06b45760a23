"""What engine checks found."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now

from catalog.models import Model


class EngineCheck(models.Model):
    """The last one that was made of a model on one profile as it was then. Written by the check's job.

    Findings are what the engine does, not what was claimed of it: see `nodes/checks/findings.py`.
    """

    model = models.ForeignKey(Model, models.CASCADE, related_name="engine_checks")
    profile_name = models.CharField(max_length=200, blank=True)
    fingerprint = models.CharField(max_length=16, blank=True, help_text="of the profile; empty is unknown")
    engine = models.CharField(max_length=40)
    engine_version = models.CharField(max_length=100, blank=True)
    gpu = models.CharField(max_length=100, blank=True)
    replica = models.UUIDField()
    job = models.UUIDField()
    findings = models.JSONField(default=list)
    checked_at = models.DateTimeField(db_default=Now())

    class Meta:
        ordering = ["-checked_at", "-id"]
        default_permissions = ()
        constraints = [
            models.UniqueConstraint(fields=["model", "fingerprint"], name="a_profile_has_one_engine_check")
        ]

    def __str__(self) -> str:
        return f"{self.model_id}/{self.profile_name} on {self.engine} {self.engine_version}"
