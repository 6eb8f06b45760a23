"""Replicas and nodes over REST: what was observed, and where it differs from the catalog. Read-only here."""

from __future__ import annotations

from typing import Any

from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.routers import SimpleRouter
from rest_framework.viewsets import GenericViewSet

from catalog.hiding import SEE_ENV
from catalog.rest import MayDo, Pages, asked
from nodes.models import Node, Replica
from nodes.showing import node_as_dict, nodes, of_model, replica_as_dict, replicas


class ReplicaViewSet(GenericViewSet[Replica]):
    """Replicas, oldest first. `?model=` and `?state=` narrow the list."""

    queryset = replicas()
    permission_classes = (MayDo,)
    pagination_class = Pages
    ordering = ("created_at", "id")
    lookup_value_regex = "[0-9a-fA-F-]{36}"

    def list(self, request: Request) -> Response:
        found = self.get_queryset()
        if model := asked(request, "model"):
            found = found.filter(of_model(model))
        if state := asked(request, "state"):
            found = found.filter(state=state)
        page = self.paginate_queryset(found)
        return self.get_paginated_response([self._shown(replica) for replica in page or ()])

    def retrieve(self, request: Request, pk: str) -> Response:
        return Response(self._shown(self.get_object()))

    def _shown(self, replica: Replica) -> dict[str, Any]:
        return replica_as_dict(replica, sees_env=self.request.user.has_perm(SEE_ENV))


class NodeViewSet(GenericViewSet[Node]):
    queryset = nodes()
    permission_classes = (MayDo,)
    pagination_class = Pages
    ordering = ("name",)

    def list(self, request: Request) -> Response:
        page = self.paginate_queryset(self.get_queryset())
        return self.get_paginated_response([node_as_dict(node) for node in page or ()])


router = SimpleRouter()
router.trailing_slash = "/?"  # with or without
router.register("replicas", ReplicaViewSet)
router.register("nodes", NodeViewSet)
