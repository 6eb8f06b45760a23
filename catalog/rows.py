"""How a model that the law has passed is written into rows; `Model.as_dict` reads it back.

Rows that stay as they are are left untouched. Nobody writes with this but the verbs, in their transactions.
"""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet

from catalog.models import Fallback, Model, Name, Profile
from catalog.spec import ModelSpec, ProfileSpec


def whole_models() -> QuerySet[Model]:
    """Models with all that their spec is read from. Four queries."""
    return Model.objects.prefetch_related("names", "profiles", "fallbacks")


def columns(wanted: ModelSpec) -> dict[str, Any]:
    return {
        "name": wanted.name,
        "description": wanted.description,
        "source": wanted.source,
        "routing_profile": wanted.routing_profile,
        "scaling_min": wanted.scaling.min,
        "scaling_max": wanted.scaling.max,
        "idle_timeout_ns": wanted.scaling.idle_timeout,
        "ttft_p99_ns": wanted.slo.ttft_p99,
        "tpot_p99_ns": wanted.slo.tpot_p99,
        "context_length": wanted.context_length,
        "max_output": wanted.max_output,
        "can_tools": wanted.capabilities.tools,
        "can_vision": wanted.capabilities.vision,
        "can_embeddings": wanted.capabilities.embeddings,
    }


def write_names(row: Model, wanted: ModelSpec) -> None:
    names = [wanted.name, *wanted.aliases]
    held = {each.name: each for each in row.names.all()}
    row.names.exclude(name__in=names).delete()
    row.names.exclude(name=wanted.name).update(is_canonical=False)  # before another becomes canonical
    for position, name in enumerate(names):
        is_canonical = name == wanted.name
        if name not in held:
            Name.objects.create(name=name, model=row, is_canonical=is_canonical, position=position)
        elif (held[name].position, held[name].is_canonical) != (position, is_canonical):
            row.names.filter(name=name).update(position=position, is_canonical=is_canonical)


def write_fallbacks(row: Model, wanted: ModelSpec) -> None:
    Fallback.objects.bulk_create(
        Fallback(model=row, position=position, name_id=name) for position, name in enumerate(wanted.fallbacks)
    )


def write_profiles(row: Model, wanted: ModelSpec) -> None:
    held = {each.name: each for each in row.profiles.all()}
    row.profiles.exclude(name__in=[profile.name for profile in wanted.profiles]).delete()
    for position, profile in enumerate(wanted.profiles):
        kept = held.get(profile.name)
        if kept is None:
            Profile.objects.create(model=row, position=position, **_profile_columns(profile))
        elif kept.spec != profile:
            row.profiles.filter(pk=kept.pk).update(position=position, **_profile_columns(profile))
        elif kept.position != position:
            row.profiles.filter(pk=kept.pk).update(position=position)


def _profile_columns(profile: ProfileSpec) -> dict[str, Any]:
    return {
        "name": profile.name,
        "engine": profile.engine,
        "gpu_class": profile.gpu_class,
        "tp": profile.tp,
        "pp": profile.pp,
        "gpus_per_node": profile.gpus_per_node,
        "nodes": profile.nodes,
        "args": list(profile.args),
        "env": dict(profile.env),
        "min_memory_gb": profile.min_memory_gb,
        "min_disk_gb": profile.min_disk_gb,
        "node_selector": dict(profile.node_selector),
        "weight": profile.weight,
        "priority": profile.priority,
        "startup_timeout_ns": profile.startup_timeout,
        "fingerprint": profile.fingerprint(),
    }
