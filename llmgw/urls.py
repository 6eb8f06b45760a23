"""Which address leads to which door. /v1/ and what watches a process are not here: see `llmgw/asgi.py`."""

from __future__ import annotations

import sys

from django.contrib import admin
from django.db import InterfaceError, OperationalError
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import include, path, re_path
from django.views.generic import RedirectView
from drf_spectacular.utils import extend_schema
from rest_framework.decorators import api_view
from rest_framework.request import Request
from rest_framework.response import Response

from catalog.api import no_such_address
from catalog.api import router as catalog_router
from llmgw.docs import show_docs, show_schema
from llmgw.playground import urls as playground_urls
from nodes.api import router as nodes_router
from nodes.api import urls as nodes_urls
from nodes.machines import urls as machines_urls
from nodes.monitoring import urls as monitoring_urls


@extend_schema(exclude=True)
@api_view(["GET", "HEAD"])
def what_rest_serves(request: Request) -> Response:
    """For whoever opens the address of REST itself."""
    names = [prefix for router in (catalog_router, nodes_router) for prefix, *_ in router.registry]
    names += ["overview", "plan", "reconciler", "series", "usage", "schema", "docs"]
    return Response({name: request.build_absolute_uri(f"/api/{name}") for name in names})


def handler500(request: HttpRequest) -> HttpResponse:
    """For an exception that no door expected. A database that is away is told from a fault of our own; what
    either says of itself stays in the log."""
    status, code, sentence = 500, "own_fault", "llmgw itself failed here; its log tells more."
    if isinstance(sys.exc_info()[1], (OperationalError, InterfaceError)):
        status, code = 503, "database_away"
        sentence = "The database cannot be used at this moment; try again soon. The log tells more."
    answer: HttpResponse
    if request.path.startswith("/api/"):
        answer = JsonResponse({"errors": [{"field": "", "code": code, "sentence": sentence}]}, status=status)
    else:
        answer = HttpResponse(f"{sentence}\n", status=status, content_type="text/plain")
    if status == 503:
        answer["Retry-After"] = "5"
    return answer


urlpatterns = [
    path("", RedirectView.as_view(pattern_name="admin:index")),
    path("admin/playground/", include(playground_urls)),  # before the admin's, which know any
    path("admin/", admin.site.urls),
    re_path("^api/?$", what_rest_serves),
    re_path("^api/schema/?$", show_schema, name="schema"),
    re_path("^api/docs/?$", admin.site.admin_view(show_docs), name="docs"),
    path("api/", include(catalog_router.urls)),
    path("api/", include(machines_urls)),  # before the nodes themselves, whose names hold slashes
    path("api/", include(monitoring_urls)),
    path("api/", include(nodes_urls)),
    re_path(r"^api/(?P<rest>[\s\S]+)\Z", no_such_address),  # a line may end in it, which a path cannot have
]
