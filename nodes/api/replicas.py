"""Replicas over REST: what was observed of them, how they differ from the catalog, and their logs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any, ClassVar

from django.core.exceptions import ValidationError
from django.db.models import Q
from django.http import HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase
from rest_framework import exceptions, status
from rest_framework.request import Request
from rest_framework.response import Response

from catalog.hiding import SEE_ENV
from catalog.listing import Filter, Listing, refused
from catalog.reading import quote
from catalog.resources import Resource, is_said
from nodes import actions
from nodes.api.reaching import Unreachable
from nodes.conversation import AgentProblem
from nodes.logs import TAIL_LINES_LIMIT, NoLog, follow_log, read_log, visible
from nodes.models import Node, Orphan, Rank, Replica
from nodes.schema.replicas import describe_log, describe_replicas
from nodes.showing import of_model, replica_as_dict, replicas
from nodes.tasks import wake


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


# --- logs -----------------------------------------------------------------------------------------

FOLLOWERS_LIMIT = 32  # of one process: each holds a connection to its agent
COUNT_LIMIT = 2**31 - 1
_OF_LOG = {"Content-Type": "text/plain; charset=utf-8", "Cache-Control": "no-store"}


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
