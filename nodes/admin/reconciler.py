"""The reconciler in the admin: whether it acts, what it holds back, and what its next pass would do."""

from __future__ import annotations

from typing import Any, ClassVar

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html_join
from django.utils.safestring import SafeString

from catalog.pieces import badge, said, table
from catalog.typed import span_words
from nodes import actions
from nodes.admin.reading import ReadOnlyAdmin
from nodes.models import Cluster, Held
from nodes.outlook import Outlook, preview_plan
from nodes.pieces import item_row, replica_link
from nodes.tasks import wake
from nodes.telling import ITEM_HEADINGS


@admin.register(Cluster)
class ClusterAdmin(ReadOnlyAdmin):
    """There is one, so its page is in the place of a list."""

    actions: ClassVar[list[Any]] = ["pause", "resume", "allow", "outrank"]
    fieldsets = (
        (None, {"fields": ("state", "last_pass", "uuid")}),
        ("Held back", {"fields": ("held",)}),
        ("The next pass", {"fields": ("plan",)}),
    )

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        this = Cluster.this()
        if request.method == "POST":
            return super().changelist_view(request, extra_context)
        return self.change_view(request, str(this.pk), extra_context=extra_context)

    def render_change_form(
        self, request: HttpRequest, context: Any, *args: Any, **kwargs: Any
    ) -> HttpResponse:
        context["title"] = "Reconciler"
        context["subtitle"] = None
        context["held"] = Held.objects.count()
        return super().render_change_form(request, context, *args, **kwargs)

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        """The row, with the plan of this moment for all that is shown of it."""
        row = super().get_object(request, object_id, from_field)
        if row is not None:
            row.outlook = preview_plan()
        return row

    def subject_of(self, cluster: Cluster) -> tuple[str, str, str]:
        return "cluster", "", str(cluster)

    @admin.display(description="state")
    def state(self, cluster: Any) -> SafeString:
        acting = cluster.outlook.acting
        parts = [
            (badge("nobody looks", "bad"), acting.unwatched_says),
            (badge("paused", "warn"), acting.paused_says),
            (badge("alarm", "bad"), acting.alarm),
        ]
        told = [(mark, said(f"{says}.")) for mark, says in parts if says]
        return format_html_join("", "{}{}", told) or badge("acts", "good")

    @admin.display(description="last pass")
    def last_pass(self, cluster: Any) -> str:
        unwatched = cluster.outlook.acting.unwatched
        return "never" if unwatched is None else f"{span_words(unwatched.total_seconds())} ago"

    @admin.display(description="waits for a yes")
    def held(self, cluster: Cluster) -> SafeString | str:
        rows = [
            (replica_link(each.replica_id, str(each.replica)), f"would {each.wanted}", each.why)
            for each in Held.objects.select_related("replica").order_by("pk")
        ]
        return table(("replica", "end", "why"), rows) if rows else "nothing"

    @admin.display(description="would do")
    def plan(self, cluster: Any) -> SafeString | str:
        outlook: Outlook = cluster.outlook
        if not outlook.items:
            return "Nothing: all is as wanted, or on its way there."
        return table(ITEM_HEADINGS, [item_row(item) for item in outlook.items])

    @admin.action(description="Pause the reconciler", permissions=["change"])
    def pause(self, request: HttpRequest, queryset: QuerySet[Cluster]) -> HttpResponse:
        return self.confirm(
            request,
            queryset,
            action="pause",
            title="Pause the reconciler",
            question="Start and stop nothing until it is resumed? Looking goes on, and what runs answers "
            "requests.",
            button="Yes, pause",
            done="paused",
            act=lambda cluster, **told: actions.pause(**told),
        )

    @admin.action(description="Resume the reconciler", permissions=["change"])
    def resume(self, request: HttpRequest, queryset: QuerySet[Cluster]) -> HttpResponse:
        return self.confirm(
            request,
            queryset,
            action="resume",
            title="Resume the reconciler",
            question="Let it act again? Its page tells what the next pass would do.",
            button="Yes, resume",
            done="acts again",
            act=lambda cluster, **told: actions.resume(**told),
            after=wake,
        )

    @admin.action(description="Allow what is held back", permissions=["change"])
    def allow(self, request: HttpRequest, queryset: QuerySet[Cluster]) -> HttpResponse:
        return self.confirm(
            request,
            queryset,
            action="allow",
            title="Allow what is held back",
            question="Let all of these replicas end?",
            button="Yes, let them end",
            done="told to end what was held back",
            act=lambda cluster, **told: bool(actions.allow_held(**told)),
            after=wake,
            entails=lambda rows: {row.pk: _held_lines() for row in rows},
        )

    @admin.action(description="Have agents obey this database again", permissions=["change"])
    def outrank(self, request: HttpRequest, queryset: QuerySet[Cluster]) -> HttpResponse:
        return self.confirm(
            request,
            queryset,
            action="outrank",
            title="Have agents obey this database",
            question="Was this database restored from a backup, and do agents refuse what it says as older "
            "than what they have seen? They obey it again from the next pass on, and no other control plane: "
            "stop any other first.",
            button="Yes, have them obey this one",
            done="obeyed from the next pass on",
            act=lambda cluster, **told: bool(actions.outrank(**told)),
            after=wake,
        )


def _held_lines() -> list[str]:
    held = Held.objects.select_related("replica").order_by("pk")
    return [f"{each.replica}, to {each.wanted}: {each.why}" for each in held] or ["nothing is held back now"]
