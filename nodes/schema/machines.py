"""Nodes and join tokens, as OpenAPI tells of them."""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema, extend_schema_view
from rest_framework import serializers as shapes

from catalog.reading import NAME_LIMIT
from catalog.schema import WHY, fields
from catalog.schema.beside import GONE, LOCATION
from catalog.schema.refusals import REFUSALS, ErrorsSerializer
from nodes.placement import Freshness
from nodes.schema.fields import ReasonSerializer, text, unknown, whole
from nodes.showing import GpuUse
from nodes.tokens import TOKEN_STATES


class GpuSerializer(shapes.Serializer):
    """A device as its agent reported it; what is unknown is left out."""

    id = shapes.CharField()
    index = whole()
    name = shapes.CharField(required=False)
    gpu_class = shapes.CharField(required=False)
    memory_mib = whole(required=False)
    used_mib = whole(required=False)
    foreign_mib = whole("Held by what is not llmgw's.", required=False)
    is_healthy = shapes.BooleanField(required=False)
    sickness = shapes.CharField(required=False, help_text="What is wrong with one that is not healthy.")
    use = shapes.ChoiceField([each.value for each in GpuUse])
    taken_by = text("A replica, an orphan, something else; empty: free.")


class EngineSerializer(shapes.Serializer):
    name = shapes.CharField()
    version = shapes.CharField(required=False)


class NodeSerializer(shapes.Serializer):
    """A machine, as its agent last reported it."""

    name = shapes.CharField()
    uuid = shapes.UUIDField()
    address = shapes.CharField()
    certificate = text("SHA-256 of the one its agent shows; empty: an authority vouches for it, or none.")
    state = shapes.ChoiceField([each.value for each in Freshness])
    seen_at = shapes.DateTimeField(allow_null=True)
    age_s = shapes.FloatField(allow_null=True, help_text="Seconds since it was heard from.")
    problem = text()
    cordoned = shapes.BooleanField(help_text="Nothing new is placed there.")
    draining = shapes.BooleanField(help_text="What runs there moves.")
    cordoned_by = text()
    cordoned_why = text()
    gpus_total = whole()
    gpus_free = whole()
    gpus = shapes.ListField(child=GpuSerializer())
    replicas = shapes.ListField(child=shapes.UUIDField(), help_text="With a rank there, and not over.")
    engines = shapes.ListField(child=EngineSerializer())
    labels = shapes.DictField(child=shapes.CharField(allow_blank=True))
    engine_tls = shapes.BooleanField(
        allow_null=True, help_text="Engines that start there answer over TLS alone; null: not told."
    )
    fabric = text()
    memory_total_mib = unknown()
    memory_free_mib = unknown()
    cpu_model = text("Empty: not told.")
    cpu_cores = unknown("That engines may use; null: unknown.")
    disk_total_bytes = unknown()
    disk_free_bytes = unknown()
    room_bytes = unknown("What its store could take, with what it would make room by; null: unknown.")
    agent_version = text()


_NAME = OpenApiParameter("name", str, OpenApiParameter.PATH, description="It may hold slashes.")

describe_nodes = extend_schema_view(
    list=extend_schema(summary="Nodes", responses=NodeSerializer(many=True)),
    retrieve=extend_schema(summary="One node", parameters=[_NAME], responses=NodeSerializer),
    destroy=extend_schema(
        summary="Forget a node that is drained, and empty or lost",
        parameters=[_NAME, WHY],
        responses={204: GONE, 409: OpenApiResponse(ErrorsSerializer, REFUSALS["409"])},
    ),
)
_CORDONING: dict[str, Any] = {
    "parameters": [_NAME],
    "request": ReasonSerializer,
    "responses": {200: NodeSerializer},
}
describe_cordon = extend_schema(summary="Place nothing new on a node", **_CORDONING)
describe_uncordon = extend_schema(summary="Place replicas on a node again", **_CORDONING)
describe_drain = extend_schema(
    summary="Empty a node: what runs there moves, each replica once another has taken its place", **_CORDONING
)


# --- join tokens ----------------------------------------------------------------------------------


class JoinTokenSerializer(shapes.Serializer):
    """What lets one machine become a node, without what opens the door."""

    id = shapes.CharField()
    name = text("Of the node that it makes; empty: as the machine calls itself.")
    labels = shapes.DictField(child=shapes.CharField())
    by = shapes.CharField()
    state = shapes.ChoiceField(list(TOKEN_STATES))
    created_at = shapes.DateTimeField()
    expires_at = shapes.DateTimeField()
    used_at = shapes.DateTimeField(allow_null=True)
    node = shapes.CharField(allow_null=True, help_text="Which machine used it.")


class NewJoinTokenSerializer(shapes.Serializer):
    """A join token to be made."""

    name = fields.text(NAME_LIMIT, "Of the node, or of one whose place the machine takes; any, if left out.")
    labels = fields.pairs("What node selectors look for on it.")
    expires_in = fields.duration("Up to 168h; 1h, if left out.")
    why = fields.why()


class MadeJoinTokenSerializer(JoinTokenSerializer):
    """A join token that was just made."""

    token = shapes.CharField(help_text="The token itself, shown in this answer and never again.")
    line = shapes.CharField(help_text="What to run on the machine; it asks for the token.")


describe_join_tokens = extend_schema_view(
    list=extend_schema(summary="Join tokens", responses=JoinTokenSerializer(many=True)),
    retrieve=extend_schema(summary="One join token", responses=JoinTokenSerializer),
    create=extend_schema(
        summary="Make a join token, and the line that a machine joins by",
        parameters=[LOCATION],
        request=NewJoinTokenSerializer,
        responses={201: MadeJoinTokenSerializer},
    ),
    destroy=extend_schema(summary="Revoke a join token", parameters=[WHY], responses={204: GONE}),
)
