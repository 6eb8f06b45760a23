"""The catalog over REST: models, keys, and the history.

A body goes to the verbs as plain JSON and is judged by the law; nothing of a request is expanded into a query
or a constructor.
"""

from __future__ import annotations

from drf_spectacular.utils import extend_schema
from rest_framework import exceptions
from rest_framework.decorators import api_view
from rest_framework.request import Request
from rest_framework.response import Response

from catalog.api.events import EventViewSet
from catalog.api.keys import KeyViewSet
from catalog.api.models import ModelViewSet
from catalog.resources import Addresses
from catalog.rest import NOTHING_HERE

__all__ = ["no_such_address", "router"]


@extend_schema(exclude=True)
@api_view(["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"])
def no_such_address(request: Request, rest: str) -> Response:
    raise exceptions.NotFound(NOTHING_HERE)


router = Addresses()
router.register("models", ModelViewSet)
router.register("keys", KeyViewSet)
router.register("events", EventViewSet)
