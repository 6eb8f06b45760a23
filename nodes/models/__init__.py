"""What there is, as the database keeps it: nodes, replicas and their ranks, claims, demand, the pass's lease.

Every column has one writer, named in its model: operators (through verbs), the reconciler's assignments, what
agents report, or a gateway. See `nodes/plan.py` for what follows from it.
"""

from nodes.models.checks import EngineCheck
from nodes.models.cluster import Cluster, Lease
from nodes.models.gateways import Demand, Gateway, Usage
from nodes.models.jobs import Job
from nodes.models.machines import JoinToken, Node, Weights
from nodes.models.notices import Delivery, Trouble, Webhook
from nodes.models.replicas import Claim, Held, Orphan, Rank, Replica
from nodes.models.samples import Sample, Traffic
from nodes.models.wants import Load, Roll, Unplaced

__all__ = [
    "Claim",
    "Cluster",
    "Delivery",
    "Demand",
    "EngineCheck",
    "Gateway",
    "Held",
    "Job",
    "JoinToken",
    "Lease",
    "Load",
    "Node",
    "Orphan",
    "Rank",
    "Replica",
    "Roll",
    "Sample",
    "Traffic",
    "Trouble",
    "Unplaced",
    "Usage",
    "Webhook",
    "Weights",
]
