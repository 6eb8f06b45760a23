"""Nodes in the admin: whether they answer, what they have, and who holds each of their GPUs."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any, ClassVar

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from catalog.pieces import badge, said, sentence, table
from catalog.typed import span_words
from nodes import actions
from nodes.admin.reading import ReadOnlyAdmin
from nodes.agents import last_report
from nodes.holdings import needing, state_words
from nodes.models import Node
from nodes.pieces import (
    freshness_badge,
    gpu_badge,
    kept_free_badge,
    replica_badge,
    replica_link,
    weights_badge,
)
from nodes.placement import GB
from nodes.plots import node_figure
from nodes.protocol import GpuReport
from nodes.showing import GpuUse, gpus_of, nodes, running_on
from nodes.tasks import wake

WEIGHTS_HEADINGS = ("weights", "state", "size", "in use", "needed by", "note")
GPU_HEADINGS = ("no.", "use", "by", "class", "device", "memory", "id")


class PlacingFilter(admin.SimpleListFilter):
    title = "what is placed there"
    parameter_name = "takes"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [
            ("all", "whatever fits"),
            ("nothing-new", "nothing new: cordoned"),
            ("leaving", "nothing: draining"),
        ]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Node]) -> QuerySet[Node]:
        if self.value() == "all":
            return queryset.filter(is_cordoned=False)
        if self.value() == "nothing-new":
            return queryset.filter(is_cordoned=True, is_draining=False)
        return queryset.filter(is_draining=True) if self.value() == "leaving" else queryset


@admin.register(Node)
class NodeAdmin(ReadOnlyAdmin):
    list_display = ("name", "state", "seen", "note", "gpus", "engines", "runs", "address")
    list_filter = (PlacingFilter,)
    is_live = True
    search_fields = ("name", "address")
    actions: ClassVar[list[Any]] = ["cordon", "drain", "uncordon", "remove"]
    fieldsets = (
        (None, {"fields": ("name", "address", "trusted", "state", "seen", "note", "uuid", "agent_version")}),
        ("Lately", {"fields": ("lately",)}),
        ("GPUs", {"fields": ("gpus", "gpu_map")}),
        ("Runs", {"fields": ("runs_table",)}),
        ("Weights", {"fields": ("disk", "weights_table")}),
        ("Has", {"fields": ("engines", "engines_speak", "labels", "fabric", "cpu", "memory")}),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Node]:
        return nodes()

    def subject_of(self, node: Node) -> tuple[str, str, str]:
        return "node", str(node.pk), node.name

    @admin.display(description="its certificate")
    def trusted(self, node: Node) -> str:
        if not node.address.startswith("https:"):
            return "none: plain HTTP"
        return f"SHA-256 {node.certificate}" if node.certificate else "vouched for by an authority"

    @admin.display(description="state")
    def state(self, node: Node) -> SafeString:
        return format_html("{} {}", freshness_badge(node), kept_free_badge(node))

    @admin.display(description="seen", ordering="seen_at")
    def seen(self, node: Node) -> str:
        age: timedelta | None = node.age  # type: ignore[attr-defined]  # annotated
        return "never" if age is None else f"{span_words(age.total_seconds())} ago"

    @admin.display(description="plots")
    def lately(self, node: Node) -> SafeString:
        return node_figure(node.name)

    @admin.display(description="GPUs free")
    def gpus(self, node: Node) -> str:
        total: Counter[str] = Counter()
        free: Counter[str] = Counter()
        for each in gpus_of(node):
            total[each.gpu.gpu_class] += 1
            free[each.gpu.gpu_class] += each.use is GpuUse.FREE
        return ", ".join(f"{free[name]} of {count} {sentence(name)}" for name, count in total.items()) or "-"

    @admin.display(description="engines")
    def engines(self, node: Node) -> str:
        report = last_report(node)
        told = (f"{each.name} {each.version}".strip() for each in (report.engines if report else ()))
        return sentence(", ".join(told)) or "-"

    @admin.display(description="runs")
    def runs(self, node: Node) -> SafeString | str:
        links = [replica_link(replica.pk, str(replica)) for replica in running_on(node)]
        links += [badge(f"orphan {str(orphan.replica)[:8]}", "warn") for orphan in node.orphans.all()]
        return format_html_join(", ", "{}", ((link,) for link in links)) or "-"

    @admin.display(description="replicas")
    def runs_table(self, node: Node) -> SafeString | str:
        rows: list[tuple[Any, ...]] = [
            (
                replica_link(replica.pk, str(replica)),
                replica_badge(replica),
                "" if replica.wanted == replica.Wanted.RUN else f"to {replica.wanted}",
                replica.reason if replica.wanted == replica.Wanted.RUN else replica.wanted_why,
            )
            for replica in running_on(node)
        ]
        rows += [
            (f"orphan {str(orphan.replica)[:8]}", badge("orphan", "warn"), "", orphan.why)
            for orphan in node.orphans.all()
        ]
        return table(("replica", "state", "wanted", "reason"), rows) if rows else "none"

    @admin.display(description="of repositories")
    def weights_table(self, node: Node) -> SafeString | str:
        rows = list(node.weights.all())
        needed = needing(rows)
        lines = [
            (
                str(row),
                weights_badge(row),
                state_words(row).partition(", ")[2],
                "yes" if row.is_used else "no",
                ", ".join(needed[row.pk]) or "-",
                row.reason or "-",
            )
            for row in rows
        ]
        return table(WEIGHTS_HEADINGS, lines) if lines else "none"

    @admin.display(description="note")
    def note(self, node: Node) -> SafeString | str:
        lines = [said(node.problem, "problem")] if node.problem else []
        if node.is_cordoned:
            verb = "drained" if node.is_draining else "cordoned"
            why = f": {node.cordoned_why}" if node.cordoned_why else ""
            lines.append(said(f"{verb} by {node.cordoned_by}{why}"))
        return format_html_join("", "{}", ((line,) for line in lines)) or "-"

    @admin.display(description="each of them")
    def gpu_map(self, node: Node) -> SafeString | str:
        rows = [
            (
                each.gpu.index,
                gpu_badge(each.use),
                replica_link(each.replica, each.taken_by) if each.replica else said(each.taken_by),
                each.gpu.gpu_class,
                _device(each.gpu),
                _memory(each.gpu),
                each.gpu.id,
            )
            for each in gpus_of(node)
        ]
        return table(GPU_HEADINGS, rows) if rows else "none"

    @admin.display(description="labels")
    def labels(self, node: Node) -> str:
        report = last_report(node)
        told = report.labels.items() if report else ()
        return sentence(", ".join(f"{key}={value}" for key, value in told)) or "-"

    @admin.display(description="engines speak")
    def engines_speak(self, node: Node) -> str:
        """Those that start from now on; each replica's page tells what its own does."""
        report = last_report(node)
        return "TLS" if report and report.engine_tls else "plain HTTP" if report else "not told"

    @admin.display(description="fabric")
    def fabric(self, node: Node) -> str:
        report = last_report(node)
        return sentence(report.fabric) if report and report.fabric else "none"

    @admin.display(description="processor")
    def cpu(self, node: Node) -> str:
        report = last_report(node)
        cores = f"{report.cpu_cores} cores" if report and report.cpu_cores else ""
        told = (cores, report.cpu_model if report else "")
        return sentence(" of ".join(filter(None, told))) or "not told"

    @admin.display(description="host memory")
    def memory(self, node: Node) -> str:
        report = last_report(node)
        if report is None or report.memory_total_mib is None:
            return "not told"
        return f"{_gib(report.memory_free_mib)} free of {_gib(report.memory_total_mib)}"

    @admin.display(description="disk for weights")
    def disk(self, node: Node) -> str:
        report = last_report(node)
        if report is None or report.disk_free_bytes is None:
            return "not told"
        free = f"{report.disk_free_bytes / GB:.0f} GB free"
        if report.room_bytes is None:
            return free
        return f"{free}; {report.room_bytes / GB:.0f} GB to be had, with what nothing needs"

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

    @admin.action(description="Drain the selected nodes", permissions=["change"])
    def drain(self, request: HttpRequest, queryset: QuerySet[Node]) -> HttpResponse:
        return self.confirm(
            request,
            queryset,
            action="drain",
            title="Drain nodes",
            question="Empty these? Nothing new is placed there, and what runs there moves: each replica "
            "leaves once another has taken its place, or at once where nothing else has room for it.",
            button="Yes, drain",
            done="being drained",
            act=actions.drain_node,
            after=wake,
            entails=lambda rows: {node.pk: [f"{each} moves" for each in running_on(node)] for node in rows},
        )

    @admin.action(description="Remove the selected nodes", permissions=["remove"])
    def remove(self, request: HttpRequest, queryset: QuerySet[Node]) -> HttpResponse:
        return self.confirm(
            request,
            queryset,
            action="remove",
            title="Remove nodes",
            question="Forget these? They must be drained, and empty or lost. What a lost one still runs is "
            "counted as ended, and its agent's token opens nothing any more.",
            button="Yes, remove",
            done="removed",
            act=actions.remove_node,
            after=wake,
            entails=lambda rows: {node.pk: [f"{each} ends" for each in running_on(node)] for node in rows},
        )

    def has_remove_permission(self, request: HttpRequest) -> bool:
        return bool(request.user.has_perm("nodes.delete_node"))

    @admin.action(description="Uncordon the selected nodes", permissions=["change"])
    def uncordon(self, request: HttpRequest, queryset: QuerySet[Node]) -> HttpResponse:
        return self.confirm(
            request,
            queryset,
            action="uncordon",
            title="Uncordon nodes",
            question="Let replicas be placed on these again? Where one is being drained, that ends.",
            button="Yes, uncordon",
            done="uncordoned",
            act=actions.uncordon,
            after=wake,
        )


def _gib(memory_mib: int | None) -> str:
    return "not told" if memory_mib is None else f"{memory_mib / 1024:.1f} GiB"


def _device(gpu: GpuReport) -> SafeString | str:
    """One that is sick says why, whoever holds it."""
    if not gpu.sickness:
        return sentence(gpu.name)
    return format_html("{}{}", sentence(gpu.name), said(gpu.sickness, "problem"))


def _memory(gpu: GpuReport) -> str:
    """Of unified memory a device tells nothing."""
    if gpu.memory_mib is None:
        return "not told"
    used = "" if gpu.used_mib is None else f"{_gib(gpu.used_mib)} of "
    return used + _gib(gpu.memory_mib)
