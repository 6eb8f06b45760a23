"""How models that the law has passed are written into rows; `Model.spec` reads them back.

Rows that stay as they are are left untouched. Nobody writes with this but the verbs, in their transactions.
One model is written field by field; many are written table by table, in as many queries for a thousand of
them as one statement's length makes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from django.db.models import QuerySet
from django.db.models.functions import Now

from catalog.models import Fallback, Key, Model, Name, Profile, Tombstone
from catalog.spec import ModelSpec, ProfileSpec

_BATCH = 500  # keys in one IN (...)


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
        "requests_per_minute": wanted.limits.requests_per_minute,
        "tokens_per_minute": wanted.limits.tokens_per_minute,
        "concurrency": wanted.limits.concurrency,
        "over_max_output": wanted.over_max_output,
        "timeout_hold_ns": wanted.timeouts.hold,
        "timeout_connect_ns": wanted.timeouts.connect,
        "timeout_first_byte_ns": wanted.timeouts.first_byte,
        "timeout_idle_ns": wanted.timeouts.idle,
    }


def write_names(row: Model, wanted: ModelSpec) -> None:
    names = [wanted.name, *wanted.aliases]
    held = {each.name: each for each in row.names.all()}
    row.names.exclude(name__in=names).delete()
    row.names.exclude(name=wanted.name).update(is_canonical=False)  # before another becomes canonical
    new, moved = [], []
    for position, name in enumerate(names):
        told = Name(name=name, model=row, is_canonical=name == wanted.name, position=position)
        if name not in held:
            new.append(told)
        elif (held[name].position, held[name].is_canonical) != (position, told.is_canonical):
            moved.append(told)
    row.names.bulk_update(moved, ["position", "is_canonical"])
    Name.objects.bulk_create(new)


def write_fallbacks(row: Model, wanted: ModelSpec) -> None:
    Fallback.objects.bulk_create(
        Fallback(model=row, position=position, name_id=name) for position, name in enumerate(wanted.fallbacks)
    )


def leave_keys(gone: Sequence[int], revision: int) -> None:
    """Keys that open a model by name change with it when it goes, for whoever asks what is newer. One that
    opened nothing else opens nothing then."""
    for start in range(0, len(gone), _BATCH):
        Key.objects.filter(opened__in=gone[start : start + _BATCH]).update(revision=revision)


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


# --- many models at once --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Writing:
    """A model to be written: over its row of `whole_models()`, which says `was`, or as a new row. `checks`
    are the columns of a source check that was made for it."""

    wanted: ModelSpec
    row: Model | None = None
    was: ModelSpec | None = None
    checks: Mapping[str, Any] = field(default_factory=dict, hash=False)


def write_models(writings: Sequence[Writing], removed: Sequence[Model], revision: int) -> list[Model]:
    """The rows as written, in the order given.

    A name may move from one model to another, and fallbacks point to names: so old fallbacks go first, names
    move before models go, and new fallbacks come last.
    """
    diverted = [each for each in writings if each.was is None or each.was.fallbacks != each.wanted.fallbacks]
    _delete(Fallback, "model", [each.row.pk for each in diverted if each.row] + [row.pk for row in removed])
    rows = _write_model_rows(writings, revision)
    pk_of = {row.name: row.pk for row in rows}
    _write_names(writings, pk_of)
    leave_keys([row.pk for row in removed], revision)
    _delete(Model, "pk", [row.pk for row in removed])
    _write_profiles(writings, pk_of)
    Fallback.objects.bulk_create(
        Fallback(model_id=pk_of[each.wanted.name], position=position, name_id=name)
        for each in diverted
        for position, name in enumerate(each.wanted.fallbacks)
    )
    _delete(Tombstone, "name", [each.wanted.name for each in writings if not each.row])
    Tombstone.objects.bulk_create(Tombstone(name=row.name, revision=revision) for row in removed)
    return rows


def _delete(table: type[Any], column: str, keys: Sequence[Any]) -> None:
    for start in range(0, len(keys), _BATCH):
        table.objects.filter(**{f"{column}__in": keys[start : start + _BATCH]}).delete()


def _write_model_rows(writings: Sequence[Writing], revision: int) -> list[Model]:
    rows: list[Model] = []
    new: list[Model] = []
    by_columns: dict[tuple[str, ...], list[Model]] = {}  # without a check, what is known of a source stays
    for each in writings:
        told = {**columns(each.wanted), **each.checks, "revision": revision, "changed_at": Now()}
        row = Model(pk=each.row.pk if each.row else None, **told)
        rows.append(row)
        (by_columns.setdefault(tuple(told), []) if each.row else new).append(row)
    Model.objects.bulk_create(new)
    for names, changed in by_columns.items():
        _overwrite(Model, changed, "id", names)
    return rows


def _write_names(writings: Sequence[Writing], pk_of: Mapping[str, int]) -> None:
    there = {name for each in writings for name in (each.wanted.name, *each.wanted.aliases)}
    changed: list[Name] = []
    lost: list[str] = []
    for each in writings:
        held = {row.name: row.position for row in each.row.names.all()} if each.row else {}
        for position, name in enumerate((each.wanted.name, *each.wanted.aliases)):
            if held.get(name) != position:
                pk = pk_of[each.wanted.name]
                changed.append(Name(name=name, model_id=pk, is_canonical=position == 0, position=position))
        lost += [name for name in held if name not in there]
    _overwrite(Name, changed, "name", ["model", "is_canonical", "position"])
    _delete(Name, "pk", lost)


def _write_profiles(writings: Sequence[Writing], pk_of: Mapping[str, int]) -> None:
    new: list[Profile] = []
    changed: list[Profile] = []
    lost: list[int] = []
    for each in writings:
        held = {row.name: row for row in each.row.profiles.all()} if each.row else {}
        for position, profile in enumerate(each.wanted.profiles):
            kept = held.pop(profile.name, None)
            told = {"model_id": pk_of[each.wanted.name], "position": position, **_profile_columns(profile)}
            if kept is None:
                new.append(Profile(**told))
            elif kept.position != position or kept.spec != profile:
                changed.append(Profile(pk=kept.pk, **told))
        lost += [row.pk for row in held.values()]
    _delete(Profile, "pk", lost)
    _overwrite(Profile, changed, "id", ["position", *_profile_columns(ProfileSpec(""))])
    Profile.objects.bulk_create(new)


def _overwrite(table: type[Any], rows: Sequence[Any], key: str, told: Sequence[str]) -> None:
    """Rows that are there, or not yet, with these columns as they are told."""
    table.objects.bulk_create(rows, update_conflicts=True, unique_fields=[key], update_fields=told)
