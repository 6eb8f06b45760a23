"""The playground: a page that talks to a model through /v1/, as any client does.

The page's scripts hold a key of its user's own, in memory alone, which ends within the hour. It is asked for
by a POST, and stands in no page, no address and no log. What is said to a model does not come by here.
"""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.contrib import admin
from django.contrib.auth.decorators import permission_required
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.template.response import TemplateResponse
from django.urls import path
from django.views.decorators.debug import sensitive_variables
from django.views.decorators.http import require_POST, require_safe

from catalog import actions

may_chat = permission_required("catalog.add_key", raise_exception=True)
"""Whoever may make keys of their own may be given one here."""

BESIDE_IMAGES_BYTES = 1024 * 1024
"""Of what a request may hold, left for everything that is no image."""


@require_safe
@may_chat
def show_playground(request: HttpRequest) -> HttpResponse:
    context = {
        **admin.site.each_context(request),
        "title": "Playground",
        "origin": request.build_absolute_uri("/").rstrip("/"),
        "images_bytes": max(0, settings.LLMGW_MAX_BODY_BYTES - BESIDE_IMAGES_BYTES) // 4 * 3,  # as base64
    }
    return TemplateResponse(request, "playground.html", context)


@require_POST
@may_chat
@sensitive_variables("text")
def renew_key(request: HttpRequest) -> HttpResponse:
    """A key that no other page of this user has any longer."""
    user: Any = request.user
    _, text = actions.renew_playground_key(user, by=user.get_username(), door="admin")
    return JsonResponse({"key": text})


urls = [
    path("", admin.site.admin_view(show_playground), name="playground"),
    path("key/", admin.site.admin_view(renew_key), name="playground_key"),
]
