"""What is wanted of a model beyond its catalog entry: rolls, load, and what could not be placed."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now

from catalog.models import Model


class Roll(models.Model):
    """An operator's word to replace a model's stale replicas one after another.

    The operator writes model, by, why, asked_at and keep (how many there were); the reconciler writes halted,
    and removes the row once all are replaced.
    """

    model = models.OneToOneField(Model, models.CASCADE, related_name="roll")
    by = models.CharField(max_length=150)
    why = models.TextField(blank=True)
    asked_at = models.DateTimeField(db_default=Now())
    keep = models.PositiveIntegerField(default=0)
    halted = models.TextField(blank=True)

    def __str__(self) -> str:
        return self.halted or f"rolling since {self.asked_at:%Y-%m-%d %H:%M:%S} UTC"


class Load(models.Model):
    """How busy a model's ready replicas have been without a change, while it matters. Written by
    observation."""

    class Level(models.TextChoices):
        PRESSED = "pressed"
        SLACK = "slack"

    model = models.OneToOneField(Model, models.CASCADE, related_name="load")
    level = models.CharField(max_length=10, choices=Level)
    since = models.DateTimeField()
    replicas = models.PositiveIntegerField()

    class Meta:
        verbose_name_plural = "load"

    def __str__(self) -> str:
        return f"{self.level}, {self.replicas} ready"


class Unplaced(models.Model):
    """A want that the last pass could not place, and why. Written by the reconciler."""

    model = models.OneToOneField(Model, models.CASCADE, related_name="unplaced")
    missing = models.PositiveIntegerField(help_text="replicas short of what is wanted")
    why = models.TextField()
    since = models.DateTimeField(db_default=Now())

    class Meta:
        verbose_name_plural = "unplaced"

    def __str__(self) -> str:
        return self.why
