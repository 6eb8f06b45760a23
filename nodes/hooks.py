"""Webhooks over REST: added, with a secret that is told once, changed, tried and removed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from django.core.exceptions import ValidationError
from django.db.models import Q
from drf_spectacular.utils import OpenApiResponse, extend_schema, extend_schema_view
from rest_framework import exceptions, status
from rest_framework import serializers as shapes
from rest_framework.request import Request
from rest_framework.response import Response

from catalog.listing import Filter, Listing
from catalog.reading import quote
from catalog.resources import Resource, body_of, settle
from catalog.schema import WHY, fields
from catalog.schema.beside import GONE, LOCATION
from catalog.schema.refusals import REFUSALS, ErrorsSerializer
from nodes import webhooks
from nodes.models import Delivery, Webhook
from nodes.notices import KINDS, NAME_LIMIT, URL_LIMIT

_KINDS = shapes.ListField(
    child=shapes.ChoiceField(tuple(KINDS)),
    required=False,
    help_text="; ".join(f"{kind}: {each.says}" for kind, each in KINDS.items())
    + ". None: it is told of all.",
)
_CONFLICT = OpenApiResponse(ErrorsSerializer, REFUSALS["409"])


class WebhookSerializer(shapes.Serializer):
    """An address that is told of troubles. Its path is for those who may change it alone."""

    id = shapes.UUIDField()
    name = shapes.CharField()
    url = shapes.CharField()
    kinds = shapes.ListField(child=shapes.ChoiceField(tuple(KINDS)))
    paused = shapes.BooleanField()
    state = shapes.ChoiceField(("live", "failing", "paused"))
    by = shapes.CharField(allow_blank=True)
    created_at = shapes.DateTimeField()
    waiting = shapes.IntegerField(help_text="Notices that it has not taken yet.")
    delivered = shapes.IntegerField()
    failed = shapes.IntegerField(help_text="Tries.")
    given_up = shapes.IntegerField()


class DeliverySerializer(shapes.Serializer):
    """A notice for one webhook, and what became of it."""

    id = shapes.IntegerField(help_text="By which a receiver knows one that comes twice.")
    kind = shapes.CharField()
    state = shapes.ChoiceField(("begins", "over", "test"))
    subject = shapes.CharField(allow_blank=True)
    sentence = shapes.CharField(allow_blank=True)
    made_at = shapes.DateTimeField()
    delivery = shapes.ChoiceField(Delivery.State.values)
    tries = shapes.IntegerField()
    next_at = shapes.DateTimeField(allow_null=True, help_text="null: it is over.")
    ended_at = shapes.DateTimeField(allow_null=True)
    status = shapes.IntegerField(allow_null=True, help_text="Of the last answer; null: none came.")
    problem = shapes.CharField(allow_blank=True)


class WholeWebhookSerializer(WebhookSerializer):
    """One webhook, and its last notices."""

    deliveries = DeliverySerializer(many=True)


class NewWebhookSerializer(shapes.Serializer):
    """A webhook to be added."""

    name = shapes.CharField(min_length=1, max_length=NAME_LIMIT, help_text="What it is for, such as pager.")
    url = shapes.CharField(max_length=URL_LIMIT, help_text="https://...")
    kinds = _KINDS
    why = fields.why()


class WebhookPatchSerializer(shapes.Serializer):
    """What is left out stays."""

    name = shapes.CharField(max_length=NAME_LIMIT, required=False)
    url = shapes.CharField(max_length=URL_LIMIT, required=False)
    kinds = _KINDS
    paused = shapes.BooleanField(required=False)
    why = fields.why()


class MadeWebhookSerializer(WebhookSerializer):
    """A webhook that was just added, with its secret."""

    secret = shapes.CharField(help_text="What its notices are signed with, in this answer and never again.")


class TryWebhookSerializer(shapes.Serializer):
    """Why it is done."""

    why = fields.why()


@extend_schema_view(
    list=extend_schema(summary="Webhooks", responses=WebhookSerializer(many=True)),
    retrieve=extend_schema(summary="One webhook, and its last notices", responses=WholeWebhookSerializer),
    create=extend_schema(
        summary="Add a webhook",
        parameters=[LOCATION],
        request=NewWebhookSerializer,
        responses={201: MadeWebhookSerializer, 409: _CONFLICT},
    ),
    partial_update=extend_schema(
        summary="Change, pause or resume a webhook",
        request=WebhookPatchSerializer,
        responses={200: WholeWebhookSerializer, 409: _CONFLICT},
    ),
    destroy=extend_schema(summary="Remove a webhook", parameters=[WHY], responses={204: GONE}),
)
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

    @extend_schema(
        summary="Post a test notice to a webhook, and tell what it answered",
        request=TryWebhookSerializer,
        responses={200: DeliverySerializer, 409: _CONFLICT},
    )
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
