"""Models and their replicas, counted. Replicas that are alike are counted by the database; of what is as the
catalog has it, which is most, no launch is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from django.db.models import Count

from catalog.models import Model, Profile
from nodes.attention import StaleModel, failed_lately
from nodes.models import Replica, Unplaced
from nodes.overview.value import Models, Replicas, Want
from nodes.showing import spec_of
from nodes.stale import Staleness, is_as_the_catalog, judge, launch_from


@dataclass(frozen=True, slots=True)
class Counted:
    models: Models = field(default_factory=Models)
    replicas: Replicas = field(default_factory=Replicas)
    stale: tuple[StaleModel, ...] = ()
    unplaced: tuple[Want, ...] = ()


@dataclass(slots=True)
class _Alike:
    """Replicas of one model that were started from the same record, and stand and are wanted the same."""

    model: int | None
    state: str
    wanted: str
    fingerprint: str
    launch: Mapping[str, Any]
    count: int


def count_models() -> Counted:
    rows = Replica.objects.exclude(state__in=Replica.OVER).order_by()
    columns = ("model_id", "state", "wanted", "fingerprint", "launch")
    alike = [_Alike(*row) for row in rows.values_list(*columns).annotate(count=Count("pk"))]
    short = {want.model_id: want for want in Unplaced.objects.select_related("model").order_by("since")}
    failed = set(failed_lately().values_list("model_id", flat=True))
    models = Model.objects.values("pk", "name", "scaling_min", "scaling_max", *_OF_LAUNCH)
    known = {row["pk"]: row for row in models}
    stale, mild = _differing(alike, known)
    return Counted(
        models=Models(
            **Counter(_state(row, alike_of, short, failed) for row, alike_of in _by_model(known, alike))
        ),
        replicas=_replicas(alike, sum(stale.values()), mild),
        stale=tuple(StaleModel(pk, row["name"], stale[pk]) for pk, row in known.items() if stale[pk]),
        unplaced=tuple(
            Want(each.model_id, each.model.name, each.missing, each.why, each.since)
            for each in short.values()
        ),
    )


_OF_LAUNCH = ("source", "context_length", "source_revision", "can_tools", "can_vision", "can_embeddings")


def _by_model(
    known: Mapping[int, Mapping[str, Any]], alike: list[_Alike]
) -> Iterator[tuple[Mapping[str, Any], list[_Alike]]]:
    found: dict[int | None, list[_Alike]] = {}
    for each in alike:
        found.setdefault(each.model, []).append(each)
    for pk, row in known.items():
        yield row, found.get(pk, [])


def _state(
    model: Mapping[str, Any], alike: list[_Alike], short: Mapping[int, Unplaced], failed: set[int]
) -> str:
    """In a word of `Models`."""
    running = [each for each in alike if each.wanted == Replica.Wanted.RUN]
    ready = sum(each.count for each in running if each.state == Replica.State.READY)
    missing = short[model["pk"]].missing if model["pk"] in short else 0
    wanted = max(model["scaling_min"], sum(each.count for each in running) + missing)
    if model["scaling_max"] == 0:
        return "off"
    if ready < wanted or model["pk"] in short:
        lost = any(each.state == Replica.State.LOST for each in running)
        return "failing" if lost or model["pk"] in short or model["pk"] in failed else "loading"
    return "ready" if wanted else "asleep"


def _replicas(alike: list[_Alike], stale: int, mild: int) -> Replicas:
    count: Counter[str] = Counter()
    for each in alike:
        if each.state == Replica.State.LOST:
            count["lost"] += each.count
        elif each.wanted != Replica.Wanted.RUN or each.state == Replica.State.DRAINING:
            count["draining"] += each.count
        else:
            count["ready" if each.state == Replica.State.READY else "starting"] += each.count
    return Replicas(**count, stale=stale, mild=mild)


# --- what differs from the catalog


_Now = tuple[str, Mapping[str, Any], str]
"""Of a model: the fingerprint that the profile has now, what else shapes a launch, and the commit it pins."""
_Key = tuple[int, str, str]
"""Of replicas that are alike: model, fingerprint and launch."""

_judged: dict[_Key, tuple[_Now, Staleness]] = {}
"""What was last compared with what, and found. It takes a hundred times longer to find than to see that both
are as they were."""


def _differing(alike: list[_Alike], known: Mapping[int, Mapping[str, Any]]) -> tuple[Counter[int], int]:
    """How many replicas are stale, by model, and how many mildly so. Most are neither, which is soon seen."""
    profiles = {
        (model, name): fingerprint
        for model, name, fingerprint in Profile.objects.values_list("model_id", "name", "fingerprint")
    }
    doubtful: dict[_Key, tuple[_Now, list[_Alike]]] = {}
    for each in alike:
        if each.model is None or each.model not in known:
            continue
        now = _now(known[each.model], profiles.get((each.model, _profile_name(each)), ""))
        if not is_as_the_catalog(each.fingerprint, each.launch, *now):
            key = (each.model, each.fingerprint, str(each.launch))
            doubtful.setdefault(key, (now, []))[1].append(each)
    found = _judge({key: (now, group[0]) for key, (now, group) in doubtful.items()})
    stale: Counter[int] = Counter()
    mild = 0
    for key, (_, group) in doubtful.items():
        count = sum(each.count for each in group)
        stale[key[0]] += count if found[key].restart_needed else 0
        mild += count if found[key].stale_profile is True and not found[key].restart_needed else 0
    return stale, mild


def _judge(doubtful: Mapping[_Key, tuple[_Now, _Alike]]) -> Mapping[_Key, Staleness]:
    """What is as it was when it was last judged is not judged again; what is not asked for is forgotten."""
    global _judged
    before = _judged
    judged = {
        key: before[key] for key, (now, _) in doubtful.items() if key in before and before[key][0] == now
    }
    new = {key: each for key, each in doubtful.items() if key not in judged}
    whole = Model.objects.prefetch_related("names", "profiles", "fallbacks")
    models = {row.pk: row for row in whole.filter(pk__in={pk for pk, *_ in new})}
    for key, (now, each) in new.items():
        spec = spec_of(models[key[0]]) if key[0] in models else None  # removed a moment ago
        profile = spec.profile(_profile_name(each)) if spec else None
        launch = launch_from(each.launch)
        judged[key] = now, judge(each.fingerprint, launch, profile, spec, source_revision=now[2])
    _judged = judged
    return {key: staleness for key, (_, staleness) in judged.items()}


def _profile_name(each: _Alike) -> str:
    return str(each.launch.get("profile", {}).get("name", ""))


def _now(model: Mapping[str, Any], profile: str) -> _Now:
    told = {
        "name": model["name"],
        "source": model["source"],
        "context_length": model["context_length"],
        "capabilities": {name for name in ("tools", "vision", "embeddings") if model[f"can_{name}"]},
    }
    return profile, told, model["source_revision"]
