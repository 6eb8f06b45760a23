"""What /api/ tells of a plan, as OpenAPI has it: shapes that the catalog's addresses answer with as well."""

from __future__ import annotations

from rest_framework import serializers as shapes

from nodes.agenda import BUCKETS


class DifferenceSerializer(shapes.Serializer):
    """One field that differs. Of a map, only the entries that do. null is unset."""

    field = shapes.CharField()
    was = shapes.JSONField(allow_null=True)
    now = shapes.JSONField(allow_null=True)


class ItemSerializer(shapes.Serializer):
    """A line of a plan: what would be done, held back or left waiting."""

    bucket = shapes.ChoiceField(BUCKETS)
    model = shapes.CharField(allow_blank=True, help_text="Empty: nobody knows.")
    profile = shapes.CharField(allow_blank=True)
    replica = shapes.UUIDField(allow_null=True, help_text="null: it is yet to be.")
    replaces = shapes.UUIDField(allow_null=True, help_text="The replica that leaves once this one is ready.")
    nodes = shapes.ListField(child=shapes.CharField())
    gpus = shapes.ListField(child=shapes.CharField())
    missing = shapes.IntegerField(help_text="Replicas short of what is wanted.")
    why = shapes.CharField(allow_blank=True)


class TurnsStaleSerializer(shapes.Serializer):
    """A replica that would run on as started, and differ from the catalog in what a restart would change."""

    replica = shapes.UUIDField()
    model = shapes.CharField()
    profile = shapes.CharField(allow_blank=True)
    nodes = shapes.ListField(child=shapes.CharField())
    differences = shapes.ListField(child=DifferenceSerializer())
    why = shapes.CharField()


class ConsequencesSerializer(shapes.Serializer):
    """What a change of the catalog would bring about."""

    stale = shapes.ListField(child=TurnsStaleSerializer())
    plan = shapes.ListField(
        child=ItemSerializer(), help_text="What the plan has with the change, and has not without it."
    )
    lifted = shapes.ListField(child=ItemSerializer(), help_text="Wants that would wait no more.")
