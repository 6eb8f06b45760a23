"""The history, and the refusal that tells a part of it: somebody has changed the model since."""

from __future__ import annotations

from drf_spectacular.utils import OpenApiResponse, extend_schema, extend_schema_view
from rest_framework import serializers as shapes

from catalog.schema import fields
from catalog.schema.refusals import ErrorsSerializer


class EventSerializer(shapes.Serializer):
    """Who did what to what, and why."""

    id = shapes.IntegerField()
    at = fields.moment()
    by = shapes.CharField(allow_blank=True, help_text="Empty: llmgw itself.")
    door = shapes.CharField(allow_blank=True, help_text="admin, api, command, or the loop.")
    verb = shapes.CharField()
    kind = shapes.CharField(help_text="model, key, node, replica, cluster, user or group.")
    subject = shapes.CharField(allow_blank=True)
    why = shapes.CharField(allow_blank=True)
    revision = shapes.IntegerField(help_text="What a change of the catalog was counted as, otherwise 0.")
    detail = shapes.DictField(help_text="What changed, field by field.")


class ChangedSinceSerializer(ErrorsSerializer):
    changes = shapes.ListField(child=EventSerializer(), help_text="What was done since, oldest first.")


CHANGED = OpenApiResponse(ChangedSinceSerializer, "Somebody has changed it since; `changes` tells what.")

describe_events = extend_schema_view(
    list=extend_schema(summary="The history", responses=EventSerializer(many=True)),
    retrieve=extend_schema(summary="One event", responses=EventSerializer),
)
