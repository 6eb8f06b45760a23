"""Weights in the nodes' stores over REST: listed, fetched and removed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from django.db.models import Q
from rest_framework import exceptions, status
from rest_framework.request import Request
from rest_framework.response import Response

from catalog.actions import find_model
from catalog.listing import Filter, Listing, refused
from catalog.reading import quote
from catalog.resources import Resource, body_of, settle
from nodes import stocking
from nodes.api.reaching import reached
from nodes.holdings import needing, weights, weights_as_dict
from nodes.models import Node, Weights
from nodes.schema.weights import describe_weights


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
        with reached():
            stocking.fetch(model, node, by=request.user.get_username(), why=why, door="api")
        return Response({"model": model.name, "node": node.name}, status=status.HTTP_202_ACCEPTED)

    def destroy(self, request: Request, pk: str) -> Response:
        why, by = request.query_params.get("why", ""), request.user.get_username()
        with reached():
            stocking.remove(self.get_object(), by=by, why=why, door="api")
        return Response(status=status.HTTP_204_NO_CONTENT)

    def paginate_queryset(self, queryset: Any) -> Any:
        page = super().paginate_queryset(queryset)
        self.needing = needing(page or ())
        return page

    def shown(self, row: Weights) -> dict[str, Any]:
        return weights_as_dict(row, self.needing.get(row.pk) or needing([row])[row.pk])
