"""Replicas, nodes and the reconciler in the admin: what runs where and why, and what happens next.

What is shown is what was observed, or what the next pass would do; nothing here is edited. The few things an
operator may do go through the verbs, after a confirmation.
"""

from nodes.admin.machines import NodeAdmin
from nodes.admin.reconciler import ClusterAdmin
from nodes.admin.replicas import OrphanAdmin, ReplicaAdmin
from nodes.admin.tokens import JoinTokenAdmin

__all__ = ["ClusterAdmin", "JoinTokenAdmin", "NodeAdmin", "OrphanAdmin", "ReplicaAdmin"]
