"""What plots are drawn from: values of nodes, models and the cluster, and what models' requests came to."""

from __future__ import annotations

from django.db import models

from nodes.sampling import CLUSTER, MODEL, NODE


class Sample(models.Model):
    """An hour of a node, a model or the cluster in minutes, or a day of it in hours; a line for each thing
    that is measured, as `sampling` packs them. Written by the reconciler.

    Subjects are names here, as in Usage. is_rolled: an hour that is in its day.
    """

    class Kind(models.TextChoices):
        CLUSTER = CLUSTER
        MODEL = MODEL
        NODE = NODE

    kind = models.CharField(max_length=7, choices=Kind)
    subject = models.CharField(max_length=200, blank=True, help_text="empty: the cluster")
    step_s = models.PositiveIntegerField(help_text="between two values")
    begins_at = models.DateTimeField()
    lines = models.JSONField(default=dict)
    is_rolled = models.BooleanField(default=False)

    class Meta:
        default_permissions = ()
        constraints = [
            models.UniqueConstraint(
                fields=["step_s", "begins_at", "kind", "subject"], name="samples_are_a_row_a_subject"
            )
        ]
        # Of two days of rows an hour's are not in their day: without this each minute would read them all.
        indexes = [
            models.Index(fields=["begins_at"], condition=models.Q(is_rolled=False), name="samples_to_roll_up")
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.subject} from {self.begins_at:%Y-%m-%d %H:%M} by {self.step_s} s"


class Traffic(models.Model):
    """What all requests to one model came to in one step of a plot, whatever their keys; under no name, what
    all did. Written by the gateways along with Usage; columns as in `tallies.Tally`, and
    what no plot shows is left out."""

    step_s = models.PositiveIntegerField()
    begins_at = models.DateTimeField()
    model = models.CharField(max_length=200, blank=True, help_text="empty: all requests")

    requests = models.BigIntegerField(default=0)
    errors = models.BigIntegerField(default=0)
    left = models.BigIntegerField(default=0)
    prompt_tokens = models.BigIntegerField(default=0)
    cached_tokens = models.BigIntegerField(default=0)
    completion_tokens = models.BigIntegerField(default=0)
    times = models.JSONField(default=dict)

    class Meta:
        verbose_name_plural = "traffic"
        default_permissions = ()
        constraints = [
            models.UniqueConstraint(fields=["step_s", "begins_at", "model"], name="traffic_is_a_row_a_step")
        ]

    def __str__(self) -> str:
        return f"{self.model or 'all'}, {self.step_s} s from {self.begins_at:%Y-%m-%d %H:%M}"
