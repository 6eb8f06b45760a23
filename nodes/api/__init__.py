"""Actual state over REST: replicas, nodes and the reconciler, what was observed, and the few things that an
operator may do about it."""

from __future__ import annotations

from django.urls import re_path

from catalog.resources import Addresses
from nodes.api.figures import OverviewViewSet, SeriesViewSet, UsageViewSet
from nodes.api.jobs import JobViewSet
from nodes.api.machines import JoinTokenViewSet, NodeViewSet
from nodes.api.reconciler import ReconcilerViewSet
from nodes.api.replicas import ReplicaViewSet
from nodes.api.webhooks import WebhookViewSet
from nodes.api.weights import WeightsViewSet

__all__ = ["router", "urls"]

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
