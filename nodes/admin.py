"""Replicas and nodes in the admin: what runs where, since when and why, and how it differs from the catalog.

What is shown is what was observed; nothing here is edited. The few things an operator may do (stop a
replica, cordon a node) go through the verbs, after a confirmation.
"""

from __future__ import annotations

import shlex
from collections import Counter
from datetime import timedelta
from typing import Any, ClassVar

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from catalog.pages import VerbAdmin
from catalog.pieces import as_json, badge, difference_table, preformatted, said, sentence, table
from catalog.typed import span_words
from nodes import actions
from nodes.agents import AgentProblem, last_report, read_log
from nodes.models import Node, Orphan, Replica
from nodes.pieces import freshness_badge, replica_badge, stale_badge
from nodes.placement import GB, Freshness
from nodes.showing import (
    differences_as_dicts,
    freshness_of,
    gpus_of,
    launch_as_dict,
    nodes,
    replicas,
    staleness_of,
    with_age,
)
from nodes.tasks import wake

LOG_LINES = 40


class ReadOnlyAdmin(VerbAdmin):
    """Rows that observation writes: looked at, and acted on by the actions alone."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Of a list with actions, so that they show; of no row, so that pages are read-only."""
        return obj is None and bool(self.actions) and super().has_change_permission(request)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


def _since(age: timedelta | None) -> str:
    return "never" if age is None else f"{span_words(age.total_seconds())} ago"


class AliveFilter(admin.SimpleListFilter):
    """Those that are over are asked for; the list is of what is, or is to be."""

    title = "shown"
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
    actions: ClassVar[list[Any]] = ["stop"]
    ordering = ("model__name", "created_at")
    fieldsets = (
        (
            None,
            {"fields": ("state_shown", "reason_shown", "wanted_shown", "where", "gpus", "engine_load")},
        ),
        ("Differs from the catalog", {"fields": ("stale_shown", "stale_why", "profile_differences")}),
        (
            "Launch",
            {"fields": ("launch_shown", "fingerprint", "command", "came_by", "generation", "created_at")},
        ),
        ("Log", {"fields": ("log",)}),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Replica]:
        return replicas()

    @admin.display(description="replica", ordering="model__name")
    def replica(self, replica: Replica) -> str:
        return sentence(str(replica))

    @admin.display(description="state", ordering="state")
    def state_shown(self, replica: Replica) -> SafeString:
        age = said(span_words(replica.age.total_seconds()))  # type: ignore[attr-defined]  # annotated
        if replica.wanted == Replica.Wanted.RUN:
            return format_html("{}{}", replica_badge(replica), age)
        return format_html("{} {}{}", replica_badge(replica), badge(f"to {replica.wanted}"), age)

    @admin.display(description="stale")
    def stale_shown(self, replica: Replica) -> SafeString | str:
        return stale_badge(replica) or "-"

    @admin.display(description="reason")
    def reason_shown(self, replica: Replica) -> SafeString | str:
        if not replica.reason:
            return "-"
        return said(replica.reason, "problem" if replica.state == Replica.State.FAILED else "")

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
            pid = f", pid {rank.pid}" if rank.pid else ""
            lines.append((sentence(rank.node.name + port), said(gpus + pid)))
        return format_html_join("", "{}{}", lines) or "-"

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

    @admin.display(description="last lines")
    def log(self, replica: Replica) -> SafeString | str:
        """Asked of the agent while the page loads, for as long as an agent may take to answer."""
        rank = next(iter(replica.ranks.all()), None)
        if rank is None:
            return "-"
        if freshness_of(rank.node) is Freshness.LOST:
            return said(f"{rank.node.name} is out of contact; its log cannot be read now.")
        try:
            return preformatted(read_log(rank.node, str(replica.pk), tail=LOG_LINES) or "nothing yet", "log")
        except AgentProblem as problem:
            return said(str(problem))

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


@admin.register(Node)
class NodeAdmin(ReadOnlyAdmin):
    list_display = ("name", "freshness", "seen", "gpus", "engines", "runs", "address", "note")
    search_fields = ("name", "address")
    actions: ClassVar[list[Any]] = ["cordon", "uncordon"]
    fieldsets = (
        (None, {"fields": ("name", "address", "freshness", "seen", "note", "uuid", "agent_version")}),
        ("Has", {"fields": ("gpu_table", "engines", "labels", "memory", "disk")}),
        ("Runs", {"fields": ("runs",)}),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Node]:
        return nodes()

    def subject_of(self, node: Node) -> tuple[str, str, str]:
        return "node", str(node.pk), node.name

    @admin.display(description="state")
    def freshness(self, node: Node) -> SafeString:
        if node.is_cordoned:
            return format_html("{} {}", freshness_badge(node), badge("cordoned", "warn"))
        return freshness_badge(node)

    @admin.display(description="seen", ordering="seen_at")
    def seen(self, node: Node) -> str:
        return _since(node.age)  # type: ignore[attr-defined]  # annotated

    @admin.display(description="GPUs free")
    def gpus(self, node: Node) -> str:
        total: Counter[str] = Counter()
        free: Counter[str] = Counter()
        for each in gpus_of(node):
            total[each.gpu.gpu_class] += 1
            free[each.gpu.gpu_class] += not each.taken_by
        return ", ".join(f"{free[name]} of {count} {sentence(name)}" for name, count in total.items()) or "-"

    @admin.display(description="engines")
    def engines(self, node: Node) -> str:
        report = last_report(node)
        told = (f"{each.name} {each.version}".strip() for each in (report.engines if report else ()))
        return sentence(", ".join(told)) or "-"

    @admin.display(description="runs")
    def runs(self, node: Node) -> SafeString | str:
        links = []
        for rank in node.ranks.all():
            if rank.replica.state not in Replica.OVER:
                url = reverse("admin:nodes_replica_change", args=[rank.replica_id])
                links.append(format_html('<a href="{}">{}</a>', url, sentence(str(rank.replica))))
        links += [badge(f"orphan {str(orphan.replica)[:8]}", "warn") for orphan in node.orphans.all()]
        return format_html_join(", ", "{}", ((link,) for link in links)) or "-"

    @admin.display(description="note")
    def note(self, node: Node) -> SafeString | str:
        if node.problem:
            return said(node.problem, "problem")
        if node.is_cordoned:
            why = f": {node.cordoned_why}" if node.cordoned_why else ""
            return said(f"cordoned by {node.cordoned_by}{why}")
        return "-"

    @admin.display(description="GPUs")
    def gpu_table(self, node: Node) -> SafeString | str:
        rows = [
            (
                each.gpu.index,
                each.gpu.gpu_class,
                each.gpu.name,
                _mib(each.gpu.memory_mib),
                each.gpu.id,
                each.taken_by or said("free"),
            )
            for each in gpus_of(node)
        ]
        return table(("no.", "class", "device", "memory", "id", "taken by"), rows) if rows else "none"

    @admin.display(description="labels")
    def labels(self, node: Node) -> str:
        report = last_report(node)
        return (
            sentence(", ".join(f"{key}={value}" for key, value in (report.labels if report else {}).items()))
            or "-"
        )

    @admin.display(description="host memory")
    def memory(self, node: Node) -> str:
        report = last_report(node)
        if report is None or report.memory_total_mib is None:
            return "not told"
        return f"{_mib(report.memory_free_mib)} free of {_mib(report.memory_total_mib)}"

    @admin.display(description="disk for weights")
    def disk(self, node: Node) -> str:
        report = last_report(node)
        if report is None or report.disk_free_bytes is None:
            return "not told"
        return f"{report.disk_free_bytes / GB:.0f} GB free"

    @admin.display(description="agent")
    def agent_version(self, node: Node) -> str:
        report = last_report(node)
        return sentence(report.agent_version) if report and report.agent_version else "not told"

    @admin.action(description="Cordon the selected nodes", permissions=["change"])
    def cordon(self, request: HttpRequest, queryset: QuerySet[Node]) -> HttpResponse:
        return self.confirm(
            request,
            queryset,
            action="cordon",
            title="Cordon nodes",
            question="Place nothing new on these? What runs there stays.",
            button="Yes, cordon",
            done="cordoned",
            act=actions.cordon,
            after=wake,
        )

    @admin.action(description="Uncordon the selected nodes", permissions=["change"])
    def uncordon(self, request: HttpRequest, queryset: QuerySet[Node]) -> HttpResponse:
        return self.confirm(
            request,
            queryset,
            action="uncordon",
            title="Uncordon nodes",
            question="Let replicas be placed on these again?",
            button="Yes, uncordon",
            done="uncordoned",
            act=actions.uncordon,
            after=wake,
        )


def _mib(memory_mib: int | None) -> str:
    return "not told" if memory_mib is None else f"{memory_mib / 1024:.1f} GiB"


@admin.register(Orphan)
class OrphanAdmin(ReadOnlyAdmin):
    """Engines that run and belong to nothing in the database. They are left running."""

    list_display = ("short", "node", "age_shown", "why_shown")
    list_select_related = ("node",)
    fields = ("replica", "node", "rank", "since", "why_shown", "gpus", "launch_shown")

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
