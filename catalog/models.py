"""What operators want, as the database keeps it: models, their names, profiles and fallbacks; keys; events.

The law itself is `catalog/spec.py`; constraints repeat what a race could break. Rows are written by the verbs
in `catalog/actions/` and by nobody else. Durations are whole nanoseconds, as in the law.
"""

from __future__ import annotations

from datetime import datetime

from django.conf import settings
from django.db import connection, models, transaction
from django.db.models import F, Q
from django.db.models.functions import Now

from catalog import parts, reach, spec


def database_now() -> datetime:
    """The database's clock, which is the only one that rows are compared with."""
    row, _ = Revision.objects.get_or_create(pk=1)
    now: datetime = Revision.objects.filter(pk=row.pk).values_list(Now(), flat=True).get()
    return now


class Revision(models.Model):
    """One row that counts changes. Gateways ask for rows newer than the number they have seen."""

    value = models.BigIntegerField(default=0)

    class Meta:
        constraints = [models.CheckConstraint(condition=Q(pk=1), name="there_is_one_revision")]

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def advance(cls) -> int:
        """The next number. Its row stays locked until the caller's transaction ends, so numbers show
        in order: a reader that has seen n has seen everything up to n."""
        if not connection.in_atomic_block:
            raise transaction.TransactionManagementError("a revision belongs to its change's transaction")
        row, _ = cls.objects.get_or_create(pk=1)
        cls.objects.filter(pk=row.pk).update(value=F("value") + 1)
        return cls.current()

    @classmethod
    def hold(cls) -> None:
        """Lock the row until the caller's transaction ends. Who will change several rows of what requests are
        routed by begins with this (or with `advance`): so no two of them wait for each other."""
        cls.objects.select_for_update().get_or_create(pk=1)

    @classmethod
    def current(cls) -> int:
        return cls.objects.get_or_create(pk=1)[0].value


class Model(models.Model):
    """A catalog entry. `name` repeats the canonical row of Name, in the same transaction."""

    class Source(models.TextChoices):
        UNCHECKED = "", "not checked"
        OK = "ok", "found"
        WARN = "warn", "found, with a warning"
        REFUSE = "refuse", "refused"

    name = models.CharField(max_length=200, unique=True)
    description = models.TextField(blank=True)
    source = models.TextField()
    routing_profile = models.CharField(max_length=20, blank=True)
    scaling_min = models.PositiveIntegerField(default=0)
    scaling_max = models.PositiveIntegerField(default=0)
    idle_timeout_ns = models.PositiveBigIntegerField(default=0)
    ttft_p99_ns = models.PositiveBigIntegerField(default=0)
    tpot_p99_ns = models.PositiveBigIntegerField(default=0)
    context_length = models.PositiveBigIntegerField(default=0)
    max_output = models.PositiveBigIntegerField(default=0)
    can_tools = models.BooleanField(default=False)
    can_vision = models.BooleanField(default=False)
    can_embeddings = models.BooleanField(default=False)
    requests_per_minute = models.PositiveIntegerField(default=0)
    tokens_per_minute = models.PositiveIntegerField(default=0)
    concurrency = models.PositiveIntegerField(default=0)
    over_max_output = models.CharField(max_length=10, blank=True)
    timeout_hold_ns = models.PositiveBigIntegerField(default=0)
    timeout_connect_ns = models.PositiveBigIntegerField(default=0)
    timeout_first_byte_ns = models.PositiveBigIntegerField(default=0)
    timeout_idle_ns = models.PositiveBigIntegerField(default=0)

    # What the last source check found; the sentence is the law's own.
    source_state = models.CharField(max_length=10, choices=Source, blank=True, default="")
    source_sentence = models.TextField(blank=True)
    source_facts = models.JSONField(default=dict, blank=True)
    source_asked_at = models.DateTimeField(null=True, blank=True)
    source_checked_at = models.DateTimeField(null=True, blank=True, help_text="when it was last answered")
    source_skipped_by = models.CharField(max_length=150, blank=True)
    source_revision = models.CharField(max_length=64, blank=True, help_text="the commit that a launch pins")

    created_at = models.DateTimeField(db_default=Now())
    changed_at = models.DateTimeField(db_default=Now())
    revision = models.BigIntegerField(default=0, db_index=True)

    class Meta:
        ordering = ["id"]
        permissions = [("see_env", "Can see the values of profiles' environments, secrets apart")]
        constraints = [
            models.CheckConstraint(condition=~Q(name=""), name="a_model_has_a_name"),
            models.CheckConstraint(condition=~Q(source=""), name="a_model_has_a_source"),
            models.CheckConstraint(
                condition=Q(scaling_max__gte=F("scaling_min")), name="scaling_max_is_not_below_min"
            ),
            models.CheckConstraint(
                condition=Q(over_max_output__in=parts.OVER_MAX_OUTPUT), name="over_max_output_is_known"
            ),
            models.CheckConstraint(
                condition=Q(
                    timeout_hold_ns__lte=parts.LONGEST_TIMEOUT,
                    timeout_connect_ns__lte=parts.LONGEST_TIMEOUT,
                    timeout_first_byte_ns__lte=parts.LONGEST_TIMEOUT,
                    timeout_idle_ns__lte=parts.LONGEST_TIMEOUT,
                ),
                name="no_timeout_is_longer_than_a_day",
            ),
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def spec(self) -> spec.ModelSpec:
        """What is stored, as it is. It was judged when it was written: a law that has changed since then must
        not hide from anybody what exists and runs."""
        return spec.ModelSpec(
            name=self.name,
            aliases=tuple(row.name for row in self.names.all() if not row.is_canonical),
            description=self.description,
            source=self.source,
            profiles=tuple(profile.spec for profile in self.profiles.all()),
            scaling=parts.Scaling(self.scaling_min, self.scaling_max, self.idle_timeout_ns),
            fallbacks=tuple(row.name_id for row in self.fallbacks.all()),
            routing_profile=self.routing_profile,
            slo=parts.Slo(self.ttft_p99_ns, self.tpot_p99_ns),
            context_length=self.context_length,
            max_output=self.max_output,
            capabilities=parts.Capabilities(self.can_tools, self.can_vision, self.can_embeddings),
            limits=parts.Limits(self.requests_per_minute, self.tokens_per_minute, self.concurrency),
            over_max_output=self.over_max_output,
            timeouts=parts.Timeouts(
                self.timeout_hold_ns,
                self.timeout_connect_ns,
                self.timeout_first_byte_ns,
                self.timeout_idle_ns,
            ),
        )


class Name(models.Model):
    """Every name a request may use, canonical and alias, in one table, so that none can be claimed twice."""

    name = models.CharField(max_length=200, primary_key=True)
    model = models.ForeignKey(Model, models.CASCADE, related_name="names")
    is_canonical = models.BooleanField(default=False)
    position = models.PositiveIntegerField(default=0)

    class Meta:
        ordering = ["model", "position"]
        constraints = [
            models.CheckConstraint(condition=~Q(name=""), name="a_name_is_not_empty"),
            models.UniqueConstraint(
                fields=["model"], condition=Q(is_canonical=True), name="a_model_has_one_canonical_name"
            ),
        ]

    def __str__(self) -> str:
        return self.name


class Fallback(models.Model):
    """Where requests go when the model cannot answer, in order, by the name as typed (an alias, too)."""

    model = models.ForeignKey(Model, models.CASCADE, related_name="fallbacks")
    position = models.PositiveIntegerField()
    # RESTRICT, not PROTECT: a model that is its own alias's only user may still go as a whole.
    name = models.ForeignKey(Name, models.RESTRICT, related_name="fallback_of")

    class Meta:
        ordering = ["model", "position"]
        constraints = [
            models.UniqueConstraint(fields=["model", "position"], name="a_fallback_has_its_place"),
        ]

    def __str__(self) -> str:
        return self.name_id


class Profile(models.Model):
    """One way to run a model on one GPU class. An empty gpu_class means without a card."""

    model = models.ForeignKey(Model, models.CASCADE, related_name="profiles")
    position = models.PositiveIntegerField(default=0)
    name = models.CharField(max_length=200)
    engine = models.CharField(max_length=20, choices=[(engine, engine) for engine in spec.ENGINES])
    gpu_class = models.CharField("GPU class", max_length=200, blank=True)
    tp = models.PositiveIntegerField("TP", default=1)
    pp = models.PositiveIntegerField("PP", default=0)
    gpus_per_node = models.PositiveIntegerField("GPUs per node", default=0)
    nodes = models.PositiveIntegerField(default=1)
    args = models.JSONField(default=list, blank=True)
    env = models.JSONField(default=dict, blank=True)
    min_memory_gb = models.PositiveIntegerField("memory, GB", default=0)
    min_disk_gb = models.PositiveIntegerField("disk, GB", default=0)
    node_selector = models.JSONField(default=dict, blank=True)
    weight = models.FloatField(default=1)
    priority = models.IntegerField(default=0)
    startup_timeout_ns = models.PositiveBigIntegerField(default=0)
    fingerprint = models.CharField(max_length=16, editable=False, help_text="of the contents above")

    class Meta:
        ordering = ["model", "position"]
        constraints = [
            models.UniqueConstraint(fields=["model", "name"], name="a_profile_is_declared_once"),
            models.CheckConstraint(condition=~Q(name=""), name="a_profile_has_a_name"),
            models.CheckConstraint(condition=Q(tp__gte=1, nodes__gte=1), name="a_profile_has_tp_and_nodes"),
            models.CheckConstraint(condition=Q(weight__gt=0), name="a_weight_is_above_zero"),
        ]

    def __str__(self) -> str:
        return self.name

    @property
    def spec(self) -> spec.ProfileSpec:
        return spec.ProfileSpec(
            name=self.name,
            engine=self.engine,
            gpu_class=self.gpu_class,
            tp=self.tp,
            pp=self.pp,
            gpus_per_node=self.gpus_per_node,
            nodes=self.nodes,
            args=tuple(self.args),
            env=dict(sorted(self.env.items())),
            min_memory_gb=self.min_memory_gb,
            min_disk_gb=self.min_disk_gb,
            node_selector=dict(sorted(self.node_selector.items())),
            weight=self.weight,
            priority=self.priority,
            startup_timeout=self.startup_timeout_ns,
        )


class Tombstone(models.Model):
    """A name that left the catalog, so that a gateway which asks for what is newer learns of it, too."""

    name = models.CharField(max_length=200)
    revision = models.BigIntegerField(db_index=True)
    at = models.DateTimeField(db_default=Now())

    def __str__(self) -> str:
        return self.name


class Key(models.Model):
    """An API key. Its secret is kept as an HMAC only; the text was shown once."""

    class Scope(models.TextChoices):
        INFERENCE = "inference", "/v1/ alone"
        MANAGE = "manage", "/v1/ and, as its owner, /api/"
        METRICS = "metrics", "/metrics alone"

    id = models.CharField(max_length=8, primary_key=True)
    name = models.CharField(max_length=200)
    user = models.ForeignKey(settings.AUTH_USER_MODEL, models.CASCADE, related_name="keys")
    scope = models.CharField(max_length=10, choices=Scope, default=Scope.INFERENCE)
    digest = models.CharField(max_length=64)
    # Apart from the list, so that a list whose models have gone opens none, and not all.
    opens_all = models.BooleanField(default=True, help_text="every model, those to come as well")
    opened = models.ManyToManyField(Model, related_name="opened_by", blank=True, help_text="or these alone")
    requests_per_minute = models.PositiveIntegerField(default=0)
    tokens_per_minute = models.PositiveIntegerField(default=0)
    concurrency = models.PositiveIntegerField(default=0)
    cache_scope = models.CharField(max_length=200, blank=True)
    is_playground = models.BooleanField(default=False, help_text="its user's page for trying models has it")
    created_at = models.DateTimeField(db_default=Now())
    expires_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)
    revision = models.BigIntegerField(default=0, db_index=True)

    class Meta:
        ordering = ["created_at"]
        verbose_name = "API key"
        constraints = [
            models.UniqueConstraint(
                fields=["user"],
                condition=Q(is_playground=True, revoked_at=None),
                name="a_user_has_one_playground_key",
            )
        ]
        permissions = [("any_key", "Can see, make and revoke API keys of others")]

    def __str__(self) -> str:
        return f"{self.name} ({self.id})"

    @property
    def reach(self) -> reach.Reach:
        """What it opens and how much of it, as it is stored; the models by their names of now."""
        return reach.Reach(
            None if self.opens_all else tuple(sorted(model.name for model in self.opened.all())),
            parts.Limits(self.requests_per_minute, self.tokens_per_minute, self.concurrency),
            self.cache_scope,
        )


class Event(models.Model):
    """Who did what to what, and why. Rows are added, never changed. `by` is empty for llmgw's own doing."""

    at = models.DateTimeField(db_default=Now(), db_index=True)
    by = models.CharField(max_length=150, blank=True)
    door = models.CharField(max_length=20, blank=True, help_text="admin, api, command, or the loop")
    verb = models.CharField(max_length=40)
    kind = models.CharField(max_length=20, help_text="what it was done to")
    subject = models.CharField(max_length=200, db_index=True)
    subject_key = models.CharField(max_length=40, blank=True, help_text="its row, whatever it is called now")
    why = models.TextField(blank=True)
    detail = models.JSONField(default=dict, blank=True)
    revision = models.BigIntegerField(default=0, help_text="what a change of the catalog was counted as")

    class Meta:
        ordering = ["-id"]
        indexes = [models.Index(fields=["kind", "subject_key"], name="events_of_one_row")]

    def __str__(self) -> str:
        return f"{self.verb} {self.kind} {self.called}"

    @property
    def called(self) -> str:
        """What it was done to, as people call it: of a replica, first what it runs."""
        of = self.detail
        if self.kind != "replica" or not {"model", "profile"} <= of.keys():
            return self.subject
        return f"{of['model']}/{of['profile']} {self.subject[:8]}"
