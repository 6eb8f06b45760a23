"""Running copies of models, their parts on nodes, the GPUs that these hold, and whatever runs besides."""

from __future__ import annotations

import uuid

from django.db import models
from django.db.models.functions import Now

from catalog.models import Model, Profile
from nodes.models.machines import Node


class Replica(models.Model):
    """One running copy of a model.

    Written once by whoever assigns or adopts it: model, profile, launch, fingerprint, key_id, replaces. By
    the reconciler: wanted, wanted_why, generation. By observation, from its ranks: state, reason,
    state_since, failure.
    """

    class State(models.TextChoices):
        PENDING = "pending"
        FETCHING = "fetching"
        STARTING = "starting"
        READY = "ready"
        DRAINING = "draining"
        STOPPED = "stopped"
        FAILED = "failed"
        LOST = "lost"

    class Wanted(models.TextChoices):
        RUN = "run"
        DRAIN = "drain"
        STOP = "stop"

    OVER = (State.STOPPED, State.FAILED)

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    model = models.ForeignKey(Model, models.SET_NULL, null=True, related_name="replicas")
    profile = models.ForeignKey(Profile, models.SET_NULL, null=True, related_name="replicas")
    launch = models.JSONField(help_text="what it was started from; never rewritten")
    fingerprint = models.CharField(max_length=16, blank=True, help_text="of its profile; empty is unknown")
    is_adopted = models.BooleanField(default=False)
    generation = models.PositiveIntegerField(default=1)
    key_id = models.CharField(max_length=100, blank=True, help_text="the cluster key its own derives from")
    created_at = models.DateTimeField(db_default=Now())
    replaces = models.UUIDField(null=True, help_text="the replica that leaves once this one is ready")

    wanted = models.CharField(max_length=10, choices=Wanted, default=Wanted.RUN)
    wanted_why = models.TextField(blank=True)
    wanted_since = models.DateTimeField(db_default=Now())

    state = models.CharField(max_length=10, choices=State, default=State.PENDING)
    reason = models.TextField(blank=True)
    state_since = models.DateTimeField(db_default=Now())
    cause = models.CharField(max_length=40, blank=True)
    failure_kind = models.CharField(max_length=20, blank=True)

    revision = models.BigIntegerField(default=0, db_index=True)

    class Meta:
        ordering = ["created_at", "id"]
        indexes = [models.Index(fields=["state", "model"], name="replicas_by_state")]

    def __str__(self) -> str:
        return f"{self.model_name}/{self.profile_name} {str(self.id)[:8]}"

    @property
    def model_name(self) -> str:
        """The name it was launched under, which is the name its engine answers to."""
        return str(self.launch.get("model", ""))

    @property
    def profile_name(self) -> str:
        return str(self.launch.get("profile", {}).get("name", ""))


class Rank(models.Model):
    """The part of a replica on one node. The reconciler writes replica, node, rank; observation the rest."""

    replica = models.ForeignKey(Replica, models.CASCADE, related_name="ranks")
    node = models.ForeignKey(Node, models.PROTECT, related_name="ranks")
    rank = models.PositiveIntegerField(default=0)

    state = models.CharField(max_length=10, choices=Replica.State, default=Replica.State.PENDING)
    reason = models.TextField(blank=True)
    port = models.PositiveIntegerField(null=True)
    certificate = models.CharField(
        max_length=64, blank=True, help_text="SHA-256 of the one that its port shows; empty: plain HTTP"
    )
    pid = models.PositiveIntegerField(null=True)
    command = models.JSONField(default=list)
    exit_code = models.IntegerField(null=True)
    running = models.PositiveIntegerField(null=True)
    waiting = models.PositiveIntegerField(null=True)
    done_bytes = models.PositiveBigIntegerField(null=True)
    total_bytes = models.PositiveBigIntegerField(null=True)
    bytes_per_s = models.PositiveBigIntegerField(null=True, help_text="of what it fetches")
    meeting = models.CharField(max_length=80, blank=True, help_text="where it waits for the other ranks")
    context_length = models.PositiveIntegerField(
        null=True, help_text="tokens that one request may have, by the engine's own word"
    )
    attempts = models.JSONField(default=list, help_text="its last processes that have ended")

    class Meta:
        ordering = ["replica", "rank"]
        constraints = [models.UniqueConstraint(fields=["replica", "rank"], name="a_rank_is_on_one_node")]

    def __str__(self) -> str:
        return f"{self.replica} rank {self.rank}"


class Claim(models.Model):
    """A GPU that a rank holds, from its assignment until there is evidence that its engine is gone."""

    rank = models.ForeignKey(Rank, models.CASCADE, related_name="claims")
    node = models.ForeignKey(Node, models.PROTECT, related_name="claims")
    gpu = models.CharField(max_length=100, help_text="the device's UUID")

    class Meta:
        constraints = [models.UniqueConstraint(fields=["node", "gpu"], name="a_gpu_is_claimed_once")]

    def __str__(self) -> str:
        return self.gpu


class Held(models.Model):
    """The end of a replica that waits for a person's yes, as too many would end at once. Written by the
    reconciler; `wanted` is what the yes makes of it."""

    replica = models.OneToOneField(Replica, models.CASCADE, related_name="held")
    wanted = models.CharField(max_length=10, choices=Replica.Wanted)
    why = models.TextField()
    since = models.DateTimeField(db_default=Now())

    class Meta:
        verbose_name_plural = "held"

    def __str__(self) -> str:
        return self.why


class Orphan(models.Model):
    """A running engine that this database does not know and could not adopt: left running, and shown.
    Written by observation."""

    replica = models.UUIDField()
    node = models.ForeignKey(Node, models.CASCADE, related_name="orphans")
    rank = models.PositiveIntegerField(default=0)
    why = models.TextField()
    gpus = models.JSONField(default=list)
    launch = models.JSONField(default=dict)
    since = models.DateTimeField(db_default=Now())

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["replica", "node", "rank"], name="an_orphan_is_shown_once")
        ]

    def __str__(self) -> str:
        return f"{self.replica} on {self.node}"
