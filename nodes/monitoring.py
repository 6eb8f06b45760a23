"""What Prometheus asks of the control plane: its own numbers, each node's, where all of them are to be had,
and the dashboard and alerts that are made of them.

An API key whose scope is metrics opens these addresses, and neither a session nor any other key does; it
opens nothing else but /metrics of gateways. A node's agent is asked with the node's own token, which stays
here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from django.conf import settings
from django.http import HttpResponse
from django.urls import re_path
from drf_spectacular.utils import extend_schema
from rest_framework import exceptions
from rest_framework.permissions import BasePermission
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.viewsets import ViewSet

from catalog.listing import check_parameters
from catalog.models import Key
from catalog.reading import quote as quoted
from catalog.rest import KeyAuthentication
from nodes.agents import read_metrics
from nodes.api.reaching import Unreachable
from nodes.conversation import AgentProblem
from nodes.exposition import CONTENT_TYPE, written
from nodes.gauges import families
from nodes.models import Node

FILES = Path(settings.BASE_DIR, "templates", "monitoring")
_OF_FILES = {".json": "application/json", ".yml": "application/yaml; charset=utf-8"}
_NAMES = {each.name: each for each in sorted(FILES.iterdir())}


class MetricsKey(KeyAuthentication):
    scope = Key.Scope.METRICS


class HasKey(BasePermission):
    """The key's scope says it all: whoever made it could see what it shows."""

    def has_permission(self, request: Request, view: Any) -> bool:
        return request.auth is not None


@extend_schema(exclude=True)
class MonitoringViewSet(ViewSet):
    authentication_classes = (MetricsKey,)
    permission_classes = (HasKey,)

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super().initial(request, *args, **kwargs)
        check_parameters(request, ())

    def perform_content_negotiation(self, request: Request, force: bool = False) -> Any:
        return super().perform_content_negotiation(request, force=True)  # whoever scrapes asks for a text

    def metrics(self, request: Request) -> HttpResponse:
        return _text(written(families()))

    def of_node(self, request: Request, name: str) -> HttpResponse:
        node = Node.objects.filter(name=name).first()
        if node is None:
            raise exceptions.NotFound(f"there is no node {quoted(name)}; GET /api/sd lists them")
        try:
            return _text(read_metrics(node))
        except AgentProblem as problem:
            raise Unreachable(str(problem)) from None

    def targets(self, request: Request) -> Response:
        """As Prometheus's HTTP service discovery reads it: all are reached through this address."""
        own, scheme = request.get_host(), str(request.scheme)
        found = [_target(own, scheme, "/api/metrics", job="llmgw", instance=own)]
        for url in settings.LLMGW_GATEWAYS or [f"{scheme}://{own}"]:
            parts = urlsplit(url)
            found.append(
                _target(parts.netloc, parts.scheme, "/metrics", job="llmgw-gateway", instance=parts.netloc)
            )
        for name in Node.objects.values_list("name", flat=True):
            path = f"/api/nodes/{quote(name, safe='')}/metrics"
            found.append(_target(own, scheme, path, job="llmgw-node", instance=name, node=name))
        return Response(found)

    def file(self, request: Request, name: str) -> HttpResponse:
        """One that a Grafana or a Prometheus is set up with."""
        path = _NAMES.get(name)
        if path is None:
            raise exceptions.NotFound(f"there is no file {quoted(name)}; there are {', '.join(_NAMES)}")
        return HttpResponse(path.read_bytes(), content_type=_OF_FILES[path.suffix])


def _text(told: str) -> HttpResponse:
    return HttpResponse(told, headers={"Content-Type": CONTENT_TYPE, "Cache-Control": "no-store"})


def _target(host: str, scheme: str, path: str, **labels: str) -> dict[str, Any]:
    return {"targets": [host], "labels": {"__scheme__": scheme, "__metrics_path__": path, **labels}}


urls = [
    re_path(r"^metrics/?\Z", MonitoringViewSet.as_view({"get": "metrics"}), name="metrics"),
    re_path(r"^sd/?\Z", MonitoringViewSet.as_view({"get": "targets"}), name="sd"),
    re_path(
        r"^monitoring/(?P<name>[^/\x00]{1,100})\Z",
        MonitoringViewSet.as_view({"get": "file"}),
        name="monitoring-file",
    ),
    re_path(
        r"^nodes/(?P<name>[^\x00]+)/metrics\Z",
        MonitoringViewSet.as_view({"get": "of_node"}),
        name="node-metrics",
    ),
]
