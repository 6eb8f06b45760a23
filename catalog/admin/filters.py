"""What the list of models can be narrowed to: how they scale, their engines, what is stale or missing."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.db.models import Count, Exists, F, IntegerField, OuterRef, Q, QuerySet, Subquery
from django.db.models.functions import Coalesce
from django.http import HttpRequest

from catalog.models import Model, Profile
from catalog.showing import SCALINGS
from catalog.spec import ENGINES
from nodes.models import Replica
from nodes.showing import models_with_replicas, tally

Choices = list[tuple[str, str]]


class ScalingFilter(admin.SimpleListFilter):
    title = "scaling"
    parameter_name = "scaling"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Choices:
        return [("kept", "kept running"), ("on-demand", "on demand"), ("off", "off")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Model]) -> QuerySet[Model]:
        wanted = SCALINGS.get(self.value() or "")
        return queryset.filter(wanted) if wanted else queryset


class EngineFilter(admin.SimpleListFilter):
    title = "engine"
    parameter_name = "engine"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Choices:
        return [(engine, engine) for engine in ENGINES]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Model]) -> QuerySet[Model]:
        if self.value() not in ENGINES:
            return queryset
        return queryset.filter(Exists(Profile.objects.filter(model=OuterRef("pk"), engine=self.value())))


class AttentionFilter(admin.SimpleListFilter):
    """What is not as it is to be."""

    title = "state"
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Choices:
        return [("short", "short of replicas"), ("stale", "stale")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Model]) -> QuerySet[Model]:
        if self.value() == "stale":  # judged as the badges are, which no column knows
            return queryset.filter(pk__in=[row.pk for row in _that_run() if tally(row).stale])
        if self.value() == "short":
            return _short(queryset)
        return queryset


def _that_run() -> QuerySet[Model]:
    return models_with_replicas().filter(Exists(_alive(OuterRef("pk"))))


def _alive(model: Any) -> QuerySet[Replica]:
    return Replica.objects.filter(model=model).exclude(state__in=Replica.OVER)


def _short(models: QuerySet[Model]) -> QuerySet[Model]:
    """As the badge counts: fewer ready than are kept running or were started, or some without a place."""
    running = _alive(OuterRef("pk")).filter(wanted=Replica.Wanted.RUN)
    ready = running.filter(state=Replica.State.READY)
    counted = models.annotate(running_count=_count(running), ready_count=_count(ready))
    is_short = Q(ready_count__lt=F("running_count")) | Q(ready_count__lt=F("scaling_min"))
    return counted.filter(is_short | Q(unplaced__isnull=False))


def _count(replicas: QuerySet[Replica]) -> Coalesce:
    counted = replicas.order_by().values("model").annotate(count=Count("pk")).values("count")
    return Coalesce(Subquery(counted, output_field=IntegerField()), 0)
