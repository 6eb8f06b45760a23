"""Replicas, as OpenAPI tells of them."""

from __future__ import annotations

from drf_spectacular.utils import OpenApiParameter, extend_schema, extend_schema_view
from rest_framework import serializers as shapes

from catalog.schema import WHY
from nodes.logs import TAIL_LINES_LIMIT
from nodes.models import Replica
from nodes.schema.fields import text, unknown, whole
from nodes.shapes import DifferenceSerializer, EngineCheckSerializer


class AttemptSerializer(shapes.Serializer):
    """A process that was started for a rank, and has ended. null: nobody saw it."""

    number = whole("By which its log is asked for.")
    generation = whole()
    duration_s = shapes.FloatField(allow_null=True)
    exit_code = unknown("Below 0: by a signal.")
    signal = unknown()
    cause = text("Empty: it was told to end.")
    reason = text()


class RankSerializer(shapes.Serializer):
    """The part of a replica on one node."""

    rank = whole()
    node = shapes.CharField()
    state = shapes.ChoiceField(Replica.State.values)
    reason = text()
    port = unknown()
    certificate = text("SHA-256 of the one that its port shows; empty: it speaks plain HTTP.")
    pid = unknown()
    gpus = shapes.ListField(child=shapes.CharField())
    exit_code = unknown()
    running = unknown("Requests that the engine is answering; null: unknown.")
    waiting = unknown("Requests that wait in the engine; null: unknown.")
    done_bytes = unknown("Of the weights being fetched; null: none, or unknown.")
    total_bytes = unknown()
    bytes_per_s = unknown("How fast they come; null: nothing comes, or unknown.")
    left_s = unknown("Seconds until all of them are there; null: unknown.")
    context_length = unknown(
        "Tokens that one request may have, by the engine's own word; null: not ready yet, or unknown."
    )
    attempts = shapes.ListField(child=AttemptSerializer(), help_text="The last that ended, oldest first.")


class ReplicaSerializer(shapes.Serializer):
    """One running copy of a model, as it was observed."""

    id = shapes.UUIDField()
    model = text("The name it was started under.")
    profile = text()
    state = shapes.ChoiceField(Replica.State.values)
    reason = text()
    since = shapes.DateTimeField()
    age_s = shapes.FloatField(allow_null=True, help_text="Seconds in this state.")
    deadline_s = shapes.FloatField(
        allow_null=True,
        help_text="Seconds after which a start has failed, and a drain waits no longer. null: no such time.",
    )
    cause = text("The code of a failure.")
    failure_kind = text()
    wanted = shapes.ChoiceField(Replica.Wanted.values)
    wanted_why = text()
    stale_profile = shapes.BooleanField(allow_null=True, help_text="null: it cannot be known.")
    stale_fields = shapes.ListField(child=shapes.CharField())
    restart_needed = shapes.BooleanField(help_text="A restart would change what runs.")
    differences = shapes.ListField(child=DifferenceSerializer())
    stale_launch = shapes.BooleanField()
    launch_differences = shapes.ListField(child=DifferenceSerializer())
    stale_why = text()
    fingerprint = text("Empty: unknown.")
    engine_check = EngineCheckSerializer()
    adopted = shapes.BooleanField()
    generation = whole()
    created_at = shapes.DateTimeField()
    node = shapes.CharField(allow_null=True, help_text="Where its first rank is.")
    port = unknown()
    certificate = text("SHA-256 of the one that this port shows; empty: it speaks plain HTTP.")
    pid = unknown()
    ranks = shapes.ListField(child=RankSerializer())
    launch = shapes.DictField(help_text="What it was started from; never rewritten.")


describe_replicas = extend_schema_view(
    list=extend_schema(summary="Replicas", responses=ReplicaSerializer(many=True)),
    retrieve=extend_schema(summary="One replica", responses=ReplicaSerializer),
    destroy=extend_schema(
        summary="Stop a replica, of which another is started if one is still wanted, or an orphan",
        parameters=[WHY],
        responses={202: ReplicaSerializer},
    ),
)


_OF_LOG = [
    OpenApiParameter("tail", int, description=f"The last lines, 1 to {TAIL_LINES_LIMIT}; 200 unless told."),
    OpenApiParameter("follow", bool, description="And what is written from now on, until it is over."),
    OpenApiParameter("attempt", int, description="Of an earlier process, by its number."),
    OpenApiParameter("rank", int, description="Of another rank than the first."),
]
describe_log = extend_schema(
    summary="What a replica's engine wrote",
    description="Text, with what cannot be seen made visible.",
    parameters=_OF_LOG,
    responses={(200, "text/plain"): str},
)
