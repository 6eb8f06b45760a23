"""The catalog over REST.

A body goes to the verbs as plain JSON and is judged by the law; nothing of a request is expanded into a query
or a constructor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db.models import QuerySet
from rest_framework import exceptions, status
from rest_framework.decorators import api_view
from rest_framework.generics import get_object_or_404
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.routers import SimpleRouter
from rest_framework.viewsets import GenericViewSet

from catalog import actions
from catalog.hiding import SEE_ENV, hide_all
from catalog.models import Event, Model
from catalog.reading import CatalogError, Fault, quote
from catalog.rest import MayDo, Pages, asked
from nodes.agents import ask_paths
from nodes.showing import model_as_dict, models_with_replicas
from nodes.tasks import wake

# Told by a GET beside the catalog's own fields; ignored where it is sent back.
_READ_ONLY = ("status",)


class ModelViewSet(GenericViewSet[Model]):
    """Models by canonical name. POST adds one, PUT replaces it whole, DELETE removes and drains it."""

    queryset = models_with_replicas()
    permission_classes = (MayDo,)
    pagination_class = Pages
    ordering = ("id",)
    lookup_field = "name"
    lookup_value_regex = "[^\\x00]+?"  # names may have slashes

    def get_object(self) -> Model:
        name = self.kwargs["name"]
        found: Model | None = self.get_queryset().filter(name=name).first()
        if found is None:
            raise exceptions.NotFound(f"model {quote(name)} is not in the catalog; check the spelling")
        return found

    def list(self, request: Request) -> Response:
        page = self.paginate_queryset(self.get_queryset())
        return self.get_paginated_response([self._shown(model) for model in page or ()])

    def retrieve(self, request: Request, name: str) -> Response:
        return Response(self._shown(self.get_object()))

    def create(self, request: Request) -> Response:
        raw, words = self._asked()
        outcome = actions.add_model(raw, **words)
        answer = Response(self._outcome(outcome), status=status.HTTP_201_CREATED)
        answer["Location"] = self.reverse_action("detail", args=[outcome.model.name])
        return answer

    def update(self, request: Request, name: str) -> Response:
        stored = self.get_object()
        raw, words = self._asked()
        raw = {"name": stored.name, **raw} if isinstance(raw, Mapping) else raw
        outcome = actions.edit_model(stored.name, raw, **words)
        return Response(self._outcome(outcome))

    def destroy(self, request: Request, name: str) -> Response:
        name, by = self.get_object().name, request.user.get_username()
        actions.remove_model(name, by=by, why=asked(request, "why"), door="api", after_change=wake)
        return Response(status=status.HTTP_204_NO_CONTENT)

    def _asked(self) -> tuple[Any, dict[str, Any]]:
        """The body apart from what is said beside the model; and what every verb wants to be told."""
        body: Any = self.request.data
        why, skip = "", False
        if isinstance(body, Mapping):
            body = {key: value for key, value in body.items() if key not in _READ_ONLY}
            why, skip = body.pop("why", ""), body.pop("skip_source_check", False)
            if not isinstance(why, str):
                raise _wrong_type("why", "a text")
            if not isinstance(skip, bool):
                raise _wrong_type("skip_source_check", "true or false")
        return body, {
            "by": self.request.user.get_username(),
            "why": why,
            "door": "api",
            "skip_source_check": skip,
            "ask_paths": ask_paths,
            "after_change": wake,
        }

    def _shown(self, model: Model) -> dict[str, Any]:
        return model_as_dict(model, sees_env=self.request.user.has_perm(SEE_ENV))

    def _outcome(self, outcome: actions.Outcome) -> dict[str, Any]:
        shown = self._shown(get_object_or_404(self.get_queryset(), pk=outcome.model.pk))
        told = [outcome.finding.sentence] if outcome.finding.level == "warn" else []
        shown["status"]["warnings"] = told + list(outcome.warnings)
        return shown


def _wrong_type(field: str, wanted: str) -> CatalogError:
    return CatalogError([Fault("", "", field, "type", f"{field} must be {wanted}")])


class EventViewSet(GenericViewSet[Event]):
    """Who did what to what, and why, newest first. `?kind=` and `?subject=` narrow it."""

    queryset = Event.objects.all()
    permission_classes = (MayDo,)
    pagination_class = Pages
    ordering = ("-id",)

    def list(self, request: Request) -> Response:
        events: QuerySet[Event] = self.get_queryset()
        for field in ("kind", "subject"):
            if value := asked(request, field):
                events = events.filter(**{field: value})
        page = self.paginate_queryset(events)
        return self.get_paginated_response(
            [_event_as_dict(event, sees_env=request.user.has_perm(SEE_ENV)) for event in page or ()]
        )


def _event_as_dict(event: Event, *, sees_env: bool) -> dict[str, Any]:
    return {
        "id": event.pk,
        "at": event.at.isoformat(),
        "by": event.by,
        "door": event.door,
        "verb": event.verb,
        "kind": event.kind,
        "subject": event.subject,
        "why": event.why,
        "detail": hide_all(event.detail, sees_env=sees_env),
    }


@api_view(["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"])
def no_such_address(request: Request, rest: str) -> Response:
    raise exceptions.NotFound("There is nothing at this address.")


router = SimpleRouter()
router.trailing_slash = "/?"  # with or without
router.register("models", ModelViewSet)
router.register("events", EventViewSet)
