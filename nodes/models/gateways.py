"""What gateways write: that they live, what is asked for, and what was used."""

from __future__ import annotations

import uuid

from django.db import models
from django.db.models.functions import Now

from catalog.models import Model


class Gateway(models.Model):
    """A gateway process. It writes its own row: a heartbeat, the table revision it has seen, the number of
    its last lot of usage that was added, and when it stopped. The row stays, as its demand does."""

    id = models.UUIDField(primary_key=True, default=uuid.uuid4)
    started_at = models.DateTimeField(db_default=Now())
    heartbeat_at = models.DateTimeField(db_default=Now())
    stopped_at = models.DateTimeField(null=True)
    seen_revision = models.BigIntegerField(default=0)
    lots = models.BigIntegerField(default=0)

    def __str__(self) -> str:
        return str(self.id)


class Demand(models.Model):
    """When a model was last asked for through one gateway process, and what is under way. Written by it."""

    gateway = models.ForeignKey(Gateway, models.CASCADE, related_name="demand")
    model = models.ForeignKey(Model, models.CASCADE, related_name="demand")
    asked_at = models.DateTimeField(null=True)
    waiting = models.PositiveIntegerField(default=0)
    in_flight = models.PositiveIntegerField(default=0)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["gateway", "model"], name="demand_is_a_row_a_gateway")]

    def __str__(self) -> str:
        return f"{self.model} at {self.gateway}"


class Usage(models.Model):
    """What one key's requests to one model used in a minute or an hour, added up over all gateways; and, for
    whoever counts on, what each model's ever did, by endpoint and outcome. Written by the gateways.

    Keys and models are names here: what they used stays known when they are gone. Columns as in
    `tallies.Tally`.
    """

    class Span(models.TextChoices):
        MINUTE = "minute"
        HOUR = "hour"
        EVER = "ever"

    span = models.CharField(max_length=6, choices=Span)
    begins_at = models.DateTimeField()
    key = models.CharField(max_length=20, blank=True, help_text="empty without one, and of what ever was")
    key_name = models.CharField(max_length=200, blank=True)
    model = models.CharField(max_length=200, blank=True, help_text="empty when none of ours was meant")
    endpoint = models.CharField(max_length=60, blank=True, help_text="of what ever was alone, as the outcome")
    outcome = models.CharField(max_length=3, blank=True)

    requests = models.BigIntegerField(default=0)
    errors = models.BigIntegerField(default=0)
    left = models.BigIntegerField(default=0)
    prompt_tokens = models.BigIntegerField(default=0)
    cached_tokens = models.BigIntegerField(default=0)
    completion_tokens = models.BigIntegerField(default=0)
    codes = models.JSONField(default=dict)
    times = models.JSONField(default=dict)

    class Meta:
        verbose_name_plural = "usage"
        default_permissions = ("view",)
        permissions = [("all_usage", "Can see what others' keys used")]
        constraints = [
            models.UniqueConstraint(
                fields=["span", "begins_at", "key", "model", "endpoint", "outcome"],
                name="usage_is_a_row_a_span",
            )
        ]

    def __str__(self) -> str:
        return f"{self.model} by {self.key_name or self.key}, {self.span} of {self.begins_at:%Y-%m-%d %H:%M}"
