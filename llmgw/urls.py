"""Which address leads to which door. /v1/ is not here: `llmgw/asgi.py` sends it to the gateway."""

from __future__ import annotations

from django.contrib import admin
from django.http import HttpRequest, HttpResponse
from django.urls import include, path
from django.views.decorators.http import require_safe
from django.views.generic import RedirectView

from catalog.api import no_such_address
from catalog.api import router as catalog_router
from nodes.api import router as nodes_router


@require_safe
def healthz(request: HttpRequest) -> HttpResponse:
    """This process answers. Open to all, and says nothing else."""
    return HttpResponse("ok\n", content_type="text/plain")


urlpatterns = [
    path("", RedirectView.as_view(pattern_name="admin:index")),
    path("healthz", healthz),
    path("admin/", admin.site.urls),
    path("api/", include(catalog_router.urls)),
    path("api/", include(nodes_router.urls)),
    path("api/<path:rest>", no_such_address),
]
