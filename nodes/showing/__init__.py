"""What every door shows of replicas and nodes: state, age and staleness, read in a fixed number of queries.

Reads and judges, and changes nothing. Ages are subtracted by the database, so that no other clock is asked.
"""

from nodes.showing.ages import seconds, with_age
from nodes.showing.checks import Checked, check_of_replica, checked_words, findings_from, verdict_rows
from nodes.showing.counting import (
    Tally,
    check_of_model,
    model_as_dict,
    models_with_replicas,
    replicas_to_show,
    tally,
)
from nodes.showing.machines import (
    GpuUse,
    ShownGpu,
    freshness_of,
    gpus_of,
    kept_free_words,
    node_as_dict,
    nodes,
    running_on,
    use_of,
)
from nodes.showing.reconciler import Acting, acting
from nodes.showing.running import (
    attempt_as_dict,
    becoming_stale,
    deadline_of,
    differences_as_dicts,
    end_words,
    launch_as_dict,
    of_model,
    progress_of,
    replica_as_dict,
    replicas,
    spec_of,
    staleness_of,
)

__all__ = [
    "Acting",
    "Checked",
    "GpuUse",
    "ShownGpu",
    "Tally",
    "acting",
    "attempt_as_dict",
    "becoming_stale",
    "check_of_model",
    "check_of_replica",
    "checked_words",
    "deadline_of",
    "differences_as_dicts",
    "end_words",
    "findings_from",
    "freshness_of",
    "gpus_of",
    "kept_free_words",
    "launch_as_dict",
    "model_as_dict",
    "models_with_replicas",
    "node_as_dict",
    "nodes",
    "of_model",
    "progress_of",
    "replica_as_dict",
    "replicas",
    "replicas_to_show",
    "running_on",
    "seconds",
    "spec_of",
    "staleness_of",
    "tally",
    "use_of",
    "verdict_rows",
    "with_age",
]
