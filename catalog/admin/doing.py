"""What an operator may do to models chosen in a list: each asks, and calls a verb for each of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse

from catalog import actions
from catalog.models import Model
from catalog.names import knotted, users_first
from catalog.pages import VerbAdmin
from catalog.source import Answer
from nodes.actions import cancel_roll, roll_model
from nodes.agents import ask_paths
from nodes.checking import ask_check
from nodes.models import Job, Replica
from nodes.showing import replicas, spec_of, staleness_of
from nodes.tasks import offer, wake


@admin.action(description="Check the sources of the selected models", permissions=["change"])
def check_sources(page: VerbAdmin, request: HttpRequest, queryset: QuerySet[Model]) -> HttpResponse:
    is_silent = False

    def act(model: Model, **told: Any) -> bool:
        """A hub that does not answer is not waited for again and again."""
        nonlocal is_silent
        if is_silent and not model.source.startswith("/"):
            return False
        is_silent |= check(model, **told).finding.code == Answer.UNREACHABLE
        return not is_silent

    return page.confirm(
        request,
        queryset,
        action="check_sources",
        title="Check sources",
        question="Ask for the sources of these again? What runs is left alone.",
        button="Yes, check",
        done="checked",
        act=act,
    )


@admin.action(description="Check the engines of the selected models", permissions=["check_engine"])
def check_engine(page: VerbAdmin, request: HttpRequest, queryset: QuerySet[Model]) -> HttpResponse:
    asked: list[Job] = []
    return page.confirm(
        request,
        queryset,
        action="check_engine",
        title="Check engines",
        question="Have a replica of each of these asked for all that it should do? It takes some twenty "
        "requests, of which one is as long as its context. A worker does it; see the list of jobs.",
        button="Yes, check",
        done="engine check asked for",
        act=lambda model, **told: asked.append(ask_check(model, **told)),
        after=lambda: offer(*asked),
    )


@admin.action(description="Pin the newest commits of the selected models", permissions=["change"])
def pin(page: VerbAdmin, request: HttpRequest, queryset: QuerySet[Model]) -> HttpResponse:
    return page.confirm(
        request,
        queryset,
        action="pin",
        title="Pin newest commits",
        question="Start replicas of these from the newest commits of their sources from now on? Those "
        "that run keep running, and are stale then.",
        button="Yes, pin",
        done="asked for, and their newest commits pinned",
        act=partial(check, pin=True),
        entails=commits,
    )


@admin.action(description="Remove the selected models", permissions=["delete"])
def remove(page: VerbAdmin, request: HttpRequest, queryset: QuerySet[Model]) -> HttpResponse:
    if not page.has_delete_permission(request):
        raise PermissionDenied
    row_of = {row.name: row for row in queryset}
    specs = [spec_of(row) for row in row_of.values()]
    together = knotted(specs)
    gone: list[str] = []

    def act(model: Model, **told: Any) -> bool:
        """Models that fall back to one another go with the first of them, or stay with it."""
        if model.name not in together:
            actions.remove_model(model.name, after_change=wake, **told)
            return True
        if model.name == together[0]:
            actions.remove_models(together, after_change=wake, **told)
            gone.extend(together)
        return model.name in gone

    return page.confirm(
        request,
        [row_of[name] for name in users_first(specs)],
        action="remove",
        title="Remove models",
        question="Take these out of the catalog? Their replicas finish what they are doing and stop.",
        button="Yes, remove",
        done="removed",
        act=act,
        entails=_replicas_that_stop,
    )


@admin.action(description="Turn off the selected models", permissions=["change"])
def turn_off(page: VerbAdmin, request: HttpRequest, queryset: QuerySet[Model]) -> HttpResponse:
    return page.confirm(
        request,
        queryset,
        action="turn_off",
        title="Turn off models",
        question="Turn these off? They stay in the catalog. Their replicas finish what they are doing "
        "and stop; requests go to their fallbacks, or are refused.",
        button="Yes, turn off",
        done="turned off",
        act=_turn_off,
        entails=_replicas_that_stop,
    )


@admin.action(description="Roll the selected models", permissions=["change"])
def roll(page: VerbAdmin, request: HttpRequest, queryset: QuerySet[Model]) -> HttpResponse:
    return page.confirm(
        request,
        queryset,
        action="roll",
        title="Roll models",
        question="Replace what is stale of these, one replica after another, with the catalog as it is now? "
        "Where there is room, the new one is ready before the old one leaves. The first that fails halts it.",
        button="Yes, roll",
        done="being rolled",
        act=lambda model, **told: roll_model(model, **told) is not None,
        after=wake,
        entails=_stale_replicas,
    )


@admin.action(description="End the rolls of the selected models", permissions=["change"])
def end_roll(page: VerbAdmin, request: HttpRequest, queryset: QuerySet[Model]) -> HttpResponse:
    return page.confirm(
        request,
        queryset,
        action="end_roll",
        title="End rolls",
        question="Replace no more replicas of these? What has been replaced stays.",
        button="Yes, end",
        done="no longer being rolled",
        act=cancel_roll,
        after=wake,
    )


def check(model: Model, **told: Any) -> actions.Outcome:
    return actions.check_model(model.name, ask_paths=ask_paths, after_change=wake, **told)


def commits(models: Sequence[Model]) -> Mapping[int, Sequence[str]]:
    """By model: where its source has moved on to, as far as the last check knows."""
    return {
        model.pk: [f"from commit {model.source_revision} to {newest}"]
        for model in models
        if (newest := model.source_facts.get("newest_commit"))
    }


def _turn_off(model: Model, **told: Any) -> bool:
    if model.scaling_max == 0:
        return False
    off = {"scaling": {"min": 0, "max": 0}}
    actions.patch_model(model.name, off, ask_paths=ask_paths, after_change=wake, **told)
    return True


def _replicas_that_stop(models: Sequence[Model]) -> Mapping[int, Sequence[str]]:
    """By model: each replica's name, where it runs and how it is."""
    alive = replicas().filter(model__in=models).exclude(state__in=Replica.OVER)
    found: dict[Any, list[str]] = defaultdict(list)
    for replica in alive:
        where = ", ".join(rank.node.name for rank in replica.ranks.all()) or "no node yet"
        found[replica.model_id].append(f"{replica} on {where}, {replica.state}, will stop")
    return {model.pk: found[model.pk] or ["no replica runs"] for model in models}


def _stale_replicas(models: Sequence[Model]) -> Mapping[int, Sequence[str]]:
    """By model: each replica that a roll replaces, and how it differs."""
    found: dict[Any, list[str]] = defaultdict(list)
    for replica in replicas().filter(model__in=models).exclude(state__in=Replica.OVER):
        judged = staleness_of(replica)
        if judged.restart_needed:
            found[replica.model_id].append(f"{replica}: {judged.sentence}")
    return {model.pk: found[model.pk] or ["nothing of it is stale"] for model in models}
