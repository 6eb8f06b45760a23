"""Pages of rows that observation writes."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest

from catalog.pages import VerbAdmin


class ReadOnlyAdmin(VerbAdmin):
    """Rows that observation writes: looked at, and acted on by the actions alone."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Of a list with actions, so that they show; of no row, so that pages are read-only."""
        return obj is None and bool(self.actions) and super().has_change_permission(request)

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False
