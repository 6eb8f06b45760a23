"""Replicas, nodes and the reconciler over REST: what was observed, where it differs from the catalog, what
the next pass would do, and the few things that an operator may do about it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any, ClassVar, cast

from django.core.exceptions import ValidationError
from django.db.models import Q, QuerySet
from django.http import HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase
from django.urls import re_path
from rest_framework import exceptions, status
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.viewsets import ViewSet

from catalog.actions import find_model
from catalog.hiding import SEE_ENV
from catalog.listing import Filter, Listing, check_parameters, refused
from catalog.models import Key, database_now
from catalog.reading import quote
from catalog.resources import Addresses, Resource, body_of, is_said, settle
from catalog.rest import MayDo
from nodes import actions, jobs, joining, stocking
from nodes.bundle import join_line
from nodes.conversation import AgentProblem
from nodes.holdings import needing, weights, weights_as_dict
from nodes.hooks import WebhookViewSet
from nodes.logs import TAIL_LINES_LIMIT, NoLog, follow_log, read_log, visible
from nodes.models import Job, JoinToken, Node, Orphan, Rank, Replica, Weights
from nodes.outlook import preview_plan
from nodes.overview import look, overview_as_dict
from nodes.plots import asked_span, describe_cluster_series, describe_node_series
from nodes.reckoning import answer, ask
from nodes.schema import (
    describe_allow,
    describe_cordon,
    describe_drain,
    describe_jobs,
    describe_join_tokens,
    describe_log,
    describe_nodes,
    describe_outrank,
    describe_pause,
    describe_plan,
    describe_replicas,
    describe_resume,
    describe_state,
    describe_uncordon,
    describe_usage,
    describe_weights,
)
from nodes.series import series_of_cluster, series_of_node
from nodes.shapes import describe_overview
from nodes.showing import acting, node_as_dict, nodes, of_model, replica_as_dict, replicas
from nodes.tasks import wake
from nodes.telling import outlook_as_dict
from nodes.tokens import TOKEN_STATES, join_tokens, token_as_dict


@describe_replicas
class ReplicaViewSet(Resource):
    """Replicas, oldest first."""

    queryset = replicas()
    lookup_value_regex = "[0-9a-fA-F-]{36}"
    parameters = {**Resource.parameters, "log": ("tail", "follow", "attempt", "rank")}
    needs: ClassVar[Mapping[str, str]] = {
        "list": "nodes.view_replica",
        "retrieve": "nodes.view_replica",
        "log": "nodes.view_replica",
        "destroy": "nodes.change_replica",
    }
    listing = Listing(
        orders={"created": "created_at", "since": "state_since", "state": "state"},
        filters={
            "model": Filter("Of this model, or started under its name.", of_model),
            "profile": Filter("Started from this profile.", lambda name: Q(launch__profile__name=name)),
            "state": Filter("In this state.", lambda state: Q(state=state), tuple(Replica.State.values)),
            "wanted": Filter(
                "To become this.", lambda wanted: Q(wanted=wanted), tuple(Replica.Wanted.values)
            ),
            "node": Filter(
                "With a rank on this node.",
                lambda name: Q(pk__in=Rank.objects.filter(node__name=name).values("replica")),
            ),
        },
        search=lambda text: Q(launch__model__icontains=text) | Q(reason__icontains=text),
    )

    def get_object(self) -> Replica:
        text = self.kwargs["pk"]
        try:
            found = self.get_queryset().filter(pk=text).first()
        except ValidationError:  # of a UUID
            found = None
        if found is None:
            raise exceptions.NotFound(f"there is no replica {quote(text)}; GET /api/replicas lists them")
        return found

    def destroy(self, request: Request, pk: str) -> Response:
        by, why = request.user.get_username(), request.query_params.get("why", "")
        if orphan := self._orphan():
            is_told = actions.stop_orphan(orphan, by=by, why=why, door="api")
        else:
            is_told = actions.stop_replica(self.get_object(), by=by, why=why, door="api")
        if is_told:
            wake()
        return Response(self.shown(self.get_object()), status=status.HTTP_202_ACCEPTED)

    def _orphan(self) -> Orphan | None:
        """What runs under this id and is no replica of ours, as /api/plan tells of it."""
        try:
            known = Replica.objects.filter(pk=self.kwargs["pk"])
            orphans = Orphan.objects.select_related("node").filter(replica=self.kwargs["pk"])
            return None if known.exists() else orphans.first()
        except ValidationError:  # of a UUID
            return None

    def perform_content_negotiation(self, request: Request, force: bool = False) -> Any:
        return super().perform_content_negotiation(request, force=force or self.action == "log")

    @describe_log
    def log(self, request: Request, pk: str) -> HttpResponseBase:
        replica = self.get_object()
        tail = _count(request, "tail", "200", 1, TAIL_LINES_LIMIT)
        attempt = _count(request, "attempt", "1", 1) if "attempt" in request.query_params else None
        number = _count(request, "rank", "0", 0)
        rank = next((each for each in replica.ranks.all() if each.rank == number), None)
        if rank is None:
            raise exceptions.NotFound(f"replica {replica.pk} has no rank {number}")
        is_followed = is_said(request, "follow")
        if is_followed and followers.count >= FOLLOWERS_LIMIT:
            raise Unreachable(f"{FOLLOWERS_LIMIT} logs are followed here already; end one of these first")
        try:
            # Also ahead of one that is followed: what keeps it from being read is told with its status.
            told = read_log(rank.node, str(replica.pk), tail=1 if is_followed else tail, attempt=attempt)
        except NoLog as problem:
            raise exceptions.NotFound(str(problem)) from None
        except AgentProblem as problem:
            raise Unreachable(str(problem)) from None
        if not is_followed:
            return HttpResponse(visible(told), headers=_OF_LOG)
        pieces = followers.follow(rank.node, str(replica.pk), tail=tail, attempt=attempt)
        return StreamingHttpResponse(pieces, headers=_OF_LOG)

    def shown(self, replica: Replica) -> dict[str, Any]:
        return replica_as_dict(replica, sees_env=self.request.user.has_perm(SEE_ENV))


@describe_nodes
class NodeViewSet(Resource):
    """Nodes by name."""

    queryset = nodes()
    lookup_field = "name"
    lookup_value_regex = "[^\\x00]+?"  # names may have slashes
    posted = ("cordon", "uncordon", "drain")
    parameters = {**Resource.parameters, "series": ("span",)}
    beneath: ClassVar[Mapping[str, str]] = {"series": "series"}
    needs: ClassVar[Mapping[str, str]] = {
        "list": "nodes.view_node",
        "retrieve": "nodes.view_node",  # and what lies beneath it
        "destroy": "nodes.delete_node",
        "cordon": "nodes.change_node",
        "uncordon": "nodes.change_node",
        "drain": "nodes.change_node",
    }
    listing = Listing(
        orders={"name": "name", "created": "created_at"},
        filters={
            "cordoned": Filter(
                "Whether nothing new is placed there.",
                lambda text: Q(is_cordoned=text == "true"),
                ("true", "false"),
            ),
            "draining": Filter(
                "Whether what runs there moves.",
                lambda text: Q(is_draining=text == "true"),
                ("true", "false"),
            ),
        },
        search=lambda text: Q(name__icontains=text) | Q(address__icontains=text),
    )

    def get_object(self) -> Node:
        return self._found(self.get_queryset())

    def _found(self, rows: QuerySet[Node]) -> Node:
        name = self.kwargs["name"]
        found = rows.filter(name=name).first()
        if found is None:
            raise exceptions.NotFound(f"there is no node {quote(name)}; GET /api/nodes lists them")
        return found

    def retrieve(self, request: Request, *args: Any, **kwargs: Any) -> Response:
        """A node by the whole address if there is one; otherwise what lies beneath another."""
        name = self.kwargs["name"]
        found = self.get_queryset().filter(name=name).first()
        if found is None and name.endswith("/series"):
            return self.series(request)
        check_parameters(request, ())
        return Response(self.shown(found or self.get_object()))

    @describe_node_series
    def series(self, request: Request) -> Response:
        span = asked_span(request)
        self.kwargs["name"] = self.kwargs["name"].removesuffix("/series")
        node = self._found(Node.objects.only("name"))
        return Response(series_of_node(node.name, span, database_now()).as_dict())

    def destroy(self, request: Request, name: str) -> Response:
        why, by = request.query_params.get("why", ""), request.user.get_username()
        if actions.remove_node(self.get_object(), by=by, why=why, door="api"):
            wake()
        return Response(status=status.HTTP_204_NO_CONTENT)

    @describe_cordon
    def cordon(self, request: Request) -> Response:
        return self._change(actions.cordon)

    @describe_uncordon
    def uncordon(self, request: Request) -> Response:
        return self._change(actions.uncordon)

    @describe_drain
    def drain(self, request: Request) -> Response:
        return self._change(actions.drain_node)

    def _change(self, verb: Any) -> Response:
        node = self.get_object()
        body = body_of(self.request, "why")
        why = body.text("why")
        settle(body)
        if verb(node, by=self.request.user.get_username(), why=why, door="api"):
            wake()
        return Response(self.shown(self.get_object()))

    def shown(self, node: Node) -> dict[str, Any]:
        return node_as_dict(node)


@describe_join_tokens
class JoinTokenViewSet(Resource):
    """Join tokens, newest first."""

    queryset = join_tokens()
    lookup_value_regex = "[0-9A-Za-z]{1,40}"
    needs: ClassVar[Mapping[str, str]] = {
        "list": "nodes.view_jointoken",
        "retrieve": "nodes.view_jointoken",
        "create": joining.MAY_ADD,
        "destroy": joining.MAY_ADD,
    }
    listing = Listing(
        orders={"created": "created_at", "expires": "expires_at"},
        newest_first=True,
        filters={
            "state": Filter("What has become of it.", lambda state: TOKEN_STATES[state], tuple(TOKEN_STATES)),
            "name": Filter("Of this node.", lambda name: Q(node_name=name) | Q(node__name=name)),
        },
        search=lambda text: Q(node_name__icontains=text) | Q(by__icontains=text) | Q(id=text),
    )

    def get_object(self) -> JoinToken:
        found: JoinToken | None = self.get_queryset().filter(pk=self.kwargs["pk"]).first()
        if found is None:
            asked = quote(self.kwargs["pk"])
            raise exceptions.NotFound(f"there is no join token {asked}; GET /api/join-tokens lists them")
        return found

    def create(self, request: Request) -> Response:
        body = body_of(request, "name", "labels", "expires_in", "why")
        asked: dict[str, Any] = {
            "name": body.text("name"),
            "labels": body.pairs("labels"),
            "lives_ns": body.duration("expires_in", negative_allowed=True)
            if body.has("expires_in")
            else None,
            "why": body.text("why"),
        }
        settle(body)
        maker: Any = request.user
        through = cast("Key | None", request.auth)
        token, text = joining.mint_join_token(
            **asked, by=maker.get_username(), door="api", maker=maker, key=through
        )
        told = self.shown(self.get_queryset().get(pk=token.pk))
        line = join_line(request.build_absolute_uri("/").rstrip("/"))
        answer = Response(
            told | {"token": text, "line": line},
            status=status.HTTP_201_CREATED,
            headers={"Cache-Control": "no-store"},
        )
        answer["Location"] = self.reverse_action("detail", args=[token.pk])
        return answer

    def destroy(self, request: Request, pk: str) -> Response:
        why, by = request.query_params.get("why", ""), request.user.get_username()
        joining.revoke_join_token(self.get_object(), by=by, door="api", why=why)
        return Response(status=status.HTTP_204_NO_CONTENT)

    def shown(self, token: JoinToken) -> dict[str, Any]:
        return token_as_dict(token)


@describe_weights
class WeightsViewSet(Resource):
    """Weights in the nodes' stores, by repository."""

    queryset = weights()
    lookup_value_regex = "[0-9]{1,18}"
    needs: ClassVar[Mapping[str, str]] = {
        "list": "nodes.view_weights",
        "retrieve": "nodes.view_weights",
        "create": "nodes.add_weights",
        "destroy": "nodes.delete_weights",
    }
    listing = Listing(
        orders={"repo": "repo", "size": "size_bytes", "node": "node__name"},
        filters={
            "node": Filter("On this node.", lambda name: Q(node__name=name)),
            "repo": Filter("Of this repository.", lambda name: Q(repo=name)),
            "state": Filter("In this state.", lambda state: Q(state=state), tuple(Weights.State.values)),
            "in_use": Filter(
                "Whether a replica reads them.", lambda text: Q(is_used=text == "true"), ("true", "false")
            ),
        },
        search=lambda text: Q(repo__icontains=text) | Q(node__name__icontains=text),
    )
    needing: Mapping[int, tuple[str, ...]] = {}

    def get_object(self) -> Weights:
        text = self.kwargs["pk"]
        found: Weights | None = self.get_queryset().filter(pk=text).first()
        if found is None:
            raise exceptions.NotFound(f"there are no weights {quote(text)}; GET /api/weights lists them")
        return found

    def create(self, request: Request) -> Response:
        body = body_of(request, "model", "node", "why")
        name, place, why = body.text("model"), body.text("node"), body.text("why")
        settle(body)
        model = find_model(name)
        node = Node.objects.filter(name=place).first()
        if node is None:
            raise refused("node", "not_found", f"there is no node {quote(place)}; GET /api/nodes lists them")
        with _reached():
            stocking.fetch(model, node, by=request.user.get_username(), why=why, door="api")
        return Response({"model": model.name, "node": node.name}, status=status.HTTP_202_ACCEPTED)

    def destroy(self, request: Request, pk: str) -> Response:
        why, by = request.query_params.get("why", ""), request.user.get_username()
        with _reached():
            stocking.remove(self.get_object(), by=by, why=why, door="api")
        return Response(status=status.HTTP_204_NO_CONTENT)

    def paginate_queryset(self, queryset: Any) -> Any:
        page = super().paginate_queryset(queryset)
        self.needing = needing(page or ())
        return page

    def shown(self, row: Weights) -> dict[str, Any]:
        return weights_as_dict(row, self.needing.get(row.pk) or needing([row])[row.pk])


@describe_jobs
class JobViewSet(Resource):
    """Jobs, newest first."""

    queryset = jobs.jobs()
    lookup_value_regex = "[0-9a-fA-F-]{36}"
    needs: ClassVar[Mapping[str, str]] = {
        "list": "nodes.view_job",
        "retrieve": "nodes.view_job",
        "destroy": "nodes.change_job",
    }
    listing = Listing(
        orders={"asked": "asked_at", "state": "state", "model": "model_name"},
        newest_first=True,
        filters={
            "kind": Filter("Of this kind.", lambda kind: Q(kind=kind), tuple(Job.Kind.values)),
            "model": Filter("About this model.", lambda name: Q(model_name=name)),
            "state": Filter("In this state.", lambda state: Q(state=state), tuple(Job.State.values)),
        },
        search=lambda text: (
            Q(model_name__icontains=text) | Q(by__icontains=text) | Q(problem__icontains=text)
        ),
    )

    def get_object(self) -> Job:
        text = self.kwargs["pk"]
        try:
            found: Job | None = self.get_queryset().filter(pk=text).first()
        except ValidationError:  # of a UUID
            found = None
        if found is None:
            raise exceptions.NotFound(f"there is no job {quote(text)}; GET /api/jobs lists them")
        return found

    def destroy(self, request: Request, pk: str) -> Response:
        by, why = request.user.get_username(), request.query_params.get("why", "")
        jobs.stop(self.get_object().pk, by=by, why=why, door="api")
        return Response(self.shown(self.get_object()), status=status.HTTP_202_ACCEPTED)

    def shown(self, job: Job) -> dict[str, Any]:
        return jobs.job_as_dict(job)


class ReconcilerViewSet(ViewSet):
    """What the reconciler will do, and whether it may."""

    permission_classes = (MayDo,)
    needs: ClassVar[Mapping[str, str]] = {
        "plan": "nodes.view_cluster",
        "state": "nodes.view_cluster",
        "pause": "nodes.change_cluster",
        "resume": "nodes.change_cluster",
        "allow": "nodes.change_cluster",
        "outrank": "nodes.change_cluster",
    }

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super().initial(request, *args, **kwargs)
        check_parameters(request, ())

    @describe_plan
    def plan(self, request: Request) -> Response:
        return Response(outlook_as_dict(preview_plan()))

    @describe_state
    def state(self, request: Request) -> Response:
        return Response(acting().as_dict())

    @describe_pause
    def pause(self, request: Request) -> Response:
        return self._change(actions.pause)

    @describe_resume
    def resume(self, request: Request) -> Response:
        return self._change(actions.resume)

    @describe_allow
    def allow(self, request: Request) -> Response:
        return self._change(actions.allow_held)

    @describe_outrank
    def outrank(self, request: Request) -> Response:
        return self._change(actions.outrank)

    def _change(self, verb: Any) -> Response:
        body = body_of(self.request, "why")
        why = body.text("why")
        settle(body)
        if verb(by=self.request.user.get_username(), why=why, door="api"):
            wake()
        return Response(acting().as_dict())


# --- logs -----------------------------------------------------------------------------------------

FOLLOWERS_LIMIT = 32  # of one process: each holds a connection to its agent
COUNT_LIMIT = 2**31 - 1
_OF_LOG = {"Content-Type": "text/plain; charset=utf-8", "Cache-Control": "no-store"}


class Unreachable(exceptions.APIException):
    status_code = status.HTTP_503_SERVICE_UNAVAILABLE
    default_code = "agent_unreachable"


@contextmanager
def _reached() -> Iterator[None]:
    """That an agent cannot be asked is nobody's mistake."""
    try:
        yield
    except actions.NodeRefused as no:
        if no.faults[0].code == stocking.UNREACHABLE:
            raise Unreachable(str(no)) from None
        raise


class Followers:
    """How many follow a log through this process."""

    def __init__(self) -> None:
        self.count = 0

    async def follow(
        self, node: Node, replica: str, *, tail: int, attempt: int | None
    ) -> AsyncIterator[bytes]:
        """Its status has been told, so that what goes wrong from now on is a last line."""
        self.count += 1
        try:
            async with aclosing(follow_log(node, replica, tail=tail, attempt=attempt)) as pieces:
                async for piece in pieces:
                    yield visible(piece).encode()
        except AgentProblem as problem:
            yield f"\n{visible(str(problem))}\n".encode()
        finally:
            self.count -= 1


followers = Followers()


def _count(request: Request, name: str, default: str, least: int, most: int = COUNT_LIMIT) -> int:
    """Raises CatalogError."""
    text = request.query_params.get(name, default)
    if not (text.isascii() and text.isdecimal() and len(text) <= 10 and least <= int(text) <= most):
        says = f"{name} cannot be {quote(text)}; it is a whole number from {least} to {most}"
        raise refused(name, "out_of_range", says)
    return int(text)


class UsageViewSet(ViewSet):
    """What requests used."""

    permission_classes = (MayDo,)
    needs: ClassVar[Mapping[str, str]] = {"usage": "nodes.view_usage"}

    @describe_usage
    def usage(self, request: Request) -> Response:
        check_parameters(request, ("since", "by", "key", "model"))
        return Response(answer(ask(**request.query_params.dict()), request.user).as_dict())


class OverviewViewSet(ViewSet):
    """How the cluster is, at a glance."""

    permission_classes = (MayDo,)
    needs: ClassVar[Mapping[str, str]] = {"overview": "nodes.view_cluster"}

    @describe_overview
    def overview(self, request: Request) -> Response:
        check_parameters(request, ())
        return Response(overview_as_dict(look(request.user)))


class SeriesViewSet(ViewSet):
    """How the cluster did."""

    permission_classes = (MayDo,)
    needs: ClassVar[Mapping[str, str]] = {"series": "nodes.view_cluster"}

    @describe_cluster_series
    def series(self, request: Request) -> Response:
        return Response(series_of_cluster(asked_span(request), database_now(), request.user).as_dict())


router = Addresses()
router.register("replicas", ReplicaViewSet)
router.register("nodes", NodeViewSet)
router.register("join-tokens", JoinTokenViewSet)
router.register("weights", WeightsViewSet)
router.register("webhooks", WebhookViewSet)
router.register("jobs", JobViewSet)
urls = [
    *router.urls,
    re_path(
        rf"^replicas/(?P<pk>{ReplicaViewSet.lookup_value_regex})/log/?\Z",
        ReplicaViewSet.as_view({"get": "log"}),
        name="replica-log",
    ),
    re_path(r"^plan/?\Z", ReconcilerViewSet.as_view({"get": "plan"}), name="plan"),
    re_path(r"^overview/?\Z", OverviewViewSet.as_view({"get": "overview"}), name="overview"),
    re_path(r"^usage/?\Z", UsageViewSet.as_view({"get": "usage"}), name="usage"),
    re_path(r"^series/?\Z", SeriesViewSet.as_view({"get": "series"}), name="series"),
    re_path(r"^reconciler/?\Z", ReconcilerViewSet.as_view({"get": "state"}), name="reconciler"),
    *(
        re_path(rf"^reconciler/{verb}/?\Z", ReconcilerViewSet.as_view({"post": verb}))
        for verb in ("pause", "resume", "allow", "outrank")
    ),
]
