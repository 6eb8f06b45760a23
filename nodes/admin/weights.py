"""Weights in the admin: what is on which node, how far it is, and who needs it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils.safestring import SafeString

from catalog.pieces import said, sentence
from nodes import stocking
from nodes.admin.reading import ReadOnlyAdmin
from nodes.holdings import needing, weights
from nodes.models import Weights
from nodes.pieces import progress_bar, weights_badge
from nodes.progress import fetch_progress, size_words


class UsedFilter(admin.SimpleListFilter):
    title = "use"
    parameter_name = "used"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("yes", "in use"), ("no", "not in use")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Weights]) -> QuerySet[Weights]:
        if self.value() not in ("yes", "no"):
            return queryset
        return queryset.filter(is_used=self.value() == "yes")


@admin.register(Weights)
class WeightsAdmin(ReadOnlyAdmin):
    list_display = ("weights", "commit", "node", "state_shown", "size", "used", "needed_by", "note")
    list_filter = ("state", UsedFilter, "node")
    is_live = True
    search_fields = ("repo", "revision", "node__name")
    fields = ("repo", "revision", "node", "state_shown", "size", "used", "needed_by", "note")
    actions: ClassVar[list[Any]] = ["remove"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Weights]:
        return weights()

    def subject_of(self, row: Weights) -> tuple[str, str, str]:
        return "node", str(row.node_id), row.node.name

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Of the list, so that its actions show."""
        return obj is None and self.has_remove_permission(request)

    def has_remove_permission(self, request: HttpRequest) -> bool:
        return bool(request.user.has_perm("nodes.delete_weights"))

    @admin.display(description="weights", ordering="repo")
    def weights(self, row: Weights) -> str:
        return sentence(row.repo)

    @admin.display(description="commit")
    def commit(self, row: Weights) -> str:
        return row.revision[:8]

    @admin.display(description="state", ordering="state")
    def state_shown(self, row: Weights) -> SafeString:
        return weights_badge(row)

    @admin.display(description="size", ordering="size_bytes")
    def size(self, row: Weights) -> SafeString | str:
        if row.state == Weights.State.HELD or row.total_bytes is None:
            return size_words(row.size_bytes)
        return progress_bar(fetch_progress(row.size_bytes, row.total_bytes, row.bytes_per_s))

    @admin.display(description="in use", boolean=True, ordering="is_used")
    def used(self, row: Weights) -> bool:
        return row.is_used

    @admin.display(description="needed by")
    def needed_by(self, row: Weights) -> str:
        names: Sequence[str] = row.needing  # type: ignore[attr-defined]  # found for all rows at once
        return sentence(", ".join(names)) or "-"

    def get_changelist_instance(self, request: HttpRequest) -> Any:
        changelist = super().get_changelist_instance(request)
        _find_needing(changelist.result_list)
        return changelist

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        row = super().get_object(request, object_id, from_field)
        _find_needing([row] if row is not None else [])
        return row

    @admin.display(description="note")
    def note(self, row: Weights) -> SafeString | str:
        return said(row.reason, "problem") if row.reason else "-"

    @admin.action(description="Remove the selected weights", permissions=["remove"])
    def remove(self, request: HttpRequest, queryset: QuerySet[Weights]) -> HttpResponse:
        return self.confirm(
            request,
            queryset,
            action="remove",
            title="Remove weights",
            question="Give back the room of these? What a replica reads stays; what is needed again is "
            "fetched again.",
            button="Yes, remove",
            done="removed",
            act=stocking.remove,
            entails=lambda rows: {
                pk: [f"{name} needs it" for name in names] for pk, names in needing(rows).items()
            },
        )


def _find_needing(rows: Iterable[Any]) -> None:
    found = needing(rows)
    for row in rows:
        row.needing = found[row.pk]
