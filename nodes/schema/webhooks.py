"""Webhooks and their notices, as OpenAPI tells of them."""

from __future__ import annotations

from drf_spectacular.utils import OpenApiResponse, extend_schema, extend_schema_view
from rest_framework import serializers as shapes

from catalog.schema import WHY, fields
from catalog.schema.beside import GONE, LOCATION
from catalog.schema.refusals import REFUSALS, ErrorsSerializer
from nodes.models import Delivery
from nodes.notices import KINDS, NAME_LIMIT, URL_LIMIT
from nodes.schema.fields import ReasonSerializer

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


describe_webhooks = extend_schema_view(
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
describe_test = extend_schema(
    summary="Post a test notice to a webhook, and tell what it answered",
    request=ReasonSerializer,
    responses={200: DeliverySerializer, 409: _CONFLICT},
)
