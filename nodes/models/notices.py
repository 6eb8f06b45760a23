"""What is wrong now, who is told of it, and what has become of telling them."""

from __future__ import annotations

import uuid

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now


class Trouble(models.Model):
    """Something that is wrong now, from when it was first seen until it has been gone for a while.

    Written by whoever looks (`nodes/noticing.py`): told_at is when notices of its beginning were made, None
    before it has lasted for as long as its kind is borne with; gone_at is when it was first missed.
    """

    kind = models.CharField(max_length=40)
    subject = models.CharField(max_length=300)
    sentence = models.TextField()
    since = models.DateTimeField(db_default=Now())
    told_at = models.DateTimeField(null=True)
    gone_at = models.DateTimeField(null=True)

    class Meta:
        default_permissions = ()
        constraints = [models.UniqueConstraint(fields=["kind", "subject"], name="a_trouble_is_known_once")]

    def __str__(self) -> str:
        return f"{self.kind} {self.subject}"


class Webhook(models.Model):
    """An address that is told of troubles. Operators write name to is_paused; whoever tells it, the rest.

    Its secret derives from a key of the control plane and `id`, and so is kept nowhere. claimed_until: nobody
    else posts to it until then.
    """

    id = models.UUIDField(primary_key=True, default=uuid.uuid4, editable=False)
    name = models.CharField(max_length=200, unique=True)
    url = models.CharField(max_length=2000)
    kinds = models.JSONField(default=list, help_text="the troubles that it is told of; empty: of all")
    is_paused = models.BooleanField(default=False)
    by = models.CharField(max_length=150)
    created_at = models.DateTimeField(db_default=Now())

    delivered = models.BigIntegerField(default=0)
    failed = models.BigIntegerField(default=0, help_text="tries")
    given_up = models.BigIntegerField(default=0)
    streak = models.PositiveIntegerField(default=0, help_text="tries that failed since one was taken")
    claimed_until = models.DateTimeField(null=True)

    class Meta:
        ordering = ["name"]
        constraints = [models.CheckConstraint(condition=~Q(name=""), name="a_webhook_has_a_name")]

    def __str__(self) -> str:
        return self.name


class Delivery(models.Model):
    """One notice for one webhook, from when it was made until it is forgotten. `body` is what is posted."""

    class State(models.TextChoices):
        WAITING = "waiting"
        DELIVERED = "delivered"
        GIVEN_UP = "given up"

    webhook = models.ForeignKey(Webhook, models.CASCADE, related_name="deliveries")
    body = models.JSONField()
    made_at = models.DateTimeField(db_default=Now())
    state = models.CharField(max_length=10, choices=State, default=State.WAITING)
    tries = models.PositiveIntegerField(default=0)
    next_at = models.DateTimeField(db_default=Now(), help_text="not tried before then")
    ended_at = models.DateTimeField(null=True)
    status = models.PositiveIntegerField(null=True, help_text="of the last answer")
    problem = models.TextField(blank=True)

    class Meta:
        verbose_name_plural = "deliveries"
        ordering = ["-id"]
        default_permissions = ()
        indexes = [models.Index(fields=["state", "webhook", "next_at"], name="deliveries_that_are_due")]

    def __str__(self) -> str:
        return " ".join(str(self.body.get(key, "")) for key in ("kind", "state", "subject"))
