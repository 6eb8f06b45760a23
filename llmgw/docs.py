"""The OpenAPI description of /api/, and a page of it that people can read.

Both are for whoever may come in, and the page needs no script and no other host.
"""

from __future__ import annotations

import functools
from typing import Any

from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.utils import extend_schema
from rest_framework.decorators import api_view
from rest_framework.request import Request
from rest_framework.response import Response


@functools.cache
def schema() -> dict[str, Any]:
    """The same for all users; what one may is told by the answers."""
    found: dict[str, Any] = SchemaGenerator().get_schema(public=True)
    return found


@extend_schema(exclude=True)
@api_view(["GET", "HEAD"])
def show_schema(request: Request) -> Response:
    return Response(schema())
