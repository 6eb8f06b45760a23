"""Replicas as every door shows them: state, age, deadline, and where they differ from the catalog."""

from __future__ import annotations

from collections.abc import Mapping
from signal import Signals
from typing import Any

from django.db.models import Prefetch, Q, QuerySet

from catalog.differences import Difference
from catalog.durations import format_duration
from catalog.hiding import hide_all
from catalog.models import Model
from catalog.spec import DEFAULT_STARTUP_TIMEOUT, ModelSpec
from nodes.models import Node, Replica
from nodes.orders import deadline_s
from nodes.progress import Progress, fetch_progress, left_s, wait_progress
from nodes.showing.ages import seconds, with_age
from nodes.showing.checks import check_of_replica, engine_checks
from nodes.stale import AS_IT_IS, Staleness, is_as_the_catalog, judge, launch_from


def replicas() -> QuerySet[Replica]:
    """All replicas, with whatever a door shows of them. Nine queries, however many there are."""
    return with_age(Replica.objects.all(), "state_since").prefetch_related(
        "model__names",
        "model__profiles",
        "model__fallbacks",
        Prefetch("model__engine_checks", engine_checks()),
        Prefetch("ranks__node", with_age(Node.objects.all(), "seen_at")),
        "ranks__claims",
    )


def of_model(name: str) -> Q:
    """The replicas of a model that is called so, or was when they were started: it may be gone by now."""
    return Q(model__name=name) | Q(launch__model=name)


def staleness_of(replica: Replica) -> Staleness:
    """Judged once for all that one page tells of the row."""
    if "shown_staleness" not in replica.__dict__:
        spec = spec_of(replica.model) if replica.model else None
        replica.__dict__["shown_staleness"] = _staleness(replica, spec)
    found: Staleness = replica.__dict__["shown_staleness"]
    return found


def becoming_stale(model: Model, wanted: ModelSpec) -> int:
    """How many replicas of a row of `models_with_replicas()` would need a restart, and need none now, if the
    model were as it is wanted."""
    alive: list[Replica] = model.alive  # type: ignore[attr-defined]  # prefetched
    return sum(
        _staleness(replica, wanted).restart_needed and not staleness_of(replica).restart_needed
        for replica in alive
    )


def _staleness(replica: Replica, spec: ModelSpec | None) -> Staleness:
    """By name: a profile that was removed and is back is the profile that the replica was started from."""
    model = replica.model
    if model and spec:  # as most are
        fingerprints, others = _shaping(model, spec)
        profile = fingerprints.get(replica.profile_name, "")
        if is_as_the_catalog(replica.fingerprint, replica.launch, profile, others, model.source_revision):
            return AS_IT_IS
    return judge(
        replica.fingerprint,
        launch_from(replica.launch),
        spec.profile(replica.profile_name) if spec else None,
        spec,
        source_revision=model.source_revision if model else "",
    )


def _shaping(model: Model, spec: ModelSpec) -> tuple[Mapping[str, str], Mapping[str, Any]]:
    """What of the spec shapes a launch, told once for all replicas that share the row: the fingerprint of
    each profile, and the rest."""
    known = model.__dict__.setdefault("shown_shaping", {})
    if id(spec) not in known:
        others = {
            "name": spec.name,
            "source": spec.source,
            "context_length": spec.context_length,
            "capabilities": set(spec.capabilities.written()),
        }
        fingerprints = {each.name: each.fingerprint() for each in spec.profiles}
        known[id(spec)] = (spec, fingerprints, others)  # with the spec, so that no other gets its id
    _, fingerprints, others = known[id(spec)]
    return fingerprints, others


def spec_of(model: Model) -> ModelSpec:
    """The model's spec, loaded once for all replicas of one page that share the row."""
    if "shown_spec" not in model.__dict__:
        model.__dict__["shown_spec"] = model.spec
    spec: ModelSpec = model.__dict__["shown_spec"]
    return spec


def differences_as_dicts(found: tuple[Difference, ...], *, sees_env: bool = False) -> list[dict[str, Any]]:
    """As one may read them: durations as texts, and hidden what is to be."""
    return [
        {
            "field": each.field,
            "was": _readable(each.field, each.was, sees_env),
            "now": _readable(each.field, each.now, sees_env),
        }
        for each in found
    ]


def launch_as_dict(launch: Mapping[str, Any], *, sees_env: bool = False) -> dict[str, Any]:
    """As one may read it: durations as texts, and hidden what is to be."""
    profile = launch.get("profile")
    if not isinstance(profile, Mapping):
        return {key: _readable(key, value, sees_env) for key, value in launch.items()}
    shown = {key: _readable(key, value, sees_env) for key, value in profile.items()}
    return {
        key: shown if key == "profile" else _readable(key, value, sees_env) for key, value in launch.items()
    }


def _readable(field: str, value: Any, sees_env: bool) -> Any:
    if field == "startup_timeout" and isinstance(value, int):
        return format_duration(value)
    return hide_all({field: value}, sees_env=sees_env)[field]


def replica_as_dict(replica: Replica, *, sees_env: bool = False) -> dict[str, Any]:
    """A row of `replicas()` as REST and `--json` tell it."""
    staleness = staleness_of(replica)
    ranks = list(replica.ranks.all())
    head = ranks[0] if ranks else None
    return {
        "id": str(replica.pk),
        "model": replica.model_name,
        "profile": replica.profile_name,
        "state": replica.state,
        "reason": replica.reason,
        "since": replica.state_since.isoformat(),
        "age_s": seconds(replica.age),  # type: ignore[attr-defined]  # annotated
        "deadline_s": deadline_of(replica),
        "cause": replica.cause,
        "failure_kind": replica.failure_kind,
        "wanted": replica.wanted,
        "wanted_why": replica.wanted_why,
        "stale_profile": staleness.stale_profile,
        "stale_fields": [each.field for each in staleness.stale_fields],
        "restart_needed": staleness.restart_needed,
        "differences": differences_as_dicts(staleness.stale_fields, sees_env=sees_env),
        "stale_launch": staleness.stale_launch,
        "launch_differences": differences_as_dicts(staleness.launch_fields, sees_env=sees_env),
        "stale_why": staleness.sentence,
        "fingerprint": replica.fingerprint,
        "engine_check": check_of_replica(replica).as_dict(),
        "adopted": replica.is_adopted,
        "generation": replica.generation,
        "created_at": replica.created_at.isoformat(),
        "node": head.node.name if head else None,
        "port": head.port if head else None,
        "certificate": head.certificate if head else "",
        "pid": head.pid if head else None,
        "ranks": [
            {
                "rank": rank.rank,
                "node": rank.node.name,
                "state": rank.state,
                "reason": rank.reason,
                "port": rank.port,
                "certificate": rank.certificate,
                "pid": rank.pid,
                "gpus": [claim.gpu for claim in rank.claims.all()],
                "exit_code": rank.exit_code,
                "running": rank.running,
                "waiting": rank.waiting,
                "done_bytes": rank.done_bytes,
                "total_bytes": rank.total_bytes,
                "bytes_per_s": rank.bytes_per_s,
                "left_s": left_s(rank.done_bytes, rank.total_bytes, rank.bytes_per_s),
                "context_length": rank.context_length,
                "attempts": [attempt_as_dict(each) for each in rank.attempts],
            }
            for rank in ranks
        ],
        "launch": launch_as_dict(replica.launch, sees_env=sees_env),
    }


def deadline_of(replica: Replica) -> float | None:
    """Seconds that a row of `replicas()` may still be in its state; None where it has no such time."""
    profile = replica.launch.get("profile")  # the rest of a launch is not read for it
    timeout_ns = profile.get("startup_timeout") if isinstance(profile, Mapping) else None
    age_s = seconds(replica.age) or 0.0  # type: ignore[attr-defined]  # annotated
    limit_ns = timeout_ns if isinstance(timeout_ns, int) and timeout_ns > 0 else DEFAULT_STARTUP_TIMEOUT
    return deadline_s(replica.state, replica.wanted, age_s, limit_ns)


def progress_of(replica: Replica) -> tuple[Progress, ...]:
    """How far a row of `replicas()` is with what it does now: one for each rank that fetches, else one for
    the time that a start or an end may take; none of what waits or just runs."""
    ranks = list(replica.ranks.all())
    fetching = [rank for rank in ranks if rank.state == Replica.State.FETCHING and rank.total_bytes]
    if fetching:
        return tuple(
            fetch_progress(rank.done_bytes or 0, rank.total_bytes or 0, rank.bytes_per_s) for rank in fetching
        )
    if (left := deadline_of(replica)) is None:
        return ()
    age_s = seconds(replica.age) or 0.0  # type: ignore[attr-defined]  # annotated
    running = sum(rank.running or 0 for rank in ranks)
    if replica.state != Replica.State.DRAINING:
        what = "starting"
    elif running:
        what = f"{running} {'request' if running == 1 else 'requests'} to finish"
    else:
        what = "ending"
    return (wait_progress(age_s, left, what),)


def attempt_as_dict(attempt: Mapping[str, Any]) -> dict[str, Any]:
    """A process that has ended, as its rank's row keeps it. null: nobody saw it."""
    return {
        "number": attempt.get("number"),
        "generation": attempt.get("generation", 1),
        "duration_s": attempt.get("duration_s"),
        "exit_code": attempt.get("exit_code"),
        "signal": attempt.get("signal"),
        "cause": attempt.get("cause", ""),
        "reason": attempt.get("reason", ""),
    }


def end_words(attempt: Mapping[str, Any]) -> str:
    """By what a process ended, of `attempt_as_dict`."""
    if attempt["signal"] is not None:
        names = {each.value: each.name for each in Signals}
        return names.get(attempt["signal"], f"signal {attempt['signal']}")
    return "not seen" if attempt["exit_code"] is None else f"exit code {attempt['exit_code']}"
