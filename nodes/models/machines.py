"""Machines, what lets one in, and what is in their stores."""

from __future__ import annotations

import uuid

from django.conf import settings
from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from catalog.models import Key


class Node(models.Model):
    """A machine. Operators write name, address, certificate, cordon and drain, and a machine that joins the
    first three; observation writes the rest."""

    uuid = models.UUIDField(default=uuid.uuid4, unique=True, editable=False)
    name = models.CharField(max_length=200, unique=True)
    address = models.CharField(
        max_length=500, help_text="where its agent listens, such as http://10.0.0.7:8378"
    )
    certificate = models.CharField(
        max_length=64,
        blank=True,
        help_text="SHA-256 of the one its agent shows; empty: any that the system's authorities vouch for",
    )
    token_generation = models.PositiveIntegerField(default=1)
    cordoned_by = models.CharField(max_length=150, blank=True)
    cordoned_why = models.TextField(blank=True)
    is_cordoned = models.BooleanField(default=False)
    is_draining = models.BooleanField(default=False, help_text="what runs here moves elsewhere")
    created_at = models.DateTimeField(db_default=Now())

    # Observed. `report` is the last StateReport without its ranks; `problem` is why the last ask failed;
    # `rival_at` is when another agent was last found to answer for the node.
    report = models.JSONField(default=dict, editable=False)
    etag = models.CharField(max_length=80, blank=True, editable=False)
    seen_at = models.DateTimeField(null=True, editable=False)
    problem = models.TextField(blank=True, editable=False)
    rival_at = models.DateTimeField(null=True, editable=False)

    class Meta:
        ordering = ["name"]
        constraints = [
            models.CheckConstraint(condition=~Q(name=""), name="a_node_has_a_name"),
            models.CheckConstraint(
                condition=Q(is_draining=False) | Q(is_cordoned=True), name="a_draining_node_is_cordoned"
            ),
        ]

    def __str__(self) -> str:
        return self.name


class JoinToken(models.Model):
    """What lets one machine become a node, once and soon. Its secret is kept as an HMAC only; the text was
    shown once. It opens no more than whoever made it may do: `maker` is empty for a shell, `key` is the API
    key that it was made with. Joining writes used_at, node and claim, the digest by which the machine that
    used it is known again."""

    id = models.CharField(max_length=8, primary_key=True)
    digest = models.CharField(max_length=64)
    node_name = models.CharField(max_length=200, blank=True, help_text="empty: as the machine calls itself")
    labels = models.JSONField(default=dict, blank=True)
    by = models.CharField(max_length=150)
    maker = models.ForeignKey(settings.AUTH_USER_MODEL, models.CASCADE, null=True, related_name="+")
    key = models.ForeignKey(Key, models.CASCADE, null=True, related_name="+")
    created_at = models.DateTimeField(db_default=Now())
    expires_at = models.DateTimeField()
    revoked_at = models.DateTimeField(null=True)
    used_at = models.DateTimeField(null=True)
    node = models.ForeignKey(Node, models.SET_NULL, null=True, related_name="+")
    claim = models.CharField(max_length=64, blank=True)

    class Meta:
        ordering = ["-created_at"]
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"{self.node_name or 'any node'} ({self.id})"


class Weights(models.Model):
    """What a node's store has of one repository at one commit. Written by observation."""

    class State(models.TextChoices):
        HELD = "held"
        FETCHING = "fetching"
        PARTIAL = "partial"

    node = models.ForeignKey(Node, models.CASCADE, related_name="weights")
    key = models.CharField(max_length=32)
    repo = models.CharField(max_length=200)
    revision = models.CharField(max_length=200)
    state = models.CharField(max_length=10, choices=State)
    size_bytes = models.PositiveBigIntegerField(default=0)
    total_bytes = models.PositiveBigIntegerField(null=True)
    bytes_per_s = models.PositiveBigIntegerField(null=True)
    is_used = models.BooleanField(default=False)
    reason = models.TextField(blank=True)

    class Meta:
        verbose_name = verbose_name_plural = "weights"
        ordering = ["repo", "revision", "node__name"]
        default_permissions = ("view", "add", "delete")
        constraints = [models.UniqueConstraint(fields=["node", "key"], name="weights_are_on_a_node_once")]

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision[:8]}"
