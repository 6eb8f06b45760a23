"""What /api/ tells of a plan and of the whole cluster, as OpenAPI has it: shapes that the catalog's addresses
answer with as well, and those of the overview."""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import extend_schema
from rest_framework import serializers as shapes

from nodes.agenda import BUCKETS
from nodes.checks import Verdict


class DifferenceSerializer(shapes.Serializer):
    """One field that differs. Of a map, only the entries that do. null is unset."""

    field = shapes.CharField()
    was = shapes.JSONField(allow_null=True)
    now = shapes.JSONField(allow_null=True)


class BadgeSerializer(shapes.Serializer):
    """What an engine check says of one thing, held against what is claimed of it now."""

    about = shapes.CharField()
    verdict = shapes.ChoiceField([each.value for each in Verdict])
    says = shapes.CharField()


class EngineCheckSerializer(shapes.Serializer):
    """The engine check that tells most of it. Each of its findings is in the result of its job."""

    badges = shapes.ListField(child=BadgeSerializer())
    checked_at = shapes.DateTimeField(allow_null=True, help_text="null: never.")
    older = shapes.BooleanField(help_text="Of a profile that is not as it was then.")
    profile = shapes.CharField(allow_blank=True)
    fingerprint = shapes.CharField(allow_blank=True)
    engine = shapes.CharField(allow_blank=True)
    engine_version = shapes.CharField(allow_blank=True)
    gpu = shapes.CharField(allow_blank=True)
    job = shapes.UUIDField(allow_null=True)


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


# --- the overview ---------------------------------------------------------------------------------


def _count(says: str = "", **told: Any) -> Any:
    return shapes.IntegerField(min_value=0, help_text=says, **told)


class MatterSerializer(shapes.Serializer):
    """Something to look at. kind and key name its row; of an empty key, all of the kind."""

    word = shapes.CharField()
    look = shapes.ChoiceField(["bad", "warn", "busy", "good", ""])
    kind = shapes.ChoiceField(["reconciler", "model", "node", "replica", "orphan"])
    key = shapes.CharField(allow_blank=True)
    subject = shapes.CharField()
    why = shapes.CharField(allow_blank=True)
    query = shapes.CharField(allow_blank=True, help_text="By which the admin's list shows all of them.")


class NodesSeenSerializer(shapes.Serializer):
    fresh = _count()
    suspect = _count()
    lost = _count()
    never = _count("Not heard from yet.")
    cordoned = _count("Those that are drained as well.")
    draining = _count()


class GpusSeenSerializer(shapes.Serializer):
    """Devices of one class."""

    gpu_class = shapes.CharField(allow_blank=True)
    total = _count()
    used = _count("By engines of ours.")
    free = _count()
    closed = _count("Free, on a node that nothing is placed on.")
    foreign = _count("Used by something else.")
    unhealthy = _count()


class ModelsSeenSerializer(shapes.Serializer):
    ready = _count("As many replicas as are wanted.")
    loading = _count("Short, and what is missing is on its way.")
    failing = _count("Short, and something failed within the hour, is lost, or has no place.")
    asleep = _count("On demand, and nobody asks.")
    off = _count()


class ReplicasSeenSerializer(shapes.Serializer):
    ready = _count()
    starting = _count("Pending, fetching or starting.")
    draining = _count()
    lost = _count()
    stale = _count("A restart would change what runs.")
    mild = _count("They differ from the catalog in what needs no restart.")


class WantSerializer(shapes.Serializer):
    """One that the last pass could not place."""

    key = _count()
    model = shapes.CharField()
    missing = _count("Replicas.")
    why = shapes.CharField()
    since = shapes.DateTimeField()


class TrafficSerializer(shapes.Serializer):
    """Of the last hour; of one's own keys alone for whoever may not see what others used."""

    requests = _count()
    errors = _count()
    requests_per_s = shapes.FloatField()
    tokens_per_s = shapes.FloatField(help_text="Generated.")
    ttft_p50_s = shapes.FloatField(allow_null=True, help_text="Of streams; null: there was none.")
    ttft_p99_s = shapes.FloatField(allow_null=True)


class HappenedSerializer(shapes.Serializer):
    key = _count()
    at = shapes.DateTimeField()
    by = shapes.CharField(allow_blank=True, help_text="Empty: llmgw itself.")
    door = shapes.CharField(allow_blank=True)
    did = shapes.CharField()
    why = shapes.CharField(allow_blank=True)


class FactSerializer(shapes.Serializer):
    name = shapes.CharField()
    words = shapes.CharField()


class OverviewSerializer(shapes.Serializer):
    """How the cluster is. null: it is not for you to see."""

    at = shapes.DateTimeField()
    needs = MatterSerializer(many=True, help_text="What needs a person, the most urgent first.")
    under_way = MatterSerializer(many=True)
    nodes = NodesSeenSerializer(allow_null=True)
    gpus = GpusSeenSerializer(many=True, allow_null=True)
    models = ModelsSeenSerializer(allow_null=True)
    replicas = ReplicasSeenSerializer(allow_null=True)
    unplaced = WantSerializer(many=True, allow_null=True)
    traffic = TrafficSerializer(allow_null=True)
    events = HappenedSerializer(many=True, allow_null=True, help_text="The last, newest first.")
    facts = FactSerializer(many=True, help_text="The same in words.")


describe_overview = extend_schema(summary="How the cluster is, at a glance", responses=OverviewSerializer)
