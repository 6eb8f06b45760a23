"""Replicas in the admin, and engines that belong to nobody."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, ClassVar

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from catalog.pieces import as_json, badge, difference_table, preformatted, said, sentence, table
from catalog.typed import span_words
from nodes import actions
from nodes.admin.reading import ReadOnlyAdmin
from nodes.checking import ask_check
from nodes.models import Job, Orphan, Replica
from nodes.pieces import engine_check_shown, progress_bars, replica_badge, stale_badge
from nodes.placement import Freshness
from nodes.showing import (
    attempt_as_dict,
    check_of_replica,
    deadline_of,
    differences_as_dicts,
    end_words,
    freshness_of,
    launch_as_dict,
    replicas,
    staleness_of,
    with_age,
)
from nodes.tasks import offer, wake

ATTEMPT_HEADINGS = ("rank", "attempt", "ended by", "after", "cause", "what happened", "its log")
ATTEMPT_LOOKS = ("", "", "brief", "brief", "brief", "", "brief")


class AliveFilter(admin.SimpleListFilter):
    """Those that are over are asked for; the list is of what is, or is to be."""

    title = "whether it is over"
    parameter_name = "shown"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("stale", "stale"), ("over", "over"), ("all", "all")]

    def choices(self, changelist: Any) -> Any:
        first, *others = super().choices(changelist)
        return [{**first, "display": "not over"}, *others]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Replica]) -> QuerySet[Replica]:
        alive = queryset.exclude(state__in=Replica.OVER)
        if self.value() == "stale":  # judged as the badges are, which no column knows
            return alive.filter(pk__in=[row.pk for row in alive if _is_stale(row)])
        if self.value() == "over":
            return queryset.filter(state__in=Replica.OVER)
        return queryset if self.value() == "all" else alive


def _is_stale(replica: Replica) -> bool:
    found = staleness_of(replica)
    return found.stale_profile is True or found.stale_launch


@admin.register(Replica)
class ReplicaAdmin(ReadOnlyAdmin):
    list_display = ("replica", "state_shown", "stale_shown", "reason_shown", "where", "engine_load")
    list_filter = (AliveFilter, "state", "model", "ranks__node")
    search_fields = ("id", "model__names__name", "reason")
    actions: ClassVar[list[Any]] = ["check_engine", "stop"]
    is_live = True
    ordering = ("model__name", "created_at")
    fieldsets = (
        (
            None,
            {
                "fields": (
                    *("of", "state_shown", "reason_shown", "wanted_shown", "where", "shows"),
                    *("gpus", "engine_load"),
                )
            },
        ),
        ("Engine check", {"fields": ("checked",)}),
        ("Differs from the catalog", {"fields": ("stale_shown", "stale_why", "profile_differences")}),
        (
            "Launch",
            {"fields": ("launch_shown", "fingerprint", "command", "came_by", "generation", "created_at")},
        ),
        ("Processes", {"fields": ("attempts",)}),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Replica]:
        return replicas()

    @admin.display(description="replica", ordering="model__name")
    def replica(self, replica: Replica) -> str:
        return sentence(str(replica))

    @admin.display(description="model")
    def of(self, replica: Replica) -> SafeString | str:
        if replica.model is None:
            return sentence(replica.model_name)
        address = reverse("admin:catalog_model_change", args=[replica.model.pk])
        return format_html('<a href="{}">{}</a>', address, sentence(replica.model.name))

    @admin.display(description="state", ordering="state")
    def state_shown(self, replica: Replica) -> SafeString:
        words = span_words(replica.age.total_seconds())  # type: ignore[attr-defined]  # annotated
        if (left := deadline_of(replica)) is not None:
            words += f", {span_words(left)} left"
        age = said(words)
        if replica.wanted == Replica.Wanted.RUN:
            return format_html("{}{}", replica_badge(replica), age)
        return format_html("{} {}{}", replica_badge(replica), badge(f"to {replica.wanted}"), age)

    @admin.display(description="stale")
    def stale_shown(self, replica: Replica) -> SafeString | str:
        return stale_badge(replica) or "-"

    @admin.display(description="reason")
    def reason_shown(self, replica: Replica) -> SafeString | str:
        bars = progress_bars(replica)
        if not replica.reason or (bars and replica.state == Replica.State.FETCHING):  # which says the same
            return bars or "-"
        look = "problem" if replica.state == Replica.State.FAILED else ""
        return format_html("{}{}", said(replica.reason, look), bars)

    @admin.display(description="wanted")
    def wanted_shown(self, replica: Replica) -> str:
        why = f": {replica.wanted_why}" if replica.wanted_why else ""
        return sentence(f"{replica.wanted}{why}")

    @admin.display(description="where")
    def where(self, replica: Replica) -> SafeString | str:
        lines = []
        for rank in replica.ranks.all():
            count = len(rank.claims.all())
            gpus = f"{count} {'GPU' if count == 1 else 'GPUs'}" if count else "no GPU"
            port = f":{rank.port}" if rank.port else ""
            tls = ", over TLS" if rank.certificate else ""
            pid = f", pid {rank.pid}" if rank.pid else ""
            lines.append((sentence(rank.node.name + port), said(gpus + pid + tls)))
        return format_html_join("", "{}{}", lines) or "-"

    @admin.display(description="its certificate")
    def shows(self, replica: Replica) -> str:
        rank = next(iter(replica.ranks.all()), None)
        if rank is None or rank.port is None:  # it shows nothing yet, or nothing that can be believed
            return "-"
        return f"SHA-256 {rank.certificate}" if rank.certificate else "none: plain HTTP"

    @admin.display(description="GPUs")
    def gpus(self, replica: Replica) -> str:
        held = (claim.gpu for rank in replica.ranks.all() for claim in rank.claims.all())
        return sentence(", ".join(held)) or "none"

    @admin.display(description="requests")
    def engine_load(self, replica: Replica) -> str:
        rank = next(iter(replica.ranks.all()), None)
        if rank is None or rank.running is None:
            return "-"
        return f"{rank.running} run, {rank.waiting or 0} wait"

    @admin.display(description="why")
    def stale_why(self, replica: Replica) -> str:
        return sentence(staleness_of(replica).sentence) or "It runs what the catalog says."

    @admin.display(description="field by field")
    def profile_differences(self, replica: Replica) -> SafeString | str:
        found = staleness_of(replica)
        differences = found.stale_fields + found.launch_fields
        if not differences:
            return "-"
        return difference_table(differences_as_dicts(differences, sees_env=replica.sees_env))

    @admin.display(description="started from")
    def launch_shown(self, replica: Replica) -> SafeString:
        return as_json(launch_as_dict(replica.launch, sees_env=replica.sees_env))

    @admin.display(description="came by")
    def came_by(self, replica: Replica) -> str:
        return "adopted while it ran" if replica.is_adopted else "started by llmgw"

    @admin.display(description="command")
    def command(self, replica: Replica) -> SafeString | str:
        lines = [
            shlex.join(str(word) for word in rank.command) for rank in replica.ranks.all() if rank.command
        ]
        return preformatted("\n".join(lines), "command") if lines else "not told yet"

    @admin.display(description="processes that have ended")
    def attempts(self, replica: Replica) -> SafeString | str:
        rows = [
            (
                str(rank.rank),
                str(each["number"]),
                end_words(each),
                _lasted(each),
                each["cause"],
                each["reason"],
                _log_link(replica, rank.rank, each["number"]),
            )
            for rank in replica.ranks.all()
            for each in map(attempt_as_dict, rank.attempts)
        ]
        return table(ATTEMPT_HEADINGS, rows, ATTEMPT_LOOKS) if rows else "none"

    def render_change_form(
        self, request: HttpRequest, context: Any, *args: Any, **kwargs: Any
    ) -> HttpResponse:
        """With the way to its log, which is asked of its agent once the page is there."""
        replica = context["original"]
        ranks = list(replica.ranks.all())
        context["log"] = reverse("replica-log", args=[replica.pk]) if ranks else ""
        if ranks and freshness_of(ranks[0].node) is Freshness.LOST:
            name = sentence(ranks[0].node.name)
            context["log_says"] = f"{name} is out of contact; its log cannot be read now."
        may_roll = request.user.has_perm("catalog.change_model")
        is_stale = replica.model is not None and staleness_of(replica).restart_needed
        context["can_roll"] = may_roll and is_stale and replica.state not in Replica.OVER
        return super().render_change_form(request, context, *args, **kwargs)

    @admin.display(description="what it does")
    def checked(self, replica: Replica) -> SafeString:
        return engine_check_shown(check_of_replica(replica))

    def has_check_engine_permission(self, request: HttpRequest) -> bool:
        return bool(request.user.has_perm("nodes.add_job"))

    @admin.action(description="Check the engines of the selected replicas", permissions=["check_engine"])
    def check_engine(self, request: HttpRequest, queryset: QuerySet[Replica]) -> HttpResponse:
        asked: list[Job] = []

        def act(replica: Replica, **told: Any) -> bool:
            if replica.model is None:
                return False
            asked.append(ask_check(replica.model, replica=str(replica.pk), **told))
            return True

        return self.confirm(
            request,
            queryset,
            action="check_engine",
            title="Check engines",
            question="Have each of these asked for all that it should do? It takes some twenty requests, of "
            "which one is as long as its context. A worker does it; see the list of jobs.",
            button="Yes, check",
            done="engine check asked for",
            act=act,
            after=lambda: offer(*asked),
        )

    @admin.action(description="Stop the selected replicas", permissions=["change"])
    def stop(self, request: HttpRequest, queryset: QuerySet[Replica]) -> HttpResponse:
        return self.confirm(
            request,
            queryset,
            action="stop",
            title="Stop replicas",
            question="Stop these? Requests they are answering are cut; where a replica is still wanted, "
            "another is started from the catalog as it is now.",
            button="Yes, stop",
            done="told to stop",
            act=actions.stop_replica,
            after=wake,
        )


def _log_link(replica: Replica, rank: int, attempt: int | None) -> SafeString | str:
    """For the module that shows logs on the page; without it, to the text itself."""
    if attempt is None:
        return "-"
    return format_html(
        '<a href="{}?attempt={}&amp;rank={}" data-attempt="attempt {}">show</a>',
        reverse("replica-log", args=[replica.pk]),
        attempt,
        rank,
        attempt,
    )


def _lasted(attempt: Mapping[str, Any]) -> str:
    return "not seen" if attempt["duration_s"] is None else span_words(attempt["duration_s"])


@admin.register(Orphan)
class OrphanAdmin(ReadOnlyAdmin):
    """Engines that run and belong to nothing in the database. They are left running until somebody stops
    them."""

    list_display = ("short", "node", "age_shown", "why_shown")
    list_select_related = ("node",)
    fields = ("replica", "node", "rank", "since", "why_shown", "gpus", "launch_shown")
    actions: ClassVar[list[Any]] = ["stop"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Orphan]:
        return with_age(super().get_queryset(request), "since")

    @admin.display(description="replica")
    def short(self, orphan: Orphan) -> str:
        return str(orphan.replica)

    @admin.display(description="for", ordering="-since")
    def age_shown(self, orphan: Orphan) -> str:
        return span_words(orphan.age.total_seconds())  # type: ignore[attr-defined]  # annotated

    @admin.display(description="why")
    def why_shown(self, orphan: Orphan) -> SafeString:
        return said(orphan.why)

    @admin.display(description="started from")
    def launch_shown(self, orphan: Orphan) -> SafeString:
        return as_json(launch_as_dict(orphan.launch, sees_env=orphan.sees_env))

    def has_stop_permission(self, request: HttpRequest) -> bool:
        return bool(request.user.has_perm("nodes.change_replica"))

    @admin.action(description="Stop the selected orphans", permissions=["stop"])
    def stop(self, request: HttpRequest, queryset: QuerySet[Orphan]) -> HttpResponse:
        return self.confirm(
            request,
            queryset,
            action="stop",
            title="Stop orphans",
            question="End these engines? Nothing here accounts for them, but somebody may use them.",
            button="Yes, stop",
            done="told to stop",
            act=actions.stop_orphan,
            after=wake,
        )
