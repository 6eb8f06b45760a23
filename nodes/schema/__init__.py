"""What /api/ answers with of actual state, as OpenAPI tells it: a module for each of `nodes/api/`. See
`catalog/schema/`, whose models are told of with what stands here."""

from nodes.schema.jobs import describe_bench, describe_engine_check
from nodes.schema.reconciler import describe_why

__all__ = ["describe_bench", "describe_engine_check", "describe_why"]
