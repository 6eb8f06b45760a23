"""Webhooks over REST: added, with a secret that is told once, changed, tried and removed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from django.core.exceptions import ValidationError
from django.db.models import Q
from rest_framework import exceptions, status
from rest_framework.request import Request
from rest_framework.response import Response

from catalog.listing import Filter, Listing
from catalog.reading import quote
from catalog.resources import Resource, body_of, settle
from nodes import webhooks
from nodes.models import Webhook
from nodes.schema.webhooks import describe_test, describe_webhooks


@describe_webhooks
class WebhookViewSet(Resource):
    """Webhooks by name."""

    queryset = webhooks.webhooks()
    lookup_value_regex = "[^\\x00]+?"
    posted = ("test",)
    needs: ClassVar[Mapping[str, str]] = {
        "list": "nodes.view_webhook",
        "retrieve": "nodes.view_webhook",
        "create": webhooks.MAY_ADD,
        "partial_update": webhooks.MAY_CHANGE,
        "test": webhooks.MAY_CHANGE,
        "destroy": webhooks.MAY_DELETE,
    }
    listing = Listing(
        orders={"name": "name", "created": "created_at"},
        filters={
            "paused": Filter(
                "Whether nothing is posted to it.",
                lambda text: Q(is_paused=text == "true"),
                ("true", "false"),
            ),
        },
        search=lambda text: Q(name__icontains=text),
    )

    def get_object(self) -> Webhook:
        text = self.kwargs["pk"]
        try:
            found: Webhook | None = self.get_queryset().filter(pk=text).first()
        except ValidationError:  # of a UUID
            found = None
        if found is None:
            raise exceptions.NotFound(f"there is no webhook {quote(text)}; GET /api/webhooks lists them")
        return found

    def create(self, request: Request) -> Response:
        body = body_of(request, "name", "url", "kinds", "why")
        asked: dict[str, Any] = {
            "name": body.text("name"),
            "url": body.text("url"),
            "kinds": body.texts("kinds"),
            "why": body.text("why"),
        }
        settle(body)
        webhook, secret = webhooks.add_webhook(**asked, by=request.user.get_username(), door="api")
        told = self.shown(self.get_queryset().get(pk=webhook.pk))
        answer = Response(
            told | {"secret": secret},
            status=status.HTTP_201_CREATED,
            headers={"Cache-Control": "no-store"},
        )
        answer["Location"] = self.reverse_action("detail", args=[webhook.pk])
        return answer

    def retrieve(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        return self._whole(self.get_object())

    def partial_update(self, request: Request, pk: str) -> Response:
        webhook = self.get_object()
        body = body_of(request, "name", "url", "kinds", "paused", "why")
        asked: dict[str, Any] = {
            "name": body.text("name") if body.has("name") else None,
            "url": body.text("url") if body.has("url") else None,
            "kinds": body.texts("kinds") if body.has("kinds") else None,
            "is_paused": body.is_true("paused") if body.has("paused") else None,
            "why": body.text("why"),
        }
        settle(body)
        webhooks.edit_webhook(webhook, **asked, by=request.user.get_username(), door="api")
        return self._whole(self.get_object())

    def destroy(self, request: Request, pk: str) -> Response:
        by, why = request.user.get_username(), request.query_params.get("why", "")
        webhooks.remove_webhook(self.get_object(), by=by, why=why, door="api")
        return Response(status=status.HTTP_204_NO_CONTENT)

    @describe_test
    def test(self, request: Request) -> Response:
        webhook = self.get_object()
        body = body_of(request, "why")
        why = body.text("why")
        settle(body)
        delivery = webhooks.try_webhook(webhook, by=request.user.get_username(), why=why, door="api")
        return Response(webhooks.delivery_as_dict(delivery))

    def shown(self, webhook: Webhook) -> dict[str, Any]:
        return webhooks.webhook_as_dict(webhook, sees_url=self.request.user.has_perm(webhooks.MAY_CHANGE))

    def _whole(self, webhook: Webhook) -> Response:
        deliveries = map(webhooks.delivery_as_dict, webhooks.deliveries_of(webhook))
        return Response({**self.shown(webhook), "deliveries": list(deliveries)})
