"""How the cluster is, at a glance: what needs a person, and nodes, GPUs, models, replicas and requests in
numbers. One value for the admin's first page, `manage.py status` and REST, which tell it in the same words.

The same queries whatever there is, but for four more where something may be stale. Of thousands of rows, what
is alike is counted by the database, and what a node reported is read again only when it differs.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db.models import Count, TextField
from django.db.models.functions import Cast

from catalog.models import Event, Model, Profile, database_now
from catalog.showing import events_for
from nodes.agents import report_from
from nodes.attention import Matter, StaleModel, failed_lately, needs_a_person, under_way
from nodes.kept import Kept
from nodes.models import Claim, Node, Orphan, Replica, Unplaced
from nodes.placement import Freshness, freshness
from nodes.reckoning import answer, ask, lasted
from nodes.showing import GpuUse, spec_of, use_of
from nodes.stale import is_as_the_catalog, judge, launch_from

SINCE, SINCE_S = "1h", 3600
EVENTS = 8
UNPLACED = 20
_State = Replica.State


# --- the value ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Nodes:
    """never: not heard from yet. cordoned: those that are drained as well."""

    fresh: int = 0
    suspect: int = 0
    lost: int = 0
    never: int = 0
    cordoned: int = 0
    draining: int = 0


@dataclass(frozen=True, slots=True)
class Gpus:
    """Devices of one class. used: by engines of ours; foreign: by something else; closed: free, on a node
    that nothing is placed on."""

    gpu_class: str
    total: int = 0
    used: int = 0
    free: int = 0
    closed: int = 0
    foreign: int = 0
    unhealthy: int = 0


@dataclass(frozen=True, slots=True)
class Models:
    """ready: as many replicas as are wanted. Of those that are short, failing: something failed within the
    hour or has no place; loading: all that is missing is on its way. asleep: on demand, and nobody asks."""

    ready: int = 0
    loading: int = 0
    failing: int = 0
    asleep: int = 0
    off: int = 0


@dataclass(frozen=True, slots=True)
class Replicas:
    """stale: a restart would change what runs; mild: it differs from the catalog in what needs no restart."""

    ready: int = 0
    starting: int = 0
    draining: int = 0
    lost: int = 0
    stale: int = 0
    mild: int = 0


@dataclass(frozen=True, slots=True)
class Want:
    """One that the last pass could not place."""

    key: int
    model: str
    missing: int
    why: str
    since: datetime


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of the last hour; of one's own keys alone for whoever may not see what others used. TTFT of streams,
    in seconds, None where there was none. Tokens are those that were generated."""

    requests: int
    errors: int
    requests_per_s: float
    tokens_per_s: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None


@dataclass(frozen=True, slots=True)
class Happened:
    """An event. by is empty for llmgw's own doing."""

    key: int
    at: datetime
    by: str
    door: str
    did: str
    why: str


@dataclass(frozen=True, slots=True)
class Part:
    """Some of what a fact counts, such as "3 lost". look: of its badge; query: by which a list shows them."""

    words: str
    look: str = ""
    query: str = ""


@dataclass(frozen=True, slots=True)
class Fact:
    """A line for people. kind: whose list tells more, empty where none does."""

    name: str
    kind: str
    parts: tuple[Part, ...]

    @property
    def words(self) -> str:
        return ", ".join(part.words for part in self.parts)


@dataclass(frozen=True, slots=True)
class Overview:
    """What whoever asks may see: None where that is not theirs to see."""

    at: datetime
    needs: tuple[Matter, ...]
    under_way: tuple[Matter, ...]
    nodes: Nodes | None
    gpus: tuple[Gpus, ...] | None
    models: Models | None
    replicas: Replicas | None
    unplaced: tuple[Want, ...] | None
    traffic: Traffic | None
    events: tuple[Happened, ...] | None

    @property
    def facts(self) -> tuple[Fact, ...]:
        """In words, the emptier parts left out."""
        return tuple(_facts(self))

    def as_dict(self) -> dict[str, Any]:
        """As REST and `--json` tell it."""
        return asdict(self) | {"facts": [{"name": fact.name, "words": fact.words} for fact in self.facts]}


# --- in words -------------------------------------------------------------------------------------


def _facts(seen: Overview) -> Iterator[Fact]:
    if seen.nodes is not None:
        yield Fact("nodes", "node", tuple(_of_nodes(seen.nodes)) or (Part("none"),))
    for each in seen.gpus or ():
        yield Fact(f"GPUs {each.gpu_class}", "node", tuple(_of_gpus(each)))
    if seen.models is not None:
        yield Fact("models", "model", tuple(_of_models(seen.models)) or (Part("none"),))
    if seen.replicas is not None:
        yield Fact("replicas", "replica", tuple(_of_replicas(seen.replicas)) or (Part("none"),))
    if seen.traffic is not None:
        yield Fact("last hour", "usage", tuple(_of_traffic(seen.traffic)))


def _of_nodes(nodes: Nodes) -> Iterator[Part]:
    if nodes.fresh:
        yield Part(f"{nodes.fresh} fresh", "good")
    if nodes.suspect:
        yield Part(f"{nodes.suspect} suspect", "warn")
    if nodes.lost:
        yield Part(f"{nodes.lost} lost", "bad")
    if nodes.never:
        yield Part(f"{nodes.never} never heard from")
    if nodes.cordoned > nodes.draining:
        yield Part(f"{nodes.cordoned - nodes.draining} cordoned", "warn", "?takes=nothing-new")
    if nodes.draining:
        yield Part(f"{nodes.draining} draining", "warn", "?takes=leaving")


def _of_gpus(gpus: Gpus) -> Iterator[Part]:
    yield Part(f"{gpus.used} of {gpus.total} in use", "busy" if gpus.used else "")
    if gpus.free:
        yield Part(f"{gpus.free} free", "good")
    if gpus.closed:
        yield Part(f"{gpus.closed} free on nodes that take nothing", "warn")
    if gpus.foreign:
        yield Part(f"{gpus.foreign} used by something else", "warn")
    if gpus.unhealthy:
        yield Part(f"{gpus.unhealthy} not healthy", "bad")


def _of_models(models: Models) -> Iterator[Part]:
    if models.ready:
        yield Part(f"{models.ready} ready", "good")
    if models.loading:
        yield Part(f"{models.loading} loading", "busy", "?state=short")
    if models.failing:
        yield Part(f"{models.failing} failing", "bad", "?state=short")
    if models.asleep:
        yield Part(f"{models.asleep} asleep until asked for", "", "?scaling=on-demand")
    if models.off:
        yield Part(f"{models.off} off", "", "?scaling=off")


def _of_replicas(replicas: Replicas) -> Iterator[Part]:
    if replicas.ready:
        yield Part(f"{replicas.ready} ready", "good", f"?state__exact={_State.READY}")
    if replicas.starting:
        yield Part(f"{replicas.starting} on the way", "busy")
    if replicas.draining:
        yield Part(f"{replicas.draining} leaving", "busy")
    if replicas.lost:
        yield Part(f"{replicas.lost} lost", "bad", f"?state__exact={_State.LOST}")
    if replicas.stale:
        yield Part(f"{replicas.stale} stale", "warn", "?shown=stale")
    if replicas.mild:
        yield Part(f"{replicas.mild} stale, no restart needed", "", "?shown=stale")


def _of_traffic(traffic: Traffic) -> Iterator[Part]:
    if not traffic.requests:
        yield Part("no requests")
        return
    yield Part(f"{_rate(traffic.requests_per_s)} requests/s")
    if traffic.errors:
        yield Part(f"{traffic.errors / traffic.requests:.2%} errors", "warn")
    if traffic.ttft_p50_s is not None:
        yield Part(f"TTFT p50 {lasted(traffic.ttft_p50_s)}")
        yield Part(f"TTFT p99 {lasted(traffic.ttft_p99_s)}")
    yield Part(f"{_rate(traffic.tokens_per_s)} tokens/s")


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


# --- read -----------------------------------------------------------------------------------------


def look(user: Any = None) -> Overview:
    """For this user; for a shell, where one may see everything, without."""

    def may(permission: str) -> bool:
        return user is None or bool(user.has_perm(permission))

    now = database_now()
    counted = _count() if may("catalog.view_model") or may("nodes.view_replica") else _Counted()
    nodes, gpus = _nodes_and_gpus(now) if may("nodes.view_node") else (None, None)
    return Overview(
        at=now,
        needs=needs_a_person(may, counted.stale),
        under_way=under_way(may),
        nodes=nodes,
        gpus=gpus,
        models=counted.models if may("catalog.view_model") else None,
        replicas=counted.replicas if may("nodes.view_replica") else None,
        unplaced=counted.unplaced if may("catalog.view_model") else None,
        traffic=_traffic(user) if may("nodes.view_usage") else None,
        events=_events(user) if may("catalog.view_event") else None,
    )


def _events(user: Any) -> tuple[Happened, ...]:
    rows = Event.objects.all() if user is None else events_for(user)
    return tuple(Happened(row.pk, row.at, row.by, row.door, str(row), row.why) for row in rows[:EVENTS])


def _traffic(user: Any) -> Traffic:
    used = answer(ask(since=SINCE, by="model"), user).total
    return Traffic(
        requests=used.requests,
        errors=used.errors,
        requests_per_s=used.requests / SINCE_S,
        tokens_per_s=used.completion_tokens / SINCE_S,
        ttft_p50_s=used.quantile("ttft", 0.5),
        ttft_p99_s=used.quantile("ttft", 0.99),
    )


# --- nodes and their GPUs


def _gpus_of_report(text: str) -> tuple[tuple[str, str, GpuUse], ...]:
    """Id, class, and what each device would be if nobody held it."""
    report = report_from(json.loads(text))
    return tuple((gpu.id, gpu.gpu_class, use_of(gpu)) for gpu in report.gpus) if report else ()


_reports = Kept(_gpus_of_report)


def _nodes_and_gpus(now: datetime) -> tuple[Nodes, tuple[Gpus, ...]]:
    rows = Node.objects.annotate(told=Cast("report", TextField())).values_list(
        "pk", "seen_at", "is_cordoned", "is_draining", "told"
    )
    held: dict[int, set[str]] = defaultdict(set)
    for node, gpu in Claim.objects.values_list("node_id", "gpu"):
        held[node].add(gpu)
    for node, gpus in Orphan.objects.values_list("node_id", "gpus"):
        held[node].update(gpus)
    count: Counter[str] = Counter()
    by_class: dict[str, Counter[str]] = defaultdict(Counter)
    for node, seen_at, is_cordoned, is_draining, told in rows:
        found = freshness(
            now - seen_at if seen_at else None,
            timedelta.max,
            suspect_after_s=settings.LLMGW_SUSPECT_AFTER_S,
            lost_after_s=settings.LLMGW_LOST_AFTER_S,
        )
        count[found] += 1
        count["cordoned"] += is_cordoned
        count["draining"] += is_draining
        takes = not is_cordoned and found in (Freshness.FRESH, Freshness.SUSPECT)
        counted_as = _COUNTED_AS if takes else _COUNTED_AS | {GpuUse.FREE: "closed"}
        holds = held[node]
        for gpu, gpu_class, use in _reports.get(node, told):
            of_class = by_class[gpu_class]
            of_class["total"] += 1
            of_class["used" if gpu in holds else counted_as[use]] += 1
    _reports.keep_only({row[0] for row in rows})
    return Nodes(**count), tuple(Gpus(name, **by_class[name]) for name in sorted(by_class))


_COUNTED_AS = {GpuUse.FREE: "free", GpuUse.FOREIGN: "foreign", GpuUse.SICK: "unhealthy"}


# --- models and their replicas


@dataclass(frozen=True, slots=True)
class _Counted:
    models: Models = Models()
    replicas: Replicas = Replicas()
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


def _count() -> _Counted:
    rows = Replica.objects.exclude(state__in=Replica.OVER).order_by()
    columns = ("model_id", "state", "wanted", "fingerprint", "launch")
    alike = [_Alike(*row) for row in rows.values_list(*columns).annotate(count=Count("pk"))]
    short = {want.model_id: want for want in Unplaced.objects.select_related("model").order_by("since")}
    failed = set(failed_lately().values_list("model_id", flat=True))
    models = Model.objects.values("pk", "name", "scaling_min", "scaling_max", *_OF_LAUNCH)
    known = {row["pk"]: row for row in models}
    stale, mild = _differing(alike, known)
    return _Counted(
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
    ready = sum(each.count for each in running if each.state == _State.READY)
    missing = short[model["pk"]].missing if model["pk"] in short else 0
    wanted = max(model["scaling_min"], sum(each.count for each in running) + missing)
    if model["scaling_max"] == 0:
        return "off"
    if ready < wanted or model["pk"] in short:
        lost = any(each.state == _State.LOST for each in running)
        return "failing" if lost or model["pk"] in short or model["pk"] in failed else "loading"
    return "ready" if wanted else "asleep"


def _replicas(alike: list[_Alike], stale: int, mild: int) -> Replicas:
    count: Counter[str] = Counter()
    for each in alike:
        if each.state == _State.LOST:
            count["lost"] += each.count
        elif each.wanted != Replica.Wanted.RUN or each.state == _State.DRAINING:
            count["draining"] += each.count
        else:
            count["ready" if each.state == _State.READY else "starting"] += each.count
    return Replicas(**count, stale=stale, mild=mild)


def _differing(alike: list[_Alike], known: Mapping[int, Mapping[str, Any]]) -> tuple[Counter[int], int]:
    """How many replicas are stale, by model, and how many mildly so. Most are neither, which is soon seen."""
    profiles = {
        (model, name): fingerprint
        for model, name, fingerprint in Profile.objects.values_list("model_id", "name", "fingerprint")
    }
    doubtful = [each for each in alike if each.model is not None and not _is_sound(each, known, profiles)]
    whole = Model.objects.prefetch_related("names", "profiles", "fallbacks")
    models = {row.pk: row for row in whole.filter(pk__in={each.model for each in doubtful})}
    stale: Counter[int] = Counter()
    mild = 0
    for each in doubtful:
        model = models.get(each.model or 0)
        if model is None:  # removed a moment ago
            continue
        launch = launch_from(each.launch)
        profile = spec_of(model).profile(str(launch.profile.get("name", "")))
        found = judge(
            each.fingerprint, launch, profile, spec_of(model), source_revision=model.source_revision
        )
        stale[model.pk] += each.count if found.restart_needed else 0
        mild += each.count if found.stale_profile is True and not found.restart_needed else 0
    return stale, mild


def _is_sound(
    each: _Alike, known: Mapping[int, Mapping[str, Any]], profiles: Mapping[tuple[int, str], str]
) -> bool:
    model = known.get(each.model or 0)
    if model is None:
        return False
    now = {
        "name": model["name"],
        "source": model["source"],
        "context_length": model["context_length"],
        "capabilities": {name for name in ("tools", "vision", "embeddings") if model[f"can_{name}"]},
    }
    profile = profiles.get((model["pk"], str(each.launch.get("profile", {}).get("name", ""))), "")
    return is_as_the_catalog(each.fingerprint, each.launch, profile, now, model["source_revision"])
