"""What machines themselves ask of the control plane: the agent's code, to be a node, and to be looked at.

They prove themselves with a join token or with a node's own, and with nothing else: no API key or session
opens these addresses, and these tokens open no other.
"""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse
from django.urls import re_path
from drf_spectacular.utils import extend_schema
from rest_framework import exceptions
from rest_framework.authentication import BaseAuthentication
from rest_framework.permissions import BasePermission
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.viewsets import ViewSet

from catalog.listing import check_parameters
from catalog.resources import body_of, settle
from catalog.rest import bearer_of
from nodes.actions import NodeRefused
from nodes.bundle import bundle
from nodes.conversation import is_token_of
from nodes.joining import Machine, find_join_token, join, judge_join_token
from nodes.models import JoinToken, Node
from nodes.tasks import hint, wake

SAYS = ("name", "host", "address", "certificate", "claim", "cluster", "node", "token")


class _Machines(BaseAuthentication):
    """There is no user behind it: what it is comes as `request.auth`."""

    def authenticate_header(self, request: Request) -> str:
        return 'Bearer realm="llmgw nodes"'


class ByJoinToken(_Machines):
    def authenticate(self, request: Request) -> tuple[None, JoinToken] | None:
        text = bearer_of(request)
        if text is None:
            return None
        token = find_join_token(text)
        if token is None:
            raise exceptions.AuthenticationFailed(
                "This is no join token; give the one that was printed with the line, or make a new one."
            )
        try:
            judge_join_token(token)
        except NodeRefused as no:
            raise exceptions.AuthenticationFailed(str(no)) from None
        return None, token


class ByNodeToken(_Machines):
    def authenticate(self, request: Request) -> tuple[None, Node] | None:
        text = bearer_of(request)
        if text is None:
            return None
        node = Node.objects.filter(uuid=request.parser_context["kwargs"]["uuid"]).first()
        if node is None or not is_token_of(node, text):
            raise exceptions.AuthenticationFailed(
                "This is not the token of that node; have the machine join again."
            )
        return None, node


class ProvesItself(BasePermission):
    def has_permission(self, request: Request, view: Any) -> bool:
        return request.auth is not None


@extend_schema(exclude=True)
class JoinViewSet(ViewSet):
    authentication_classes = (ByJoinToken,)
    permission_classes = (ProvesItself,)

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super().initial(request, *args, **kwargs)
        check_parameters(request, ())

    def code(self, request: Request) -> HttpResponse:
        """What the machine runs to join."""
        answer = HttpResponse(bundle().content, content_type="application/zip")
        answer["Cache-Control"] = "no-store"
        return answer

    def join(self, request: Request) -> Response:
        body = body_of(request, *SAYS)
        said = {name: body.text(name) for name in SAYS}
        settle(body)
        token: Any = request.auth
        told = join(token, Machine(**said))
        wake()
        return Response(told, headers={"Cache-Control": "no-store"})


@extend_schema(exclude=True)
class HintViewSet(ViewSet):
    authentication_classes = (ByNodeToken,)
    permission_classes = (ProvesItself,)

    def hint(self, request: Request, uuid: str) -> Response:
        """Something has changed there. What it is, the node's next report tells."""
        hint()
        return Response(status=204)


urls = [
    re_path(r"^nodes/join/?\Z", JoinViewSet.as_view({"get": "code", "post": "join"}), name="join"),
    re_path(r"^nodes/(?P<uuid>[0-9a-f-]{36})/hint/?\Z", HintViewSet.as_view({"post": "hint"}), name="hint"),
]
