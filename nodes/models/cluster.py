"""The cluster as one, and who may reconcile it now."""

from __future__ import annotations

import uuid

from django.db import models
from django.db.models import Q


class Cluster(models.Model):
    """One row: which cluster this database is, whether operators let it act, and what else keeps it from
    acting (`alarm`, written by the reconciler). Agents serve one cluster only."""

    uuid = models.UUIDField(default=uuid.uuid4, editable=False)
    is_paused = models.BooleanField(default=False)
    paused_by = models.CharField(max_length=150, blank=True)
    paused_why = models.TextField(blank=True)
    alarm = models.TextField(blank=True, editable=False)

    class Meta:
        verbose_name = verbose_name_plural = "reconciler"
        constraints = [models.CheckConstraint(condition=Q(pk=1), name="there_is_one_cluster")]

    def __str__(self) -> str:
        return str(self.uuid)

    @classmethod
    def this(cls) -> Cluster:
        return cls.objects.get_or_create(pk=1)[0]


class Lease(models.Model):
    """Who may reconcile now. `token` grows with each holder; an agent refuses one below what it has seen.
    passes, passes_s and last_s: how many were made, and how long all of them and the last one took."""

    name = models.CharField(max_length=40, primary_key=True)
    holder = models.CharField(max_length=100, blank=True)
    token = models.BigIntegerField(default=0)
    expires_at = models.DateTimeField(null=True)
    passes = models.BigIntegerField(db_default=0)
    passes_s = models.FloatField(db_default=0.0)
    last_s = models.FloatField(null=True)

    def __str__(self) -> str:
        return self.name
