"""Replicas and nodes over REST: what was observed, where it differs from the catalog, and the few things that
an operator may do to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from django.core.exceptions import ValidationError
from django.db.models import Q
from rest_framework import exceptions, status
from rest_framework.request import Request
from rest_framework.response import Response

from catalog.hiding import SEE_ENV
from catalog.listing import Filter, Listing
from catalog.reading import quote
from catalog.resources import Addresses, Resource, body_of, settle
from nodes import actions
from nodes.models import Node, Rank, Replica
from nodes.schema import describe_cordon, describe_nodes, describe_replicas, describe_uncordon
from nodes.showing import node_as_dict, nodes, of_model, replica_as_dict, replicas
from nodes.tasks import wake


@describe_replicas
class ReplicaViewSet(Resource):
    """Replicas, oldest first."""

    queryset = replicas()
    lookup_value_regex = "[0-9a-fA-F-]{36}"
    needs: ClassVar[Mapping[str, str]] = {
        "list": "nodes.view_replica",
        "retrieve": "nodes.view_replica",
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
        replica, by = self.get_object(), request.user.get_username()
        if actions.stop_replica(replica, by=by, why=request.query_params.get("why", ""), door="api"):
            wake()
        return Response(self.shown(self.get_object()), status=status.HTTP_202_ACCEPTED)

    def shown(self, replica: Replica) -> dict[str, Any]:
        return replica_as_dict(replica, sees_env=self.request.user.has_perm(SEE_ENV))


@describe_nodes
class NodeViewSet(Resource):
    """Nodes by name."""

    queryset = nodes()
    lookup_field = "name"
    lookup_value_regex = "[^\\x00]+?"  # names may have slashes
    posted = ("cordon", "uncordon")
    needs: ClassVar[Mapping[str, str]] = {
        "list": "nodes.view_node",
        "retrieve": "nodes.view_node",
        "cordon": "nodes.change_node",
        "uncordon": "nodes.change_node",
    }
    listing = Listing(
        orders={"name": "name", "created": "created_at"},
        filters={
            "cordoned": Filter(
                "Whether nothing new is placed there.",
                lambda text: Q(is_cordoned=text == "true"),
                ("true", "false"),
            ),
        },
        search=lambda text: Q(name__icontains=text) | Q(address__icontains=text),
    )

    def get_object(self) -> Node:
        name = self.kwargs["name"]
        found: Node | None = self.get_queryset().filter(name=name).first()
        if found is None:
            raise exceptions.NotFound(f"there is no node {quote(name)}; GET /api/nodes lists them")
        return found

    @describe_cordon
    def cordon(self, request: Request) -> Response:
        return self._change(actions.cordon)

    @describe_uncordon
    def uncordon(self, request: Request) -> Response:
        return self._change(actions.uncordon)

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


router = Addresses()
router.register("replicas", ReplicaViewSet)
router.register("nodes", NodeViewSet)
