"""The cluster in numbers over REST: how it is, how it did, and what requests used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.viewsets import ViewSet

from catalog.listing import check_parameters
from catalog.models import database_now
from catalog.rest import MayDo
from nodes.overview import look, overview_as_dict
from nodes.plots import asked_span, describe_cluster_series
from nodes.reckoning import answer, ask
from nodes.schema.usage import describe_usage
from nodes.series import series_of_cluster
from nodes.shapes import describe_overview


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
