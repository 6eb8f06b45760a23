"""The catalog in the admin: models with their profiles, API keys, and the history of what was done."""

from __future__ import annotations

from django.contrib import admin

from catalog.admin.events import EventAdmin
from catalog.admin.keys import KeyAdmin
from catalog.admin.models import ModelAdmin

__all__ = ["EventAdmin", "KeyAdmin", "ModelAdmin"]

admin.site.site_header = admin.site.site_title = "llmgw"
admin.site.index_title = "What there is"
admin.site.site_url = None  # there is no other site to view
