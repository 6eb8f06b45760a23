"""What /api/ answers with of replicas and nodes, as OpenAPI tells it. See `catalog/schema/`."""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import OpenApiParameter, OpenApiResponse, extend_schema, extend_schema_view
from rest_framework import serializers as shapes

from catalog.reading import NAME_LIMIT, TEXT_LIMIT
from catalog.schema import MODEL_NAME, WHY, fields
from catalog.schema.beside import GONE, LOCATION
from catalog.schema.refusals import REFUSALS, ErrorsSerializer
from nodes.agenda import BUCKETS
from nodes.bench.asks import DISTRIBUTIONS
from nodes.bench.options import WAYS, Options
from nodes.logs import TAIL_LINES_LIMIT
from nodes.models import Job, Replica, Weights
from nodes.placement import Freshness
from nodes.reckoning import BY, SINCE
from nodes.shapes import DifferenceSerializer, EngineCheckSerializer, ItemSerializer
from nodes.showing import GpuUse
from nodes.tokens import TOKEN_STATES


def _text(says: str = "") -> Any:
    return shapes.CharField(allow_blank=True, help_text=says)


def _whole(says: str = "", **told: Any) -> Any:
    return shapes.IntegerField(help_text=says, **told)


def _unknown(says: str = "") -> Any:
    return shapes.IntegerField(allow_null=True, help_text=says or "null: unknown")


# --- replicas -------------------------------------------------------------------------------------


class AttemptSerializer(shapes.Serializer):
    """A process that was started for a rank, and has ended. null: nobody saw it."""

    number = _whole("By which its log is asked for.")
    generation = _whole()
    duration_s = shapes.FloatField(allow_null=True)
    exit_code = _unknown("Below 0: by a signal.")
    signal = _unknown()
    cause = _text("Empty: it was told to end.")
    reason = _text()


class RankSerializer(shapes.Serializer):
    """The part of a replica on one node."""

    rank = _whole()
    node = shapes.CharField()
    state = shapes.ChoiceField(Replica.State.values)
    reason = _text()
    port = _unknown()
    pid = _unknown()
    gpus = shapes.ListField(child=shapes.CharField())
    exit_code = _unknown()
    running = _unknown("Requests that the engine is answering; null: unknown.")
    waiting = _unknown("Requests that wait in the engine; null: unknown.")
    done_bytes = _unknown("Of the weights being fetched; null: none, or unknown.")
    total_bytes = _unknown()
    bytes_per_s = _unknown("How fast they come; null: nothing comes, or unknown.")
    left_s = _unknown("Seconds until all of them are there; null: unknown.")
    context_length = _unknown(
        "Tokens that one request may have, by the engine's own word; null: not ready yet, or unknown."
    )
    attempts = shapes.ListField(child=AttemptSerializer(), help_text="The last that ended, oldest first.")


class ReplicaSerializer(shapes.Serializer):
    """One running copy of a model, as it was observed."""

    id = shapes.UUIDField()
    model = _text("The name it was started under.")
    profile = _text()
    state = shapes.ChoiceField(Replica.State.values)
    reason = _text()
    since = shapes.DateTimeField()
    age_s = shapes.FloatField(allow_null=True, help_text="Seconds in this state.")
    deadline_s = shapes.FloatField(
        allow_null=True,
        help_text="Seconds after which a start has failed, and a drain waits no longer. null: no such time.",
    )
    cause = _text("The code of a failure.")
    failure_kind = _text()
    wanted = shapes.ChoiceField(Replica.Wanted.values)
    wanted_why = _text()
    stale_profile = shapes.BooleanField(allow_null=True, help_text="null: it cannot be known.")
    stale_fields = shapes.ListField(child=shapes.CharField())
    restart_needed = shapes.BooleanField(help_text="A restart would change what runs.")
    differences = shapes.ListField(child=DifferenceSerializer())
    stale_launch = shapes.BooleanField()
    launch_differences = shapes.ListField(child=DifferenceSerializer())
    stale_why = _text()
    fingerprint = _text("Empty: unknown.")
    engine_check = EngineCheckSerializer()
    adopted = shapes.BooleanField()
    generation = _whole()
    created_at = shapes.DateTimeField()
    node = shapes.CharField(allow_null=True, help_text="Where its first rank is.")
    port = _unknown()
    pid = _unknown()
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


# --- nodes ----------------------------------------------------------------------------------------


class GpuSerializer(shapes.Serializer):
    """A device as its agent reported it; what is unknown is left out."""

    id = shapes.CharField()
    index = _whole()
    name = shapes.CharField(required=False)
    gpu_class = shapes.CharField(required=False)
    memory_mib = _whole(required=False)
    used_mib = _whole(required=False)
    foreign_mib = _whole("Held by what is not llmgw's.", required=False)
    is_healthy = shapes.BooleanField(required=False)
    sickness = shapes.CharField(required=False, help_text="What is wrong with one that is not healthy.")
    use = shapes.ChoiceField([each.value for each in GpuUse])
    taken_by = _text("A replica, an orphan, something else; empty: free.")


class EngineSerializer(shapes.Serializer):
    name = shapes.CharField()
    version = shapes.CharField(required=False)


class NodeSerializer(shapes.Serializer):
    """A machine, as its agent last reported it."""

    name = shapes.CharField()
    uuid = shapes.UUIDField()
    address = shapes.CharField()
    certificate = _text("SHA-256 of the one its agent shows; empty: an authority vouches for it, or none.")
    state = shapes.ChoiceField([each.value for each in Freshness])
    seen_at = shapes.DateTimeField(allow_null=True)
    age_s = shapes.FloatField(allow_null=True, help_text="Seconds since it was heard from.")
    problem = _text()
    cordoned = shapes.BooleanField(help_text="Nothing new is placed there.")
    draining = shapes.BooleanField(help_text="What runs there moves.")
    cordoned_by = _text()
    cordoned_why = _text()
    gpus_total = _whole()
    gpus_free = _whole()
    gpus = shapes.ListField(child=GpuSerializer())
    replicas = shapes.ListField(child=shapes.UUIDField(), help_text="With a rank there, and not over.")
    engines = shapes.ListField(child=EngineSerializer())
    labels = shapes.DictField(child=shapes.CharField(allow_blank=True))
    fabric = _text()
    memory_total_mib = _unknown()
    memory_free_mib = _unknown()
    cpu_model = _text("Empty: not told.")
    cpu_cores = _unknown("That engines may use; null: unknown.")
    disk_total_bytes = _unknown()
    disk_free_bytes = _unknown()
    room_bytes = _unknown("What its store could take, with what it would make room by; null: unknown.")
    agent_version = _text()


class ReasonSerializer(shapes.Serializer):
    why = shapes.CharField(
        max_length=TEXT_LIMIT, allow_blank=True, required=False, help_text="Kept in the history."
    )


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
    name = _text("Of the node that it makes; empty: as the machine calls itself.")
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


# --- jobs -----------------------------------------------------------------------------------------


class JobSerializer(shapes.Serializer):
    """Work of minutes that somebody asked for, and a worker or a shell does."""

    id = shapes.UUIDField()
    kind = shapes.ChoiceField(Job.Kind.values)
    model = shapes.CharField()
    replica = shapes.UUIDField(allow_null=True, help_text="null: whichever is ready.")
    options = shapes.DictField()
    by = _text()
    why = _text()
    state = shapes.ChoiceField(Job.State.values)
    asked_at = shapes.DateTimeField()
    claimed_at = shapes.DateTimeField(allow_null=True, help_text="When it began; null: it waits yet.")
    heartbeat_at = shapes.DateTimeField(allow_null=True, help_text="When it last told of itself.")
    ended_at = shapes.DateTimeField(allow_null=True)
    stop_asked_at = shapes.DateTimeField(allow_null=True)
    progress = shapes.DictField(help_text="part (0 to 1), say, and numbers of the moment.")
    result = shapes.DictField(help_text="Of what it found; its form is the kind's.")
    problem = _text("Why it failed, or by whom it was stopped.")
    fingerprint = _text("Of the profile that it was done to; empty: not known yet.")
    engine = _text()
    engine_version = _text()
    gpu = _text()


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


# --- weights --------------------------------------------------------------------------------------


class WeightsSerializer(shapes.Serializer):
    """What a node's store has of one repository at one commit."""

    id = _whole()
    node = shapes.CharField()
    repo = shapes.CharField()
    revision = shapes.CharField()
    state = shapes.ChoiceField(Weights.State.values)
    size_bytes = _whole("On the disk, parts of files included.")
    total_bytes = _unknown("Of what was asked for.")
    bytes_per_s = _unknown("How fast they come; null: nothing comes, or unknown.")
    left_s = _unknown("Seconds until all of them are there; null: unknown.")
    in_use = shapes.BooleanField(help_text="A replica there reads them.")
    needed_by = shapes.ListField(child=shapes.CharField(), help_text="Models that have them as their source.")
    reason = _text("Why a fetch ahead of time has ended without them.")


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


# --- usage ----------------------------------------------------------------------------------------


class _QuantilesSerializer(shapes.Serializer):
    """Milliseconds, within the width of a bucket; null: nothing was measured."""

    p50 = shapes.FloatField(allow_null=True)
    p99 = shapes.FloatField(allow_null=True)


class UsedSerializer(shapes.Serializer):
    """What some requests used. Tokens are the engines' own counts."""

    requests = _whole()
    errors = _whole("Refused or failed.")
    left = _whole("Whose client did not stay.")
    codes = shapes.DictField(child=shapes.IntegerField(), help_text="Errors by their code.")
    prompt_tokens = _whole()
    cached_tokens = _whole("Of the prompts, those that an engine had computed before.")
    completion_tokens = _whole()
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

    since_s = _whole("How long ago it begins; beyond two days, with a whole hour.")
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


# --- the reconciler -------------------------------------------------------------------------------


class StateSerializer(shapes.Serializer):
    """What keeps the reconciler from acting, if anything does."""

    last_pass_age_s = shapes.FloatField(allow_null=True, help_text="null: there never was a pass.")
    paused = shapes.BooleanField()
    paused_by = _text()
    paused_why = _text()
    alarm = _text("What it does not act on, and why; empty: nothing.")
    held = _whole("Ends of replicas that wait for a person's yes.")
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
    reason = _text("Empty: there is room for one more.")


class ProfileSaysSerializer(shapes.Serializer):
    profile = shapes.CharField()
    says = _text("What all nodes say together.")
    nodes = shapes.ListField(child=NodeSaysSerializer())


class WhySerializer(shapes.Serializer):
    """Why a model does not run where or as wanted."""

    model = shapes.CharField()
    as_wanted = shapes.BooleanField()
    says = _text()
    amiss = shapes.ListField(child=shapes.CharField(), help_text="What is not as wanted, a sentence each.")
    notes = shapes.ListField(child=shapes.CharField(), help_text="What is as wanted, and could be better.")
    ready = _whole()
    wanted = _whole()
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
