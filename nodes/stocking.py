"""What operators may do about weights: have a node fetch them ahead of time, and give back what nobody uses.
Agents do it, and are told at once; what has come of it is observed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from django.db.models import Q

from catalog.actions import record
from catalog.models import Model, database_now
from catalog.reading import quote
from catalog.spec import ModelSpec, ProfileSpec
from nodes import snapshot as values
from nodes.actions import NodeRefused
from nodes.agents import last_report
from nodes.conversation import AgentProblem, clean
from nodes.models import Cluster, Node, Weights
from nodes.picture import known_of_source
from nodes.placement import by_preference
from nodes.protocol import WeightsOrder
from nodes.sharing import hub_source, key_of, needed_sources
from nodes.stores import Declined, order_weights, peers_for, remove_weights

UNREACHABLE = "agent_unreachable"


def fetch(model: Model, node: Node, *, by: str, why: str, door: str) -> None:
    """Have the node fetch what the model's replicas there would read; it is on its way when this returns.
    Raises NodeRefused."""
    spec = model.spec
    profile = _profile_for(spec, node)
    row = _as_value(model, spec)
    launch = values.launch_of(row, profile)
    key = key_of(launch)
    there = Weights.objects.filter(~Q(node=node), ~Q(state=Weights.State.PARTIAL), key=key)
    holders = [
        (each.node, each.state == Weights.State.FETCHING)
        for each in there.select_related("node").order_by("state")
    ]
    models = [_as_value(each, each.spec) for each in Model.objects.prefetch_related("names", "profiles")]
    order = WeightsOrder(
        cluster=str(Cluster.this().uuid),
        launch=launch,
        peers=peers_for(node, launch, holders, now=database_now()),
        needed=needed_sources(models),
    )
    with _refusals():
        order_weights(node, order)
    detail = {"model": model.name, "source": spec.source, "revision": launch.revision}
    record("fetch weights", "node", node.name, subject_key=node.pk, by=by, door=door, why=why, detail=detail)


def remove(weights: Weights, *, by: str, why: str, door: str) -> None:
    """Have the node give back their room; whoever needs them fetches them again. Raises NodeRefused."""
    node = weights.node
    with _refusals():
        remove_weights(node, weights.key, cluster=str(Cluster.this().uuid))
    Weights.objects.filter(pk=weights.pk).delete()
    detail = {"repo": weights.repo, "revision": weights.revision, "size_bytes": weights.size_bytes}
    record("remove weights", "node", node.name, subject_key=node.pk, by=by, door=door, why=why, detail=detail)


@contextmanager
def _refusals() -> Iterator[None]:
    """An agent's no, or that it cannot be asked."""
    try:
        yield
    except AgentProblem as problem:
        code = "conflict" if isinstance(problem, Declined) else UNREACHABLE
        raise NodeRefused(clean(str(problem)), code=code) from None


def _profile_for(spec: ModelSpec, node: Node) -> ProfileSpec:
    if hub_source(spec.source) is None:
        raise NodeRefused(
            f"Model {quote(spec.name)} is read from a path on the nodes ({spec.source}); put its weights "
            f"there by hand.",
            field="model",
        )
    report = last_report(node)
    engines = {engine.name for engine in report.engines} if report else set()
    for profile in by_preference(spec.profiles):
        if profile.engine != "sim" and profile.engine in engines:
            return profile
    told = ", ".join(sorted({profile.engine for profile in spec.profiles}))
    raise NodeRefused(
        f"No profile of model {quote(spec.name)} ({told}) has an engine on {node.name} that reads weights; "
        f"choose a node that has one, as manage.py nodes tells.",
        field="node",
    )


def _as_value(model: Model, spec: ModelSpec) -> values.Model:
    facts = known_of_source(model.source_facts)
    return values.Model(model.pk, spec, source_revision=model.source_revision, **facts)
