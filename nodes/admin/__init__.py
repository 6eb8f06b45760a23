"""Replicas, nodes, weights, jobs, the reconciler and usage in the admin: what runs where and why, what
happens next, and who used what.

What is shown is what was observed, or what the next pass would do; nothing here is edited. The few things an
operator may do go through the verbs, after a confirmation.
"""

from nodes.admin.jobs import JobAdmin
from nodes.admin.machines import NodeAdmin
from nodes.admin.reconciler import ClusterAdmin
from nodes.admin.replicas import OrphanAdmin, ReplicaAdmin
from nodes.admin.tokens import JoinTokenAdmin
from nodes.admin.usage import UsageAdmin
from nodes.admin.webhooks import WebhookAdmin
from nodes.admin.weights import WeightsAdmin

__all__ = [
    "ClusterAdmin",
    "JobAdmin",
    "JoinTokenAdmin",
    "NodeAdmin",
    "OrphanAdmin",
    "ReplicaAdmin",
    "UsageAdmin",
    "WebhookAdmin",
    "WeightsAdmin",
]
