"""The catalog in the admin: models with their profiles, API keys, and the history of what was done."""

from __future__ import annotations

from catalog.admin.events import EventAdmin
from catalog.admin.keys import KeyAdmin
from catalog.admin.models import ModelAdmin

__all__ = ["EventAdmin", "KeyAdmin", "ModelAdmin"]
