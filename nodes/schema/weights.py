"""Weights in the nodes' stores, as OpenAPI tells of them."""

from __future__ import annotations

from drf_spectacular.utils import extend_schema, extend_schema_view
from rest_framework import serializers as shapes

from catalog.reading import NAME_LIMIT, TEXT_LIMIT
from catalog.schema import WHY, fields
from catalog.schema.beside import GONE
from nodes.models import Weights
from nodes.schema.fields import text, unknown, whole


class WeightsSerializer(shapes.Serializer):
    """What a node's store has of one repository at one commit."""

    id = whole()
    node = shapes.CharField()
    repo = shapes.CharField()
    revision = shapes.CharField()
    state = shapes.ChoiceField(Weights.State.values)
    size_bytes = whole("On the disk, parts of files included.")
    total_bytes = unknown("Of what was asked for.")
    bytes_per_s = unknown("How fast they come; null: nothing comes, or unknown.")
    left_s = unknown("Seconds until all of them are there; null: unknown.")
    in_use = shapes.BooleanField(help_text="A replica there reads them.")
    needed_by = shapes.ListField(child=shapes.CharField(), help_text="Models that have them as their source.")
    reason = text("Why a fetch ahead of time has ended without them.")


class WeightsToFetchSerializer(shapes.Serializer):
    """Weights that a node is to have before a replica asks for them."""

    model = fields.text(NAME_LIMIT, "Whose source it is.")
    node = fields.text(NAME_LIMIT, "Which is to have them.")
    why = fields.text(TEXT_LIMIT, "Kept in the history.", required=False)


class WeightsOrderedSerializer(shapes.Serializer):
    model = shapes.CharField()
    node = shapes.CharField()


describe_weights = extend_schema_view(
    list=extend_schema(summary="Weights", responses=WeightsSerializer(many=True)),
    retrieve=extend_schema(summary="Weights of one repository on one node", responses=WeightsSerializer),
    create=extend_schema(
        summary="Have a node fetch a model's weights ahead of time",
        request=WeightsToFetchSerializer,
        responses={202: WeightsOrderedSerializer},
    ),
    destroy=extend_schema(
        summary="Have a node give back the room of weights that nothing there uses",
        parameters=[WHY],
        responses={204: GONE},
    ),
)
