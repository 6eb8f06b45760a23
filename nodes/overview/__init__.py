"""How the cluster is, at a glance: what needs a person, and nodes, GPUs, models, replicas and requests in
numbers. One value for the admin's first page, `manage.py status` and REST, which tell it in the same words.

The same queries whatever there is, but for four more where something may be stale. Of thousands of rows, what
is alike is counted by the database, and what a node reported is read again only when it differs.
"""

from nodes.overview.reading import look
from nodes.overview.value import Overview
from nodes.overview.words import Fact, Part, facts_of, overview_as_dict

__all__ = ["Fact", "Overview", "Part", "facts_of", "look", "overview_as_dict"]
