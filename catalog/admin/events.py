"""The history in the admin: who did what to what, when, why, and what changed. Read-only."""

from __future__ import annotations

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from catalog.hiding import hide_all
from catalog.history import changes, summary
from catalog.models import Event, Model
from catalog.pages import VerbAdmin
from catalog.pieces import as_json, said, sentence
from catalog.showing import events_for
from nodes.models import Replica


@admin.register(Event)
class EventAdmin(VerbAdmin):
    list_display = ("at", "came", "did", "changed", "because")
    list_filter = ("kind", "verb", "door")
    search_fields = ("subject", "by", "why")
    fieldsets = (
        (None, {"fields": ("at", "who", "door", "verb", "kind", "what", "because", "differences", "today")}),
        ("As it was recorded", {"fields": ("recorded",), "classes": ("collapse",)}),
    )
    show_full_result_count = False

    def get_queryset(self, request: HttpRequest) -> QuerySet[Event]:
        return events_for(request.user)

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Event | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Event | None = None) -> bool:
        return False

    def subject_of(self, event: Event) -> tuple[str, str, str]:
        return event.kind, event.subject_key, event.subject

    @admin.display(description="by", ordering="by")
    def who(self, event: Event) -> str:
        return sentence(event.by) or "llmgw"

    @admin.display(description="by", ordering="by")
    def came(self, event: Event) -> SafeString:
        return format_html("{}{}", self.who(event), said(event.door))

    @admin.display(description="did", ordering="subject")
    def did(self, event: Event) -> str:
        return sentence(str(event))

    @admin.display(description="what")
    def what(self, event: Event) -> SafeString | str:
        """With the way to a replica, as long as its row is kept."""
        called = sentence(event.called)
        if event.kind != "replica" or not Replica.objects.filter(pk=event.subject).exists():
            return called
        address = reverse("admin:nodes_replica_change", args=[event.subject])
        return format_html('<a href="{}">{}</a>', address, called)

    @admin.display(description="why")
    def because(self, event: Event) -> str:
        return sentence(event.why)

    @admin.display(description="changed")
    def changed(self, event: Event) -> str:
        return summary(event)

    @admin.display(description="what changed")
    def differences(self, event: Event) -> SafeString | str:
        return changes(event, sees_env=event.sees_env)

    @admin.display(description="the model now")
    def today(self, event: Event) -> SafeString | str:
        """The way to it, whatever it is called by now, and what the law has against it."""
        model = _model_of(event)
        if model is None:
            return "-"
        address = reverse("admin:catalog_model_change", args=[model.pk])
        link = format_html('<a href="{}">{}</a>', address, sentence(model.name))
        against = [(said(fault.sentence, "problem"),) for fault in model.spec.faults_today()]
        return format_html("{}{}", link, format_html_join("", "{}", against))

    @admin.display(description="detail")
    def recorded(self, event: Event) -> SafeString | str:
        return as_json(hide_all(event.detail, sees_env=event.sees_env)) if event.detail else "-"


def _model_of(event: Event) -> Model | None:
    if event.kind != "model" or not event.subject_key.isdecimal():
        return None
    return Model.objects.filter(pk=event.subject_key).first()
