"""Jobs, and what asks for one, as OpenAPI tells of them."""

from __future__ import annotations

from drf_spectacular.utils import extend_schema, extend_schema_view
from rest_framework import serializers as shapes

from catalog.schema import MODEL_NAME, WHY, fields
from catalog.schema.beside import LOCATION
from nodes.bench.asks import DISTRIBUTIONS
from nodes.bench.options import WAYS, Options
from nodes.models import Job
from nodes.schema.fields import text


class JobSerializer(shapes.Serializer):
    """Work of minutes that somebody asked for, and a worker or a shell does."""

    id = shapes.UUIDField()
    kind = shapes.ChoiceField(Job.Kind.values)
    model = shapes.CharField()
    replica = shapes.UUIDField(allow_null=True, help_text="null: whichever is ready.")
    options = shapes.DictField()
    by = text()
    why = text()
    state = shapes.ChoiceField(Job.State.values)
    asked_at = shapes.DateTimeField()
    claimed_at = shapes.DateTimeField(allow_null=True, help_text="When it began; null: it waits yet.")
    heartbeat_at = shapes.DateTimeField(allow_null=True, help_text="When it last told of itself.")
    ended_at = shapes.DateTimeField(allow_null=True)
    stop_asked_at = shapes.DateTimeField(allow_null=True)
    progress = shapes.DictField(help_text="part (0 to 1), say, and numbers of the moment.")
    result = shapes.DictField(help_text="Of what it found; its form is the kind's.")
    problem = text("Why it failed, or by whom it was stopped.")
    fingerprint = text("Of the profile that it was done to; empty: not known yet.")
    engine = text()
    engine_version = text()
    gpu = text()


class EngineCheckToMakeSerializer(shapes.Serializer):
    """A check of what a running engine really does."""

    replica = shapes.UUIDField(required=False, help_text="Which is to be asked; left out: any that is ready.")
    why = fields.why()


describe_engine_check = extend_schema(
    summary="Have a running engine of a model asked for all that it should do",
    description="A job; its findings are in its result, and the last of them are told with the model.",
    parameters=[MODEL_NAME, LOCATION],
    request=EngineCheckToMakeSerializer,
    responses={202: JobSerializer},
)

_LOAD = Options().as_dict()


class LoadSerializer(shapes.Serializer):
    """How a bench makes its load, and what has to hold; what is left out suits a chat. Durations are texts
    such as 1.5s."""

    through = shapes.ChoiceField(WAYS, default=_LOAD["through"])
    distribution = shapes.ChoiceField(DISTRIBUTIONS, default=_LOAD["distribution"], help_text="Of lengths.")
    prompt_tokens = shapes.IntegerField(default=_LOAD["prompt_tokens"], help_text="On average.")
    output_tokens = shapes.IntegerField(default=_LOAD["output_tokens"], help_text="On average.")
    spread = shapes.FloatField(default=_LOAD["spread"], help_text="Of lengths, as a part of their mean.")
    shared_prefix = shapes.FloatField(default=0, help_text="The part of each prompt that all share, 0 to 1.")
    seed = shapes.IntegerField(default=_LOAD["seed"], help_text="The same is asked at the same times again.")
    start_rate = shapes.FloatField(default=_LOAD["start_rate"], help_text="Requests a second.")
    max_rate = shapes.FloatField(default=_LOAD["max_rate"], help_text="No more are tried.")
    precision = shapes.FloatField(default=_LOAD["precision"], help_text="Of what is found, as a part of it.")
    step = shapes.CharField(default=_LOAD["step"], help_text="For so long each load is measured.")
    warmup = shapes.CharField(default=_LOAD["warmup"], help_text="Before anything counts.")
    ttft_p99 = shapes.CharField(required=False, help_text="What has to hold, instead of the model's SLO.")
    tpot_p99 = shapes.CharField(required=False, help_text="What has to hold, instead of the model's SLO.")


class BenchSerializer(shapes.Serializer):
    """A bench that is asked for."""

    options = LoadSerializer(required=False)
    replica = shapes.UUIDField(required=False, help_text="Directly at this one.")
    profile = shapes.CharField(required=False, help_text="Directly at a replica of this profile.")
    why = fields.why()


describe_bench = extend_schema(
    summary="Find the highest load at which a model's SLO holds: the job that does",
    parameters=[MODEL_NAME, LOCATION],
    request=BenchSerializer,
    responses={202: JobSerializer},
)

describe_jobs = extend_schema_view(
    list=extend_schema(summary="Jobs", responses=JobSerializer(many=True)),
    retrieve=extend_schema(summary="One job, and how far it is", responses=JobSerializer),
    destroy=extend_schema(
        summary="Stop a job: at once where it waits, soon where it runs",
        parameters=[WHY],
        responses={202: JobSerializer},
    ),
)
