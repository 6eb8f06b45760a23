"""Which address leads to which door. /v1/ is not here: `llmgw/asgi.py` sends it to the gateway."""

from __future__ import annotations

from django.contrib import admin
from django.urls import path

urlpatterns = [path("admin/", admin.site.urls)]
