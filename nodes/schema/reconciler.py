"""The reconciler's state and plan, as OpenAPI tells of them."""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import extend_schema
from rest_framework import serializers as shapes

from catalog.schema import MODEL_NAME
from nodes.agenda import BUCKETS
from nodes.schema.fields import ReasonSerializer, text, whole
from nodes.shapes import ItemSerializer


class StateSerializer(shapes.Serializer):
    """What keeps the reconciler from acting, if anything does."""

    last_pass_age_s = shapes.FloatField(allow_null=True, help_text="null: there never was a pass.")
    paused = shapes.BooleanField()
    paused_by = text()
    paused_why = text()
    alarm = text("What it does not act on, and why; empty: nothing.")
    held = whole("Ends of replicas that wait for a person's yes.")
    obstacles = shapes.ListField(child=shapes.CharField(), help_text="A sentence each.")


class CountsSerializer(shapes.Serializer):
    """How many lines there are of each kind."""

    def get_fields(self) -> dict[str, Any]:
        return {bucket: shapes.IntegerField() for bucket in BUCKETS}


class PlanSerializer(StateSerializer):
    """What the next pass would do, and why; read without doing it."""

    at = shapes.DateTimeField()
    acts = shapes.BooleanField(help_text="Whether it changes anything.")
    counts = CountsSerializer()
    items = shapes.ListField(child=ItemSerializer())


class NodeSaysSerializer(shapes.Serializer):
    node = shapes.CharField()
    reason = text("Empty: there is room for one more.")


class ProfileSaysSerializer(shapes.Serializer):
    profile = shapes.CharField()
    says = text("What all nodes say together.")
    nodes = shapes.ListField(child=NodeSaysSerializer())


class WhySerializer(shapes.Serializer):
    """Why a model does not run where or as wanted."""

    model = shapes.CharField()
    as_wanted = shapes.BooleanField()
    says = text()
    amiss = shapes.ListField(child=shapes.CharField(), help_text="What is not as wanted, a sentence each.")
    notes = shapes.ListField(child=shapes.CharField(), help_text="What is as wanted, and could be better.")
    ready = whole()
    wanted = whole()
    profiles = shapes.ListField(child=ProfileSaysSerializer(), help_text="The preferred one first.")


describe_why = extend_schema(
    summary="Why a model does not run where or as wanted", parameters=[MODEL_NAME], responses=WhySerializer
)
_ACTING: dict[str, Any] = {"request": ReasonSerializer, "responses": {200: StateSerializer}}
describe_plan = extend_schema(summary="What the next pass would do, and why", responses=PlanSerializer)
describe_state = extend_schema(
    summary="Whether the reconciler acts, and what keeps it", responses=StateSerializer
)
describe_pause = extend_schema(summary="Start and stop nothing until it is resumed", **_ACTING)
describe_resume = extend_schema(summary="Let it act again", **_ACTING)
describe_allow = extend_schema(summary="Say yes to what the last pass held back", **_ACTING)
describe_outrank = extend_schema(
    summary="Have agents obey this database again, which was restored from a backup",
    description="Stop any other control plane of these nodes first: agents obey it no more.",
    **_ACTING,
)
