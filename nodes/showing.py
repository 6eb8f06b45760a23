"""What every door shows of replicas and nodes: state, age and staleness, read in a fixed number of queries.

Reads and judges, and changes nothing. Ages are subtracted by the database, so that no other clock is asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from signal import Signals
from typing import Any, TypeVar
from uuid import UUID

from django.conf import settings
from django.db import models
from django.db.models import DurationField, ExpressionWrapper, F, Prefetch, Q, QuerySet
from django.db.models.functions import Now

from catalog.differences import Difference
from catalog.durations import format_duration
from catalog.hiding import hide_all, hide_model
from catalog.models import Model
from catalog.spec import DEFAULT_STARTUP_TIMEOUT, ModelSpec
from catalog.typed import scaling_words, span_words
from nodes import lease
from nodes.agents import last_report
from nodes.models import Cluster, Held, Node, Replica
from nodes.orders import deadline_s
from nodes.placement import FOREIGN_LIMIT_MIB, Freshness, freshness
from nodes.progress import left_s
from nodes.protocol import GpuReport, to_json
from nodes.stale import Staleness, judge, launch_from

Row = TypeVar("Row", bound=models.Model)


def with_age(rows: QuerySet[Row], since: str) -> QuerySet[Row]:
    """Each row with `age`, a timedelta since the moment in that column; None where the column is empty."""
    age = ExpressionWrapper(Now() - F(since), DurationField())
    return rows.annotate(age=age)  # type: ignore[return-value]  # the stubs forget which model it was


def seconds(age: timedelta | None) -> float | None:
    return None if age is None else max(age.total_seconds(), 0.0)


# --- replicas -------------------------------------------------------------------------------------


def replicas() -> QuerySet[Replica]:
    """All replicas, with whatever a door shows of them. Eight queries, however many there are."""
    return with_age(Replica.objects.all(), "state_since").prefetch_related(
        "model__names",
        "model__profiles",
        "model__fallbacks",
        Prefetch("ranks__node", with_age(Node.objects.all(), "seen_at")),
        "ranks__claims",
    )


def of_model(name: str) -> Q:
    """The replicas of a model that is called so, or was when they were started: it may be gone by now."""
    return Q(model__name=name) | Q(launch__model=name)


def staleness_of(replica: Replica) -> Staleness:
    return _staleness(replica, spec_of(replica.model) if replica.model else None)


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
    return judge(
        replica.fingerprint,
        launch_from(replica.launch),
        spec.profile(replica.profile_name) if spec else None,
        spec,
        source_revision=model.source_revision if model else "",
    )


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
        "adopted": replica.is_adopted,
        "generation": replica.generation,
        "created_at": replica.created_at.isoformat(),
        "node": head.node.name if head else None,
        "port": head.port if head else None,
        "pid": head.pid if head else None,
        "ranks": [
            {
                "rank": rank.rank,
                "node": rank.node.name,
                "state": rank.state,
                "reason": rank.reason,
                "port": rank.port,
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
    timeout_ns = launch_from(replica.launch).profile.get("startup_timeout")
    age_s = seconds(replica.age) or 0.0  # type: ignore[attr-defined]  # annotated
    limit_ns = timeout_ns if isinstance(timeout_ns, int) and timeout_ns > 0 else DEFAULT_STARTUP_TIMEOUT
    return deadline_s(replica.state, replica.wanted, age_s, limit_ns)


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


# --- models and their replicas --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tally:
    """A model's replicas, counted. `stale`: a restart would change what runs; `mild`: it would not."""

    ready: int = 0
    wanted: int = 0
    stale: int = 0
    mild: int = 0


def replicas_to_show(model: Model) -> QuerySet[Replica]:
    """Of the model: what is not over, and what failed as it would be started again, unless dealt with."""
    failed = Q(state=Replica.State.FAILED, wanted=Replica.Wanted.RUN)
    as_it_is_now = Q(fingerprint__in=model.profiles.values("fingerprint"))
    return replicas().filter(~Q(state__in=Replica.OVER) | failed & as_it_is_now, model=model)


def models_with_replicas() -> QuerySet[Model]:
    """All models, with their replicas that are not over, what could not be placed, and their rolls. Five
    queries."""
    alive = with_age(Replica.objects.exclude(state__in=Replica.OVER), "state_since")
    return Model.objects.select_related("unplaced", "roll").prefetch_related(
        "names", "profiles", "fallbacks", Prefetch("replicas", alive, "alive")
    )


def tally(model: Model) -> Tally:
    """Of a row of `models_with_replicas()`."""
    alive: list[Replica] = model.alive  # type: ignore[attr-defined]  # prefetched
    running = [replica for replica in alive if replica.wanted == Replica.Wanted.RUN]
    found = [staleness_of(replica) for replica in alive]
    missing = model.unplaced.missing if hasattr(model, "unplaced") else 0
    return Tally(
        ready=sum(replica.state == Replica.State.READY for replica in running),
        wanted=max(model.scaling_min, len(running) + missing),
        stale=sum(each.restart_needed for each in found),
        mild=sum(each.stale_profile is True and not each.restart_needed for each in found),
    )


def model_as_dict(model: Model, *, sees_env: bool = False) -> dict[str, Any]:
    """A row of `models_with_replicas()` as REST and `--json` tell it: the catalog's form, and its status."""
    spec = spec_of(model)
    form = hide_model(spec.as_text_dict(), sees_env=sees_env)
    counted = tally(model)
    return form | {
        "status": {
            "scaling": scaling_words(spec.scaling, settings.LLMGW_IDLE_TIMEOUT),
            "simulated": spec.simulated,
            "ready": counted.ready,
            "wanted": counted.wanted,
            "stale": counted.stale,
            "unplaced": _unplaced(model),
            "roll": _roll(model),
            "faults": [fault.sentence for fault in spec.faults_today()],
            "source": {
                "state": model.source_state or "unchecked",
                "sentence": model.source_sentence,
                "revision": model.source_revision,
                "checked_at": model.source_checked_at and model.source_checked_at.isoformat(),
                "skipped_by": model.source_skipped_by,
            },
        }
    }


def _unplaced(model: Model) -> dict[str, Any] | None:
    if not hasattr(model, "unplaced"):
        return None
    return {"missing": model.unplaced.missing, "why": model.unplaced.why}


def _roll(model: Model) -> dict[str, Any] | None:
    if not hasattr(model, "roll"):
        return None
    roll = model.roll
    return {"by": roll.by, "why": roll.why, "asked_at": roll.asked_at.isoformat(), "halted": roll.halted}


# --- the reconciler -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Acting:
    """Whether passes act. unwatched: how long none has been made, None where there never was one. alarm: what
    they do not act on, and why. held: how many ends of replicas wait for a person's yes."""

    cluster: Cluster
    unwatched: timedelta | None
    alarm: str = ""
    held: int = 0

    @property
    def obstacles(self) -> tuple[str, ...]:
        """Why nothing is done, or not all: a sentence each."""
        return tuple(filter(None, (self.unwatched_says, self.paused_says, self.alarm)))

    @property
    def paused_says(self) -> str:
        if not self.cluster.is_paused:
            return ""
        why = f" ({self.cluster.paused_why})" if self.cluster.paused_why else ""
        return (
            f"nothing is started or stopped: {self.cluster.paused_by} has paused the reconciler{why}; "
            "manage.py reconcile_resume lets it act again"
        )

    @property
    def unwatched_says(self) -> str:
        """Of a reconciler that is not there."""
        longest_s = max(settings.LLMGW_SUSPECT_AFTER_S, 3 * settings.LLMGW_TICK_S)
        if self.unwatched is None:
            since = "no pass has been made yet"
        elif self.unwatched.total_seconds() <= longest_s:
            return ""
        else:
            since = f"no pass has been made for {span_words(self.unwatched.total_seconds())}"
        return f"{since}; see to it that a worker runs, and one with --beat"

    def as_dict(self) -> dict[str, Any]:
        """As REST and `--json` tell it."""
        return {
            "last_pass_age_s": seconds(self.unwatched),
            "paused": self.cluster.is_paused,
            "paused_by": self.cluster.paused_by,
            "paused_why": self.cluster.paused_why,
            "alarm": self.alarm,
            "held": self.held,
            "obstacles": list(self.obstacles),
        }


def acting() -> Acting:
    """As the last pass left it. Three queries."""
    cluster = Cluster.this()
    return Acting(cluster, lease.unwatched(), cluster.alarm, Held.objects.count())


# --- nodes ----------------------------------------------------------------------------------------


class GpuUse(StrEnum):
    """What a device is to placement, in a word."""

    FREE = "free"
    REPLICA = "replica"
    ORPHAN = "orphan"
    FOREIGN = "foreign"
    SICK = "sick"


@dataclass(frozen=True, slots=True)
class ShownGpu:
    """A device as reported, its use, and what it is taken by in words; empty: it is free.

    replica: the id of the replica that holds it, None where none does.
    """

    gpu: GpuReport
    use: GpuUse
    taken_by: str
    replica: UUID | None = None


def nodes() -> QuerySet[Node]:
    """All nodes, with what runs there and who holds their GPUs. Seven queries."""
    return with_age(Node.objects.all(), "seen_at").prefetch_related(
        "claims__rank__replica", "ranks__replica", "orphans"
    )


def freshness_of(node: Node) -> Freshness:
    """Of a row of `nodes()`, as if it had been asked all along."""
    return freshness(
        node.age,  # type: ignore[attr-defined]  # annotated
        timedelta.max,
        suspect_after_s=settings.LLMGW_SUSPECT_AFTER_S,
        lost_after_s=settings.LLMGW_LOST_AFTER_S,
    )


def gpus_of(node: Node) -> list[ShownGpu]:
    """Of a row of `nodes()`, as its agent last reported them, and who holds them by the record."""
    report = last_report(node)
    orphans = {
        gpu: f"orphan {str(orphan.replica)[:8]}" for orphan in node.orphans.all() for gpu in orphan.gpus
    }
    claims = {claim.gpu: claim.rank.replica for claim in node.claims.all()}
    found = []
    for gpu in report.gpus if report else ():
        if holder := claims.get(gpu.id):
            found.append(ShownGpu(gpu, GpuUse.REPLICA, str(holder), holder.pk))
        elif gpu.id in orphans:
            found.append(ShownGpu(gpu, GpuUse.ORPHAN, orphans[gpu.id]))
        else:
            found.append(ShownGpu(gpu, *_other_use(gpu)))
    return found


def _other_use(gpu: GpuReport) -> tuple[GpuUse, str]:
    if not gpu.is_healthy:
        return GpuUse.SICK, "nothing: it is not healthy" + (f" ({gpu.sickness})" if gpu.sickness else "")
    if (gpu.foreign_mib or 0) > FOREIGN_LIMIT_MIB:
        return GpuUse.FOREIGN, f"something else on the node ({gpu.foreign_mib} MiB)"
    return GpuUse.FREE, ""


def running_on(node: Node) -> list[Replica]:
    """Of a row of `nodes()`: the replicas with a rank there that are not over."""
    return [rank.replica for rank in node.ranks.all() if rank.replica.state not in Replica.OVER]


def node_as_dict(node: Node) -> dict[str, Any]:
    """A row of `nodes()` as REST and `--json` tell it."""
    report = last_report(node)
    gpus = gpus_of(node)
    return {
        "name": node.name,
        "uuid": str(node.uuid),
        "address": node.address,
        "certificate": node.certificate,
        "state": freshness_of(node),
        "seen_at": node.seen_at and node.seen_at.isoformat(),
        "age_s": seconds(node.age),  # type: ignore[attr-defined]  # annotated
        "problem": node.problem,
        "cordoned": node.is_cordoned,
        "draining": node.is_draining,
        "cordoned_by": node.cordoned_by,
        "cordoned_why": node.cordoned_why,
        "gpus_total": len(gpus),
        "gpus_free": sum(not each.taken_by for each in gpus),
        "gpus": [{**to_json(each.gpu), "use": each.use, "taken_by": each.taken_by} for each in gpus],
        "replicas": [str(replica.pk) for replica in running_on(node)],
        "engines": [to_json(engine) for engine in report.engines] if report else [],
        "labels": dict(report.labels) if report else {},
        "fabric": report.fabric if report else "",
        "memory_total_mib": report.memory_total_mib if report else None,
        "memory_free_mib": report.memory_free_mib if report else None,
        "cpu_model": report.cpu_model if report else "",
        "cpu_cores": report.cpu_cores if report else None,
        "disk_free_bytes": report.disk_free_bytes if report else None,
        "room_bytes": report.room_bytes if report else None,
        "agent_version": report.agent_version if report else "",
    }
