"""What there is, as the database keeps it: nodes, replicas and their ranks, claims, demand, the pass's lease.

Every column has one writer, named in its model: operators (through verbs), the reconciler's assignments, what
agents report, or a gateway. See `nodes/plan.py` for what follows from it.
"""

from __future__ import annotations

import uuid

from django.conf import settings
from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from catalog.models import Key, Model, Profile


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
    """Who may reconcile now. `token` grows with each holder; an agent refuses one below what it has seen."""

    name = models.CharField(max_length=40, primary_key=True)
    holder = models.CharField(max_length=100, blank=True)
    token = models.BigIntegerField(default=0)
    expires_at = models.DateTimeField(null=True)

    def __str__(self) -> str:
        return self.name


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
