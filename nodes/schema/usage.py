"""What requests used, as OpenAPI tells of it."""

from __future__ import annotations

from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers as shapes

from nodes.reckoning import BY, SINCE
from nodes.schema.fields import whole


class _QuantilesSerializer(shapes.Serializer):
    """Milliseconds, within the width of a bucket; null: nothing was measured."""

    p50 = shapes.FloatField(allow_null=True)
    p99 = shapes.FloatField(allow_null=True)


class UsedSerializer(shapes.Serializer):
    """What some requests used. Tokens are the engines' own counts."""

    requests = whole()
    errors = whole("Refused or failed.")
    left = whole("Whose client did not stay.")
    codes = shapes.DictField(child=shapes.IntegerField(), help_text="Errors by their code.")
    prompt_tokens = whole()
    cached_tokens = whole("Of the prompts, those that an engine had computed before.")
    completion_tokens = whole()
    ttft_ms = _QuantilesSerializer(help_text="To the first token of a stream.")
    tpot_ms = _QuantilesSerializer(help_text="Between two tokens of a stream.")
    queue_ms = _QuantilesSerializer(help_text="Until an engine had it, but for the hold.")
    hold_ms = _QuantilesSerializer(help_text="For a replica to be there.")
    duration_ms = _QuantilesSerializer()


class UsedByOneSerializer(UsedSerializer):
    """What requests with one key, to one model, or both used."""

    key = shapes.CharField(allow_null=True, allow_blank=True, help_text="null: not told apart; empty: none.")
    key_name = shapes.CharField(allow_null=True, allow_blank=True)
    model = shapes.CharField(
        allow_null=True, allow_blank=True, help_text="null: not told apart; empty: none of the catalog's."
    )


class UsageSerializer(shapes.Serializer):
    """Most requests first. Whoever may not see what others used is told of their own keys."""

    since_s = whole("How long ago it begins; beyond two days, with a whole hour.")
    until = shapes.DateTimeField()
    by = shapes.ChoiceField(list(BY))
    results = UsedByOneSerializer(many=True)
    total = UsedSerializer()


describe_usage = extend_schema(
    summary="What was used, by key and model",
    parameters=[
        OpenApiParameter("since", str, description=f"How long ago, such as 720h; {SINCE} unless told."),
        OpenApiParameter("by", str, enum=list(BY), description="What is told apart; both unless told."),
        OpenApiParameter("key", str, description="Of this key alone: its id or its name."),
        OpenApiParameter("model", str, description="Of this model alone: its name or an alias."),
    ],
    responses=UsageSerializer,
)
