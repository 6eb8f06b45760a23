"""Nodes over REST, and the join tokens by which new ones come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

from django.db.models import Q, QuerySet
from rest_framework import exceptions, status
from rest_framework.request import Request
from rest_framework.response import Response

from catalog.listing import Filter, Listing, check_parameters
from catalog.models import Key, database_now
from catalog.reading import quote
from catalog.resources import Resource, body_of, settle
from nodes import actions, joining
from nodes.bundle import join_line
from nodes.models import JoinToken, Node
from nodes.plots import asked_span, describe_node_series
from nodes.schema.machines import (
    describe_cordon,
    describe_drain,
    describe_join_tokens,
    describe_nodes,
    describe_uncordon,
)
from nodes.series import series_of_node
from nodes.showing import node_as_dict, nodes
from nodes.tasks import wake
from nodes.tokens import TOKEN_STATES, join_tokens, token_as_dict


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
