"""The reconciler over REST: what it will do, and whether it may."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.viewsets import ViewSet

from catalog.listing import check_parameters
from catalog.resources import body_of, settle
from catalog.rest import MayDo
from nodes import actions
from nodes.outlook import preview_plan
from nodes.schema.reconciler import (
    describe_allow,
    describe_outrank,
    describe_pause,
    describe_plan,
    describe_resume,
    describe_state,
)
from nodes.showing import acting
from nodes.tasks import wake
from nodes.telling import outlook_as_dict


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
