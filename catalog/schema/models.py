"""Models: what they take and tell, whole, in part and on trial; and what a profile of theirs will run."""

from __future__ import annotations

from drf_spectacular.utils import (
    OpenApiParameter,
    OpenApiResponse,
    PolymorphicProxySerializer,
    extend_schema,
    extend_schema_view,
)
from rest_framework import serializers as shapes

from catalog.models import Model
from catalog.parts import OVER_MAX_OUTPUT
from catalog.reading import ENTRIES_LIMIT, NAME_LIMIT, TEXT_LIMIT
from catalog.schema import fields
from catalog.schema.beside import DRY_RUN, ETAG, GONE, IF_MATCH, LOCATION, MODEL_NAME, WHY
from catalog.schema.events import CHANGED
from catalog.spec import ENGINES, HIGHEST_WEIGHT, ROUTING_PROFILES, SOURCE_LIMIT
from nodes.shapes import ConsequencesSerializer, EngineCheckSerializer


class ProfileSerializer(shapes.Serializer):
    """One way to run a model on one GPU class. What is zero or empty is left out of an answer."""

    name = fields.name()
    engine = shapes.ChoiceField(ENGINES, help_text="vllm, if left out", required=False)
    gpu_class = fields.text(NAME_LIMIT, "Empty: without a card, for an engine that can.")
    tp = fields.whole("GPUs that share each layer; at least 1.")
    pp = fields.whole("Groups of layers.", lowest=0)
    gpus_per_node = fields.whole("0: tp / nodes.")
    nodes = fields.whole("At least 1.")
    args = shapes.ListField(
        child=fields.text(TEXT_LIMIT),
        max_length=ENTRIES_LIMIT,
        help_text="Arguments of the engine.",
        required=False,
    )
    env = fields.pairs("Environment of the engine. Sending (hidden) for a value keeps what is stored.")
    min_memory_gb = fields.whole("Host memory it needs.", lowest=0)
    min_disk_gb = fields.whole("Disk it needs.", lowest=0)
    node_selector = fields.pairs("Labels that a node must have.")
    weight = shapes.FloatField(
        max_value=HIGHEST_WEIGHT, help_text="Share of the requests; 1, if left out.", required=False
    )
    priority = fields.whole("The highest that fits wins.")
    startup_timeout = fields.duration("20m, if left out.")


class ScalingSerializer(shapes.Serializer):
    """How many replicas to keep. min 0 with max above it is on demand; min 0, max 0 is off."""

    min = fields.whole()
    max = fields.whole("0 with min above it: as many as min.")
    idle_timeout = fields.duration("On demand: unloaded after so long without a request.")


class SloSerializer(shapes.Serializer):
    """Promised at the 99th percentile. Either spelling is read; answers have the first one."""

    TTFTp99 = fields.duration("To the first token.")
    TPOTp99 = fields.duration("For each further token.")
    ttft_p99 = fields.duration(write_only=True)
    tpot_p99 = fields.duration(write_only=True)


class CapabilitiesSerializer(shapes.Serializer):
    tools = shapes.BooleanField(required=False)
    vision = shapes.BooleanField(required=False)
    embeddings = shapes.BooleanField(required=False)


class LimitsSerializer(shapes.Serializer):
    """How much may be asked of it with all keys together."""

    requests_per_minute = fields.whole("0: no limit.", lowest=0)
    tokens_per_minute = fields.whole("0: no limit.", lowest=0)
    concurrency = fields.whole("Requests at once; 0: no limit.", lowest=0)
    over_max_output = shapes.ChoiceField(
        OVER_MAX_OUTPUT,
        required=False,
        help_text="Of a request for more than max_output; refuse, if left out.",
    )


class TimeoutsSerializer(shapes.Serializer):
    """How long a request waits: at most 24h each; what is left out is as the gateway is set."""

    hold = fields.duration("For a replica to be there.")
    connect = fields.duration("For the engine to take the connection.")
    first_byte = fields.duration("For the answer to begin.")
    idle = fields.duration("For the answer's next byte.")


class RollSerializer(shapes.Serializer):
    """Stale replicas are being replaced one after another."""

    by = shapes.CharField(allow_blank=True)
    why = shapes.CharField(allow_blank=True)
    asked_at = fields.moment()
    halted = shapes.CharField(allow_blank=True, help_text="Why it goes no further; empty: it does.")


class UnplacedSerializer(shapes.Serializer):
    missing = shapes.IntegerField(help_text="Replicas short of what is wanted.")
    why = shapes.CharField()


class SourceSerializer(shapes.Serializer):
    """What the last check of the source found."""

    state = shapes.ChoiceField(("unchecked", *filter(None, Model.Source.values)))
    sentence = shapes.CharField(allow_blank=True)
    revision = shapes.CharField(allow_blank=True, help_text="The commit that a launch pins.")
    checked_at = fields.moment(allow_null=True)
    skipped_by = shapes.CharField(allow_blank=True)


class StatusSerializer(shapes.Serializer):
    """What there is of the model. Told, and never taken."""

    scaling = shapes.CharField(help_text="In words.")
    simulated = shapes.BooleanField(help_text="Every profile is of the sim engine.")
    ready = shapes.IntegerField()
    wanted = shapes.IntegerField()
    stale = shapes.IntegerField(help_text="Replicas that a restart would change.")
    unplaced = UnplacedSerializer(allow_null=True)
    roll = RollSerializer(allow_null=True)
    engine_check = EngineCheckSerializer()
    faults = shapes.ListField(
        child=shapes.CharField(), help_text="What today's law has against what is stored."
    )
    source = SourceSerializer()  # type: ignore[assignment]  # a declared field is taken off the class
    warnings = shapes.ListField(
        child=shapes.CharField(), required=False, help_text="Of a change alone: what is seldom meant."
    )


class ModelSerializer(shapes.Serializer):
    """A catalog entry. What is zero or empty is left out of an answer."""

    name = fields.name("What a request asks for.")
    aliases = fields.names("Further names of it.")
    description = fields.text(TEXT_LIMIT)
    source = shapes.CharField(  # type: ignore[assignment]  # a declared field is taken off the class
        min_length=1,
        max_length=SOURCE_LIMIT,
        help_text="org/name[@revision][:file-or-glob], or an absolute path on the nodes.",
    )
    profiles = shapes.ListField(child=ProfileSerializer(), min_length=1, max_length=ENTRIES_LIMIT)
    scaling = ScalingSerializer(required=False)
    fallbacks = fields.names("Where requests go when it cannot answer, in order.")
    routing_profile = shapes.ChoiceField(ROUTING_PROFILES, required=False)
    slo = SloSerializer(required=False)
    context_length = fields.whole("Tokens; 0: the model's own.", lowest=0)
    max_output = fields.whole("Tokens; 0: no limit of its own.", lowest=0)
    capabilities = CapabilitiesSerializer(required=False)
    limits = LimitsSerializer(required=False)
    timeouts = TimeoutsSerializer(required=False)
    status = StatusSerializer(read_only=True)
    why = fields.why(write_only=True)
    skip_source_check = shapes.BooleanField(
        write_only=True, required=False, help_text="Save what the check refuses; say why."
    )


class ReplacingModelSerializer(ModelSerializer):
    """The whole model. Without a name it keeps the one it has; with another it is renamed."""

    name = fields.name(required=False)


def _emptied(serializer: type[shapes.Serializer]) -> dict[str, shapes.Field]:
    """The fields of a merge patch: each may be left out, and null takes it back to what it is then."""
    found = serializer().get_fields()
    for field in found.values():
        field.required, field.allow_null = False, True
    return found


class ScalingPatchSerializer(ScalingSerializer):
    def get_fields(self) -> dict[str, shapes.Field]:
        return _emptied(ScalingSerializer)


class SloPatchSerializer(SloSerializer):
    def get_fields(self) -> dict[str, shapes.Field]:
        return _emptied(SloSerializer)


class CapabilitiesPatchSerializer(CapabilitiesSerializer):
    def get_fields(self) -> dict[str, shapes.Field]:
        return _emptied(CapabilitiesSerializer)


class LimitsPatchSerializer(LimitsSerializer):
    def get_fields(self) -> dict[str, shapes.Field]:
        return _emptied(LimitsSerializer)


class TimeoutsPatchSerializer(TimeoutsSerializer):
    def get_fields(self) -> dict[str, shapes.Field]:
        return _emptied(TimeoutsSerializer)


class ModelPatchSerializer(ModelSerializer):
    """A JSON merge patch (RFC 7396): null takes a field back, a list is replaced whole."""

    def get_fields(self) -> dict[str, shapes.Field]:
        inner = {
            "scaling": ScalingPatchSerializer(),
            "slo": SloPatchSerializer(),
            "capabilities": CapabilitiesPatchSerializer(),
            "limits": LimitsPatchSerializer(),
            "timeouts": TimeoutsPatchSerializer(),
        }
        found = _emptied(ModelSerializer) | inner
        for name in inner:
            found[name].required, found[name].allow_null = False, True
        return found


class CheckSerializer(shapes.Serializer):
    pin = shapes.BooleanField(required=False, help_text="Launch the commit that the source is at now.")
    why = fields.why()


class RollingSerializer(shapes.Serializer):
    cancel = shapes.BooleanField(required=False, help_text="Replace no more; what has been stays.")
    why = fields.why()


class TrialSerializer(shapes.Serializer):
    """What a change would be and bring about. Nothing was saved."""

    model = shapes.DictField(allow_null=True, help_text="As it would be; null: removed.")
    changes = shapes.DictField(help_text="What an edit would change; empty: nothing, or it is none.")
    warnings = shapes.ListField(child=shapes.CharField(), help_text="What is seldom meant.")
    consequences = ConsequencesSerializer()


class NeedsSerializer(shapes.Serializer):
    """What a node must have for a replica, or for one rank of it."""

    engine = shapes.CharField()
    nodes = shapes.IntegerField()
    gpus_per_node = shapes.IntegerField()
    gpu_class = shapes.CharField(allow_blank=True)
    memory_gb = shapes.IntegerField()
    disk_gb = shapes.IntegerField()
    labels = shapes.DictField(child=shapes.CharField(allow_blank=True))
    fabric = shapes.BooleanField(help_text="All nodes in one fabric.")
    words = shapes.CharField()


class LintSerializer(shapes.Serializer):
    profile = shapes.CharField(allow_blank=True, help_text="Empty: it is about the model.")
    field = shapes.CharField()
    code = shapes.CharField()
    sentence = shapes.CharField()


class PreviewSerializer(shapes.Serializer):
    """What a profile needs and will run. What is not chosen yet stands as <port>, <key> and so on."""

    model = shapes.CharField()
    profile = shapes.CharField()
    fingerprint = shapes.CharField()
    needs = NeedsSerializer()
    command = shapes.ListField(child=shapes.CharField(allow_blank=True))
    command_line = shapes.CharField(allow_blank=True, help_text="Quoted for a shell.")
    env = shapes.DictField(child=shapes.CharField(allow_blank=True))
    refusal = shapes.CharField(allow_blank=True, help_text="Why there is no command.")
    remarks = shapes.ListField(child=shapes.CharField())
    warnings = shapes.ListField(child=LintSerializer(), help_text="What is seldom meant.")


# --- the views ------------------------------------------------------------------------------------

_EITHER = PolymorphicProxySerializer("ModelOrTrial", [ModelSerializer, TrialSerializer], None)
_TRIAL = OpenApiResponse(TrialSerializer, "Of a dry run.")
describe_models = extend_schema_view(
    list=extend_schema(summary="Models", responses=ModelSerializer(many=True)),
    retrieve=extend_schema(summary="One model", parameters=[MODEL_NAME, ETAG], responses=ModelSerializer),
    create=extend_schema(
        summary="Add a model",
        parameters=[DRY_RUN, ETAG, LOCATION],
        request=ModelSerializer,
        responses={200: _TRIAL, 201: ModelSerializer},
    ),
    update=extend_schema(
        summary="Replace a model whole",
        parameters=[MODEL_NAME, DRY_RUN, IF_MATCH, ETAG],
        request=ReplacingModelSerializer,
        responses={200: _EITHER, 412: CHANGED},
    ),
    partial_update=extend_schema(
        summary="Change some fields of a model",
        parameters=[MODEL_NAME, DRY_RUN, IF_MATCH, ETAG],
        request=ModelPatchSerializer,
        responses={200: _EITHER, 412: CHANGED},
    ),
    destroy=extend_schema(
        summary="Remove a model; its replicas drain",
        parameters=[MODEL_NAME, DRY_RUN, IF_MATCH, WHY],
        responses={200: _TRIAL, 204: GONE, 412: CHANGED},
    ),
)
describe_check = extend_schema(
    summary="Ask about the source of a model again",
    parameters=[MODEL_NAME, ETAG],
    request=CheckSerializer,
    responses={200: ModelSerializer},
)

describe_roll = extend_schema(
    summary="Replace the stale replicas of a model one after another; where none is, nothing happens",
    parameters=[MODEL_NAME, ETAG],
    request=RollingSerializer,
    responses={200: ModelSerializer},
)

_PROFILE = OpenApiParameter(
    "profile", str, OpenApiParameter.PATH, description="The name of one of its profiles."
)
describe_profile = extend_schema(
    summary="What a profile will run", parameters=[MODEL_NAME, _PROFILE], responses=PreviewSerializer
)
