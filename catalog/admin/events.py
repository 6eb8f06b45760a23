"""The history in the admin: who did what to what, and why. Read-only."""

from __future__ import annotations

from django.contrib import admin
from django.http import HttpRequest
from django.utils.safestring import SafeString

from catalog.hiding import hide_all
from catalog.models import Event
from catalog.pages import VerbAdmin
from catalog.pieces import as_json, sentence


@admin.register(Event)
class EventAdmin(VerbAdmin):
    """Who did what to what, and why. Read-only."""

    list_display = ("at", "who", "verb", "kind", "what", "because", "door")
    list_filter = ("kind", "verb", "door")
    search_fields = ("subject", "by", "why")
    fields = ("at", "who", "door", "verb", "kind", "what", "because", "details")
    show_full_result_count = False

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Event | None = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Event | None = None) -> bool:
        return False

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        return lookup == "subject" or super().lookup_allowed(lookup, value, request)

    def subject_of(self, event: Event) -> tuple[str, str]:
        return event.kind, event.subject

    @admin.display(description="by", ordering="by")
    def who(self, event: Event) -> str:
        return sentence(event.by) or "llmgw"

    @admin.display(description="what", ordering="subject")
    def what(self, event: Event) -> str:
        return sentence(event.subject)

    @admin.display(description="why")
    def because(self, event: Event) -> str:
        return sentence(event.why)

    @admin.display(description="detail")
    def details(self, event: Event) -> SafeString | str:
        return as_json(hide_all(event.detail)) if event.detail else "-"
