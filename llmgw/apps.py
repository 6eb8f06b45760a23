"""Puts llmgw's own site in the place of Django's stock admin site."""

from __future__ import annotations

from django.contrib.admin import apps


class AdminConfig(apps.AdminConfig):
    default = False  # of django.contrib.admin, not of llmgw
    default_site = "llmgw.admin.Site"
