"""What Prometheus is told of the control plane: nodes, GPUs, what is short, stale or failing, passes, jobs,
keys that end soon, and webhooks. Read from the tables, in a fixed number of queries.

Replicas by state and all that requests do, each gateway tells (`llmgw/gateway/metrics.py`); what a node and
its engines do, its agent (`nodes/agent/figures.py`). No name is told by two of these. Labels are names of the
catalog, of nodes and of webhooks; of keys, the few that end soonest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from django.db.models import Count, DurationField, ExpressionWrapper, F, Q
from django.db.models.functions import Now

from catalog.durations import SECOND
from catalog.models import Model
from nodes import lease
from nodes.agents import report_from
from nodes.exposition import COUNTER, GAUGE, SUMMARY, Family
from nodes.kept import Kept
from nodes.models import Claim, Delivery, Job, Lease, Node, Orphan, Replica, Roll, Trouble, Unplaced, Webhook
from nodes.notices import KINDS
from nodes.overview.models import count_models
from nodes.placement import Freshness
from nodes.showing import (
    GpuUse,
    acting,
    freshness_of,
    seconds,
    with_age,
)
from nodes.showing.machines import use_of
from nodes.troubles import crash_loops, disk_of, expiring_keys

KEYS_TOLD = 100
KEYS_WITHIN = timedelta(days=30)

_reports = Kept(report_from)


def families() -> Iterator[Family]:
    yield from _nodes()
    yield from _models()
    yield from _reconciler()
    yield from _jobs()
    yield from _keys()
    yield from _notices()


def _nodes() -> Iterator[Family]:
    nodes = Family("llmgw_nodes", GAUGE, "Nodes, by how far their last report can be believed.")
    up = Family("llmgw_node_up", GAUGE, "Whether the node's agent answers.")
    silence = Family("llmgw_node_silence_seconds", GAUGE, "Since the node's agent last answered.")
    kept_free = Family("llmgw_node_kept_free", GAUGE, "Whether operators keep things off the node.")
    gpus = Family("llmgw_gpus", GAUGE, "GPUs, by what they are to placement.")
    disk = Family("llmgw_node_disk_bytes", GAUGE, "The disk for weights.")
    disk_free = Family("llmgw_node_disk_free_bytes", GAUGE, "What is free of it.")
    states: Counter[str] = Counter()
    held = dict.fromkeys(Claim.objects.values_list("node_id", "gpu"), GpuUse.REPLICA)
    for node_id, orphaned in Orphan.objects.values_list("node_id", "gpus"):
        for gpu in orphaned:
            held.setdefault((node_id, gpu), GpuUse.ORPHAN)
    rows = list(with_age(Node.objects.all(), "seen_at"))
    _reports.keep_only({node.pk for node in rows})
    for node in rows:
        freshness = freshness_of(node)
        states[freshness] += 1
        up.add(freshness is Freshness.FRESH, node=node.name)
        silence.add(seconds(node.age), node=node.name)  # type: ignore[attr-defined]  # annotated
        kept_free.add(node.is_cordoned, node=node.name)
        total, free = disk_of(node.report)
        disk.add(total, node=node.name)
        disk_free.add(free, node=node.name)
        report = _reports.get(node.pk, node.report)
        cards = report.gpus if report else ()
        uses = Counter((gpu.gpu_class, held.get((node.pk, gpu.id)) or use_of(gpu)) for gpu in cards)
        for gpu_class in dict.fromkeys(gpu.gpu_class for gpu in cards):
            for use in GpuUse:
                gpus.add(uses[gpu_class, use], node=node.name, gpu_class=gpu_class, use=use)
    for each in Freshness:
        nodes.add(states[each], state=each)
    yield from (nodes, up, silence, kept_free, gpus, disk, disk_free)


def _models() -> Iterator[Family]:
    wanted = Family("llmgw_model_wanted_replicas", GAUGE, "Replicas that should be there at this moment.")
    ready = Family("llmgw_model_ready_replicas", GAUGE, "Replicas that are ready and are to stay.")
    stale = Family("llmgw_stale_replicas", GAUGE, "Replicas that a restart would change.")
    stale_for = Family("llmgw_stale_seconds", GAUGE, "For how long the model has had stale replicas.")
    short = Family("llmgw_unplaced_replicas", GAUGE, "Wanted replicas that have no place.")
    short_for = Family("llmgw_unplaced_seconds", GAUGE, "For how long they have had none.")
    ttft = Family("llmgw_slo_time_to_first_token_seconds", GAUGE, "What the catalog promises at the p99.")
    tpot = Family("llmgw_slo_time_per_output_token_seconds", GAUGE, "What the catalog promises at the p99.")
    since = {row.subject: _age_s(row) for row in with_age(Trouble.objects.filter(kind="stale"), "since")}
    unplaced = {row.model_id: row for row in with_age(Unplaced.objects.all(), "since")}
    kept = Replica.objects.exclude(state__in=Replica.OVER).filter(wanted=Replica.Wanted.RUN).order_by()
    is_ready = Count("pk", filter=Q(state=Replica.State.READY))
    counted = {
        model: (count, of_these)
        for model, count, of_these in kept.values_list("model").annotate(kept=Count("pk"), ready=is_ready)
    }
    stale_of = {each.key: each.count for each in count_models().stale}
    columns = ("pk", "name", "scaling_min", "ttft_p99_ns", "tpot_p99_ns")
    for model in Model.objects.only(*columns).order_by("name"):
        want = unplaced.get(model.pk)
        running, ready_of_these = counted.get(model.pk, (0, 0))
        wanted.add(max(model.scaling_min, running + (want.missing if want else 0)), model=model.name)
        ready.add(ready_of_these, model=model.name)
        stale.add(stale_of.get(model.pk, 0), model=model.name)
        stale_for.add(since.get(model.name, 0.0) if model.pk in stale_of else 0.0, model=model.name)
        short.add(want.missing if want else 0, model=model.name)
        short_for.add(_age_s(want) if want else 0.0, model=model.name)
        if model.ttft_p99_ns:
            ttft.add(model.ttft_p99_ns / SECOND, model=model.name)
        if model.tpot_p99_ns:
            tpot.add(model.tpot_p99_ns / SECOND, model=model.name)
    yield from (wanted, ready, stale, stale_for, short, short_for, ttft, tpot)
    loops = Family("llmgw_crash_loops", GAUGE, "1 for each profile whose replicas keep failing.")
    for name, profile in crash_loops():
        loops.add(1, model=name, profile=profile)
    yield loops


def _reconciler() -> Iterator[Family]:
    found = acting()
    row = Lease.objects.filter(name=lease.NAME).first()
    rolls = Counter(
        "halted" if halted else "rolling" for halted in Roll.objects.values_list("halted", flat=True)
    )
    passes = Family("llmgw_pass_duration_seconds", SUMMARY, "How long passes of the reconciler took.")
    passes.add(row.passes_s if row else 0, "_sum")
    passes.add(row.passes if row else 0, "_count")
    yield passes
    last = Family("llmgw_pass_last_duration_seconds", GAUGE, "How long the last pass took.")
    last.add(row.last_s if row else None)
    yield last
    age = Family("llmgw_pass_age_seconds", GAUGE, "Since the last pass ended; infinite before the first.")
    age.add(float("inf") if found.unwatched is None else seconds(found.unwatched))
    yield age
    for name, says, value in (
        ("llmgw_reconciler_paused", "Whether somebody has paused it.", found.cluster.is_paused),
        ("llmgw_reconciler_alarm", "Whether it does not act on what it sees.", bool(found.alarm)),
        ("llmgw_held_replicas", "Ends of replicas that wait for a person's yes.", found.held),
        ("llmgw_orphans", "Engines that run and belong to nothing here.", Orphan.objects.count()),
    ):
        family = Family(name, GAUGE, says)
        family.add(value)
        yield family
    rolling = Family("llmgw_rolls", GAUGE, "Rolls that are under way, and that have halted.")
    for state in ("rolling", "halted"):
        rolling.add(rolls[state], state=state)
    yield rolling


def _jobs() -> Iterator[Family]:
    jobs = Family("llmgw_jobs", GAUGE, "Benches and engine checks on record, by state.")
    counted = {
        (row["kind"], row["state"]): row["n"]
        for row in Job.objects.order_by().values("kind", "state").annotate(n=Count("pk"))
    }
    for kind in Job.Kind.values:
        for state in Job.State.values:
            jobs.add(counted.get((kind, state), 0), kind=kind, state=state)
    yield jobs


def _keys() -> Iterator[Family]:
    left = Family(
        "llmgw_key_expires_seconds",
        GAUGE,
        f"Until the API key expires, of the {KEYS_TOLD} that do so first within {KEYS_WITHIN.days} days.",
    )
    until = ExpressionWrapper(F("expires_at") - Now(), DurationField())
    keys = expiring_keys(KEYS_WITHIN).annotate(until=until).values_list("pk", "name", "until")
    for key, name, until_then in keys[:KEYS_TOLD]:
        left.add(until_then.total_seconds(), key=key, name=name)
    yield left


def _notices() -> Iterator[Family]:
    troubles = Family("llmgw_troubles", GAUGE, "What is wrong now and has been told, by kind.")
    told = Trouble.objects.exclude(told_at=None).filter(gone_at=None)
    counted = {row["kind"]: row["n"] for row in told.order_by().values("kind").annotate(n=Count("pk"))}
    for kind in KINDS:
        troubles.add(counted.get(kind, 0), kind=kind)
    yield troubles
    taken = Family("llmgw_webhook_delivered_total", COUNTER, "Notices that the webhook has taken.")
    failed = Family("llmgw_webhook_failed_total", COUNTER, "Tries to post to the webhook that failed.")
    given_up = Family("llmgw_webhook_given_up_total", COUNTER, "Notices that the webhook was never told.")
    waiting = Family("llmgw_webhook_waiting", GAUGE, "Notices that the webhook has not taken yet.")
    of_state = Count("deliveries", filter=Q(deliveries__state=Delivery.State.WAITING))
    for webhook in Webhook.objects.annotate(waiting=of_state):
        taken.add(webhook.delivered, webhook=webhook.name)
        failed.add(webhook.failed, webhook=webhook.name)
        given_up.add(webhook.given_up, webhook=webhook.name)
        waiting.add(webhook.waiting, webhook=webhook.name)
    yield from (taken, failed, given_up, waiting)


def _age_s(row: Any) -> float | None:
    return seconds(row.age)
