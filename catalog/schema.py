"""What /api/ takes and answers with, as OpenAPI tells it to those who generate clients.

Serializers describe here and judge nothing: a body is judged by the law (`catalog/spec.py`), whose limits are
repeated by name. A test holds the fields and the limits of both against each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from drf_spectacular.extensions import OpenApiAuthenticationExtension, OpenApiSerializerFieldExtension
from drf_spectacular.openapi import AutoSchema
from drf_spectacular.utils import (
    OpenApiParameter,
    OpenApiResponse,
    PolymorphicProxySerializer,
    extend_schema,
    extend_schema_view,
)
from rest_framework import serializers as shapes

from catalog.models import Key, Model
from catalog.reading import ENTRIES_LIMIT, INT_LIMIT, NAME_LIMIT, TEXT_LIMIT
from catalog.spec import ENGINES, HIGHEST_WEIGHT, ROUTING_PROFILES, SOURCE_LIMIT
from nodes.shapes import ConsequencesSerializer

DURATION = r"^-?([0-9]+(\.[0-9]+)?h)?([0-9]+(\.[0-9]+)?m)?([0-9]+(\.[0-9]+)?s)?([0-9]+(\.[0-9]+)?ms)?$"


class Duration(shapes.Field):
    """`1h30m`, `1.5s`, `300ms`."""


class DurationExtension(OpenApiSerializerFieldExtension):
    target_class = Duration

    def map_serializer_field(self, auto_schema: Any, direction: str) -> dict[str, Any]:
        text = {"type": "string", "pattern": DURATION, "minLength": 1, "maxLength": 64, "example": "20m"}
        if direction == "response":
            return text
        return {"anyOf": [text, {"type": "integer", "description": "nanoseconds"}]}


def _text(limit: int, says: str = "", **told: Any) -> Any:
    return shapes.CharField(max_length=limit, allow_blank=True, help_text=says, **{"required": False} | told)


def _name(says: str = "", **told: Any) -> Any:
    return shapes.CharField(min_length=1, max_length=NAME_LIMIT, help_text=says, **told)


def _whole(says: str = "", *, lowest: int = -INT_LIMIT) -> Any:
    return shapes.IntegerField(min_value=lowest, max_value=INT_LIMIT, help_text=says, required=False)


def _names(says: str) -> Any:
    return shapes.ListField(child=_name(), max_length=ENTRIES_LIMIT, help_text=says, required=False)


def _pairs(says: str) -> Any:
    return shapes.DictField(child=_text(TEXT_LIMIT), help_text=says, required=False)


def _duration(says: str) -> Any:
    return Duration(help_text=says, required=False)


def _moment(says: str = "", **told: Any) -> Any:
    return shapes.DateTimeField(help_text=says, **told)


# --- a model --------------------------------------------------------------------------------------


class ProfileSerializer(shapes.Serializer):
    """One way to run a model on one GPU class. What is zero or empty is left out of an answer."""

    name = _name()
    engine = shapes.ChoiceField(ENGINES, help_text="vllm, if left out", required=False)
    gpu_class = _text(NAME_LIMIT, "Empty: without a card, for an engine that can.")
    tp = _whole("GPUs that share each layer; at least 1.")
    pp = _whole("Groups of layers.", lowest=0)
    gpus_per_node = _whole("0: tp / nodes.")
    nodes = _whole("At least 1.")
    args = shapes.ListField(
        child=_text(TEXT_LIMIT),
        max_length=ENTRIES_LIMIT,
        help_text="Arguments of the engine.",
        required=False,
    )
    env = _pairs("Environment of the engine. Sending (hidden) for a value keeps what is stored.")
    min_memory_gb = _whole("Host memory it needs.", lowest=0)
    min_disk_gb = _whole("Disk it needs.", lowest=0)
    node_selector = _pairs("Labels that a node must have.")
    weight = shapes.FloatField(
        max_value=HIGHEST_WEIGHT, help_text="Share of the requests; 1, if left out.", required=False
    )
    priority = _whole("The highest that fits wins.")
    startup_timeout = _duration("20m, if left out.")


class ScalingSerializer(shapes.Serializer):
    """How many replicas to keep. min 0 with max above it is on demand; min 0, max 0 is off."""

    min = _whole()
    max = _whole("0 with min above it: as many as min.")
    idle_timeout = _duration("On demand: unloaded after so long without a request.")


class SloSerializer(shapes.Serializer):
    """Promised at the 99th percentile. Either spelling is read; answers have the first one."""

    TTFTp99 = _duration("To the first token.")
    TPOTp99 = _duration("For each further token.")
    ttft_p99 = Duration(write_only=True, required=False)
    tpot_p99 = Duration(write_only=True, required=False)


class CapabilitiesSerializer(shapes.Serializer):
    tools = shapes.BooleanField(required=False)
    vision = shapes.BooleanField(required=False)
    embeddings = shapes.BooleanField(required=False)


class RollSerializer(shapes.Serializer):
    """Stale replicas are being replaced one after another."""

    by = shapes.CharField(allow_blank=True)
    why = shapes.CharField(allow_blank=True)
    asked_at = _moment()
    halted = shapes.CharField(allow_blank=True, help_text="Why it goes no further; empty: it does.")


class UnplacedSerializer(shapes.Serializer):
    missing = shapes.IntegerField(help_text="Replicas short of what is wanted.")
    why = shapes.CharField()


class SourceSerializer(shapes.Serializer):
    """What the last check of the source found."""

    state = shapes.ChoiceField(("unchecked", *filter(None, Model.Source.values)))
    sentence = shapes.CharField(allow_blank=True)
    revision = shapes.CharField(allow_blank=True, help_text="The commit that a launch pins.")
    checked_at = _moment(allow_null=True)
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
    faults = shapes.ListField(
        child=shapes.CharField(), help_text="What today's law has against what is stored."
    )
    source = SourceSerializer()  # type: ignore[assignment]  # a declared field is taken off the class
    warnings = shapes.ListField(
        child=shapes.CharField(), required=False, help_text="Of a change alone: what is seldom meant."
    )


class ModelSerializer(shapes.Serializer):
    """A catalog entry. What is zero or empty is left out of an answer."""

    name = _name("What a request asks for.")
    aliases = _names("Further names of it.")
    description = _text(TEXT_LIMIT)
    source = shapes.CharField(  # type: ignore[assignment]  # a declared field is taken off the class
        min_length=1,
        max_length=SOURCE_LIMIT,
        help_text="org/name[@revision][:file-or-glob], or an absolute path on the nodes.",
    )
    profiles = shapes.ListField(child=ProfileSerializer(), min_length=1, max_length=ENTRIES_LIMIT)
    scaling = ScalingSerializer(required=False)
    fallbacks = _names("Where requests go when it cannot answer, in order.")
    routing_profile = shapes.ChoiceField(ROUTING_PROFILES, required=False)
    slo = SloSerializer(required=False)
    context_length = _whole("Tokens; 0: the model's own.", lowest=0)
    max_output = _whole("Tokens; 0: no limit of its own.", lowest=0)
    capabilities = CapabilitiesSerializer(required=False)
    status = StatusSerializer(read_only=True)
    why = _text(TEXT_LIMIT, "Kept in the history.", write_only=True)
    skip_source_check = shapes.BooleanField(
        write_only=True, required=False, help_text="Save what the check refuses; say why."
    )


class ReplacingModelSerializer(ModelSerializer):
    """The whole model. Without a name it keeps the one it has; with another it is renamed."""

    name = _name(required=False)


def _emptied(serializer: type[shapes.Serializer]) -> dict[str, shapes.Field]:
    """The fields of a merge patch: each may be left out, and null takes it back to what it is then."""
    fields = serializer().get_fields()
    for field in fields.values():
        field.required, field.allow_null = False, True
    return fields


class ScalingPatchSerializer(ScalingSerializer):
    def get_fields(self) -> dict[str, shapes.Field]:
        return _emptied(ScalingSerializer)


class SloPatchSerializer(SloSerializer):
    def get_fields(self) -> dict[str, shapes.Field]:
        return _emptied(SloSerializer)


class CapabilitiesPatchSerializer(CapabilitiesSerializer):
    def get_fields(self) -> dict[str, shapes.Field]:
        return _emptied(CapabilitiesSerializer)


class ModelPatchSerializer(ModelSerializer):
    """A JSON merge patch (RFC 7396): null takes a field back, a list is replaced whole."""

    def get_fields(self) -> dict[str, shapes.Field]:
        inner = {
            "scaling": ScalingPatchSerializer(),
            "slo": SloPatchSerializer(),
            "capabilities": CapabilitiesPatchSerializer(),
        }
        fields = _emptied(ModelSerializer) | inner
        for name in inner:
            fields[name].required, fields[name].allow_null = False, True
        return fields


class CheckSerializer(shapes.Serializer):
    pin = shapes.BooleanField(required=False, help_text="Launch the commit that the source is at now.")
    why = _text(TEXT_LIMIT, "Kept in the history.")


class RollingSerializer(shapes.Serializer):
    cancel = shapes.BooleanField(required=False, help_text="Replace no more; what has been stays.")
    why = _text(TEXT_LIMIT, "Kept in the history.")


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


# --- keys and events ------------------------------------------------------------------------------


class KeySerializer(shapes.Serializer):
    """An API key, without what opens a door."""

    id = shapes.CharField()
    name = _name("What it is for.")
    user = shapes.CharField(help_text="Whose it is; it may do no more than they may.")
    scope = shapes.ChoiceField(Key.Scope.values)
    state = shapes.ChoiceField(("live", "expired", "revoked"))
    created_at = _moment()
    expires_at = _moment(allow_null=True)
    revoked_at = _moment(allow_null=True)


class NewKeySerializer(shapes.Serializer):
    """A key to be made."""

    name = _name("What it is for.")
    user = _text(TEXT_LIMIT, "Yourself, if left out.")
    scope = shapes.ChoiceField(Key.Scope.values, required=False, help_text="inference, if left out")
    expires_in = _duration("Such as 720h; a key lasts, if left out.")
    why = _text(TEXT_LIMIT, "Kept in the history.")


class MadeKeySerializer(KeySerializer):
    """A key that was just made, with its text."""

    key = shapes.CharField(help_text="The key itself, shown in this answer and never again.")


class EventSerializer(shapes.Serializer):
    """Who did what to what, and why."""

    id = shapes.IntegerField()
    at = _moment()
    by = shapes.CharField(allow_blank=True, help_text="Empty: llmgw itself.")
    door = shapes.CharField(allow_blank=True, help_text="admin, api, command, or the loop.")
    verb = shapes.CharField()
    kind = shapes.CharField(help_text="model, key, node, replica, cluster, user or group.")
    subject = shapes.CharField(allow_blank=True)
    why = shapes.CharField(allow_blank=True)
    revision = shapes.IntegerField(help_text="What a change of the catalog was counted as, otherwise 0.")
    detail = shapes.DictField(help_text="What changed, field by field.")


# --- refusals -------------------------------------------------------------------------------------


class ErrorSerializer(shapes.Serializer):
    field = shapes.CharField(allow_blank=True, help_text="Empty where it is about no one field.")
    code = shapes.CharField()
    sentence = shapes.CharField(help_text="What is wrong, why, and what to do.")
    profile = shapes.CharField(required=False, help_text="The profile that it is about.")


class ErrorsSerializer(shapes.Serializer):
    errors = shapes.ListField(child=ErrorSerializer(), min_length=1)  # type: ignore[assignment]  # a declared field is taken off the class


class ChangedSinceSerializer(ErrorsSerializer):
    changes = shapes.ListField(child=EventSerializer(), help_text="What was done since, oldest first.")


_REFUSALS = {
    "400": "Something sent cannot be; each error says what to send instead.",
    "401": "No credential, or one that is not valid.",
    "403": "This user may not do this.",
    "404": "There is no such thing, or none that this user may see.",
    "406": "Asked for in another form than JSON.",
    "409": "Something else stands against it.",
    "413": "The body is too large.",
    "415": "The body is no JSON.",
    "500": "llmgw failed; its log tells more.",
    "503": "The database is away for now.",
}


class Schema(AutoSchema):
    """Tells of each operation how it refuses, too."""

    def get_operation_id(self) -> str:
        return f"{self.get_tags()[0]}_{self.view.action}"

    def get_description(self) -> str:
        return ""

    def _get_response_bodies(self, direction: Any = "response") -> Any:
        bodies = super()._get_response_bodies(direction)
        for code in self._refusals():
            refusal = OpenApiResponse(ErrorsSerializer, _REFUSALS[code])
            bodies.setdefault(code, self._get_response_for_code(refusal, code))
        return dict(sorted(bodies.items()))

    def _refusals(self) -> Iterator[str]:
        yield from ("400", "401", "403", "406", "500", "503")
        if "{" in self.path:
            yield "404"
        if self.method in ("POST", "PUT", "PATCH"):
            yield from ("413", "415")
        rows = getattr(self.view, "queryset", None)
        if self.method != "GET" and rows is not None and rows.model is Model:
            yield "409"


class KeyScheme(OpenApiAuthenticationExtension):
    target_class = "catalog.rest.KeyAuthentication"
    name = "key"

    def get_security_definition(self, auto_schema: Any) -> dict[str, Any]:
        says = "An API key whose scope is manage: llmgw_..."
        return {"type": "http", "scheme": "bearer", "description": says}


def addresses(endpoints: Iterable[tuple[str, str, str, Any]]) -> list[tuple[str, str, str, Any]]:
    """Each address without its last slash. What a POST to a row does, and what lies beneath a row, are told
    under an address of their own; to Django they are the row's, since names hold slashes."""
    found = []
    for address, regex, method, view in endpoints:
        path = address.rstrip("/")
        posted, beneath = getattr(view.cls, "posted", ()), getattr(view.cls, "beneath", {})
        if posted and method == "POST" and path.endswith("}"):
            views = {word: view.cls.as_view({"post": word}, **view.initkwargs) for word in posted}
            found += [(f"{path}/{word}", regex, method, each) for word, each in views.items()]
            continue
        found.append((path, regex, method, view))
        if method == "GET" and path.endswith("}"):
            found += [
                (f"{path}/{below}", regex, method, view.cls.as_view({"get": word}, **view.initkwargs))
                for word, below in beneath.items()
            ]
    return found


def close(result: dict[str, Any], **told: Any) -> dict[str, Any]:
    """A body has no other fields than these; what a GET tells beside them may be sent back."""
    for name, shape in result["components"]["schemas"].items():
        if name.endswith("Request"):
            shape["additionalProperties"] = False
        if name.endswith(("ModelRequest", "ModelPatchRequest")):
            says = "As a GET told it; it is not looked at."
            shape["properties"]["status"] = {"type": "object", "readOnly": True, "description": says}
    return result


# --- the views ------------------------------------------------------------------------------------

WHY = OpenApiParameter("why", str, OpenApiParameter.QUERY, description="Kept in the history.")
MODEL_NAME = OpenApiParameter(
    "name", str, OpenApiParameter.PATH, description="The canonical name; it may hold slashes."
)
_ETAG = OpenApiParameter(
    "ETag",
    str,
    OpenApiParameter.HEADER,
    response=True,
    description="The version of what is wanted, for If-Match. What is observed (`status`) has no part in it.",
)
_IF_MATCH = OpenApiParameter(
    "If-Match",
    str,
    OpenApiParameter.HEADER,
    description="The ETag that you have read; 412 where somebody has changed the model since. *: any.",
)
_LOCATION = OpenApiParameter(
    "Location", str, OpenApiParameter.HEADER, response=[201], description="The address of what was added."
)
_DRY_RUN = OpenApiParameter(
    "dry_run",
    str,
    OpenApiParameter.QUERY,
    enum=("true", "false", "1", "0"),
    description="true: judge all of it, save nothing, and tell what it would bring about.",
)
_EITHER = PolymorphicProxySerializer("ModelOrTrial", [ModelSerializer, TrialSerializer], None)
_TRIAL = OpenApiResponse(TrialSerializer, "Of a dry run.")
_CHANGED = OpenApiResponse(
    ChangedSinceSerializer, "Somebody has changed the model since; `changes` tells what."
)
_GONE = OpenApiResponse(description="Done; there is nothing more to tell.")

describe_models = extend_schema_view(
    list=extend_schema(summary="Models", responses=ModelSerializer(many=True)),
    retrieve=extend_schema(summary="One model", parameters=[MODEL_NAME, _ETAG], responses=ModelSerializer),
    create=extend_schema(
        summary="Add a model",
        parameters=[_DRY_RUN, _ETAG, _LOCATION],
        request=ModelSerializer,
        responses={200: _TRIAL, 201: ModelSerializer},
    ),
    update=extend_schema(
        summary="Replace a model whole",
        parameters=[MODEL_NAME, _DRY_RUN, _IF_MATCH, _ETAG],
        request=ReplacingModelSerializer,
        responses={200: _EITHER, 412: _CHANGED},
    ),
    partial_update=extend_schema(
        summary="Change some fields of a model",
        parameters=[MODEL_NAME, _DRY_RUN, _IF_MATCH, _ETAG],
        request=ModelPatchSerializer,
        responses={200: _EITHER, 412: _CHANGED},
    ),
    destroy=extend_schema(
        summary="Remove a model; its replicas drain",
        parameters=[MODEL_NAME, _DRY_RUN, _IF_MATCH, WHY],
        responses={200: _TRIAL, 204: _GONE, 412: _CHANGED},
    ),
)
describe_check = extend_schema(
    summary="Ask about the source of a model again",
    parameters=[MODEL_NAME, _ETAG],
    request=CheckSerializer,
    responses={200: ModelSerializer},
)

describe_roll = extend_schema(
    summary="Replace the stale replicas of a model one after another; where none is, nothing happens",
    parameters=[MODEL_NAME, _ETAG],
    request=RollingSerializer,
    responses={200: ModelSerializer},
)

_PROFILE = OpenApiParameter(
    "profile", str, OpenApiParameter.PATH, description="The name of one of its profiles."
)
describe_profile = extend_schema(
    summary="What a profile will run", parameters=[MODEL_NAME, _PROFILE], responses=PreviewSerializer
)

describe_keys = extend_schema_view(
    list=extend_schema(summary="API keys", responses=KeySerializer(many=True)),
    retrieve=extend_schema(summary="One API key", responses=KeySerializer),
    create=extend_schema(
        summary="Make an API key",
        parameters=[_LOCATION],
        request=NewKeySerializer,
        responses={201: MadeKeySerializer},
    ),
    destroy=extend_schema(summary="Revoke an API key", parameters=[WHY], responses={204: _GONE}),
)

describe_events = extend_schema_view(
    list=extend_schema(summary="The history", responses=EventSerializer(many=True)),
    retrieve=extend_schema(summary="One event", responses=EventSerializer),
)
